# First device call of the next session (about 330 s), on an H200: backwards of several trees in one process (trees.py), against the tree of 2026-11-26's thirty-first session. All are right in the
# simulator (tests/sim/test_explore_attention.py -k gradients). Copy the patches and trees.py into .scratch; carry .triton .scratch. Columns: ms, cuDNN's time by it, M's time by it.
# Q1: V is given back before the last dQ is given to the sender, so that K and V are asked for before TMA gets it. W: and at dimension 128 dK leaves from where V was. O2: offsets and deltas in one tile
# (LDLs in causal loops of dimension 64). P1 to P3: places in shared memory (M: dimension 128 Q, dO, K, V, dQ, dS; 64 Q, dO, dS, dQ, K, V). F: V's ring in front of K's, forward (second run).
[ -d /tmp/site ] || (mkdir /tmp/site && tar xJf .triton/triton.tar.xz -C /tmp/site)
R=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader; export PYTHONPATH=/tmp/site TRITON_CACHE_DIR=/tmp/ct
tree() { rm -rf /tmp/$1; mkdir /tmp/$1; cp -r tritonkittens kernels bench pyproject.toml /tmp/$1; [ -n "$2" ] && (cd /tmp/$1; patch -s -p1 < $R/.scratch/$2); [ -n "$3" ] && sed -i "s/ORDER = \"\"/ORDER = \"$3\"/" /tmp/$1/tritonkittens/lang/template_memory.py; sed -i "s/\"tritonkittens::/\"tk$1::/" /tmp/$1/kernels/attention/*.py /tmp/$1/kernels/gemm/*.py; L=$L,$1=/tmp/$1; }
L=""; tree M; tree Q1 Q1.patch; tree W W.patch; tree O2 O2.patch; tree P1 places2.patch K,dQ,V; tree P2 places2.patch dQ,V,K,deltas; tree P3 places2.patch V,dQ,K; L=${L#,}
for i in $(seq 0 15); do timeout 250 python .scratch/trees.py warm $i 16 $L > /tmp/w$i.log 2>&1 & done; wait; grep -l Error /tmp/w*.log | head -3
AB_S="(512,1024,4096,16384)" timeout 300 python .scratch/trees.py time 150 $L 2> /tmp/t.log | tee $OUT/trees.txt | sed 's/cudnn [0-9.]*//'; tail -3 /tmp/t.log | cut -c1-300
L=""; tree F0; tree F places2.patch V; for x in F0 F; do (cd /tmp/$x; PYTHONPATH=/tmp/site:/tmp/$x timeout 100 python -m bench attention --quick --workers 14 --out /tmp/o/$x 2>&1 | grep "tritonkittens .*ratio\|geometric" | cut -c1-100 > $OUT/forward_$x.txt); done; paste $OUT/forward_F0.txt $OUT/forward_F.txt | sed 's/  */ /g'
