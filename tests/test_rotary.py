"""Rotary embeddings as torch sees them, their machine code, and what they refuse."""

import re
from collections import Counter

import pytest
import torch

from bench import rotary as bench_rotary
from tests.cases_rotary import angles, check, heads
from tests.util import Seen, assert_wide_offsets, explored, refused, slow, some_slow
from tritonkittens import sim
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.rotary import call_plan, inplace_operator, rotary, rotary_operator, rotary_torch
from tritonkittens.kernels.rotary.config import Head, Tiles, tiles_of
from tritonkittens.kernels.rotary.inspection import inspectable

Q, K = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
COS, SIN = (f(torch.randn(7, 8)) for f in (torch.cos, torch.sin))
IDS = torch.randint(0, 7, (2, 5))


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_rotary.DEVICE", "cpu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", slow("sm_89"), slow("sm_120a")])
def test_chips(arch):
    with sim.device(arch):
        check(heads((2, 3, 5, 16)), heads((2, 1, 5, 16)), *angles(5, 8))


@explored(2, 40)
def test_interleavings_of_programs(monkeypatch, schedules):
    """In place, also where programs share tokens: the same results in all orders."""
    monkeypatch.setattr(call_plan, "_plans", {})
    monkeypatch.setattr(call_plan, "tiles_of", lambda *_: Tiles(2, 2))

    def run():
        q, k = Q.clone(), K.clone()
        rotary(q, k, COS, SIN, inplace=True)
        return q, k

    with sim.device():
        for x, y in zip(run(), (Q, K), strict=True):
            torch.testing.assert_close(x.double(), rotary_torch(y, COS[:5], SIN[:5]), rtol=1e-5, atol=1e-5)
    sim.explore(run, schedules=schedules)


# ---------------------------------------------------------------- as torch sees them


def block(q, k, cos, sin, ids):
    """Rotations as a layer has them, the second in place."""
    y, z = rotary(q * 2, k, cos, sin, ids)
    z = z * 1
    return y, rotary(z, None, cos, sin, interleaved=True, inplace=True), rotary(k, None, cos, sin)


def test_torch_compile_sees_operators():
    leaves = [t.clone().requires_grad_() for t in (Q.transpose(1, 2).contiguous().transpose(1, 2), K)]
    with sim.device():
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        results = [function(*leaves, COS, SIN, IDS) for function in (block, compiled)]
        gradients = [torch.autograd.grad([t.square().sum() for t in found], leaves) for found in results]
    for a, b in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_compiled_rotations_in_place():
    """Without gradients they are one launch, also of views of one tensor."""

    def run(packed):
        q, k, _ = packed.split([3, 1, 2], 2)
        return rotary(q, k, COS, SIN, unsqueeze_dim=2, inplace=True)[0].sum()

    packed = torch.randn(2, 5, 6, 16)
    results = []
    with sim.device() as device, torch.no_grad():
        for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
            results.append(given := packed.clone())
            function(given)
        assert len(device.launches) == 2
    assert torch.equal(*results) and not torch.equal(packed, given)


def test_opcheck():
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    with sim.device():
        for args in (
            (q, k, COS, SIN, IDS, None, None, None, None, 1, 16, False, False, 1e-6),
            (
                q.detach().transpose(1, 2),
                None,
                COS,
                SIN,
                None,
                torch.tensor([1, 2]),
                None,
                None,
                None,
                2,
                16,
                True,
                True,
                1e-6,
            ),
            (q.detach()[:, 0], None, COS, SIN, None, None, torch.tensor([0, 2]), None, None, 1, 16, True, True, 1e-6),
        ):
            torch.library.opcheck(
                rotary_operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )
            detached = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
            torch.library.opcheck(inplace_operator, detached, test_utils=("test_schema", "test_faketensor"))


def test_an_eager_call_is_the_operator():
    """Plain tensors take an autograd function; a dispatch mode sees operators, which give the same bits."""

    def run(inplace):
        leaves = [t.clone().requires_grad_() for t in (Q, K)]
        y, z = rotary(*(t * 1 for t in leaves), COS, SIN, IDS, inplace=inplace)
        return y, torch.autograd.grad((y * z).sum(), leaves)

    with sim.device():
        y, gradients = run(False)
        assert type(y.grad_fn).__name__ == "RotaryFunctionBackward"
        assert type(run(True)[0].grad_fn).__name__ == "RotaryInplaceFunctionBackward"
        for inplace in (False, True):
            with Seen() as seen:
                again, others = run(inplace)
            assert "tritonkittens::rotary" in seen.names
            assert all(torch.equal(a, b) for a, b in zip((y, *gradients), (again, *others), strict=True))


