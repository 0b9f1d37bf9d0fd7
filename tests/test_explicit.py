"""Explicit tiles without a GPU: what kernels compile to on Hopper and Blackwell, and what Ampere, Ada and consumer
Blackwell refuse."""

import os
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

import tritonkittens.lang as tk
from tests import cases_explicit as cases
from tests.cases_explicit import TORCH
from tests.fake_libcuda import FakeCuda, build
from tests.util import meta
from tritonkittens.inspect import inspect
from tritonkittens.lang.debug import Event
from tritonkittens.launch import Launcher


def ptx_of(compiled):
    return compiled.asm["ptx"]


def compile_product(p, arch="sm_90a"):
    a, b, c = p.shapes
    tensors = [tk.gl(meta(*shape, dtype=TORCH[dtype])) for shape, dtype in ((a, p.dtype), (b, p.dtype), (c, p.sum))]
    return cases.product.compile(*tensors, *p.arguments, num_warps=p.warps, arch=arch)


# ---- products
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", cases.WGMMA[::2] + cases.WGMMA[-4:], ids=str)
def test_warpgroup_tiles_multiply_by_wgmma(p):
    compiled = compile_product(p)
    ptx = ptx_of(compiled)
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.(\S+)", ptx))
    assert {kind for _, kind in found} == {cases.INSTRUCTION[p.dtype]}
    assert {int(n) for n, _ in found} == {1 << b for b in range(9) if p.n >> b & 1}, (
        "one instruction width for every power-of-two piece"
    )
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("p", cases.MMA_SYNC[::3], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_other_register_tiles_multiply_by_mma_sync(p, arch):
    if arch == "sm_80" and p.dtype in (tk.fp8e4m3, tk.fp8e5m2):
        pytest.skip("sm_80 multiplies no fp8: refused, see below")
    ptx = ptx_of(compile_product(p, arch))
    kind = cases.INSTRUCTION[p.dtype]
    a, b = kind.split(".")[1:]
    assert re.search(rf"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.(satfinite\.)?{kind.split('.')[0]}\.{a}\.{b}", ptx)
    assert "wgmma" not in ptx


def test_products_in_flight_stay_in_flight():
    g = tk.gl(meta(64, 64))
    compiled = cases.overlapped.compile(g, g, g, *[tk.gl(meta(64, 64, dtype=torch.float32))] * 2, tk.bf16, 64)
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx_of(compiled))
    assert waits == ["1", "1", "0"]
    assert not inspect(compiled).wgmma_serialized
    for dtype in (tk.bf16, tk.fp8e4m3):
        deep = tk.gl(meta(64, 512, dtype=TORCH[dtype]))
        compiled = cases.kept_in_flight.compile(deep, deep, tk.gl(meta(64, 64, dtype=torch.float32)), dtype)
        assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1", ptx_of(compiled))


@pytest.mark.parametrize("dtype", [tk.bf16, tk.fp8e4m3], ids=str)
def test_no_product_reads_an_accumulator_that_begins_at_zero(dtype):
    a, b = (tk.gl(meta(rows, 128, dtype=TORCH[dtype])) for rows in (128, 64))
    compiled = cases.begun_at_zero.compile(a, b, tk.gl(meta(128, 64, dtype=torch.float32)), 128, dtype)
    first = re.findall(r"wgmma\.mma_async[^;]*, (\S+), 1, 1(?:, 0, 0)?;", ptx_of(compiled))  # scale-d
    assert first.count("0") == 2 and len(first) > 2
    assert not inspect(compiled).remarks


