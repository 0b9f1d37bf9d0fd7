# Next session, an H200, three calls. First: cp /work/keep/next/s34/* .scratch/ (or git show <experiments commit>:bench/experiments/…).
# (1) carry .triton .scratch: bash .scratch/next14.sh 1   (2) carry .fa4a: cp .fa4a/paa /tmp/   (3) carry .fa4b .scratch: bash .scratch/next14.sh 3
export TRITON_CACHE_DIR=/tmp/tc PYTHONPATH=/tmp/site:$PWD
if [ $1 = 1 ]; then
  [ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); cp -r .scratch/fa3 /tmp/fa3; nvidia-smi --query-gpu=name --format=csv,noheader
  for i in $(seq 0 13); do timeout 90 python .scratch/decode_variants.py warm $i 14 > /tmp/g$i.log 2>&1 & done; wait; grep -h Error /tmp/g*.log | head -5
  timeout 100 python .scratch/decode_variants.py run 30 2> /tmp/d.log | tee $OUT/decode.txt; tail -1 /tmp/d.log | cut -c1-200
  rm -rf /tmp/pub; mkdir /tmp/pub; cp -a tritonkittens kernels bench pyproject.toml /tmp/pub; (cd /tmp/pub && patch -s -p1 < $OLDPWD/.scratch/published.patch)
  timeout 150 python .scratch/ab.py run $PWD,/tmp/pub 40 | tee $OUT/published.txt   # one fence less in front of the roles: time as it is by time with it
  timeout 60 python .scratch/host.py 2>/dev/null | head -8 | tee $OUT/host.txt      # was 61 (one part), 112 (four), 80 (lengths) µs; sdpa 31
else
  mkdir -p /tmp/fa4; cat /tmp/paa .fa4b/pab | tar xJ -C /tmp/fa4; export PYTHONPATH=$PYTHONPATH:/tmp/fa3:/tmp/fa4:/tmp/fa4/nvidia_cutlass_dsl/dsl_packages
  timeout 170 python -m bench attention_decode --quick --workers 14 --out $OUT/b > $OUT/suite.txt 2> /tmp/err; tail -1 /tmp/err | cut -c1-200; grep -E "^bf16|tritonkittens|peer|copy" $OUT/suite.txt | cut -c1-100 | tail -80
  timeout 100 python -m pytest -q -n 15 tests/gpu/test_attention_decode_gpu.py tests/gpu/test_template_split_gpu.py tests/gpu/test_cluster_gpu.py tests/gpu/test_explicit_gpu.py tests/gpu/test_ptx_sync_gpu.py 2>&1 | grep -E "FAILED|passed|failed"
fi
