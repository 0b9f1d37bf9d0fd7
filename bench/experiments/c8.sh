[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader
for v in p128 p256; do rm -rf /tmp/$v; mkdir /tmp/$v; cp -r tritonkittens kernels bench pyproject.toml /tmp/$v; done
sed -i 's/return 256 if .*/return 128/' /tmp/p128/tritonkittens/launch/tensormap.py; grep -n "return 128" /tmp/p128/tritonkittens/launch/tensormap.py
K="--knobs cols=256;panel=64;group=8;schedule=split_tail --knobs cols=256;panel=64;group=16;schedule=split_tail --knobs cols=256;panel=64;cluster=2;group=8"
go() { v=$1; shift; n=$1; shift; (cd /tmp/$v; PYTHONPATH=/tmp/site:/tmp/$v TRITON_CACHE_DIR=/tmp/tc timeout 100 python -m bench "$@" --quick --workers 12 --out /tmp/o/$v$n > /tmp/$v$n.log 2>&1 || tail -3 /tmp/$v$n.log); }
for r in 1 2; do for v in p128 p256; do
  go $v d$r attention_decode --only "bf16"
  go $v f$r gemm_fp8 --only "16384x16384x16384 scale per row" $K
  [ $r = 1 ] && go $v b$r attention_backward --only "D 128"
  [ $r = 1 ] && go $v g$r gemm --only "16384x16384x16384"
  [ $r = 1 ] && go $v t$r gemm_fp8 --only "16384x16384x16384 scale per tensor"
done; done
python - <<'Q'
import glob, json, statistics as st
for f in sorted(glob.glob("/tmp/o/*/*.json"), key=lambda f: (f.split("/")[-2][4:], f)):
    print(f.split("/")[-2])
    for r in json.load(open(f))["rows"]:
        c = r["contenders"]; b = c[r["best_peer"]]["ms"]
        print("  ", r["case"][:46], r["best_peer"][:12], round(st.median(b) * 1e3, 1), {k.replace("tritonkittens", "tk"): round(st.median(x / y for x, y in zip(b, v["ms"])), 3) for k, v in c.items() if v.get("ours") and v.get("ms")})
Q