@pytest.mark.parametrize("stored, rows, cols, n", [("NK", 176, 64, 176), ("KN", 64, 192, 192)])
def test_a_contiguous_tile_is_one_instruction_a_step(stored, rows, cols, n):
    tile = tk.st(tk.bf16, rows, cols, contiguous=True)
    tensors = [tk.gl(meta(64, 64)), tk.gl(meta(2 * rows, cols), tile), tk.gl(meta(64, n, dtype=torch.float32))]
    compiled = cases.contiguous_ring.compile(*tensors, tile, stored)
    assert re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k\d+)", ptx_of(compiled)) == [f"m64n{n}k16"] * 8
    assert not inspect(compiled).wgmma_serialized


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("how", ["synchronous", "semaphore", "tensor memory", "in flight"])
def test_tensor_memory_products(arch, how):
    if how != "synchronous" and arch == "sm_103a":
        pytest.skip("the same code as for sm_100a")
    tensors = [tk.gl(meta(128, 64)), tk.gl(meta(64, 96)), tk.gl(meta(128, 96, dtype=torch.float32))]
    ptx = ptx_of(cases.tcgen05_product.compile(*tensors, "AB", 128, 96, 64, tk.bf16, how, arch=arch))
    for mnemonic in (
        "tcgen05.alloc",
        "tcgen05.mma.cta_group::1.kind::f16",
        "tcgen05.commit",
        "tcgen05.ld.sync",
        "tcgen05.st.sync",
        "tcgen05.dealloc",
    ):
        assert mnemonic in ptx
    assert "wgmma" not in ptx and "mma.sync" not in ptx
    assert ptx.count("tcgen05.commit") == (2 if how == "in flight" else 1), (
        "the unit is asynchronous: someone must wait for every product"
    )
    ends = [m.start() for m in re.finditer(r"tcgen05\.commit|mbarrier\.try_wait|tcgen05\.ld\.sync", ptx)]
    order = [ptx[e : e + 12] for e in ends if ptx.find("tcgen05.mma") < e]
    assert order[:3] == ["tcgen05.comm", "mbarrier.try", "tcgen05.ld.s" if how != "in flight" else "tcgen05.comm"]


@pytest.mark.parametrize(
    ("kind", "dtype", "unit"),
    [
        ("ABt", tk.bf16, "f16"),
        ("AtB", tk.fp16, "f16"),
        ("AtBt", tk.bf16, "f16"),
        ("ABt", tk.fp8e4m3, "f8f6f4"),
        ("AB", tk.fp8e5m2, "f8f6f4"),
        ("ABt", tk.fp32, "tf32"),
    ],
)
def test_tensor_memory_products_by_type(kind, dtype, unit):
    p = cases.Product(kind, 128, 64, 64, dtype)
    tensors = [tk.gl(meta(*shape, dtype=TORCH[t])) for shape, t in zip(p.shapes, (dtype, dtype, tk.fp32))]
    ptx = ptx_of(cases.tcgen05_product.compile(*tensors, kind, 128, 64, 64, dtype, "synchronous", arch="sm_100a"))
    assert f"kind::{unit}" in ptx


def test_tensor_memory_has_views():
    g = tk.gl(meta(128, 256, dtype=torch.float32))
    assert "tcgen05.ld" in ptx_of(cases.tensor_views.compile(g, g, 256, 64, arch="sm_100a"))
    g = tk.gl(meta(128, 96, dtype=torch.float32))
    assert "tcgen05.ld" in ptx_of(cases.tensor_views.compile(g, g, 96, 96, arch="sm_100a"))
    with pytest.raises(
        tk.TileError,
        match=re.escape("subtile(128, 48) number (0, 0) of tt(fp32, 128, 96) cuts its pieces of 64, 32 columns"),
    ):
        cases.tensor_views.compile(g, g, 96, 48, arch="sm_100a")


# ---- moving
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_tma_moves_tensors_of_every_rank(rank, arch):
    tile = tk.sv(tk.fp16, 128) if rank == 1 else tk.st(tk.fp16, 48, 64)
    g = tk.gl(meta(*(2, 3, 2, 100, 200)[5 - rank :], dtype=torch.float16), tile)
    ptx = ptx_of(cases.tma_copy.compile(g, g, tile, rank, "copy", arch=arch))
    copies = 1 if rank == 1 else 2  # 48 rows are pieces of 32 and 16
    assert (
        ptx.count(f"cp.async.bulk.tensor.{rank}d.shared") == ptx.count(f"cp.async.bulk.tensor.{rank}d.global") == copies
    )
    assert "mbarrier.arrive.expect_tx" in ptx and "createpolicy" not in ptx


