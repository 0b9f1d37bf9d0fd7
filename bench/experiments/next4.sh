# First device call of the next session (about 420 s), best on an H200. Needs .scratch/{task_stamps.patch,task_stamps.py,one_tile.patch,keys_ahead.patch}; carry .triton .scratch.
# 1. where a consumer is between tasks of the backward: every task costs 8,300 cycles beside its iterations (2.3 of them), at 512 keys and causal 1,024 a third of all; 2. offsets and
# deltas in one tile (O: half the bytes, 12 KB of shared memory), and with the keys of dimension 64 loaded a task ahead into those (K: layout's `ahead`); 3. e4m3 16384³ by rows in turns (I) or together in pairs (C).
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader
for x in S O H K; do rm -rf /tmp/$x; mkdir /tmp/$x; cp -r tritonkittens kernels bench pyproject.toml /tmp/$x; done
(cd /tmp/S; patch -s -p1 < $R/.scratch/task_stamps.patch); (cd /tmp/O; patch -s -p1 < $R/.scratch/one_tile.patch); (cd /tmp/K; patch -s -p1 < $R/.scratch/keys_ahead.patch)
PYTHONPATH=/tmp/site:/tmp/S TRITON_CACHE_DIR=/tmp/cs timeout 100 python .scratch/task_stamps.py 64,512,0 64,512,1 64,1024,1 64,4096,1 128,512,0 128,1024,0 128,1024,1 2>&1 | grep "^D" | tee $OUT/task_stamps.txt
for r in 1 2; do for v in H O K; do (cd /tmp/$v; PYTHONPATH=/tmp/site:/tmp/$v TRITON_CACHE_DIR=/tmp/c$v timeout 110 python -m bench attention_backward --quick --workers 14 --out /tmp/o/$v$r > /tmp/$v$r.log 2>&1 || tail -3 /tmp/$v$r.log); done; done
python - <<'Q'
import json, statistics as st
rows = {v: json.load(open(f"/tmp/o/{v}/attention_backward.json"))["rows"] for v in ("H1", "O1", "K1", "H2", "O2", "K2")}
for i, r in enumerate(rows["H1"]):
    print(r["case"], {v: round(st.median(a / b for a, b in zip(x[i]["contenders"]["cudnn"]["ms"], x[i]["contenders"]["tritonkittens"]["ms"])), 3) for v, x in rows.items()})
Q
I="rows=128;cols=128;independent=True;panel=32;schedule=split_tail"
for s in gemm_fp8 gemm_sustained; do w="scale per row"; o="16384x16384x16384 scale per row"; [ $s = gemm_sustained ] && o="scale per row 16384"
(cd /tmp/H; PYTHONPATH=/tmp/site:/tmp/H TRITON_CACHE_DIR=/tmp/cH timeout 90 python -m bench $s --quick --workers 12 --only "$o" --knobs "$I;group=8" --knobs "$I;group=10" --knobs "$I;group=12" --knobs "$I;group=6" --out /tmp/o/$s 2>&1 | grep "ratio" | cut -c1-140); done
