"""The synchronisation and copy shims of `inline_ptx`: every one assembles where it claims to, and is refused where it
must be. No GPU."""

import re
import subprocess

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as gluon_mbarrier

from tritonkittens.inline_ptx import (
    ArchitectureError,
    OperandError,
    barrier,
    clc,
    cluster,
    elect,
    mbarrier,
    pdl,
    registers,
    shared,
    tensormap,
    tma,
)
from tritonkittens.inline_ptx._asm import asm, is_explicit, issued, refusal
from tritonkittens.launch import encoding

pytestmark = pytest.mark.usefixtures("compiled_anew")


def compile_kernel(kernel, sm, explicit=False, options=None, **arguments):
    """The compiled kernel; `arguments` are signature types by name. The innermost error, where compilation fails."""
    source = (
        GluonASTSource(GluonJITFunction(kernel.fn), arguments, {}) if explicit else ASTSource(kernel, arguments, {})
    )
    try:
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": 4, **(options or {})})
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        raise error from None


def assembly(ptx):
    """The lines that come from inline assembly."""
    return "\n".join(re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.S))


def check(kernel, expected, arches, explicit=(False, True), **arguments):
    for sm in arches:
        for mode in explicit:
            text = assembly(compile_kernel(kernel, sm, mode, **arguments).asm["ptx"])
            for mnemonic in expected:
                assert mnemonic in text, f"{mnemonic} is missing on sm_{sm}, explicit={mode}"


@triton.jit
def mbarrier_ampere(out):
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 4)
    mbarrier.arrive(bar)
    mbarrier.arrive(bar, issuer="thread")
    done = mbarrier.test_wait(bar, 0)
    mbarrier.wait(bar, done)
    mbarrier.wait_or_trap(bar, 1, limit_ns=1000)
    mbarrier.inval(bar)
    barrier.sync(8, 128)
    barrier.arrive(9, 128)
    done += barrier.reduce(done, 10, 128) + barrier.reduce(done, 10, 128, "and") + barrier.reduce(done, 10, 128, "or")
    barrier.syncwarp()
    barrier.syncwarp(0xFF)
    barrier.fence()
    barrier.fence("sc", "sys")
    barrier.fence("acq_rel", "cta")
    shared.store(bar, done, tl.int32)
    shared.store(bar, 1.5, tl.float32, issuer="warpgroup")
    done += shared.load(bar, tl.int32) + shared.load(bar, tl.int64).to(tl.int32) + shared.address(bar)
    tl.store(out, done)
    tl.store(out + 1, shared.load(bar, tl.float64).to(tl.int32))
    tl.store(out + 2, tma.create_policy("evict_first").to(tl.int32))
    tl.store(out + 3, tma.create_policy("evict_last", 0.5).to(tl.int32))


AMPERE = (
    "mbarrier.init.shared::cta.b64",
    "mbarrier.arrive.shared::cta.b64 _",
    "mbarrier.test_wait.parity.shared::cta.b64",
    "trap;",
    "mbarrier.inval",
    "bar.sync 8, 128;",
    "bar.arrive 9, 128;",
    "bar.red.popc.u32",
    "bar.red.and.pred",
    "bar.red.or.pred",
    "bar.warp.sync",
    "fence.acq_rel.gpu;",
    "fence.sc.sys;",
    "fence.acq_rel.cta;",
    "st.shared.b32",
    "st.shared.f32",
    "ld.shared.b32",
    "ld.shared.b64",
    "ld.shared.f64",
    "createpolicy.fractional.L2::evict_first.b64",
    "createpolicy.fractional.L2::evict_last.b64",
    ".shared .align 1024 .b8 buffer[1024]",
)


def test_barriers_assemble_from_ampere_on():
    check(mbarrier_ampere, AMPERE, (80, 90, 100, 120), out="*i32")


