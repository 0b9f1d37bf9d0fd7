# On an H200 (carry .triton), copied to bench/experiments first (untracked):
# 1. bash bench/experiments/next48.sh models    (200 s) gemm_models with today's table: every row is expected at 0.95 or more, 3000x5000x2000 at 0.97 to 1.03; into bench/results, README
# 2. … training (90 s) gemm_training and gemm_host: gradients that torch need not copy; predicted: dW's copy was 15 to 20 % of dW, 5 % of a step
# 3. … lines    (120 s) rows of copies at cache lines (line_rows.patch) against rows at 16 bytes: 4095x4097x4103; predicted 242 → 215 µs with 192x176
# 4. … gpu      tests/gpu but attention and sanitizers: FIRST=1 and FIRST=2, 190 and 300 s; … sanitizer (200 s)
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); export PYTHONPATH=/tmp/site:$PWD TRITON_CACHE_DIR=/tmp/tc
nvidia-smi -L | cut -c1-24
run() { timeout -s INT $1 python -m pytest -v -n 15 --dist load --maxschedchunk=1 -p no:cacheprovider "${@:2}" > $OUT/tests.log 2>&1; grep -E "^E  |passed|failed|FAILED" $OUT/tests.log | cut -c1-300 | tail -30; grep -c PASSED $OUT/tests.log; }
case $1 in
models) timeout 330 python -m bench gemm_models --quick --workers 14 --out $OUT > $OUT/models.txt 2>&1; grep -B2 -E "ratio 0\.9[0-7]" $OUT/models.txt | cut -c1-120; tail -4 $OUT/models.txt ;;
training) timeout 200 python -m bench gemm_training gemm_host --workers 14 --out $OUT 2>&1 | grep -E "forward|torch|trito|geometric" | cut -c1-140 ;;
lines) rm -rf /tmp/lined; cp -r . /tmp/lined; (cd /tmp/lined; patch -sp1 < bench/experiments/line_rows.patch)
  k=(); for x in "cluster=2" "cluster=2;panel=64;packed=True" "consumers=3;cols=176;panel=16;cluster=2;swapped=True" "consumers=3;cols=192;panel=32;cluster=2" "cluster=4;panel=64;packed=True" "panel=64;packed=True" "cols=192;panel=64;packed=True"; do k+=(--knobs "$x"); done
  for tree in $PWD /tmp/lined; do (cd $tree; export PYTHONPATH=/tmp/site:$tree; echo $tree; timeout 120 python -m bench gemm_models --only 4095x4097x4103 "${k[@]}" --workers 14 --out $OUT/$(basename $tree) 2>&1 | grep -E "ragged|trito|cublas" | cut -c1-130); done ;;
gpu) run ${LIMIT:-560} $(ls tests/gpu/test_*_gpu.py | grep -v attention | awk "NR % 2 == ${FIRST:-1} - 1") -k "not nothing_to_report" ;;
sanitizer) run 300 tests/gpu/test_sanitizer_gpu.py -k products ;;
esac