@pytest.mark.parametrize("kind", ["add", "min", "max"])
def test_tma_reductions(kind):
    tile = tk.st(tk.bf16, 16, 64)
    g = tk.gl(meta(64, 64), tile)
    assert f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{kind}" in ptx_of(
        cases.tma_copy.compile(g, g, tile, 2, kind)
    )


@pytest.mark.parametrize("policy", ["evict_first", "evict_last", "evict_normal"])
def test_cache_policies_reach_both_directions(policy):
    tile = tk.st(tk.bf16, 16, 64)
    g = tk.gl(meta(64, 64), tile)
    ptx = ptx_of(cases.tma_copy.compile(g, g, tile, 2, "copy", policy))
    assert f"L2::{policy}" in ptx and len(re.findall(r"cp\.async\.bulk\.tensor\S*L2::cache_hint", ptx)) == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_loads_and_stores_compile_everywhere(arch):
    aligned, ragged, tile = tk.gl(meta(100, 160)), tk.gl(meta(100, 77).t()), tk.st(tk.bf16, 48, 80)
    for g in (aligned, ragged):
        ptx = ptx_of(cases.through_shared.compile(g, g, tile, 2, -1.0, arch=arch))
        assert ("ld.global.v4" in ptx) == (g is aligned), "16 bytes at once where no edge and no stride forbids it"
        ptx = ptx_of(cases.by_cp_async.compile(g, g, tile, 2, arch=arch))
        assert ("cp.async.cg.shared.global" in ptx) == (g is aligned)
    rows = tk.gl(meta(48, dtype=torch.int32))
    assert "st.global" in ptx_of(
        cases.gather_scatter.compile(aligned, rows, rows, aligned, tk.rt(tk.bf16, 48, 80, "memory"), 0.0, arch=arch)
    )


def test_raw_bytes_clusters_marks_and_dependent_launches():
    g = tk.gl(meta(4096, dtype=torch.uint8))
    ptx = ptx_of(cases.bytes_copy.compile(g, g, tk.sv(tk.fp32, 176), 64, True))
    assert ptx.count("cp.async.bulk.shared::cluster.global") == ptx.count("cp.async.bulk.global.shared") == 3
    compiled = cases.neighbours.compile(tk.gl(meta(64, dtype=torch.int32)), 4, "role", cluster_size=2)
    assert (
        compiled.metadata.num_ctas == 2
        and "mapa.shared::cluster" in ptx_of(compiled)
        and "barrier.cluster.wait.acquire" in ptx_of(compiled)
    )
    compiled = cases.marks.compile(tk.gl(meta(32, 4, dtype=torch.int64)), launch_pdl=True, launch_cooperative_grid=True)
    assert compiled.metadata.launch_pdl and compiled.metadata.launch_cooperative_grid
    several = cases.marks.compile(tk.gl(meta(32, 4, dtype=torch.int64)), minnctapersm=4)
    assert several.metadata.ptx_options == "--minnctapersm=4" and "setmaxnreg" not in ptx_of(several)
    for mnemonic in (
        "griddepcontrol.wait",
        "griddepcontrol.launch_dependents",
        "%globaltimer",
        "%smid",
        "prefetch.global.L2",
    ):
        assert mnemonic in ptx_of(compiled)


def ring_tensors():
    tile, narrow = tk.st(tk.bf16, 64, 64), tk.st(tk.bf16, 64, 96)
    return tk.gl(meta(100, 200), tile), tk.gl(meta(200, 96), narrow), tk.gl(meta(100, 96), narrow)


@pytest.mark.parametrize("debug", [False, True, "report"])
def test_debug_modes(debug):
    compiled = cases.ring_gemm.compile(*ring_tensors(), 96, 2, "role", (152, 40), maxnreg=168, debug=debug)
    report, ptx = inspect(compiled), ptx_of(compiled)
    assert ("trap;" in ptx) == bool(debug) and ("vprintf" in ptx) == (debug == "report")
    assert report.wgmma_serialized == (debug == "report"), (
        "only the printing mode may change the code around the products"
    )
    if debug == "report":
        lines = [
            bytes(int(c) for c in t.split(",")).decode()
            for t in re.findall(r"printfFormat_\d+\[\d+\] = \{([\d, ]+)\}", ptx)
        ]
        assert any(
            re.search(r"stuck waiting for a semaphore at cases_explicit\.py:\d+ \(ring_producer\), phase 0, warp", line)
            for line in lines
        ), lines