@triton.jit
def mbarrier_hopper(out):
    bar = shared.allocate(8, 8)
    mbarrier.init(bar, 4)
    mbarrier.fence_init()
    mbarrier.arrive(bar, 3)
    mbarrier.arrive_expect_tx(bar, 128)
    mbarrier.expect_tx(bar, 64, issuer="warpgroup")
    rank = cluster.ctarank()
    mbarrier.arrive_remote(bar, rank)
    mbarrier.arrive_remote(bar, rank, 5)
    mbarrier.arrive_expect_tx_remote(bar, rank, 16)
    done = (
        mbarrier.test_wait(bar, 0, scope="cluster")
        + mbarrier.try_wait(bar, 0)
        + mbarrier.try_wait(bar, 1, "cluster", 1000)
    )
    mbarrier.wait(bar, 0)
    mbarrier.wait(bar, 0, "cluster")
    mbarrier.wait_or_trap(bar, 1)
    cluster.arrive()
    cluster.wait()
    cluster.arrive("relaxed", aligned=False)
    cluster.wait(aligned=False)
    done += (
        cluster.nctarank()
        + cluster.ctaid(0)
        + cluster.ctaid(1)
        + cluster.ctaid(2)
        + cluster.nctaid(0)
        + cluster.nctaid(2)
    )
    remote = cluster.mapa(bar, rank)
    cluster.st(remote, 7, tl.int32)
    cluster.st(remote, 1.5, tl.float32)
    cluster.st(remote, 7, tl.int64, issuer="thread")
    cluster.st_async(remote, 7, remote, tl.int32)
    cluster.st_async(remote, 2.5, remote, tl.float32)
    cluster.st_async(remote, 7, remote, tl.int64)
    done += (
        cluster.ld(remote, tl.int32)
        + cluster.ld(remote, tl.float32).to(tl.int32)
        + cluster.ld(remote, tl.int64).to(tl.int32)
    )
    barrier.fence("acq_rel", "cluster")
    pdl.wait()
    pdl.launch_dependents()
    tl.store(out, done + elect.elect_one())


HOPPER = (
    "fence.mbarrier_init.release.cluster",
    "mbarrier.arrive.expect_tx.shared::cta.b64",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
    "mbarrier.arrive.release.cluster.shared::cluster.b64",
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64",
    "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64",
    "mbarrier.try_wait.parity.shared::cta.b64",
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
    "elect.sync",
    "barrier.cluster.arrive.release.aligned;",
    "barrier.cluster.wait.acquire.aligned;",
    "barrier.cluster.arrive.relaxed;",
    "barrier.cluster.wait.acquire;",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%cluster_ctaid.z",
    "%cluster_nctaid.x",
    "mapa.shared::cluster.u32",
    "st.shared::cluster.b32",
    "st.shared::cluster.f32",
    "st.shared::cluster.b64",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64",
    "ld.shared::cluster.f32",
    "ld.shared::cluster.b64",
    "fence.acq_rel.cluster;",
    "griddepcontrol.wait;",
    "griddepcontrol.launch_dependents;",
)


def test_barriers_and_clusters_assemble_from_hopper_on():
    check(mbarrier_hopper, HOPPER, (90, 100, 120), out="*i32")


