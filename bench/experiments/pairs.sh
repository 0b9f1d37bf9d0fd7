[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; rm -rf /tmp/P; mkdir -p /tmp/P; cp -r tritonkittens kernels bench /tmp/P/; (cd /tmp/P; patch -s -p1 < $R/.scratch/places.patch)
export PYTHONPATH=/tmp/site:/tmp/P:$R/.scratch; M=dram__bytes_read.sum,lts__t_sectors_op_read.sum,sm__cycles_elapsed.max
N="ncu --clock-control none --profile-from-start off --csv --metrics $M"
nvidia-smi --query-gpu=name --format=csv,noheader
TRITON_CACHE_DIR=/tmp/d1 timeout 130 $N python .scratch/pairs.py ncu e4m3 6144 2816 8192 > $OUT/p1.csv 2>&1
TRITON_CACHE_DIR=/tmp/d2 timeout 130 $N python .scratch/pairs.py ncu e4m3 16384 16384 16384 0 "I2 g1,I2 g4,I2 g8,C g8,I g8,W g8" > $OUT/p2.csv 2>&1
grep "GPC\|CTA\|WRONG" $OUT/p1.csv; python .scratch/table3.py $OUT/p1.csv $OUT/p2.csv
TRITON_CACHE_DIR=/tmp/d3 timeout 90 python .scratch/pairs.py time e4m3 16384 16384 16384 35 "I2 g1,I2 g4,I2 g8,C g8,I g8,W g8" 2>&1 | grep -v leak
