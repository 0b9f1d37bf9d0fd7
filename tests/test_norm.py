"""Norms as torch sees them, their modules, their machine code, and what they refuse."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

from bench import norm as bench_norm
from bench import norm_tiles as bench_tiles
from tests.cases_norm import BF16, FP32, check, operands
from tests.util import DEVICE, Seen, assert_wide_offsets, explored, meta, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS, chip_of
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels._rows import Rows
from tritonkittens.kernels.norm import (
    backward_operator,
    call_plan,
    interface,
    layer_norm,
    mask_operator,
    norm_operator,
    norm_torch,
    rms_norm,
)
from tritonkittens.kernels.norm.config import (
    Tiles,
    backward_cluster,
    backward_registers,
    backward_tiles,
    for_few_rows,
    forward_registers,
    forward_tiles,
    programs_of,
    stages_of,
)
from tritonkittens.kernels.norm.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded
from tritonkittens.nn import LayerNorm, RMSNorm

X, W = torch.randn(4, 32), torch.randn(32)
SEED = torch.tensor([7, 11])


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_norm.DEVICE", "cpu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", slow("sm_89"), slow("sm_120a")])
def test_chips(arch):
    with sim.device(arch):
        check(False, *operands((5, 72), BF16, ["weight", "bias", "residual"]))


@explored(2, 40)
@pytest.mark.parametrize("arch, chunks, ctas", [("sm_90a", 1, 2), ("sm_80", 3, 1)], ids=["clusters", "chunks"])
def test_interleavings_of_programs(monkeypatch, arch, chunks, ctas, schedules):
    """Rows of two CTAs of a cluster, or of three chunks, of which two programs have two and one in the backward: the
    same results in all orders."""
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "forward_tiles", lambda *_: Tiles(1, 64, 3, 1, 4, ctas))
    monkeypatch.setattr(call_plan, "backward_tiles", lambda *_: Tiles(1, 32 * ctas, 6 // chunks, chunks, 8, ctas))
    monkeypatch.setattr(call_plan, "programs_of", lambda *_: 2)
    x, given = operands((3, 150), FP32, ["weight", "bias", "residual"])
    leaves = [x, *given.values()]

    def run():
        torch.autograd.grad(layer_norm(x, **given).sum(), leaves)

    with sim.device(arch):
        check(False, x, given)
        check(True, x, given)
    sim.explore(run, schedules=schedules, arch=arch)


# ---------------------------------------------------------------- as torch sees them


def block(x, w, b, r):
    """Two norms of a residual stream, of which the second has dropout, as a layer has them."""
    y, z = layer_norm(x * 2, w, b, r, prenorm=True)
    out, z = rms_norm(y, w, residual=z, prenorm=True, dropout_p=0.5, seed=SEED)
    return out, z


def test_torch_compile_sees_operators():
    leaves = [t.requires_grad_() for t in (torch.randn(4, 32), torch.randn(32), torch.randn(32), torch.randn(4, 32))]
    with sim.device():
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        results = [function(*leaves) for function in (block, compiled)]
        gradients = [torch.autograd.grad([t.square().sum() for t in found], leaves) for found in results]
    for a, b in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_modules():
    with sim.device():
        model = nn.Sequential(RMSNorm(32), LayerNorm(32)).requires_grad_(False)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(X), model(X))


def test_opcheck():
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    nothing = (None,) * 4
    rows = torch.rand(4) + 0.5
    with sim.device():
        for operator, args in (
            (norm_operator, (x, w, w, X, *nothing, None, 1e-6, 0.0, False, False, False, None)),
            (norm_operator, (x, None, None, None, X, W, W, None, SEED, 1e-6, 0.5, True, True, True, BF16)),
            (
                backward_operator,
                (X, None, None, X, W, None, None, None, None, rows, FP32, None, FP32, True, "weight",
                 0.0, True, False),
            ),
            (mask_operator, (X, SEED, 0.5, 0)),
        ):  # fmt: skip
            torch.library.opcheck(
                operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


def test_an_eager_call_is_the_operator():
    """Plain tensors take an autograd function; a dispatch mode sees operators, which give the same bits."""

    def run():
        leaves = [t.clone().requires_grad_() for t in (X, W, W)]
        y = layer_norm(*leaves)
        return y, torch.autograd.grad(y.sum(), leaves)

    with sim.device():
        y, gradients = run()
        assert type(y.grad_fn).__name__ == "NormFunctionBackward"
        with Seen() as seen:
            again, others = run()
    assert {"tritonkittens::norm", "tritonkittens::norm_backward"} <= seen.names
    assert all(torch.equal(a, b) for a, b in zip((y, *gradients), (again, *others), strict=True))


def test_transforms_of_functions():
    x = torch.randn(3, 4, 32)
    with sim.device():
        found = torch.vmap(lambda t: rms_norm(t, W))(x)
        gradients = torch.vmap(torch.func.grad(lambda t: (rms_norm(t, W) * X).sum()))(x)
    torch.testing.assert_close(found, nn.functional.rms_norm(x, (32,), W, 1e-6))
    leaf = x.clone().requires_grad_()
    (nn.functional.rms_norm(leaf, (32,), W, 1e-6) * X).sum().backward()
    torch.testing.assert_close(gradients, leaf.grad)


def test_no_second_derivative():
    x = X.clone().requires_grad_()
    with sim.device():
        (dx,) = torch.autograd.grad(rms_norm(x, W).square().sum(), x, create_graph=True)
        with refused("norm_backward has no second derivative; use torch's norms", NotImplementedError):
            dx.sum().backward()


def test_frozen_weights_have_no_gradient():
    x, w, b = X.clone().requires_grad_(), W.clone(), W.clone().requires_grad_()
    with sim.device() as device:
        layer_norm(x, w, b).sum().backward()
        count = len(device.launches)
        torch.testing.assert_close(b.grad, torch.full((32,), 4.0))
        b.requires_grad_(False)
        layer_norm(x, w, b).sum().backward()
        assert w.grad is None and len(device.launches) - count == count - 1, "no partial sums are added up"


# ---------------------------------------------------------------- modules


@pytest.mark.parametrize(
    "kind, options",
    [
        (RMSNorm, {}),
        (RMSNorm, dict(eps=1e-3, elementwise_affine=False)),
        (LayerNorm, {}),
        (LayerNorm, dict(bias=False)),
        (LayerNorm, dict(elementwise_affine=False)),
    ],
)
@pytest.mark.parametrize("shape", [(40,), (4, 10)], ids=str)
def test_modules_are_torchs(kind, options, shape):
    theirs = getattr(nn, kind.__name__)(shape, **options)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours = kind(shape, **options)
    ours.load_state_dict(theirs.state_dict())
    results = []
    for module in (theirs, ours):
        x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with sim.device() as device:
            y = module(x)
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        assert (len(device.launches) > 0) == (module is ours)
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    for ref, out in zip(*results, strict=True):
        assert out.shape == ref.shape and relative_error(out, ref) < 2e-6
    assert repr(ours) == repr(theirs) and copy.deepcopy(ours).eps == theirs.eps


def test_modules_of_half_types():
    x = torch.randn(3, 40)
    for dtype in (BF16, torch.float16):
        with sim.device():
            for ours, theirs in ((RMSNorm(40), nn.RMSNorm(40)), (LayerNorm(40), nn.LayerNorm(40))):
                found, expected = (module.to(dtype)(1e-3 * x.to(dtype)) for module in (ours, theirs))
                assert found.dtype == dtype and relative_error(found, expected) < 4e-3


def test_modules_without_a_kernel_are_torchs():
    with sim.device() as device:
        for ours, theirs in ((RMSNorm(32), nn.RMSNorm(32)), (LayerNorm(32), nn.LayerNorm(32))):
            torch.testing.assert_close(ours.double()(X.double()), theirs.double()(X.double()))
        assert not device.launches
        with pytest.raises(RuntimeError, match="normalized_shape"):
            RMSNorm(32)(torch.randn(4, 31))
    torch.testing.assert_close(LayerNorm(32)(X), nn.LayerNorm(32)(X))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
def test_no_eps_is_that_of_torch(dtype):
    x = (1e-3 * torch.randn(4, 32)).to(dtype)
    with sim.device():
        found = rms_norm(x, eps=None)
    assert relative_error(found, nn.functional.rms_norm(x, (32,))) < 8e-3


def test_eps_may_vary_in_a_compiled_function():
    compiled = torch.compile(lambda x, eps: rms_norm(x, eps=eps), fullgraph=True, backend="eager")
    with sim.device():
        for eps in (1e-3, 1.0, 3.0):
            assert torch.equal(compiled(X, eps), rms_norm(X, eps=eps))


def test_autocast_gives_fp32_unless_a_dtype_is_given(monkeypatch):
    monkeypatch.setattr(interface, "autocasts", lambda device: BF16)
    found = []

    def run():
        found.extend([rms_norm(meta(4, 32), meta(32)), rms_norm(meta(4, 32), out_dtype=BF16)])

    recorded(run, Device.of_gpu(GPUS["H200"]))
    assert [y.dtype for y in found] == [FP32, BF16]


@pytest.mark.skipif(DEVICE == "cpu", reason="torch casts operands of norms on a GPU alone")
def test_autocast_as_torch():
    x = torch.randn(4, 32, dtype=BF16, device="cuda", requires_grad=True)
    for ours, theirs in ((RMSNorm(32), nn.RMSNorm(32)), (LayerNorm(32), nn.LayerNorm(32))):
        with torch.autocast("cuda", torch.bfloat16):
            found, expected = ours.cuda()(x), theirs.cuda()(x)
        assert found.dtype == expected.dtype == FP32
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)))


# ---------------------------------------------------------------- plans and machine code


def test_tiles():
    hopper, ampere = chip_of((9, 0)), chip_of((8, 0))
    forward = {n: forward_tiles(n, hopper) for n in (1, 128, 768, 1024, 2560, 6144, 6145, 32768, 32769, 65536)}
    assert forward == {
        1: Tiles(256, 16, 1, 1, 4), 128: Tiles(32, 128, 1, 1, 4), 768: Tiles(2, 256, 3, 1, 1),
        1024: Tiles(1, 256, 4, 1, 1), 2560: Tiles(1, 512, 5, 1, 2), 6144: Tiles(1, 1024, 6, 1, 4),
        6145: Tiles(1, 2048, 4, 1, 8), 32768: Tiles(1, 8192, 4, 1, 32), 32769: Tiles(1, 8192, 5, 1, 8, 4),
        65536: Tiles(1, 16384, 4, 1, 16, 4),
    }  # fmt: skip
    found = {n: backward_tiles(n, 1, hopper) for n in (64, 2560, 3072, 4096, 8192, 12288, 16384, 16385, 65536)}
    assert found == {
        64: Tiles(64, 64, 1, 1, 4), 2560: Tiles(1, 512, 5, 1, 2), 3072: Tiles(1, 1024, 3, 1, 4),
        4096: Tiles(1, 1024, 4, 1, 4), 8192: Tiles(1, 2048, 4, 1, 8), 12288: Tiles(1, 2048, 6, 1, 8),
        16384: Tiles(1, 4096, 4, 1, 16), 16385: Tiles(1, 8192, 3, 1, 16, 2), 65536: Tiles(1, 16384, 4, 1, 16, 4),
    }  # fmt: skip
    assert backward_tiles(16385, 1, ampere) == Tiles(1, 1024, 6, 3, 4), "chunks of columns"
    assert [backward_cluster(n, 1) for n in (16384, 16385, 32768, 32769)] == [(2, 1), (16, 2), (16, 2), (16, 4)]
    assert [backward_cluster(n, 2) for n in (12288, 12289, 16384, 16385, 65536)] == [
        (2, 1),
        *((8, c) for c in (2, 2, 4, 8)),
    ]
    for width, sums in itertools.product(range(1, 65537, 61), (0, 1, 2, 4)):
        for chip in (hopper, ampere):
            for tiles in (forward_tiles(width, chip), backward_tiles(width, sums, chip)):
                assert width <= tiles.cols * tiles.parts * tiles.chunks
                assert tiles.numbers <= (48 if tiles.warps <= 8 else 32) or chip is ampere and tiles.warps == 32
                assert chip.clusters or tiles.ctas == 1
            if width <= 16384 and width * sums <= 24576:
                assert backward_tiles(width, sums, chip)[3::2] == (1, 1), "one chunk, one CTA"
    found_of_few = [
        for_few_rows(forward[n], n, rows, 132 * 32) for n, rows in ((128, 4), (768, 2), (2560, 600), (2560, 1100))
    ]
    assert found_of_few == [forward[128], Tiles(1, 1024, 1, 1, 4), Tiles(1, 1024, 3, 1, 4), forward[2560]]
    assert for_few_rows(forward[32769], 32769, 1, 132 * 32) == forward[32769], "a cluster has warps enough"
    assert [forward_registers(forward[n]) for n in (1024, 2560, 6144, 32768)] == [64, 80, 80, 64]
    assert forward_registers(forward_tiles(65536, ampere)) == 64, "all that a thread of 32 warps has"
    assert [backward_registers(found[n]) for n in (64, 8192, 16384, 65536)] == [255, 255, 128, 128]
    programs = [programs_of(found[n], 10**6, 132) for n in (64, 2560, 4096, 8192, 16384, 16385, 65536)]
    assert programs == [264, 528, 264, 132, 132, 66, 30] and programs_of(found[64], 65, 132) == 2
    # two tiles in flight where they fit beside those of the other programs of a multiprocessor
    h200, ada = Device.of_gpu(GPUS["H200"]), Device.of_chip(chip_of((8, 9)), "", 1, 0, 0)
    assert [stages_of(found[n], 4, 2, h200) for n in (64, 8192, 16384, 65536)] == [3] * 4
    assert stages_of(found[8192], 12, 4, h200) == 2 and stages_of(found[8192], 16, 4, ada) == 1


def test_rows_of_strided_tensors():
    packed = torch.empty(2, 5, 3, 4, 64)
    rows = Rows((packed[:, :, 0], torch.empty(2, 5, 4, 64), None))
    assert (rows.count, rows.inner, rows.copied) == (40, 4, [False, False, False])
    assert rows.unit == 16 and rows.at == ((48, 4), (16, 4), (0, 0))
    rows = Rows((torch.empty(7, 1000), torch.empty(1000, 7).T))
    assert rows.copied == [False, True] and rows.unit == 8 and rows.size == (7, 125)
    assert Rows((torch.empty(3, 7),)).unit == 1


@pytest.mark.parametrize(
    "name, most",
    [
        ("rms_norm_4096", 13.0),
        ("layer_norm_4096", 16.5),
        ("rms_norm_4096_backward", 28.0),
        ("layer_norm_4096_backward", 35.0),
        slow("layer_norm_128_backward", 41.0),
        slow("layer_norm_8192_backward", 36.0),
        slow("layer_norm_32768_backward", 39.0),
    ],
)
def test_instructions_of_an_element(name, most):
    """At most. 16 bytes are loaded and stored at once, in the backward by cp.async, and nothing spills."""
    kernel, elements = inspectable[name]("sm_90a"), 32
    assert_wide_offsets(kernel)
    instructions, _ = _sass.parse(*_tools.disassemble(kernel.asm["cubin"]))
    assert not {"LDL", "STL"} & {i.base for i in instructions}, "nothing spills"
    assert len(instructions) <= most * elements, f"{len(instructions) / elements:.1f} instructions an element"
    early = re.findall(r"cp\.async\.cg\.shared\.global [^;]*0x10", kernel.asm["ptx"])
    assert len(early) == (0 if "backward" not in name else 24 if "128" in name else 36), "and weights of parts"
    widths = re.findall(r"(?:ld|st)\.global\.(v4\.b32|v2\.b32|b32|b16)", kernel.asm["ptx"])
    numbers = widths.count("b32") + widths.count("b16")
    assert set(widths) <= {"v4.b32", "b32", "b16"} and numbers <= 2 + ("128" in name), "of rows"


def test_the_reference_is_torchs():
    x, b = X.double(), torch.randn(32).double()
    torch.testing.assert_close(
        norm_torch(X, W, b, rms=False, eps=1e-3)[0], nn.functional.layer_norm(x, (32,), W.double(), b, 1e-3)
    )
    torch.testing.assert_close(
        norm_torch(X, W, rms=True, zero_centered_weight=True)[0], nn.functional.rms_norm(x, (32,), W.double() + 1, 1e-6)
    )


# ---------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", bench_norm.KINDS)
def test_the_benchmark(monkeypatch, kind, both_ways):
    """Ours and a peer are right, and a wrong result is found out."""
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with sim.device():
        trial = bench_norm.prepare(kind, 3, 64, both_ways)
        for make in (trial.ours[bench_norm.OURS], trial.peers["torch.compile"]):
            found = make()()
            assert trial.error(found) < trial.bound < trial.error([1.1 * t for t in bench_norm.parts(found)])


@pytest.mark.parametrize("kind, width, both_ways", [("layer", 768, False), slow("rms", 1024, True)])
def test_the_benchmark_of_tiles(monkeypatch, kind, width, both_ways):
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    with sim.device():
        trial = bench_tiles.prepare(kind, 3, width, both_ways)
        for make in trial.ours.values():
            found = make()()
            assert trial.error(found) < trial.bound < trial.error([1.1 * t for t in bench_norm.parts(found)])
    table = bench_tiles.BACKWARD if both_ways else bench_tiles.FORWARD
    assert len(trial.ours) == 1 + len(table[width]), "each has tiles of its own"


def test_cases_of_the_benchmark():
    found = {case.name: case for suite in bench_norm.SUITES for case in suite.cases(None)}
    assert len(found) == 2 * len(bench_norm.KINDS) * len(bench_norm.SHAPES)
    size = 16384 * 4096
    assert found["layer 16384x4096"].work == 4 * size and found["rms residual 16384x4096"].work == 8 * size
    assert found["rms backward 16384x4096"].work == 6 * size == found["layer backward 16384x4096"].work
    assert found["rms residual backward 16384x4096"].work == 8 * size


# ---------------------------------------------------------------- refusals

DTYPES = "torch.bfloat16 or torch.float16 or torch.float32"


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: rms_norm([1.0]), TypeError, "rms_norm: x is list; it must be a torch tensor"),
        (lambda: layer_norm(X, 1.0), TypeError, "layer_norm: weight is float; it must be a torch tensor"),
        (lambda: rms_norm(X.double()), TypeError, f"rms_norm: x has dtype torch.float64; it must be {DTYPES}"),
        (lambda: rms_norm(X, W.int()), TypeError, f"rms_norm: weight has dtype torch.int32; it must be {DTYPES}"),
        (
            lambda: rms_norm(torch.ones(())),
            ValueError,
            "rms_norm: x has shape (); its last dimension must have 1 to 65536 elements",
        ),
        (
            lambda: rms_norm(X[:, :0]),
            ValueError,
            "x has shape (4, 0); its last dimension must have 1 to 65536 elements",
        ),
        (
            lambda: rms_norm(torch.ones(1, 65537)),
            ValueError,
            "x has shape (1, 65537); its last dimension must have 1 to",
        ),
        (
            lambda: layer_norm(X, W[:31]),
            ValueError,
            "layer_norm: weight has shape (31,); it must be (32,), a number for each column of x",
        ),
        (lambda: layer_norm(X, W, X), ValueError, "layer_norm: bias has shape (4, 32); it must be (32,)"),
        (
            lambda: layer_norm(X, W, W.bfloat16()),
            TypeError,
            "layer_norm: bias has dtype torch.bfloat16, weight torch.float32; they must be equal",
        ),
        (
            lambda: rms_norm(X, residual=X[:3]),
            ValueError,
            "rms_norm: residual has shape (3, 32); it must be (4, 32), that of x",
        ),
        (
            lambda: rms_norm(X, rowscale=W),
            ValueError,
            "rms_norm: rowscale has shape (32,); it must be (4,), a number for each row of x",
        ),
        (
            lambda: layer_norm(X, rowscale=W[:4].clone().requires_grad_()),
            ValueError,
            "layer_norm: rowscale requires a gradient, which layer_norm does not compute; call it under",
        ),
        (
            lambda: rms_norm(X, x1=X, rowscale=W[:4]),
            ValueError,
            "rms_norm: x1 and rowscale; rowscale scales x alone, so they go not together",
        ),
        (lambda: rms_norm(X, bias1=W), ValueError, "rms_norm: bias1 without weight1; there is a second result with"),
        (lambda: layer_norm(X, eps=None), TypeError, "layer_norm: eps is NoneType; it must be a number"),
        (lambda: rms_norm(X, eps=torch.ones(())), TypeError, "rms_norm: eps is Tensor; it must be a number"),
        (lambda: rms_norm(X, eps=-1e-6), ValueError, "rms_norm: eps=-1e-06; it must be at least 0"),
        (lambda: rms_norm(X, dropout_p=1.0), ValueError, "rms_norm: dropout_p=1.0; it must be in [0, 1)"),
        (
            lambda: rms_norm(X, dropout_p=0.5, seed=torch.tensor([1.0, 2.0])),
            TypeError,
            "rms_norm: seed has dtype torch.float32; it must be torch.int64",
        ),
        (
            lambda: rms_norm(X, dropout_p=0.5, seed=torch.tensor(1)),
            ValueError,
            "rms_norm: seed has shape (); it must be (2,), a seed and an offset",
        ),
        (lambda: rms_norm(X, out_dtype=torch.int8), TypeError, f"rms_norm: out_dtype=torch.int8; it must be {DTYPES}"),
        (
            lambda: rms_norm(X, W.to("meta")),
            ValueError,
            "rms_norm: weight is on meta, x on cpu; all tensors must be on one device",
        ),
        (
            lambda: torch.func.jvp(lambda x: rms_norm(x, W), (X,), (X,)),
            ValueError,
            "rms_norm: it has no forward-mode derivative; use torch's norms",
        ),
    ],
)
def test_refusals(call, kind, message):
    with sim.device(), refused(message, kind):
        call()


def test_a_cpu_tensor_outside_of_the_simulator():
    with refused("rms_norm: x is on cpu; it must be on a CUDA device", ValueError):
        rms_norm(X)
