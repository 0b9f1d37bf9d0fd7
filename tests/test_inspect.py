"""The inspector on kernels whose facts are known: a specialised GEMM, and kernels that spill, serialise or stage on
purpose."""

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tritonkittens.__main__ import main
from tritonkittens.inline_ptx._asm import ArchitectureError
from tritonkittens.inspect import BankConflicts, _sass, _tiles, _tools, _ttgir, cli, inspect


@gluon.jit
def produce(a_desc, b_desc, a_ring, b_ring, full, empty, steps, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    for k in range(steps):
        slot = k % STAGES
        mbarrier.wait(empty.index(slot), ((k // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_load(a_desc, [0, k * 64], full.index(slot), a_ring.index(slot))
        tma.async_load(b_desc, [k * 64, 0], full.index(slot), b_ring.index(slot))


@gluon.jit
def consume(which: gl.constexpr, c_desc, a_ring, b_ring, c_tiles, full, empty, steps, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    acc = warpgroup_mma_init(gl.zeros([64, 128], gl.float32, layout))
    for k in range(steps):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), (k // STAGES) & 1)
        acc = warpgroup_mma(a_ring.index(slot), b_ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
        mbarrier.arrive(empty.index(slot))
    c_tiles.index(which).store(warpgroup_mma_wait(0, deps=[acc]).to(gl.bfloat16))
    fence_async_shared()
    tma.async_store(c_desc, [which * 64, 0], c_tiles.index(which))
    tma.store_wait(0)


@gluon.jit
def ring_gemm(
    a_desc,
    b_desc,
    c_desc,
    steps,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (0, c_desc, a_ring, b_ring, c_tiles, full, empty, steps, STAGES)),
            (consume, (1, c_desc, a_ring, b_ring, c_tiles, full, empty, steps, STAGES)),
            (produce, (a_desc, b_desc, a_ring, b_ring, full, empty, steps, 2, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def staged(a_desc, b_desc, c_desc, steps):
    """Every step sends the accumulator through shared memory."""
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], a_desc.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 128], b_desc.layout)
    bounce = gl.allocate_shared_memory(gl.float32, [64, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    acc = gl.zeros([64, 128], gl.float32, layout)
    for _ in range(steps):
        acc = warpgroup_mma(a, b, acc) + bounce.load(layout)
        bounce.store(acc)


@gluon.jit
def crowded(x, out):
    """A 128x128 float32 tile, 128 registers a thread, is needed before and after its row sums."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    offsets = (
        gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None] * 128
        + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    )
    tile = gl.load(x + offsets)
    gl.store(out + offsets, tile / gl.sum(tile, 1)[:, None])


@gluon.constexpr_function
def _wgmma(outputs, inputs):
    """Four raw wgmma groups, the accumulator doubled between them while the earlier ones are in flight."""
    acc = ", ".join(outputs[0])
    lines = []
    for _ in range(4):
        lines += ["wgmma.fence.sync.aligned;"]
        lines += [
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{acc}}}, {inputs[1][0]}, {inputs[2][0]}, 1, 1, "
            "1, 0, 0;"
        ]
        lines += ["wgmma.commit_group.sync.aligned;", *(f"add.f32 {r}, {r}, {r};" for r in outputs[0])]
    return "\n".join([*lines, "wgmma.wait_group.sync.aligned 0;"])


# 64x64 float32 is 32 registers a thread, each tied in and out
_WGMMA_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + [str(n) for n in range(32)] + ["l", "l"]))


@gluon.jit
def serialized(out, a, b):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    acc = gl.inline_asm(_wgmma, _WGMMA_OPERANDS, [acc, a, b], acc.type)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    gl.store(out + rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :], acc)


@gluon.jit
def tensor_core_5(a_desc, b_desc, c_desc, steps):
    a = gl.allocate_shared_memory(gl.bfloat16, [128, 64], a_desc.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 128], b_desc.layout)
    c = gl.allocate_shared_memory(gl.bfloat16, [128, 128], c_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.init(done, count=1)
    acc = blackwell.allocate_tensor_memory(
        gl.float32, [128, 128], blackwell.TensorMemoryLayout([128, 128], col_stride=1)
    )
    for k in range(steps):
        mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_load(a_desc, [0, k * 64], arrived, a)
        tma.async_load(b_desc, [k * 64, 0], arrived, b)
        mbarrier.wait(arrived, k & 1)
        blackwell.tcgen05_mma(a, b, acc, use_acc=k > 0)
        blackwell.tcgen05_commit(done)
        mbarrier.wait(done, k & 1)
    c.store(acc.load(acc.get_reg_layout()).to(gl.bfloat16))
    fence_async_shared()
    tma.async_store(c_desc, [0, 0], c)
    tma.store_wait(0)


def _descriptor(*shape):
    return f"tensordesc<bf16{list(shape)},{gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)!r}>"


def _compile(kernel, signature, constants=None, capability=90, **options):
    constants = constants or {}
    source = GluonASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, **options})


@functools.cache
def ring(stages=3, consumer=240, producer=24, **options):
    descriptors = dict(
        a_desc=_descriptor(64, 64), b_desc=_descriptor(64, 128), c_desc=_descriptor(64, 128), steps="i32"
    )
    constants = dict(STAGES=stages, CONSUMER_REGISTERS=consumer, PRODUCER_REGISTERS=producer)
    return _compile(ring_gemm, descriptors, constants, **options)


@functools.cache
def report(**options):
    return inspect(ring(**options))


def test_roles_of_a_specialised_kernel():
    r = report()
    assert (r.kernel, r.arch, r.warps, r.register_cap, r.registers) == ("ring_gemm", "sm_90a", 12, 168, 168)
    assert [role.name for role in r.roles] == ["consume0", "consume1", "produce"]
    assert [role.warps for role in r.roles] == [4, 4, 1]
    assert [role.requested_registers for role in r.roles] == [None, 240, 24]
    assert [role.registers for role in r.roles] == [240, 240, 24]
    assert r.reallocation_requested and r.reallocated
    assert r.register_budget_used == 32 * (4 * 240 + 4 * 240 + 24) <= 65536
    # a 64x128 float32 accumulator is 64 registers of each of 128 threads
    assert all(64 < role.live_registers <= 168 for role in r.roles[:2]) and r.role("produce").live_registers <= 24


@pytest.mark.parametrize("call, function", [
    ("tt.call @tests.test_inspect.consume__c0_i32(%a) : (i32) -> ()", "consume"),
    ('%r:2 = tt.call @"tests.x.test.<locals>._consume_all__c1.5_NW4"() : () -> (i32, i32)', "_consume_all"),
    ("tt.call @__main__.__send__i32(%a) : (i32) -> ()", "__send"),
])  # fmt: skip
def test_names_of_called_functions(call, function):
    source = (
        f"  default {{\n    {call}\n    tt.call @later__i32(%a)\n  }}\n  partition0(%arg0: i32) num_warps(4) "
        f"{{\n    %c = arith.constant 1 : i32\n  }}"
    )
    assert _ttgir._called(source) == ([function], [None])


def test_a_kernel_of_a_file_that_is_gone(tmp_path, monkeypatch):
    """Triton takes equal functions of two files for one: out of its cache comes a kernel with the lines of the
    first."""
    program = tmp_path / "first" / "rings.py"
    program.parent.mkdir()
    program.write_text(Path(__file__).read_text())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    ask = "import rings; r = rings.report(); print(*(role.name for role in r.roles), *(b.source for b in r.buffers))"
    command = [sys.executable, "-W", "ignore", "-c", ask]
    said = [subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=True).stdout]
    program.parent.rename(tmp_path / "second")
    said.append(subprocess.run(command, cwd=tmp_path / "second", capture_output=True, text=True, check=True).stdout)
    kernels = list((tmp_path / "cache").rglob("*.cubin"))
    assert len(kernels) == 1 and said[0] == said[1] and said[0].startswith("consume0 consume1 produce rings.py:")


def test_instructions_and_main_loops():
    r = report()
    # K 64 is four wgmma of K 16, and each consumer has its own copy of the loop
    assert [loop.mma for loop in r.loops] == [{"HGMMA": 4}, {"HGMMA": 4}]
    assert [loop.roles for loop in r.loops] == [("consume0",), ("consume1",)]
    assert all(loop.source.startswith("test_inspect.py:") for loop in r.loops)
    assert not any(loop.counts.get(op) for loop in r.loops for op in ("LDS", "STS", "LDL", "STL"))
    assert r.role("produce").counts["UTMALDG"] >= 2 and r.role("produce").mma == {}
    assert "UTMALDG" not in r.role("consume1").counts and r.counts["UTMASTG"] == 2
    assert r.wgmma_serialized is False
    assert (r.spill_instructions, r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes) == (0, 0, 0, 0)


def test_buffers():
    r = report()
    assert {b.name: (b.space, b.shape, b.bytes, b.slots, b.stages) for b in r.buffers} == {
        "a_ring": ("shared", (3, 64, 64), 3 * 64 * 64 * 2, 3, 3),
        "b_ring": ("shared", (3, 64, 128), 3 * 64 * 128 * 2, 3, 3),
        "c_tiles": ("shared", (2, 64, 128), 2 * 64 * 128 * 2, 2, None),
        "full": ("barrier", (3, 1), 24, 3, 3),
        "empty": ("barrier", (3, 1), 24, 3, 3),
    }
    assert sum(b.bytes for b in r.buffers) <= r.shared_bytes
    assert r.buffer("a_ring").bank_conflicts == BankConflicts(fragment=1, column=4)
    assert r.buffer("a_ring").source.startswith("test_inspect.py:")
    with pytest.raises(KeyError, match="'d_ring'.*a_ring, b_ring, c_tiles"):
        r.buffer("d_ring")


def test_register_request_that_does_not_fit():
    """256 registers for the second consumer and for the producer's group leave the first consumer none: the compiler
    drops the request."""
    r = report(consumer=256, producer=256)
    assert r.reallocation_requested and not r.reallocated
    assert [role.requested_registers for role in r.roles] == [None, 256, 256]
    assert [role.registers for role in r.roles] == [r.registers] * 3 and r.registers <= r.register_cap == 168
    assert [role.mma for role in r.roles] == [{"HGMMA": 4}, {"HGMMA": 4}, {}]
    assert "DID NOT TAKE EFFECT" in r.table()


def test_names_given():
    r = inspect(ring(), roles=["left", "right", "loader"])
    assert [role.name for role in r.roles] == ["left", "right", "loader"] and r.loops[1].roles == ("right",)
    with pytest.raises(ValueError, match=r"roles=\('one',\) names 1 roles; ring_gemm has 3"):
        inspect(ring(), roles=["one"])
    names = ["A", "B", "C", "arrived", "finished"]
    assert [b.name for b in inspect(ring(), buffers=names).buffers] == names
    with pytest.raises(ValueError, match=r"buffers=\('A',\) names 1 buffers; ring_gemm has 5"):
        inspect(ring(), buffers=["A"])


def test_spills():
    r = inspect(_compile(crowded, dict(x="*fp32", out="*fp32"), maxnreg=64))
    assert r.spill_store_bytes > 0 and r.spill_load_bytes > 0 and r.stack_bytes > 0
    assert r.spill_instructions == r.counts["LDL"] + r.counts["STL"] > 0
    assert r.registers <= r.register_cap == 64 and r.mma == {} and r.loops == ()


def test_shared_memory_in_the_main_loop():
    descriptors = dict(
        a_desc=_descriptor(64, 64), b_desc=_descriptor(64, 128), c_desc=_descriptor(64, 128), steps="i32"
    )
    r = inspect(_compile(staged, descriptors))
    assert [role.name for role in r.roles] == ["kernel"] and r.reallocation_requested is False
    (loop,) = r.loops
    assert loop.roles == ("kernel",) and loop.counts["LDS"] > 0 and loop.counts["STS"] > 0
    # float32 rows of 512 bytes without swizzle: every row starts at bank 0
    assert r.buffer("bounce").bank_conflicts == BankConflicts(fragment=8, column=32)


def test_serialised_wgmma():
    r = inspect(_compile(serialized, dict(out="*fp32", a="i64", b="i64")))
    assert r.wgmma_serialized is True and r.mma == {"HGMMA": 4} and any("serialized" in remark for remark in r.remarks)
    assert r.loops == () and "SERIALIZED" in r.table()


def test_blackwell():
    descriptors = dict(
        a_desc=_descriptor(128, 64), b_desc=_descriptor(64, 128), c_desc=_descriptor(128, 128), steps="i32"
    )
    r = inspect(_compile(tensor_core_5, descriptors, capability=100))
    acc = r.buffer("acc")
    assert (r.arch, r.wgmma_serialized) == ("sm_100a", None)
    assert (acc.space, acc.columns, acc.bytes, r.tensor_columns) == ("tensor", 128, 128 * 128 * 4, 128)
    assert [loop.mma for loop in r.loops] == [{"UTCHMMA": 4}] and r.counts["LDTM"] > 0
    assert r.buffer("done").space == "barrier"


def test_json_and_table():
    r = report()
    data = json.loads(r.to_json())
    assert data["roles"][2]["name"] == "produce" and data["buffers"][0]["bank_conflicts"] == {
        "fragment": 1,
        "column": 4,
    }
    for expected in ("consume1", "a_ring", "swizzle 128 B", "took effect", "8 HGMMA", "asynchronous"):
        assert expected in r.table()
    with pytest.raises(TypeError, match="42 has no ttgir, ptx, cubin"):
        inspect(42)


_SASS = """
	.section	.text.toy,"ax",@progbits
toy:
.text.toy:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
	//## File "toy.py", line 7 inlined at "toy.py", line 20
	//## File "toy.py", line 20
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   BSSY B0, `(.L_x_3) ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   LDS R4, [R2] ;
        /*0070*/                   BSYNC B0 ;
.L_x_2:
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA.U UP0, `(.L_x_0) ;
        /*00a0*/                   BRX R2 -0xb0                    (*"BRANCH_TARGETS .L_x_2,.L_x_4"*);
.L_x_4:
        /*00b0*/                   RET.REL.NODEC R6 `(toy) ;
"""


def test_control_flow():
    """Branches by guard and by operand, a reconvergence that jumps over code, a table, and a return that names its
    function."""
    graph = _sass.Graph(*_sass.parse(_SASS, ""))
    at = {block[0].address: n for n, block in enumerate(graph.blocks)}
    start = [hex(block[0].address) for block in graph.blocks]
    follows = {start[n]: sorted(start[s] for s in graph.successors[n]) for n in range(len(start))}
    assert follows == {
        "0x0": ["0x10"], "0x10": ["0x20"], "0x20": ["0x20", "0x40"], "0x40": ["0x60", "0x80"], "0x60": ["0x90"],
        "0x80": [], "0x90": ["0x10", "0xa0"], "0xa0": ["0x80", "0xb0"], "0xb0": [],
    }  # fmt: skip
    assert graph.blocks[at[0x10]][0].frames == (("toy.py", 7), ("toy.py", 20))
    (main_loop,) = graph.main_loops
    assert {graph.blocks[n][0].address for n in main_loop.blocks} == {0x10, 0x20, 0x40, 0x60, 0x90}
    assert len(graph.loops) == 2 and graph.dominators(at[0x90]) == [at[a] for a in (0x90, 0x60, 0x40, 0x20, 0x10, 0x0)]


def test_ptxas_log():
    log = _tools.read_ptxas_log(
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill "
        "formed stage in 'f'\n"
        "ptxas info    : Function properties for f\n    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill "
        "loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size\n"
    )
    assert (log.registers, log.stack_bytes, log.spill_store_bytes, log.spill_load_bytes) == (168, 16, 24, 32)
    assert len(log.remarks) == 1 and "serialized" in log.remarks[0]
    assert _tools.read_ptxas_log("") == _tools.PtxasLog(None, None, None, None, ())


@pytest.mark.parametrize("swizzle, fragment, column", [(0, 8, 32), (32, 1, 4), (64, 1, 4), (128, 1, 4)])
def test_swizzled_tma_layouts_have_no_fragment_conflicts(swizzle, fragment, column):
    """Without a swizzle Triton lays a tile out row by row, not in core matrices; tests/sim/test_bank_conflicts.py holds
    this against the compiler."""
    layout = _ttgir.Layout("nvmma_shared", {"swizzlingByteWidth": str(swizzle), "transposed": "false"})
    assert _tiles.bank_conflicts(layout, (64, 64), 16) == BankConflicts(fragment, column)


def test_bank_conflicts_are_unknown_rather_than_guessed():
    assert _tiles.bank_conflicts(_ttgir.Layout("padded_shared", {}), (64, 64), 16) is None
    assert _tiles.bank_conflicts(_ttgir.Layout("swizzled_shared", {"order": "[0]"}), (64,), 32) is None


def _run(kernels, kernel=None, arch="sm_90a", as_json=False):
    return cli.run(argparse.Namespace(kernel=kernel, arch=arch, json=as_json), kernels)


def test_command(capsys):
    kernels = {"named": lambda arch: report(), "ring": lambda arch: ring()}
    assert _run(kernels) == 0 and capsys.readouterr().out == "named\nring\n"
    assert _run(kernels, "named") == 0 and "consume1" in capsys.readouterr().out
    assert _run(kernels, "ring") == 0 and "consume1" in capsys.readouterr().out
    assert _run(kernels, "ring", as_json=True) == 0 and json.loads(capsys.readouterr().out)["kernel"] == "ring_gemm"
    assert (
        _run(kernels, "rong") == 2 and "rong: no kernel of that name; there are named, ring" in capsys.readouterr().err
    )
    assert (
        _run(kernels, "ring", arch="sm_42") == 2
        and "sm_42" in (said := capsys.readouterr().err)
        and "sm_90a, sm_100a" in said
    )


@pytest.mark.parametrize("error", [ValueError, ArchitectureError])
def test_command_passes_a_kernel_s_refusal_on(capsys, error):
    def refuse(arch):
        raise error(f"this kernel uses wgmma; {arch} has none")

    assert _run({"ring": refuse}, "ring", arch="sm_100a") == 2
    assert "ring for sm_100a: this kernel uses wgmma; sm_100a has none" in capsys.readouterr().err


def test_registry(tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    (package / "family").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("inspectable = {'one': lambda arch: 1}")
    (package / "family" / "__init__.py").write_text("from .two import inspectable")
    (package / "family" / "two.py").write_text("inspectable = {'two': lambda arch: 2}")
    monkeypatch.syspath_prepend(tmp_path)
    import some_kernels

    kernels = cli.registry(some_kernels)
    assert list(kernels) == ["one", "two"] and kernels["two"]("sm_90a") == 2
    (package / "three.py").write_text("inspectable = {'one': lambda arch: 3}")
    with pytest.raises(ValueError, match=r"'one' is in some_kernels\.one and in some_kernels\.three"):
        cli.registry(some_kernels)


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert {"demo", "inspect"} <= set(capsys.readouterr().out.split())
    done = subprocess.run(
        [sys.executable, "-m", "tritonkittens", "inspect", "--arch", "sm_12"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--arch='sm_12': must be one of sm_80" in done.stderr
