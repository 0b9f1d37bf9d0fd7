"""What the simulator takes for granted of Triton's text and passes. A new release of Triton that changes any of it
fails here, loudly."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests import cases_explicit
from tests.util import poison
from tritonkittens import sim
from tritonkittens.kernels.gemm.inspection import inspectable
from tritonkittens.sim import ttgir, ttgir_parser
from tritonkittens.sim.layouts import registers, shared_offsets, tensor_offsets
from tritonkittens.sim.lowering import load_ttgir
from tritonkittens.sim.memory import Global
from tritonkittens.sim.simulation import Grid, Simulation
from tritonkittens.sim.ttgir import Dense, Descriptor, MemDesc, Opaque, Pointer, Scalar, Tensor
from tritonkittens.sim.ttgir_parser import ParseError, parse

GENERIC = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
#loc = loc("a.py":3:1)
#loc1 = loc("b.py":7:5)
#loc2 = loc(callsite(#loc1 at #loc))
"builtin.module"() ({
  "tt.func"() <{function_type = (!tt.ptr<f32>, i32) -> (), sym_name = "k"}> ({
  ^bb0(%x: !tt.ptr<f32> loc("x"(#loc)), %n: i32 loc("n"(#loc))):
    %0:2 = "test.two"(%n) <{a = array<i32: 1, -2>, b = [3 : i64, true], c = 0x7F800000 : f32, d = "q\\22uote", e = #x.y<z>}>
        : (i32) -> (i32, i1) loc("named"(#loc2))
    %c = "arith.constant"() <{value = dense<[1, 2]> : tensor<2xi32, #blocked>}> : () -> tensor<2xi32, #blocked> loc(#loc2)
    "cf.cond_br"(%0#1, %0#0)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 1, 0>}> : (i1, i32) -> () loc(#loc)
  ^bb1(%later: i32 loc(unknown)):  // pred: ^bb0
    "cf.br"()[^bb2] : () -> () loc(#loc)
  ^bb2:  // 2 preds: ^bb0, ^bb1
    "tt.return"() : () -> () loc(#loc)
  }) {noinline = false} : () -> () loc(#loc)
}) {"ttg.num-warps" = 4 : i32} : () -> () loc(#loc)
"""


def test_every_part_of_the_generic_form():
    module = parse(GENERIC)
    function = module.functions["k"]
    assert module.integer("ttg.num-warps", 0) == 4 and module.kernel is function
    entry, first, second = function.regions[0].blocks
    assert entry.argument_types == [Pointer(Scalar("f32")), Scalar("i32")]
    two, constant, branch = entry.operations
    assert two.result_types == (Scalar("i32"), Scalar("i1")) and two.operands == (entry.arguments[1],)
    assert two.attributes == {"a": (1, -2), "b": (3, True), "c": float("inf"), "d": 'q"uote', "e": Opaque("#x.y<z>")}
    assert two.result_name == "named" and [str(f) for f in two.location.frames] == ["b.py:7", "a.py:3"]
    value = constant.attributes["value"]
    assert (
        isinstance(value, Dense)
        and value.values.tolist() == [1, 2]
        and constant.result_types[0].layout.startswith("#ttg.blocked<{")
    )
    assert branch.successors == (first, second) and branch.split(("condition", "value")) == (
        ("condition",),
        ("value",),
        (),
    )


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"builtin.module"', '"x.module"', "not the generic form"),
    ("(%n) <{a", "(%m) <{a", "%m is used but not defined"),
    ("(i32) -> (i32, i1)", "(i32) -> (i32)", "2 results of 1 types"),
    ('"cf.br"()[^bb2]', "cf.br ^bb2", "TTGIR line 14: expected an operation's name"),
])  # fmt: skip
def test_text_of_another_form_is_refused(old, new, message):
    with pytest.raises(ParseError, match=message.replace("(", r"\(")):
        parse(GENERIC.replace(old, new))


def test_types():
    def of(text):
        parser = ttgir_parser._Parser(text)
        parser.aliases = {"#s": "#ttg.nvmma_shared<{swizzlingByteWidth = 64}>", "#smem": "#ttg.shared_memory"}
        parser.aliases |= {"#b": "#ttg.slice<{dim = 1, parent = #p}>", "#p": "#ttg.x<1>"}
        return parser.type()

    assert of("tensor<2x4x!tt.ptr<bf16>, #b>") == Tensor(
        (2, 4), Pointer(Scalar("bf16")), "#ttg.slice<{dim = 1, parent = #ttg.x<1>}>"
    )
    shared = of("!ttg.memdesc<64x32xf16, #s, #smem, mutable, 3x64x64>")
    assert shared == MemDesc(
        (64, 32), Scalar("f16"), "#ttg.nvmma_shared<{swizzlingByteWidth = 64}>", "shared", True, (3, 64, 64)
    )
    assert of("!tt.tensordesc<64x64xbf16, #s>") == Descriptor(
        (64, 64), Scalar("bf16"), "#ttg.nvmma_shared<{swizzlingByteWidth = 64}>"
    )
    assert [Scalar(n).nbytes for n in ("i1", "bf16", "f8E4M3FN", "f32", "i64", "index")] == [1, 2, 1, 4, 8, 8]


