# On an H200. 1. bash bench/experiments/next47.sh tests (300 s: sanitizer of products, random products, what waits), 2. … epilogues (80 s), 3. … clk (60 s, wants
# .scratch/exp of clk_ep.py in `carry`), 4. … gpu (tests/gpu but attention, 11 minutes: two calls with FIRST=1 and FIRST=2).
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); export PYTHONPATH=/tmp/site:$PWD TRITON_CACHE_DIR=/tmp/tc
nvidia-smi -L | cut -c1-24
run() { timeout -s INT $1 python -m pytest -v -n 15 --dist load --maxschedchunk=1 -p no:cacheprovider "${@:2}" > $OUT/tests.log 2>&1; grep -E "^E  |passed|failed|FAILED" $OUT/tests.log | cut -c1-300 | tail -30; grep -c PASSED $OUT/tests.log; }
case $1 in
tests) run 280 tests/gpu/test_sanitizer_gpu.py tests/gpu/test_gemm_random_gpu.py tests/gpu/test_gemm_gpu.py tests/gpu/test_fast_activations_gpu.py -k "products or random or waited or panels or activations" ;;
epilogues) timeout 130 python -m bench gemm_epilogues --workers 14 --out $OUT 2>&1 | tail -40 | cut -c1-200 ;;
clk) timeout 140 python bench/experiments/clk_ep.py 10 ep:4096 2>&1 | tail -40 ;;
gpu) run 560 $(ls tests/gpu/test_*_gpu.py | grep -v attention | awk "NR % 2 == ${FIRST:-1} - 1") ;;
esac
