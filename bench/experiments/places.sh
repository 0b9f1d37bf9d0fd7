# device: bash .scratch/places.sh (copy this folder into .scratch, apply places.patch to a copy in /tmp/P)
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; mkdir -p /tmp/P; cp -r tritonkittens kernels bench /tmp/P/; (cd /tmp/P; patch -s -p1 < $R/.scratch/places.patch)
export PYTHONPATH=/tmp/site:/tmp/P; M=sm__cycles_elapsed.max,lts__t_sectors_op_read.sum,dram__bytes_read.sum
N="ncu --clock-control none --profile-from-start off --csv --metrics $M"
TRITON_CACHE_DIR=/tmp/c1 timeout 120 $N python .scratch/places.py ncu e4m3 16384 W8,W16 > $OUT/n1.csv 2>&1
TRITON_CACHE_DIR=/tmp/c2 timeout 120 $N python .scratch/places.py ncu e4m3 8192 W8,I8 > $OUT/n2.csv 2>&1
grep GPC $OUT/n1.csv; python .scratch/table3.py $OUT/n1.csv $OUT/n2.csv
TRITON_CACHE_DIR=/tmp/c3 timeout 60 python .scratch/places.py time e4m3 16384 W8,W16 25
TRITON_CACHE_DIR=/tmp/c4 timeout 60 python .scratch/places.py time bf16 8192 W8,I8 20
