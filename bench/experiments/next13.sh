# First lease of the next session, an H200; three calls, so that FlashAttention-4 travels (.fa4a, .fa4b: its two halves; without it, the first and `python -m bench attention_decode` are enough).
# (1) carry .triton .scratch:  bash .scratch/next13.sh 1   (2) carry .fa4a:  cp .fa4a/paa /tmp/   (3) carry .fa4b .scratch:  bash .scratch/next13.sh 3
export TRITON_CACHE_DIR=/tmp/tc PYTHONPATH=/tmp/site:$PWD
if [ $1 = 1 ]; then
  [ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); cp -r .scratch/fa3 /tmp/fa3; nvidia-smi --query-gpu=name --format=csv,noheader
  for i in $(seq 0 13); do timeout 60 python .scratch/decode_variants.py warm $i 14 > /tmp/g$i.log 2>&1 & done; wait; grep -h Error /tmp/g*.log | head -5
  timeout 80 python .scratch/decode_variants.py run 25 2> /tmp/d.log | tee $OUT/decode.txt; tail -1 /tmp/d.log | cut -c1-200
else
  mkdir -p /tmp/fa4; cat /tmp/paa .fa4b/pab | tar xJ -C /tmp/fa4; export PYTHONPATH=$PYTHONPATH:/tmp/fa3:/tmp/fa4:/tmp/fa4/nvidia_cutlass_dsl/dsl_packages
  timeout 110 python -m bench attention_decode --quick --workers 14 --out $OUT/b > $OUT/suite.txt 2> /tmp/err; tail -1 /tmp/err | cut -c1-200; grep -v "^ *$" $OUT/suite.txt | tail -62 | cut -c1-120
  timeout 60 python -m pytest -q -n 15 tests/gpu/test_attention_decode_gpu.py 2>&1 | grep -E "FAILED|passed|failed"
fi
