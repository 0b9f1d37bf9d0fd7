# Results packed in registers that leave a panel an iteration (TKPACK=2; 1: all at once, as measured on 2026-11-26; 0: as shipped), consumer 1 held TKLAG iterations before its end (-1: all slots
# but one; 0: not). On the device: git apply bench/experiments/packed.patch first (here, before the call). 250 s.
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site); export PYTHONPATH=/tmp/site:$PWD
nvidia-smi -L | cut -c1-20
E=bench/experiments
for x in "0 -1" "0 2" "1 -1" "2 -1" "2 2" "2 1" "2 0"; do set -- $x; (TKPACK=$1 TKLAG=$2 TRITON_CACHE_DIR=/tmp/tc_$1_$2 timeout 100 python $E/cyc.py warm >/dev/null 2>&1) & done; wait
for x in "0 -1 t" "0 2" "1 -1" "2 -1" "2 2" "2 1" "2 0"; do set -- $x
  TKPACK=$1 TKLAG=$2 WITH_TORCH=$3 TRITON_CACHE_DIR=/tmp/tc_$1_$2 timeout 60 ncu --clock-control none --profile-from-start off --metrics sm__cycles_elapsed.max --csv python $E/cyc.py run /tmp/order_$1_$2 2>/dev/null > /tmp/ncu_$1_$2.csv
  python - $1 $2 <<'P'
import csv, sys
rows = [x for x in csv.reader(open(f"/tmp/ncu_{sys.argv[1]}_{sys.argv[2]}.csv")) if len(x) > 10 and "cycles" in x[-3]]
print("pack", sys.argv[1], "lag", sys.argv[2], "  ".join(f"{n} {float(x[-1].replace(',', '')) / 1e3:.0f}" for n, x in zip(open(f"/tmp/order_{sys.argv[1]}_{sys.argv[2]}").read().split("\n"), rows)))
P
done
timeout 150 python $E/gab.py 14 e4row:16384 e4row:8192 bf16:8192 bf16:4096 2>&1 | tail -20
