# First device call of the next session (about 300 s). Needs .scratch/{ab2.py,next3.py,strip.py,sender_stamps.patch,sender_stamps.py,look_ahead.patch,table3.py}; carry .triton .scratch.
# 1. where senders and consumers wait for each other in an iteration; 2. the sender that looks a call ahead (FENCES 0, 1, 2); 3. without Triton's own barriers behind named ones; 4. thresholds of config.py.
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader
for x in S V; do rm -rf /tmp/$x; mkdir /tmp/$x; cp -r tritonkittens kernels bench /tmp/$x; done
(cd /tmp/S; patch -s -p1 < $R/.scratch/sender_stamps.patch); (cd /tmp/V; patch -s -p1 < $R/.scratch/look_ahead.patch)
export AB_S="(512,1024,4096)"
for i in $(seq 0 5); do PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 100 python .scratch/ab2.py warm $i 6 new > /tmp/wn$i 2>&1 & done
for f in 0 1; do for i in $(seq 0 3); do FENCES=$f PYTHONPATH=/tmp/site:/tmp/V TRITON_CACHE_DIR=/tmp/cv$f timeout 100 python .scratch/ab2.py warm $i 4 v > /tmp/wv$f$i 2>&1 & done; done
for i in $(seq 0 3); do PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/ct timeout 100 python .scratch/strip.py .scratch/ab2.py warm $i 4 t > /tmp/wt$i 2>&1 & done
wait; grep -h "Error" /tmp/w* | sort | uniq -c | head
PYTHONPATH=/tmp/site:/tmp/S TRITON_CACHE_DIR=/tmp/cs timeout 100 python .scratch/sender_stamps.py 64,4096,0 128,4096,0 64,4096,1 64,1024,0 2>&1 | grep "^D" | tee $OUT/stamps.txt
M=dram__bytes.sum,gpu__time_duration.sum,sm__cycles_elapsed.max; N="ncu --clock-control none --profile-from-start off -k regex:template --csv --metrics $M"
PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 60 $N python .scratch/ab2.py ncu new > $OUT/nn.csv 2>&1
for f in 0 1; do FENCES=$f PYTHONPATH=/tmp/site:/tmp/V TRITON_CACHE_DIR=/tmp/cv$f timeout 60 $N python .scratch/ab2.py ncu v > $OUT/v$f.csv 2>&1; done
PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/ct timeout 60 $N python .scratch/strip.py .scratch/ab2.py ncu t > $OUT/t.csv 2>&1
python .scratch/table3.py $OUT/nn.csv $OUT/v0.csv $OUT/v1.csv $OUT/t.csv
PYTHONPATH=/tmp/site:$R TRITON_CACHE_DIR=/tmp/cn timeout 100 python .scratch/next3.py 40 2>&1 | grep "^D\|WRONG" | tee $OUT/thresholds.txt