def test_a_lowered_kernel_has_what_the_simulator_reads():
    """Offsets in shared and tensor memory, barriers of the compiler, branches instead of loops, names and lines: for
    both architectures."""
    for arch in ("sm_90a", "sm_100a"):
        program = load_ttgir(inspectable["gemm"](arch).asm["ttgir"])
        operations = list(program.module.walk())
        names = {op.name for op in operations}
        assert {
            "cf.br",
            "cf.cond_br",
            "ttg.barrier",
            "ttng.fence_async_shared",
            "ttg.warp_specialize.partitions",
        } <= names
        assert not any(n.startswith("scf.") for n in names)
        assert all("allocation.offset" in op.attributes for op in operations if op.name == "ttg.local_alloc")
        assert all("tensor_memory_col_offset" in op.attributes for op in operations if op.name == "ttng.tmem_alloc")
        assert {"input.A", "input.B", "input.full", "input.empty"} <= {op.result_name for op in operations}
        assert program.role_names[:3] == ["consumer0", "consumer1", "producer"] and program.total_warps == 12
        copies = [op for op in operations if op.name == "ttng.async_tma_copy_global_to_local"]
        # in the loop, and before the roles start for the first slots
        assert len(copies) == 4 and all(
            any(f.file.endswith("gemm/device/gemm.py") for f in op.location.frames) for op in copies
        )
        assert program.uses_tensor_memory == (arch == "sm_100a")


def test_layouts_are_the_compilers():
    """Against the swizzle and the fragments as the PTX ISA defines them."""
    layout = "#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>"
    offsets, _ = shared_offsets(layout, (64, 128), 2)
    row, column = np.indices((64, 128))
    block, inside = column // 64, column % 64
    assert (offsets == block * 64 * 128 + row * 128 + ((inside // 8) ^ (row % 8)) * 16 + inside % 8 * 2).all()
    mma = "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 32, 16]}>"
    index = registers(mma, (64, 32), 4)
    thread, register = np.indices(index.shape)
    lane, warp = thread % 32, thread // 32
    rows = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    columns = 8 * (register // 4) + lane % 4 * 2 + register % 2
    assert (index == rows * 32 + columns).all()
    places, _, columns_taken = tensor_offsets(
        "#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 1>", (128, 64), 32
    )
    assert (places == np.arange(128)[:, None] * 2048 + np.arange(64) * 4).all() and columns_taken == 64


@triton.jit
def scale(X, Y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * FACTOR, mask=i < n)


@pytest.mark.parametrize("n", [0, 1, 31, 1000])
def test_kernels_as_text_and_numpy_arrays(rng, n):
    """`sim.run` of a function and of TTGIR alike, results written into what was passed."""
    x = rng.standard_normal(n).astype(np.float32)
    y = np.full(n, np.nan, np.float32)
    sim.run(scale, (4,), x, y, n, FACTOR=3, BLOCK=256)
    assert np.array_equal(y, x * np.float32(3))
    if n:
        signature = {"X": "*fp32", "Y": "*fp32", "n": "i32", "FACTOR": "constexpr", "BLOCK": "constexpr"}
        source = triton.compiler.ASTSource(scale, signature, {(3,): 3, (4,): 256})
        text = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32)).asm["ttgir"]
        y[:] = np.nan
        sim.run(text, (4,), x, y, n)
        assert np.array_equal(y, x * np.float32(3))


def test_wrong_use_is_refused():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="arch='sm_70': must be one of sm_80"):
        sim.run(scale, (1,), x, x, 4, FACTOR=1, BLOCK=16, arch="sm_70")
    with pytest.raises(ValueError, match="a tensor on meta"):
        with sim.device():
            cases_explicit.through_registers[(1, 1)](
                tk.gl(x.view(2, 2).to("meta")), tk.gl(x.view(2, 2)), tk.rt(tk.fp32, 64, 64), 2, 0
            )
    with pytest.raises(ValueError, match="a tensor on cpu"):
        cases_explicit.through_registers[(1, 1)](tk.gl(x.view(2, 2)), tk.gl(x.view(2, 2)), tk.rt(tk.fp32, 64, 64), 2, 0)


def test_an_unknown_operation_stops_the_run_and_is_named():
    program = load_ttgir(inspectable["gemm"]("sm_90a").asm["ttgir"])
    for op in program.module.walk():
        if op.name == "arith.remsi":
            op.name = "test.mystery"
    memory = Global()
    arguments = [1] * len(program.module.kernel.regions[0].blocks[0].arguments)
    simulation = Simulation(program, Grid((1, 1, 1)), arguments, memory)
    simulation.run()
    (finding,) = simulation.findings
    assert (
        finding.kind == "unknown"
        and "test.mystery" in str(finding)
        and any(name in str(finding) for name in ("gemm.py", "raster.py"))
    )


def test_the_outputs_alone_are_written(rng):
    """Canaries around every output, and inputs as they were."""
    block = poison(torch.empty(64 + 2 * 64, 96 + 32))
    x = torch.randn(64, 96)
    before, view = x.clone(), block[64:128, 16:112]
    tile = tk.rt(tk.fp32, 64, 96)
    sim.run(cases_explicit.through_registers, (1, 1), tk.gl(x), tk.gl(view), tile, 2, 0)
    assert torch.equal(view, before) and torch.equal(x, before)
    view.fill_(float("nan"))
    assert block.isnan().all()


def test_what_pytest_shows_of_a_program_does_not_grow_with_its_paths():
    """Of a simulation that fails, pytest shows the arguments of every call: those of a branch once led to all that is
    behind both sides, and so did theirs."""
    block = ttgir.Block()
    for _ in range(12):
        branch = ttgir.Op("cf.cond_br", (0,), (), (ttgir.Scalar("i1"),), (), {}, [], (block, block), ttgir.Location())
        block = ttgir.Block(operations=[branch])
    outer = ttgir.Op("tt.func", (), (), (), (), {}, [ttgir.Region([block])], (), ttgir.Location())
    assert (
        len(repr(branch)) < 300
        and len(repr(outer)) < 300
        and len(repr(ttgir.Module({}, {"f": outer}, 1, {n: "x" for n in range(10_000)}))) < 500
    )