def test_timeline_reads_marks():
    buffer = torch.zeros(4, 4, dtype=torch.int64)
    buffer[2] = torch.tensor([1_000_100, 7, 3, 1])
    buffer[0] = torch.tensor([1_000_050, 8, 0, 5])
    assert tk.timeline(buffer, ("load", "compute")) == [Event(0, 8, 0, 5, 0), Event(50, 7, 3, "compute", 2)]
    with pytest.raises(
        tk.TileError, match=re.escape("timeline of shape (4,), torch.int64: needs (records, 4) of torch.int64")
    ):
        tk.timeline(torch.zeros(4, dtype=torch.int64))


# ---- architectures
# ---------------------------------------------------------------------------------------------------------------


@tk.kernel
@triton.jit
def feature(X, WHAT: tl.constexpr):
    TILE: tl.constexpr = tk.st(tk.bf16, 64, 64)
    if WHAT == "semaphores":
        tk.semaphores(1)
    elif WHAT == "TMA store":
        tk.store_async(X, tk.allocate(TILE), (0, 0))
    elif WHAT == "roles":
        tk.specialize(((nothing, (X,)), (nothing, (X,))), warps=(4, 4))
    elif WHAT == "tensor memory":
        tk.tensor_allocator(tk.tt(tk.fp32, 128, 128))
    elif WHAT == "registers":
        tk.increase_registers(240)
    elif WHAT == "cluster_sync":
        tk.cluster_sync()
    elif WHAT == "cluster_rank":
        tk.cluster_rank()
    elif WHAT == "bytes":
        tk.store_bytes_async(X, tk.allocate(tk.sv(tk.bf16, 64)))
    elif WHAT == "store_wait":
        tk.store_wait()
    elif WHAT == "pdl":
        tk.dependency_wait()
    elif WHAT == "fp8":
        a = tk.zero(tk.rt(tk.fp8e5m2, 16, 32))
        tk.mm_ABt(a, a)


@triton.jit
def nothing(X):
    tk.sync()


