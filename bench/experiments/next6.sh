# First device call of the next session (about 300 s), on an H200. S.patch: GEMM's consumers, which end a task one behind the other, have staging memory in turn, all of it (in_turn), and store `together` panels behind one fence;
# predicted: 1,000 cycles a task less (128×256 e4m3, 131 thousand at K 16384), so pairs (C) as fast as turns (I) in bursts and 6 to 8 % ahead when hot. D.patch: decoding with L2 hints, rotated first blocks, 64 keys a block, all slots.
# X.patch: backward, the scheduling barrier's number from a parameter (dimension 64 causal: no spills, but more between the wait and the first product). Copy the folder into .scratch; carry .triton .scratch.
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader; export PYTHONPATH=/tmp/site TRITON_CACHE_DIR=/tmp/ct
tree() { rm -rf /tmp/$1; mkdir /tmp/$1; cp -r tritonkittens kernels bench pyproject.toml /tmp/$1; [ -n "$2" ] && (cd /tmp/$1; patch -s -p1 < $R/.scratch/$2); sed -i "s/\"tritonkittens::/\"tk$1::/" /tmp/$1/kernels/attention/*.py /tmp/$1/kernels/gemm/*.py; L=$L,$1=/tmp/$1; }
L=""; tree S S.patch; tree D D.patch; L=""; tree M; tree X X.patch; L=${L#,}
for i in $(seq 0 13); do (cd /tmp/S; PYTHONPATH=/tmp/site:/tmp/S timeout 100 python $R/.scratch/gk.py warm $i 14 > /tmp/g$i.log 2>&1) & done; wait; grep -h Error /tmp/g*.log | head -3; echo warm $SECONDS
(cd /tmp/S; PYTHONPATH=/tmp/site:/tmp/S timeout 120 ncu --clock-control none --profile-from-start off -k regex:"template|cutlass|gemm|device_kernel|nvjet|sm90" --csv --metrics sm__cycles_elapsed.max python $R/.scratch/gk.py run $OUT/names.txt > $OUT/ncu.csv 2> /tmp/ncu.log; grep WRONG $OUT/ncu.csv; tail -1 /tmp/ncu.log | cut -c1-200)
python - <<'P'
import csv, os
rows = [r for r in csv.reader(l for l in open(os.environ["OUT"] + "/ncu.csv") if l.startswith('"'))]; h = rows[0]; v, k = h.index("Metric Value"), h.index("Kernel Name")
names = [n for n in open(os.environ["OUT"] + "/names.txt").read().split("\n") for _ in range(2)]
print(len(rows) - 1, len(names)); by = {}
for n, r in zip(names, rows[1:]): by.setdefault(n.rsplit(" ", 1)[0], {}).setdefault(n.rsplit(" ", 1)[1], []).append(float(r[v].replace(",", "")) / 1000)
for s, x in by.items(): print(s, "  ".join(f"{n} {min(t):.1f}" for n, t in x.items()))
P
echo ncu $SECONDS
K="cols=256;panel=64;cluster=2;group=8;schedule=split_tail;in_turn=True"
for r in 1 2; do for s in gemm_fp8 gemm_sustained; do o="16384x16384x16384 scale per row"; [ $s = gemm_sustained ] && o="scale per row 16384"
(cd /tmp/S; echo $s; PYTHONPATH=/tmp/site:/tmp/S timeout 60 python -m bench $s --quick --workers 8 --only "$o" --knobs "$K;together=1" --knobs "$K;together=2" --knobs "$K;together=4" --out /tmp/o/$s 2>&1 | grep "ratio [0-9]" | sed 's/cols=256;panel=64;cluster=2;group=8;schedule=split_tail;//; s/  */ /g'); done; done; echo gemm $SECONDS
(cd /tmp/D; PYTHONPATH=/tmp/site:/tmp/D timeout 110 python $R/.scratch/decode_ab.py 50 2> /tmp/d.log | tee $OUT/decode.txt; tail -1 /tmp/d.log | cut -c1-200); echo decode $SECONDS
for i in $(seq 0 15); do timeout 100 python .scratch/trees.py warm $i 16 $L > /tmp/w$i.log 2>&1 & done; wait
AB_D="(64,)" AB_C="(True,)" timeout 100 python .scratch/trees.py time 30 $L 2> /tmp/t.log | tee $OUT/trees.txt; AB_D="(64,)" AB_C="(False,)" AB_S="(1024,4096,16384)" timeout 60 python .scratch/trees.py time 15 $L 2> /tmp/t.log | tee -a $OUT/trees.txt