@triton.jit
def copies(source, map, offset):
    tile = shared.allocate(1024, 128)
    bar = shared.allocate(8, 8)
    policy = tma.create_policy("evict_normal")
    tma.prefetch_tensormap(map)
    tma.fence_tensormap_acquire(map, "sys")
    tma.load_tensor(tile, map, (offset,), bar)
    tma.load_tensor(tile, map, (offset, 0), bar, cache_hint=policy)
    tma.load_tensor(tile, map, (offset, 0, 1), bar, multicast=3)
    tma.load_tensor(tile, map, (offset, 0, 1, 2), bar, multicast=offset, cache_hint=policy)
    tma.load_tensor(tile, map, (offset, 0, 1, 2, 3), bar, issuer="warpgroup")
    tma.load_bulk(tile, source, 64, bar)
    tma.load_bulk(tile, source, 64, bar, multicast=3, cache_hint=policy)
    tma.fence_proxy_async()
    tma.fence_proxy_async("")
    tma.store_tensor(map, (offset,), tile)
    tma.store_tensor(map, (offset, 0, 1, 2, 3), tile, cache_hint=policy)
    tma.reduce_tensor(map, (offset, 0), tile, "add")
    tma.reduce_tensor(map, (offset, 0), tile, "min", cache_hint=policy)
    tma.reduce_tensor(map, (offset, 0), tile, "max")
    tma.reduce_tensor(map, (offset, 0), tile, "inc")
    tma.reduce_tensor(map, (offset, 0), tile, "dec")
    tma.reduce_tensor(map, (offset, 0), tile, "and")
    tma.reduce_tensor(map, (offset, 0), tile, "or")
    tma.reduce_tensor(map, (offset, 0), tile, "xor")
    tma.store_bulk(source, tile, 64)
    tma.store_bulk(source, tile, 64, cache_hint=policy)
    tma.reduce_bulk(source, tile, 64, "add", "f32")
    tma.reduce_bulk(source, tile, 64, "add", "bf16", cache_hint=policy)
    tma.reduce_bulk(source, tile, 64, "min", "s64")
    tma.reduce_bulk(source, tile, 64, "max", "f16")
    tma.reduce_bulk(source, tile, 64, "inc", "u32")
    tma.reduce_bulk(source, tile, 64, "xor", "b64")
    remote = cluster.mapa(tile, 1)
    remote_bar = cluster.mapa(bar, 1)
    tma.copy_bulk_cluster(remote, tile, 64, remote_bar)
    tma.reduce_bulk_cluster(remote, tile, 64, remote_bar, "add", "u64")
    tma.reduce_bulk_cluster(remote, tile, 64, remote_bar, "or", "b32")
    tma.prefetch_tensor(map, (offset, 0, 1))
    tma.prefetch_tensor(map, (offset, 0), cache_hint=policy)
    tma.prefetch_bulk(source, 64)
    tma.commit_group()
    tma.wait_group_read(1)
    tma.wait_group()
    tma.fence_tensormap_release()


