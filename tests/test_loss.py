"""Softmax and losses as torch sees them, their modules, their machine code, and what they refuse."""

import re

import pytest
import torch
from torch import nn

from bench import loss as bench_loss
from tests.cases_loss import BF16, FP32, check, check_softmax, numbers, targets
from tests.util import assert_eager_is_operator, assert_wide_offsets, explored, meta, refused, slow
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.loss import (
    call_plan,
    config,
    cross_entropy,
    cross_entropy_backward_operator,
    cross_entropy_operator,
    cross_entropy_torch,
    interface,
    softmax,
    softmax_backward_operator,
    softmax_operator,
)
from tritonkittens.kernels.loss.config import Tiles, gradient_tiles, loss_tiles, softmax_tiles, stages_of
from tritonkittens.kernels.loss.inspection import inspectable
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

X, TARGET = torch.randn(4, 32), torch.tensor([3, -100, 31, 0])
OPTIONS = (-100, "mean", 0.1, 1e-3, 5.0, True)


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_loss.DEVICE", "cpu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", slow("sm_89"), slow("sm_120a")])
def test_chips(arch):
    with sim.device(arch):
        check_softmax(numbers((5, 72), BF16))
        check(numbers((3, 9000), BF16), targets((3,), 9000, ignored=0.0), label_smoothing=0.1)


