# On an H200 (an H100's own table has been made): packed results where its table has none yet, by clk.py (single calls, cycles and clock: 0.1 % where a suite has 1 %), then what the suites say.
# 1. bash bench/experiments/next45.sh clk    (about 150 s)      2. with the table changed by that: bash bench/experiments/next45.sh suites    (about 400 s)
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); export PYTHONPATH=/tmp/site:$PWD TRITON_CACHE_DIR=/tmp/tc
nvidia-smi -L | cut -c1-24
case $1 in
clk) timeout 200 python bench/experiments/clk.py 8 e4row:16384 e4:16384 bf16:16384 bf16nn:16384 bf16:8192 bf16nn:8192 bf16:4096 bf16nn:4096 e4row:8192 e4:8192 2>&1 | tail -60 ;;
suites) for s in gemm_fp8 gemm_sustained gemm; do timeout 190 python -m bench $s --quick --workers 14 --out $OUT > /tmp/$s.log 2>&1; tail -4 /tmp/$s.log | cut -c1-300; done ;;
esac