COPIES = (
    *(f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes" for rank in range(1, 6)),
    "complete_tx::bytes.multicast::cluster.L2::cache_hint",
    "complete_tx::bytes.multicast::cluster [",
    "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [",
    "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint",
    *(
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
        for op in ("add", "min", "max", "inc", "dec", "and", "or", "xor")
    ),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [",
    "cp.async.bulk.global.shared::cta.bulk_group [",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    "bulk_group.L2::cache_hint.add.noftz.bf16",
    "bulk_group.min.s64",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [",
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u64",
    "cp.async.bulk.prefetch.tensor.3d.L2.global.tile",
    "cp.async.bulk.prefetch.L2.global",
    "prefetch.tensormap",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group.read 1",
    "cp.async.bulk.wait_group 0",
    "fence.proxy.async.shared::cta;",
    "fence.proxy.async;",
    "fence.proxy.tensormap::generic.acquire.sys",
    "fence.proxy.tensormap::generic.release.gpu;",
)


def test_copies_assemble_from_hopper_on():
    check(copies, COPIES, (90, 100, 120), source="*i32", map="i64", offset="i32")


@triton.jit
def every_bulk_reduction(out):
    tile = shared.allocate(64, 16)
    for operation in tl.static_range(2):
        for kind in tl.static_range(6):
            tma.reduce_bulk(out, tile, 64, ("min", "max")[operation], ("u32", "s32", "u64", "s64", "f16", "bf16")[kind])
    for kind in tl.static_range(7):
        tma.reduce_bulk(out, tile, 64, "add", ("u32", "s32", "u64", "f16", "bf16", "f32", "f64")[kind])
    for operation in tl.static_range(3):
        for kind in tl.static_range(2):
            tma.reduce_bulk(out, tile, 64, ("and", "or", "xor")[operation], ("b32", "b64")[kind])
        tma.reduce_bulk_cluster(tile, tile, 64, tile, ("and", "or", "xor")[operation], "b32")
    tma.reduce_bulk(out, tile, 64, "inc", "u32")
    tma.reduce_bulk(out, tile, 64, "dec", "u32")
    for kind in tl.static_range(2):
        tma.reduce_bulk_cluster(tile, tile, 64, tile, "min", ("u32", "s32")[kind])
        tma.reduce_bulk_cluster(tile, tile, 64, tile, "max", ("u32", "s32")[kind])
        tma.reduce_bulk_cluster(tile, tile, 64, tile, ("inc", "dec")[kind], "u32")
    for kind in tl.static_range(3):
        tma.reduce_bulk_cluster(tile, tile, 64, tile, "add", ("u32", "s32", "u64")[kind])


def test_every_pair_of_operation_and_type_that_is_offered_assembles():
    text = assembly(compile_kernel(every_bulk_reduction, 90, out="*i32").asm["ptx"])
    assert text.count("cp.reduce.async.bulk.global") == 12 + 7 + 6 + 2
    assert text.count("cp.reduce.async.bulk.shared::cluster") == 3 + 6 + 3


@triton.jit
def specific(map, address, extent):
    registers.inc(232)
    registers.dec(24)
    tensormap.replace(map, address, "global_address")
    tensormap.replace(map, extent, "global_dim", 1)
    tensormap.replace(map, address, "global_stride", 0)
    tensormap.replace(map, 1, "rank")
    tensormap.replace(map, extent, "box_dim", 0, issuer="warpgroup")
    tensormap.replace(map, 1, "element_stride", 4)
    tensormap.replace(shared.allocate(128, 128), address, "global_address", space="shared::cta")


def test_architecture_specific_shims_assemble():
    check(
        specific,
        (
            "setmaxnreg.inc.sync.aligned.u32 232;",
            "setmaxnreg.dec.sync.aligned.u32 24;",
            "tensormap.replace.tile.global_address.global.b1024.b64",
            "tensormap.replace.tile.global_dim.global.b1024.b32",
            "tensormap.replace.tile.global_stride.global.b1024.b64",
            "tensormap.replace.tile.global_address.shared::cta.b1024.b64",
        ),
        (90, 100, 103),
        map="*i64",
        address="i64",
        extent="i32",
    )


@triton.jit
def launch_control(out):
    result = shared.allocate(16, 16)
    bar = shared.allocate(8, 8)
    clc.try_cancel(result, bar)
    mbarrier.wait(bar, 0)
    tl.store(
        out, clc.is_canceled(result) + clc.first_ctaid(result) + clc.first_ctaid(result, 1) + clc.first_ctaid(result, 2)
    )


@triton.jit
def launch_control_multicast(out):
    clc.try_cancel(shared.allocate(16, 16), shared.allocate(8, 8), multicast=True)


def test_cluster_launch_control_assembles_on_blackwell():
    check(
        launch_control,
        (
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128",
            "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128",
            "get_first_ctaid::x.b32.b128",
            "get_first_ctaid::z.b32.b128",
        ),
        (100, 120),
        out="*i32",
    )
    check(launch_control_multicast, (".multicast::cluster::all.b128",), (100, 103, 120), explicit=(False,), out="*i32")


@triton.jit
def descriptors(map):
    tile = gl.allocate_shared_memory(gl.float32, [2, 16, 32], gl.NVMMASharedLayout(128, 32, 2))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], gluon_mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(bars.index(stage), 1)
    mbarrier.fence_init()
    mbarrier.arrive_expect_tx(bars.index(0), 2048, issuer="cta")
    tma.load_tensor(tile.index(0), map, (0, 0), bars.index(0), issuer="cta")
    mbarrier.wait(bars.index(0), 0)
    tma.store_tensor(map, (0, 0), tile.index(1), issuer="cta")
    gl.static_assert(is_explicit())


def test_explicit_kernels_pass_descriptors():
    text = assembly(compile_kernel(descriptors, 90, explicit=True, map="i64").asm["ptx"])
    assert text.count("mbarrier.init") == 2 and "cp.async.bulk.tensor.2d" in text


@triton.jit
def two_buffers(out):
    a = shared.allocate(1024, 128)
    b = shared.allocate(1024, 128)
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.static_assert(not is_explicit())


def test_one_call_is_one_buffer(tmp_path):
    kernel = compile_kernel(two_buffers, 90, out="*i32")
    assert assembly(kernel.asm["ptx"]).count(".shared .align 1024 .b8 buffer[1024]") == 2
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = re.search(r"SHARED:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # 1 KiB is the hardware's own on sm_90. A multiple of 1024 leaves the compiler's swizzled tiles, which come behind,
    # where they must lie
    assert usage and int(usage.group(1)) == 3 * 1024


@triton.jit
def numbering(out):
    a, b = asm("mov.b32 $0, $2; mov.b64 $1, $3;", "=r,=l,r,l", [5, out], (tl.int32, tl.int64))
    asm("st.global.b32 [$0], $1; // $$ stays", "l,r", [out, a])
    asm("st.global.b64 [$0], $1;", ("l", "l", "~{memory}"), [out, b])
    tl.store(out, asm("add.s32 $0, $1, $2;", ("=r", "r"), [(a, 7)], tl.int32, is_pure=True))


def test_operands_are_numbered_alike_in_both_languages():
    plain, explicit = (assembly(compile_kernel(numbering, 90, mode, out="*i32").asm["ptx"]) for mode in (False, True))
    for text in (plain, explicit):
        assert re.search(r"st\.global\.b32 \[%rd\d+\], %r\d+; // \$ stays", text)
        assert re.search(r"add\.s32 %r\d+, %r\d+, %r\d+;", text)
    assert "mov.b32 %r" in plain  # plain Triton's dummy result


# -- refusals
# ------------------------------------------------------------------------------------------------------------------------


@triton.jit
def use_try_wait(out):
    mbarrier.try_wait(shared.allocate(8, 8), 0)


@triton.jit
def use_setmaxnreg(out):
    registers.dec(24)


@triton.jit
def use_clc(out):
    clc.is_canceled(shared.allocate(16, 16))


@triton.jit
def use_tma(out):
    tma.load_bulk(shared.allocate(64), out, 64, shared.allocate(8))


@triton.jit
def use_elect(out):
    elect.elect_one()


@triton.jit
def use_cluster(out):
    cluster.arrive()


@triton.jit
def use_replace(out):
    tensormap.replace(out, 1, "rank")


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    "kernel, sm, message",
    [
        (use_try_wait, 80, "mbarrier.try_wait needs sm_90 or newer; this kernel is compiled for sm_80"),
        (use_try_wait, 89, "mbarrier.try_wait needs sm_90 or newer; this kernel is compiled for sm_89"),
        (use_setmaxnreg, 80, "setmaxnreg needs sm_90a, sm_100a or sm_103a; this kernel is compiled for sm_80"),
        (use_setmaxnreg, 120, "setmaxnreg needs sm_90a, sm_100a or sm_103a; this kernel is compiled for sm_120"),
        (use_clc, 90, "clusterlaunchcontrol.query_cancel needs sm_100 or newer; this kernel is compiled for sm_90"),
        (use_tma, 86, "cp.async.bulk needs sm_90 or newer; this kernel is compiled for sm_86"),
        (use_elect, 80, "elect.sync needs sm_90 or newer; this kernel is compiled for sm_80"),
        (use_cluster, 80, "barrier.cluster.arrive needs sm_90 or newer; this kernel is compiled for sm_80"),
        (
            use_replace,
            89,
            "tensormap.replace needs sm_90a, sm_100a, sm_103a or sm_120a; this kernel is compiled for sm_89",
        ),
    ],
)
def test_a_target_that_lacks_the_instruction_is_refused(kernel, sm, message, explicit):
    with pytest.raises(ArchitectureError, match=re.escape(message)):
        compile_kernel(kernel, sm, explicit, out="*i32")


def test_a_target_of_another_maker_is_refused():
    assert refusal("mbarrier.init", "gfx942", 80) == (
        "mbarrier.init needs sm_80 or newer; this kernel is compiled for gfx942, which is not an NVIDIA architecture"
    )
    assert refusal("mbarrier.init", "sm80", 80) is None


@triton.jit
def bad_barrier_number(out):
    barrier.sync(16, 128)


@triton.jit
def bad_barrier_threads(out):
    barrier.sync(3, 100)


@triton.jit
def bad_registers(out):
    registers.inc(230)


@triton.jit
def bad_count(out):
    mbarrier.arrive(shared.allocate(8), 0)


@triton.jit
def bad_issuer(out):
    mbarrier.arrive(shared.allocate(8), issuer="lane")


@triton.jit
def bad_scope(out):
    mbarrier.wait(shared.allocate(8), 0, "gpu")


@triton.jit
def bad_rank(out):
    tma.prefetch_tensor(out, (0, 0, 0, 0, 0, 0))


@triton.jit
def bad_reduction(out):
    tma.reduce_bulk(out, shared.allocate(64), 64, "min", "f32")


@triton.jit
def bad_bytes(out):
    shared.allocate(65536)


@triton.jit
def bad_width(out):
    mbarrier.wait(out, 0)


@triton.jit
def bad_dtype(out):
    shared.load(shared.allocate(8), tl.float16)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (bad_barrier_number, "barrier.sync(number=16): barriers are numbered 0 to 15"),
        (bad_barrier_threads, "barrier.sync(threads=100): a multiple of 32 up to 1024"),
        (bad_registers, "setmaxnreg.inc(230): a multiple of 8 from 24 to 256"),
        (bad_count, "mbarrier.arrive(count=0): 1 to 1048575 arrivals"),
        (bad_issuer, "issuer='lane': it is 'thread'"),
        (bad_scope, "mbarrier.try_wait(scope='gpu'): 'cta' or 'cluster'"),
        (bad_rank, "6 coordinates; a tensor has 1 to 5 dimensions"),
        (bad_reduction, "tma.reduce_bulk(operation='min', kind='f32'): min takes u32, s32, u64, s64, f16, bf16"),
        (bad_bytes, "shared.allocate(nbytes=65536): 1 to 49152 bytes"),
        (bad_width, "an operand of type int64 is given where a 32-bit register is wanted"),
        (bad_dtype, "dtype=fp16: a single register of 32 or 64 bits is needed"),
    ],
)
def test_a_wrong_operand_is_refused(kernel, message):
    with pytest.raises(OperandError, match=re.escape(message)):
        compile_kernel(kernel, 90, out="*i32")