@explored(2, 40)
def test_interleavings_of_chunks_and_programs(monkeypatch, schedules):
    """Loops of three chunks, sums by two programs, and gradients of chunks in place: the same results in all orders."""
    for module, values in (
        (config, dict(FEW=16, MOST_AT_ONCE=16, LOOP_COLS=16, GRADIENT_COLS=16, STAGES=3, MOST_OF_SOFTMAX=(64, 64))),
        (call_plan, dict(_plans={}, MOST_SUMMED=1, SUM_PROGRAMS=2, SUM_ROWS=2)),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    x, target = numbers((3, 150), FP32), targets((3,), 150, ignored=0.0)
    with sim.device():
        check(x, target, inplace_backward=True)
        check_softmax(x)

    def run():
        leaf = x.detach().clone().requires_grad_()
        (softmax(leaf)[0, 0] + cross_entropy(leaf * 1, target, inplace_backward=True)).backward()

    sim.explore(run, schedules=schedules)


# ---------------------------------------------------------------- as torch sees them


def losses(x):
    return cross_entropy(softmax(x * 2) + 1, TARGET, label_smoothing=0.1, return_lse=True, inplace_backward=True)


def test_torch_compile_sees_operators():
    x = X.clone().requires_grad_()
    with sim.device():
        compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
        results = [function(x) for function in (losses, compiled)]
        gradients = [torch.autograd.grad(loss + lse.square().sum(), x) for loss, lse in results]
    for a, b in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck():
    x, lse, one = X.clone().requires_grad_(), torch.randn(4), torch.ones(())
    with sim.device():
        for operator, args in (
            (softmax_operator, (x, BF16)),
            (softmax_backward_operator, (X, torch.softmax(X, -1), BF16)),
            (cross_entropy_operator, (x, TARGET, *OPTIONS)),
            (cross_entropy_operator, (x, TARGET.int(), 3, "none", 0.0, 0.0, None, False)),
            (cross_entropy_backward_operator, (one, lse, X, TARGET, lse, one, *OPTIONS)),
        ):
            torch.library.opcheck(
                operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


def test_an_eager_call_is_the_operator():
    def gradients(function, *args):
        x = X.clone().requires_grad_()
        y = function(x, *args)
        return y, torch.autograd.grad(y.sum(), x)

    with sim.device():
        names = ("cross_entropy", "cross_entropy_backward")
        assert_eager_is_operator(lambda: gradients(cross_entropy, TARGET), "CrossEntropyFunction", *names)
        names = ("softmax", "softmax_backward")
        assert_eager_is_operator(lambda: gradients(softmax), "SoftmaxFunction", *names)


def test_transforms_of_functions():
    x, target = torch.randn(3, 4, 32), torch.randint(0, 32, (3, 4))
    with sim.device():
        found = torch.vmap(cross_entropy)(x, target)
        gradients = torch.vmap(torch.func.grad(cross_entropy))(x, target)
        again = torch.vmap(torch.func.grad(lambda t: softmax(t).square().sum()))(x)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected = torch.stack([nn.functional.cross_entropy(*pair) for pair in zip(leaves[0], target, strict=True)])
    expected.sum().backward()
    torch.softmax(leaves[1], -1).square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, leaves[0].grad)
    torch.testing.assert_close(again, leaves[1].grad)


def test_no_second_derivative():
    x = X.clone().requires_grad_()
    with sim.device():
        for y, message in (
            (cross_entropy(x, TARGET), "cross_entropy_backward has no second derivative; use torch's cross entropy"),
            (softmax(x).square().sum(), "softmax_backward has no second derivative; use torch's softmax"),
        ):
            (dx,) = torch.autograd.grad(y, x, create_graph=True)
            with refused(message, NotImplementedError):
                dx.sum().backward()


def test_softmax_under_autocast(monkeypatch):
    monkeypatch.setattr(interface, "autocasts", lambda device: BF16)
    found = []
    recorded(lambda: found.append(softmax(meta(4, 32))), Device.of_gpu(GPUS["H200"]))
    assert found[0].dtype == FP32


# ---------------------------------------------------------------- plans and machine code


def test_tiles():
    assert softmax_tiles(128, False) == (Tiles(32, 128, 1, 4), 1) and softmax_tiles(128, True)[0].rows == 16
    assert softmax_tiles(4096, False) == (Tiles(1, 1024, 4, 4), 4) and softmax_tiles(5120, False)[0].chunks == 3
    assert softmax_tiles(32768, False) == (Tiles(1, 8192, 4, 32), 4)
    assert softmax_tiles(16384, True) == (Tiles(1, 8192, 2, 32), 2)
    assert softmax_tiles(32769, False) == (Tiles(1, 4096, 9, 8), 0) == softmax_tiles(32769, True)
    assert loss_tiles(1000) == Tiles(4, 1024, 1, 4) and loss_tiles(7000) == Tiles(1, 8192, 1, 8) == gradient_tiles(8192)
    assert loss_tiles(5000) == Tiles(1, 2048, 3, 4) and gradient_tiles(5000) == Tiles(1, 4096, 2, 4)
    assert loss_tiles(128256) == Tiles(1, 4096, 32, 8) and gradient_tiles(128256) == Tiles(1, 8192, 16, 8)
    assert [stages_of(loss_tiles(n)) for n in (8192, 8193)] == [1, 4]


@pytest.mark.parametrize(
    "name, most",
    [
        ("softmax_4096", 13.5),
        slow("softmax_4096_backward", 14.0),
        ("cross_entropy_128256", 27.0),
        ("cross_entropy_128256_backward", 16.0),
        slow("cross_entropy_128256_capped", 45.0),
        slow("cross_entropy_128256_capped_backward", 28.0),
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
def test_instructions_of_an_element(name, most, arch):
    """At most. 16 bytes are loaded and stored at once, in the loop over a wide row by cp.async, and nothing spills."""
    kernel = inspectable[name](arch)
    loop = "128256" in name and "backward" not in name
    elements = 16 if loop or name == "softmax_4096_backward" else 32
    assert_wide_offsets(kernel)
    instructions, _ = _sass.parse(*_tools.disassemble(kernel.asm["cubin"]))
    assert not {"LDL", "STL"} & {i.base for i in instructions}, "nothing spills"
    assert len(instructions) <= most * elements, f"{len(instructions) / elements:.1f} instructions an element"
    assert len(re.findall(r"cp\.async\.cg\.shared\.global [^;]*0x10", kernel.asm["ptx"])) == 8 * loop
    widths = re.findall(r"(?:ld|st)\.global\.(v4\.b32|v2\.b32|b32|b16)", kernel.asm["ptx"])
    assert widths.count("v4.b32") >= 6 * (not loop), widths
    assert set(widths) <= {"v4.b32", "b32", "b16"}, "statistics are words, the logit of a target is alone"
    assert widths.count("b16") <= 1 and widths.count("b32") <= 4


@pytest.mark.parametrize("ignore_index", [2**40, -(2**63), 2**31 - 1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_to_ignore_that_may_be_no_target(dtype, ignore_index):
    """Rows beyond the last one, of a tile that they do not fill, count nothing."""
    x, target = X[:3].clone().requires_grad_(), torch.tensor([0, 2, 31], dtype=dtype)
    with sim.device():
        loss = cross_entropy(x, target, ignore_index=ignore_index)
        found = loss, *torch.autograd.grad(loss, x)
    expected = nn.functional.cross_entropy(x, target.long(), ignore_index=ignore_index)
    torch.testing.assert_close(found, (expected, *torch.autograd.grad(expected, x)))


def test_nothing_but_chosen_logits_is_read_of_ignored_rows():
    """In a wide vocabulary, unless their log-sum-exps are wanted."""
    x, target = torch.randn(2, 9000, requires_grad=True), torch.tensor([-100, 7])
    with sim.device():
        loss = cross_entropy(x, target, reduction="none")
        (dx,) = torch.autograd.grad(loss.sum(), x)
        _, lse = cross_entropy(x, target, reduction="none", return_lse=True)
    assert loss[0] == 0 and not dx[0].any()
    torch.testing.assert_close(lse, torch.logsumexp(x, -1))


def test_the_reference_is_torchs():
    x = X.double()
    for options in (dict(label_smoothing=0.2), dict(reduction="sum"), dict(reduction="none", ignore_index=3)):
        target = TARGET.clamp(min=0) if "ignore_index" in options else TARGET
        expected = nn.functional.cross_entropy(x, target, **options)
        torch.testing.assert_close(cross_entropy_torch(x, target, **options)[0], expected)


# ---------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", bench_loss.KINDS)
def test_the_benchmark(monkeypatch, kind, both_ways):
    """Ours and a peer are right, and a wrong result is found out."""
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with sim.device():
        trial = bench_loss.prepare(kind, 3, 64, both_ways)
        for make in (trial.ours["tritonkittens"], trial.peers["torch.compile"]):
            found = make()()
            assert trial.error(found) < trial.bound < trial.error(1.1 * found)


def test_cases_of_the_benchmark():
    found = {case.name: case for suite in bench_loss.SUITES for case in suite.cases(None)}
    size = 8192 * 32000
    assert found["cross_entropy 8192x32000"].work == 2 * size
    assert found["cross_entropy backward 8192x32000"].work == 4 * size
    assert found["8192 tokens 2048->32000"].work == 6 * 2048 * size


def test_the_benchmark_of_linear_layers(monkeypatch):
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with sim.device():
        trial = bench_loss.prepare_linear(8, 32, 64)
        for make in (trial.ours["tritonkittens"], trial.peers["torch.compile"]):
            found = make()()
            assert trial.error(found) < trial.bound < trial.error([found[0], *(1.1 * t for t in found[1:])])


# ---------------------------------------------------------------- refusals

DTYPES = "torch.bfloat16 or torch.float16 or torch.float32"


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: softmax([1.0]), TypeError, "softmax: x is list; it must be a torch tensor"),
        (lambda: softmax(X.double()), TypeError, f"softmax: x has dtype torch.float64; it must be {DTYPES}"),
        (lambda: softmax(X, out_dtype=torch.int8), TypeError, f"softmax: out_dtype=torch.int8; it must be {DTYPES}"),
        (
            lambda: softmax(torch.ones(1, 262145)),
            ValueError,
            "softmax: x has shape (1, 262145); its last dimension must have 1 to 262144 elements",
        ),
        (lambda: cross_entropy(X, 3), TypeError, "cross_entropy: target is int; it must be a torch tensor"),
        (
            lambda: cross_entropy(X.double(), TARGET),
            TypeError,
            f"cross_entropy: input has dtype torch.float64; it must be {DTYPES}",
        ),
        (
            lambda: cross_entropy(X, TARGET.float()),
            TypeError,
            "cross_entropy: target has dtype torch.float32; it must be torch.int64 or torch.int32",
        ),
        (
            lambda: cross_entropy(X, TARGET[:3]),
            ValueError,
            "cross_entropy: target has shape (3,); it must be (4,), an index for each row of input",
        ),
        (
            lambda: cross_entropy(X[:, :0], TARGET),
            ValueError,
            "cross_entropy: input has shape (4, 0); its last dimension must have 1 to 262144 elements",
        ),
        (
            lambda: cross_entropy(X, TARGET, reduction="max"),
            ValueError,
            "cross_entropy: reduction='max'; it must be 'mean' or 'sum' or 'none'",
        ),
        (
            lambda: cross_entropy(X, TARGET, label_smoothing=1.5),
            ValueError,
            "cross_entropy: label_smoothing=1.5; it must be in [0, 1]",
        ),
        (
            lambda: cross_entropy(X, TARGET, softcap=0.0),
            ValueError,
            "cross_entropy: softcap=0.0; it must be positive and finite, or None for none",
        ),
        (
            lambda: cross_entropy(X, TARGET, softcap=float("inf")),
            ValueError,
            "cross_entropy: softcap=inf; it must be positive and finite, or None for none",
        ),
        (
            lambda: cross_entropy(X, TARGET.to("meta")),
            ValueError,
            "cross_entropy: target is on meta, input on cpu; all tensors must be on one device",
        ),
        (
            lambda: torch.func.jvp(lambda x: cross_entropy(x, TARGET), (X,), (X,)),
            ValueError,
            "cross_entropy: it has no forward-mode derivative; use torch's cross_entropy",
        ),
    ],
)
def test_refusals(call, kind, message):
    with sim.device(), refused(message, kind):
        call()


def test_a_cpu_tensor_outside_of_the_simulator():
    with refused("softmax: x is on cpu; it must be on a CUDA device", ValueError):
        softmax(X)
    with refused("cross_entropy: input is on cpu; it must be on a CUDA device", ValueError):
        cross_entropy(X, TARGET)
