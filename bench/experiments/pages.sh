# Decoding from pages: page numbers fetched while the length is on its way (decode_pages.patch), with decode_bench.patch (lengths without pages) in both trees
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
for v in pa pb; do
  rm -rf /tmp/$v; mkdir -p /tmp/$v; cp -rL tritonkittens /tmp/$v/; rm -rf /tmp/$v/tritonkittens/kernels; cp -r kernels bench pyproject.toml /tmp/$v/; ln -s ../kernels /tmp/$v/tritonkittens/kernels
  (cd /tmp/$v; patch -s -p1) < .scratch/decode_bench.patch
done
(cd /tmp/pb; patch -s -p1) < .scratch/decode_pages.patch
for round in 1 2 3; do for v in pa pb; do
  (cd /tmp/$v; PYTHONPATH=/tmp/site:/tmp/$v TRITON_CACHE_DIR=/tmp/tc$v timeout 100 python -m bench attention_decode --quick --only "B 8" --out $OUT/$v$round > /tmp/$v$round.log 2>&1) || tail -5 /tmp/$v$round.log
done; done
python - <<'P'
import glob, json, os, statistics as st
for f in sorted(glob.glob(os.environ["OUT"] + "/p[ab]?/attention_decode.json")):
    for r in json.load(open(f))["rows"]:
        c = r["contenders"]
        copy = st.median(c["copy of as many bytes"]["ms"])
        print(f.split("/")[-2], r["case"], {k.replace("tritonkittens", "tk"): round(copy / st.median(v["ms"]), 3) for k, v in c.items() if v.get("ours")})
P
