# An H200, one call, carry .triton .scratch (this folder's files there): bash .scratch/next15.sh. About 250 s.
export TRITON_CACHE_DIR=/tmp/tc PYTHONPATH=/tmp/site:$PWD
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); nvidia-smi --query-gpu=name --format=csv,noheader
for i in $(seq 0 13); do timeout 90 python .scratch/many.py warm $i > /tmp/m$i 2>&1 & done; wait
timeout 150 python .scratch/many.py run 110 2> /tmp/err | tee $OUT/many.txt; tail -1 /tmp/err | cut -c1-200
export COUNT=96; for i in $(seq 0 13); do timeout 90 python .scratch/scan.py warm $i 14 > /tmp/s$i 2>&1 & done; wait
timeout 90 python .scratch/scan.py run 60 2>/dev/null | tee $OUT/scan.txt | grep -E "<<<|WRONG" | tail -30   # random shapes beside cuDNN and FlashAttention-2: those behind
timeout 60 python .scratch/host.py 2>/dev/null | head -6 | tee $OUT/host.txt