def test_transforms_of_functions():
    with sim.device():
        found = torch.vmap(lambda q, k: rotary(q, k, COS, SIN))(Q[:, None], K[:, None])
        for y, x in zip(found, (Q, K), strict=True):
            torch.testing.assert_close(y[:, 0].double(), rotary_torch(x, COS[:5], SIN[:5]), rtol=1e-5, atol=1e-5)
        gradients = torch.vmap(torch.func.grad(lambda q: (rotary(q, None, COS, SIN) * Q[:1]).sum()))(Q[:, None])
    leaf = Q.clone().requires_grad_()
    (expected,) = torch.autograd.grad((rotary_torch(leaf, COS[:5], SIN[:5]) * Q[:1]).sum(), leaf)
    torch.testing.assert_close(gradients[:, 0], expected)


def test_second_derivatives():
    x, direction = Q.clone().requires_grad_(), torch.randn_like(Q)
    with sim.device():
        (dx,) = torch.autograd.grad(rotary(x, None, COS, SIN).pow(3).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(dx, x, direction)
    (dx,) = torch.autograd.grad(rotary_torch(x, COS[:5], SIN[:5]).pow(3).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(dx, x, direction)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_that_nobody_wants():
    q, k = Q.clone().requires_grad_(), K.clone()
    with sim.device() as device:
        y, z = rotary(q, k, COS, SIN)
        torch.autograd.grad(y.sum(), q)
        assert not z.grad_fn or z.grad_fn.next_functions[1][0] is None
        assert len(device.launches) == 2
        k.requires_grad_()
        (dk,) = torch.autograd.grad(rotary(q, k, COS, SIN)[1].sum(), k)
    (expected,) = torch.autograd.grad(rotary_torch(k, COS[:5], SIN[:5]).sum(), k)
    torch.testing.assert_close(dk, expected)


def test_a_write_in_place_is_known_to_autograd():
    q = Q.clone().requires_grad_() * 1
    with sim.device():
        saved = q.square()
        with torch.no_grad():
            rotary(q, None, COS, SIN, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


# ---------------------------------------------------------------- plans and machine code


def test_tiles():
    def head(half, rest=0, norm=False):
        return Head(half, rest, 8, False, False, False, norm, False, False)

    assert tiles_of(head(64), 2, 16384, 40, 132) == Tiles(16, 8) and tiles_of(head(64), 4, 16384, 40, 132).tokens == 8
    assert tiles_of(head(32), 2, 16384, 40, 132).tokens == 32 and tiles_of(head(512), 4, 10**6, 1, 132) == Tiles(1, 1)
    assert (
        tiles_of(head(16, 48), 2, 16384, 40, 132).tokens == 32
        and tiles_of(head(32, 192), 2, 16384, 18, 132).tokens == 8
    )
    assert tiles_of(head(32, 192, norm=True), 2, 16384, 18, 132).tokens == 4, "all of a head is in registers"
    # of few tokens, each program has few heads
    assert tiles_of(head(64), 2, 64, 40, 132) == Tiles(16, 1) and tiles_of(head(64), 2, 1, 40, 132) == Tiles(16, 1)
    assert tiles_of(head(64), 2, 4096, 40, 132) == Tiles(16, 8) and tiles_of(head(64), 2, 1000, 40, 132).heads == 2


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize(
    "name", some_slow(list(inspectable), ["rotary_128", "rotary_64_interleaved_packed", "rotary_128_norm_backward"])
)
def test_machine_code(name, arch):
    """Everything moves 16 bytes at once but positions and sums of gradients, and nothing spills."""
    kernel = inspectable[name](arch)
    assert_wide_offsets(kernel)
    instructions, _ = _sass.parse(*_tools.disassemble(kernel.asm["cubin"]))
    assert not {"LDL", "STL"} & {i.base for i in instructions}
    widths = Counter(re.findall(r"(ld|st)\.global\.(\w+\.b32|b32|b64|b16)", kernel.asm["ptx"]))
    # cos and sin in fp32, two of 4 numbers each; of q and of k two parts of 8, as many of weights and of gradients
    loads = 4 + 4 * (1 + ("norm" in name) + ("backward" in name))
    assert widths["ld", "v4.b32"] == loads and widths["st", "v4.b32"] == 4
    assert (widths["ld", "b32"] > 0) == ("packed" in name) and (widths["st", "b32"] > 0) == ("backward" in name)
    assert {width for _, width in widths} <= {"v4.b32", "b32"}


# ---------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", bench_rotary.KINDS)
def test_the_benchmark(monkeypatch, kind, both_ways):
    """Ours and a peer are right, and a wrong result is found out."""
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with sim.device():
        trial = bench_rotary.prepare(kind, bench_rotary.Model(2, 1, 16), 2, 6, both_ways)
        for make in (trial.ours[bench_rotary.OURS], trial.peers["torch.compile"]):
            found = make()()
            assert trial.error(found) < trial.bound < trial.error([1.1 * t for t in found])


def test_cases_of_the_benchmark():
    found = {case.name: case for suite in bench_rotary.SUITES for case in suite.cases(None)}
    assert len(found) == 2 * len(bench_rotary.KINDS) * len(bench_rotary.SHAPES)
    size = 2 * 4 * 4096 * 40 * 128
    assert found["halves 32/8x128 4x4096"].work == found["inplace backward 32/8x128 4x4096"].work == 2 * size
    assert found["norm 32/8x128 4x4096"].work == 2 * size and found["norm backward 32/8x128 4x4096"].work == 3 * size


# ---------------------------------------------------------------- refusals

DTYPES = "torch.bfloat16 or torch.float16 or torch.float32"


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: rotary([1.0], None, COS, SIN), TypeError, "rotary: q is list; it must be a torch tensor"),
        (lambda: rotary(Q, 1.0, COS, SIN), TypeError, "rotary: k is float; it must be a torch tensor"),
        (
            lambda: rotary(Q.double(), None, COS, SIN),
            TypeError,
            f"rotary: q has dtype torch.float64; it must be {DTYPES}",
        ),
        (
            lambda: rotary(Q, K.bfloat16(), COS, SIN),
            TypeError,
            "k has dtype torch.bfloat16, q torch.float32; they must",
        ),
        (
            lambda: rotary(Q, K[:1], COS, SIN),
            ValueError,
            "rotary: k has shape (1, 1, 5, 16); it must be (2, 1, 5, 16), that of q, but for the heads",
        ),
        (
            lambda: rotary(Q[0, 0], None, COS, SIN),
            ValueError,
            "q has shape (5, 16); it must have 4 dimensions, or 3 for",
        ),
        (
            lambda: rotary(Q, K, COS, SIN[:6]),
            ValueError,
            "rotary: sin has shape (6, 8); it must be (7, 8), that of cos",
        ),
        (lambda: rotary(Q, K, COS, SIN.half()), TypeError, "sin has dtype torch.float16, cos torch.float32; they must"),
        (lambda: rotary(Q, K, COS[:4], SIN[:4]), ValueError, "rotary: cos has 4 positions; q has 5 tokens"),
        (
            lambda: rotary(Q, K, COS[None], SIN[None]),
            ValueError,
            "rotary: cos has shape (1, 7, 8); it must be (2, 5, 8) or (1, 5, 8), angles of each token",
        ),
        (
            lambda: rotary(Q, K, COS[None], SIN[None], IDS),
            ValueError,
            "cos has shape (1, 7, 8); it must have 2 dimensions",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, rotary_dim=12),
            ValueError,
            "cos has shape (7, 8); its last dimension must be 6 or 12, for rotary_dim=12",
        ),
        (lambda: rotary(Q, K, COS, SIN, rotary_dim=18), ValueError, "rotary_dim=18; it must be even, and at most 16"),
        (lambda: rotary(Q, K, COS[:, :7], SIN[:, :7], rotary_dim=7), ValueError, "rotary_dim=7; it must be even"),
        (
            lambda: rotary(Q, K, COS, SIN, IDS[:, :4]),
            ValueError,
            "rotary: position_ids has shape (2, 4); it must be (2, 5) or (1, 5) or (5,), a position for each token",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, IDS.float()),
            TypeError,
            "rotary: position_ids has dtype torch.float32; it must be torch.int32 or torch.int64",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, IDS, seqlen_offsets=torch.tensor([1, 2])),
            ValueError,
            "rotary: position_ids with seqlen_offsets or cu_seqlens; positions come from one of them",
        ),
        (lambda: rotary(Q, K, COS, SIN, IDS, seqlen_offsets=1), ValueError, "rotary: seqlen_offsets with position_ids"),
        (
            lambda: rotary(Q, K, COS, SIN, seqlen_offsets=8),
            ValueError,
            "rotary: seqlen_offsets=8 and 5 tokens need 13 positions; cos has 7",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, seqlen_offsets=-1),
            ValueError,
            "rotary: seqlen_offsets=-1; it must be in the table; cos has 7",
        ),
        *[
            (
                lambda wrong=wrong: rotary(Q, K, COS, SIN, seqlen_offsets=wrong),
                TypeError,
                f"rotary: seqlen_offsets is {type(wrong).__name__}; it must be an int, or a tensor (sequences,)",
            )
            for wrong in (1.5, None, [1, 2], True)
        ],
        (lambda: rotary(Q, K, COS, SIN, eps=None), TypeError, "rotary: eps is NoneType; it must be a number"),
        (
            lambda: rotary(Q.mT, None, COS[:, :2], SIN[:, :2]),
            ValueError,
            "rotary: cos has 7 positions; q has 16 tokens; q of (B, S, H, D) needs unsqueeze_dim=2",
        ),
        (
            lambda: rotary(Q.transpose(1, 2), K.transpose(1, 2), COS, SIN),
            ValueError,
            "that of q, but for the heads; q of (B, S, H, D) needs unsqueeze_dim=2",
        ),
        (
            lambda: rotary(Q.transpose(1, 2), None, COS[None, :5], SIN[None, :5]),
            ValueError,
            "angles of each token; q of (B, S, H, D) needs unsqueeze_dim=2",
        ),
        (
            lambda: rotary(Q.transpose(1, 2), None, COS, SIN, IDS),
            ValueError,
            "a position for each token; q of (B, S, H, D) needs unsqueeze_dim=2",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, seqlen_offsets=torch.tensor([1])),
            ValueError,
            "rotary: seqlen_offsets has shape (1,); it must be (2,), an offset for each sequence",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            "rotary: cu_seqlens with q of 4 dimensions; packed tokens are (total, H, D)",
        ),
        (
            lambda: rotary(Q[0], None, COS, SIN, cu_seqlens=torch.tensor([0])),
            ValueError,
            "rotary: cu_seqlens has shape (1,); it must be (sequences + 1,), with a sequence at least",
        ),
        (
            lambda: rotary(Q, K, COS, SIN, unsqueeze_dim=3),
            ValueError,
            "rotary: unsqueeze_dim=3; it must be 1, (B, H, S, D), or 2, (B, S, H, D)",
        ),
        (
            lambda: rotary(Q, K, COS.clone().requires_grad_(), SIN),
            ValueError,
            "rotary: cos requires a gradient, which rotary does not compute",
        ),
        (
            lambda: rotary(Q.clone().requires_grad_(), K, COS, SIN, inplace=True),
            ValueError,
            "rotary: q is a leaf that requires a gradient; it cannot be written in place",
        ),
        (
            lambda: rotary(Q, K.expand(2, 3, 5, 16), COS, SIN, inplace=True),
            ValueError,
            "rotary: k is (2, 3, 5, 16) with strides (80, 0, 16, 1); some of its elements share memory",
        ),
        (
            lambda: rotary(Q, Q, COS, SIN, inplace=True),
            ValueError,
            "rotary: inplace with q and k the same memory; one launch cannot rotate it twice",
        ),
        (
            lambda: rotary(Q, K.to("meta"), COS, SIN),
            ValueError,
            "rotary: k is on meta, q on cpu; all tensors must be on",
        ),
        (
            lambda: torch.func.jvp(lambda q: rotary(q, K, COS, SIN), (Q,), (Q,)),
            ValueError,
            "rotary: it has no forward-mode derivative; use torch's operations",
        ),
    ],
)
def test_refusals(call, kind, message):
    with sim.device(), refused(message, kind):
        call()


def test_a_cpu_tensor_outside_of_the_simulator():
    with refused("rotary: q is on cpu; it must be on a CUDA device", ValueError):
        rotary(Q, K, COS, SIN)
