# On an H200. First, with the table as it is: 1. bash bench/experiments/next46.sh suites (350 s), 2. … suites2 (200 s).
# Epilogues: mkdir -p .scratch/exp; git archive HEAD tritonkittens kernels | tar x -C .scratch/exp; (cd .scratch/exp && git apply --directory=.scratch/exp ../../bench/experiments/rotated.patch)
# then … ep (170 s; these kernels compile for 45 s each, in LLVM), with .scratch in `carry`. It tells whether activations and residuals that are applied to packed results by
# code that all panels share (they move one on, in registers) are hidden by products; with a copy of the code for each panel they are not (gemm_variants.json).
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); export PYTHONPATH=/tmp/site:$PWD TRITON_CACHE_DIR=/tmp/tc
nvidia-smi -L | cut -c1-24
case $1 in
suites) for s in gemm_fp8 gemm; do timeout 190 python -m bench $s --quick --workers 14 --out $OUT > /tmp/$s.log 2>&1; tail -4 /tmp/$s.log | cut -c1-300; done ;;
suites2) for s in gemm_epilogues gemm_sustained; do timeout 130 python -m bench $s --workers 14 --out $OUT > /tmp/$s.log 2>&1; tail -4 /tmp/$s.log | cut -c1-300; done ;;
ep) timeout 165 python bench/experiments/clk_ep.py 10 ep:4096 2>&1 | tail -60 ;;
esac