def test_shims_need_a_kernel():
    with pytest.raises(RuntimeError, match="cannot run in Triton's interpreter"):
        asm("nop;", "", [])


# -- text and tensor maps
# ------------------------------------------------------------------------------------------------------------


def test_issued_scopes_and_guards():
    assert issued("a;", "thread", 90) == "{ a; }"
    assert (
        issued(("a;", "b;"), "warp", 90) == "{ .reg .pred issue; elect.sync _|issue, 0xffffffff; @issue a; @issue b; }"
    )
    assert "%laneid" in issued("a;", "warp", 80) and "elect" not in issued("a;", "warp", 80)
    assert "and.b32 lane, lane, 127;" in issued("a;", "warpgroup", 90)
    assert issued("a;", "cta", 90, "declared;").endswith("declared; @issue a; }")


GOOD = dict(
    address=0x7F00_0000_0000, dtype="bf16", shape=(256, 100, 8), strides=(512, 51200), box=(64, 64, 1), swizzle=128
)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(shape=(8,) * 6, strides=(16,) * 5, box=(8,) * 6), "6 dimensions; a tensor map has 1 to 5"),
        (dict(shape=(), strides=(), box=()), "0 dimensions; a tensor map has 1 to 5"),
        (
            dict(address=0x7F00_0000_0008),
            "address=0x7f0000000008): the tensor's address must be a multiple of 16 bytes",
        ),
        (
            dict(address=0x7F00_0000_0010, interleave=32, swizzle=32),
            "the tensor's address must be a multiple of 32 bytes",
        ),
        (dict(shape=(256, 0, 8)), "every extent is 1 to 2**32"),
        (dict(strides=(512,)), "2 strides in bytes for 3 dimensions"),
        (dict(strides=(512, 51208)), "51208 bytes; every stride is a multiple of 16 bytes and below 2**40"),
        (dict(strides=(512, 1 << 40)), "every stride is a multiple of 16 bytes and below 2**40"),
        (dict(strides=(512, -512)), "every stride is a multiple of 16 bytes and below 2**40"),
        (dict(box=(64, 64)), "box=(64, 64)): 3 extents for the 3 dimensions of shape (256, 100, 8)"),
        (dict(box=(64, 257, 1)), "every extent of the box is 1 to 256 elements"),
        (dict(box=(4, 64, 1)), "4 elements of 2 bytes are 8 bytes; the box's fastest extent is a multiple of 16 bytes"),
        (dict(swizzle=64), "64 elements of 2 bytes are 128 bytes; a 64-byte swizzle spans at most 64"),
        (dict(swizzle=48), "swizzle=48): one of 0, 32, 64, 128"),
        (dict(interleave=32), "interleave 32 needs swizzle 32"),
        (
            dict(interleave=16, shape=(256, 100), strides=(512,), box=(64, 64)),
            "an interleaved tensor has at least 3 dimensions",
        ),
        (
            dict(fill="nan", dtype="int32", box=(32, 64, 1)),
            "fill='nan', dtype=int32): only floating-point tensors can be filled with NaN",
        ),
        (dict(fill="inf"), "fill='inf'): one of 'zero', 'nan'"),
        (dict(l2_promotion=32), "l2_promotion=32): one of 0, 64, 128, 256"),
        (dict(element_strides=(1, 9, 1)), "element_strides=(1, 9, 1)): 3 steps of 1 to 8 elements"),
        (dict(dtype="complex64"), "dtype=complex64): a tensor map holds one of"),
    ],
)
def test_the_rules_of_a_tensor_map(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tma.encode_tiled(**{**GOOD, **change})


@pytest.mark.parametrize(
    "change",
    [dict(), dict(box=(256, 64, 1), swizzle=0), dict(fill="nan"), dict(dtype=tl.float16), dict(strides=(0, 16))],
)
def test_what_the_rules_allow(change):
    tensormap.check_tiled(**{**GOOD, **change})


class RecordingDriver:
    """Stands in for libcuda: notes what it is given, in Python's terms, and fills the map with a pattern."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    version = 13020

    def cuDriverGetVersion(self, where):
        where._obj.value = self.version

    def cuTensorMapEncodeTiled(
        self, where, dtype, rank, address, shape, strides, box, steps, interleave, swizzle, promotion, fill
    ):
        import ctypes

        assert where.value % 64 == 0
        ctypes.memset(where.value, 0xA5, 128)
        self.calls.append(
            (
                dtype.value,
                rank.value,
                address.value,
                tuple(shape),
                tuple(strides),
                tuple(box),
                tuple(steps),
                interleave.value,
                swizzle.value,
                promotion.value,
                fill.value,
            )
        )
        return self.status


def test_encode_tiled_hands_the_driver_its_own_terms(monkeypatch):
    fake = RecordingDriver()
    monkeypatch.setattr(encoding, "driver", lambda: fake)
    assert tma.encode_tiled(**GOOD, fill="nan", l2_promotion=256) == b"\xa5" * 128
    assert fake.calls == [(9, 3, 0x7F00_0000_0000, (256, 100, 8), (512, 51200), (64, 64, 1), (1, 1, 1), 0, 3, 3, 1)]
    fake.status = 1
    with pytest.raises(
        RuntimeError, match="cuTensorMapEncodeTiled returned error 1 for dtype=bf16, shape=\\(256, 100, 8\\)"
    ):
        tma.encode_tiled(**GOOD)


def test_without_a_driver_the_error_says_so(monkeypatch):

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    encoding.driver.cache_clear()
    monkeypatch.setattr(encoding.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="encode_tiled needs NVIDIA's driver library libcuda.so.1"):
        tma.encode_tiled(**GOOD)
    encoding.driver.cache_clear()