HOPPER_UP = "needs sm_90a (Hopper), sm_100a or sm_103a (Blackwell data centre)"
FEATURES = {
    "semaphores": f"semaphores (mbarrier) {HOPPER_UP}",
    "TMA store": f"store_async (TMA) {HOPPER_UP}",
    "roles": f"warp roles (setmaxnreg) {HOPPER_UP}",
    "tensor memory": "tensor memory (tcgen05) needs sm_100a or sm_103a (Blackwell data centre)",
    "registers": f"increase_registers (setmaxnreg) {HOPPER_UP}",
    "cluster_sync": f"cluster_sync (barrier.cluster) {HOPPER_UP}",
    "cluster_rank": f"cluster_rank (clusters) {HOPPER_UP}",
    "bytes": f"store_bytes_async (cp.async.bulk) {HOPPER_UP}",
    "store_wait": f"store_wait (cp.async.bulk.wait_group) {HOPPER_UP}",
    "pdl": f"dependency_wait (programmatic dependent launch) {HOPPER_UP}",
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
@pytest.mark.parametrize("what", FEATURES)
def test_what_an_architecture_lacks_is_refused(what, arch):
    with pytest.raises(tk.ArchitectureError) as error:
        feature.compile(tk.gl(meta(64, 64), tk.st(tk.bf16, 64, 64)), what, arch=arch)
    assert str(error.value).startswith(
        f"{FEATURES[what]}; this kernel is compiled for {arch.removesuffix('a')}. Kernels of register tiles "
        "(@triton.jit with tk operations) run on every GPU [in feature: "
    ), str(error.value)


def test_tensor_memory_is_no_hopper_feature_and_wgmma_no_blackwell_one():
    with pytest.raises(
        tk.ArchitectureError,
        match=re.escape(
            "tensor memory (tcgen05) needs sm_100a or sm_103a (Blackwell data centre); this kernel is compiled for "
            "sm_90"
        ),
    ):
        feature.compile(tk.gl(meta(64, 64)), "tensor memory")
    p = cases.Product("ABt", 64, 64, 64)
    assert "wgmma" not in ptx_of(compile_product(p, "sm_100a"))  # register tiles use mma.sync there


def test_8_bit_floats_need_ada():
    with pytest.raises(
        tk.ArchitectureError, match="mma.sync of 8-bit floats needs sm_89 or newer; this kernel is compiled for sm_80"
    ):
        feature.compile(tk.gl(meta(64, 64)), "fp8", arch="sm_80")
    with pytest.raises(
        tk.ArchitectureError, match=r"fp8e4m3.* needs sm_89 or newer; this kernel is compiled for sm_80"
    ):
        cases.through_registers.compile(
            *[tk.gl(meta(64, 64, dtype=torch.float8_e4m3fn))] * 2, tk.rt(tk.fp8e4m3, 32, 32), 2, 0, arch="sm_80"
        )


def test_clusters_need_hopper():
    with pytest.raises(
        tk.ArchitectureError,
        match=re.escape(f"nothing_much(cluster_size=2): clusters need {HOPPER_UP.removeprefix('needs ')}"),
    ):
        nothing_much.compile(1, cluster_size=2, arch="sm_89")


@tk.kernel
@triton.jit
def nothing_much(n):
    tk.sync()


def test_an_unknown_architecture_is_refused():
    with pytest.raises(
        tk.ArchitectureError,
        match=re.escape("arch='sm_91': must be one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a"),
    ):
        nothing_much.compile(1, arch="sm_91")


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    return FakeCuda(build(tmp_path_factory.mktemp("fake"), "libfake.so"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_a_launch_on_such_a_device_is_refused_and_launches_nothing(fake, capability, monkeypatch):
    monkeypatch.setattr(sys.modules[tk.Kernel.__module__], "capability", lambda device: capability)
    monkeypatch.setattr(
        feature,
        "launcher",
        Launcher(feature._compile_for_launch, name="feature", arg_names=["X"], driver=fake.driver, native=False),
    )
    before = fake.num_launches
    with pytest.raises(
        tk.ArchitectureError, match=rf"semaphores \(mbarrier\) needs .* compiled for sm_{capability[0]}{capability[1]}"
    ):
        feature[(1,)](tk.gl(torch.zeros(64, 64, dtype=torch.bfloat16)), "semaphores")
    assert fake.num_launches == before


# ---- Triton's cache
# --------------------------------------------------------------------------------------------------------


@triton.jit
def one(X):
    tl.store(X, 1)


def test_triton_keeps_a_plain_kernel_and_explicit_ones_of_the_same_function_apart():
    explicit = tk.kernel(one)
    x = meta(16, dtype=torch.int32)
    source, clustered = explicit.compile(x).src, explicit.compile(x, cluster_size=2).src
    plain = ASTSource(one, source.signature, source.constants, source.attrs)
    assert plain.hash() == super(type(source), source).hash(), "Triton's own key has begun to tell them apart"
    assert len({plain.hash(), source.hash(), clustered.hash()}) == 3
    assert len({explicit.compile(x).hash, explicit.compile(x, cluster_size=2).hash, explicit.compile(x).hash}) == 2


def test_every_process_compiles_the_same_code(tmp_path):
    """They share a cache's folder: of two that compile a kernel at once each may read what the other has written, piece
    by piece."""
    program = (
        "import hashlib, torch; from tritonkittens.kernels.gemm import Gemm; x = torch.empty(512, 512, "
        "dtype=torch.bfloat16, device='meta'); "
        "print(hashlib.sha256(Gemm(epilogue_n=64, deferred_epilogue=True).compile(x, x, x).asm['cubin']).hexdigest())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "TRITON_CACHE_DIR": str(tmp_path / seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    codes = [process.communicate()[0].split()[0] for process in processes]
    assert codes[0] == codes[1] and len(codes[0]) == 64
