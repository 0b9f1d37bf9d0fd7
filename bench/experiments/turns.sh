[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); export PYTHONPATH=/tmp/site:$PWD TRITON_CACHE_DIR=/tmp/tc
for i in $(seq 0 13); do timeout 100 python .scratch/turns.py warm $i 6144 2816 8192 > /dev/null 2>&1 & done; wait
M=sm__cycles_elapsed.max,lts__t_sectors_op_read.sum,dram__bytes_read.sum,l1tex__m_xbar2l1tex_read_bytes.sum
timeout 100 ncu --clock-control none --profile-from-start off --csv --metrics $M python .scratch/turns.py ncu 6144 2816 8192 > $OUT/t.csv 2>&1; python .scratch/table3.py $OUT/t.csv
