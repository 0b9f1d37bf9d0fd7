# First device call of the next session (about 330 s): is the backward without zeros right on the GPU, and faster? Working tree: with claims; .scratch/old.patch:
# git diff <tree without> <tree with> -- tritonkittens kernels bench, which this takes back in /tmp/O. Needs .scratch/{ab2.py,table3.py,old.patch}.
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader
rm -rf /tmp/O; mkdir /tmp/O; cp -r tritonkittens kernels bench /tmp/O; (cd /tmp/O; patch -s -R -p1 < $R/.scratch/old.patch)
PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 60 python -m pytest -q -x tests/gpu/test_explicit_gpu.py -k sums_of_many 2>&1 | tail -2
NEW="new,still:turns=False,dropped:discards=True"
for i in $(seq 0 10); do PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 100 python .scratch/ab2.py warm $i 11 "$NEW" > /tmp/wn$i 2>&1 & done
for i in $(seq 0 4); do PYTHONPATH=/tmp/site:/tmp/O TRITON_CACHE_DIR=/tmp/co timeout 100 python .scratch/ab2.py warm $i 5 old > /tmp/wo$i 2>&1 & done; wait; grep -h "Error" /tmp/wn* /tmp/wo* | sort | uniq -c | head
for r in 1 2; do
 echo == old; PYTHONPATH=/tmp/site:/tmp/O TRITON_CACHE_DIR=/tmp/co timeout 60 python .scratch/ab2.py time 16 old 2>&1 | grep "^D\|WRONG" | tee -a $OUT/old$r.txt
 echo == new; PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 80 python .scratch/ab2.py time 30 "$NEW" 2>&1 | grep "^D\|WRONG" | tee -a $OUT/new$r.txt
done
M=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum,sm__cycles_elapsed.max; N="ncu --clock-control none --profile-from-start off -k regex:template --csv --metrics $M"
PYTHONPATH=/tmp/site:/tmp/O TRITON_CACHE_DIR=/tmp/co timeout 60 $N python .scratch/ab2.py ncu old > $OUT/no.csv 2>&1; PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 60 $N python .scratch/ab2.py ncu "$NEW" > $OUT/nn.csv 2>&1
python .scratch/table3.py $OUT/no.csv $OUT/nn.csv
