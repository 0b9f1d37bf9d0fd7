"""Gated products on chips that are simulated, as torch sees them, their machine code, and what they refuse."""

import argparse
import math

import pytest
import torch

from bench import gated_gemm as bench_gated
from tests.util import explored, refused, relative_error, slow
from tritonkittens import sim, tune
from tritonkittens.arch import GPUS
from tritonkittens.inspect import inspect
from tritonkittens.kernels.gated_gemm import Config, gated_gemm, gated_gemm_operator, gated_gemm_torch
from tritonkittens.kernels.gated_gemm.choice import candidates
from tritonkittens.kernels.gated_gemm.inspection import inspectable
from tritonkittens.kernels.gemm import Problem
from tritonkittens.kernels.gemm.cost_model import cost
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

BF16 = torch.bfloat16
A, W = torch.zeros(8, 16, dtype=BF16), torch.zeros(16, 24, dtype=BF16)
ERRORS = [
    (dict(a=[1.0]), TypeError, "gated_gemm: a is list; it must be a torch tensor"),
    (dict(a=A.float()), TypeError, "gated_gemm: gate has dtype torch.bfloat16, a torch.float32; they must be equal"),
    (dict(a=A.float(), gate=W.float(), up=W.float()), TypeError, "a has dtype torch.float32; it must be torch.bfloat"),
    (dict(up=W.half()), TypeError, "gated_gemm: up has dtype torch.float16, a torch.bfloat16; they must be equal"),
    (dict(gate=W.to("meta")), ValueError, "gated_gemm: gate is on meta; it must be on a CUDA device"),
    (dict(gate=W[1:]), ValueError, "gated_gemm: a is (8, 16), gate is (15, 24); they must be (…, K) and (K, N)"),
    (dict(gate=W[0]), ValueError, "gated_gemm: a is (8, 16), gate is (24,); they must be (…, K) and (K, N)"),
    (dict(up=W[:, 1:]), ValueError, "gated_gemm: up is (16, 23); it must be (16, 24), as gate"),
    (dict(activation="relu"), ValueError, "gated_gemm(activation='relu'): must be one of 'silu', 'gelu_tanh'"),
    (dict(config=3), TypeError, "gated_gemm(config=3): must be a Config"),
    (dict(config=Config(tile_n=96)), ValueError, "it needs tile_n=128 or 256"),
    (dict(config=Config(tile_n=128, schedule="stream_k")), ValueError, "and a schedule that splits no tasks"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ERRORS, ids=str)
def test_errors(changed, kind, message):
    given = dict(a=A, gate=W, up=W) | changed
    with sim.device(), refused(message, kind):
        gated_gemm(given.pop("a"), given.pop("gate"), given.pop("up"), **given)


def operands(m, n, k):
    return torch.randn(m, k).to(BF16), *((torch.randn(n, k) / k**0.5).to(BF16).T for _ in range(2))


@explored(2, 20)
def test_every_schedule_gives_these_results(schedules):
    given, found = operands(130, 72, 200), []
    config = Config(tile_n=128, epilogue_n=32, deferred_epilogue=True, stages=2)
    sim.explore(lambda: found.append(gated_gemm(*given, config=config)), schedules=schedules, multiprocessors=2)
    for out in found:
        assert relative_error(out, gated_gemm_torch(*(t.double() for t in given))) < 4e-3


def test_tensor_memory():
    given = operands(140, 72, 200)
    with sim.device("sm_100a"):
        found = gated_gemm(*given)
    assert relative_error(found, gated_gemm_torch(*(t.double() for t in given))) < 4e-3


@pytest.mark.parametrize("gpu", ["H200", "B200"])
def test_every_kind_has_a_configuration(gpu):
    device = tune.Device.named(gpu)
    for m, n, k in ((1, 16, 8), (64, 256, 64), (4096, 28672, 4096), (100, 6000, 72)):
        for a, b in (("mk", "nk"), ("mk", "kn"), ("km", "nk")):
            problem = Problem("bf16", "bf16", a, b, "silu", "", 1, m, n, k)
            costs = [cost(problem, c, device).total for c in candidates(problem, device)]
            assert min(costs, default=math.inf) < math.inf, problem


# ---------------------------------------------------------------- as torch sees them


def test_opcheck():
    given = [t.requires_grad_() for t in operands(8, 24, 16)]
    with sim.device():
        torch.library.opcheck(
            gated_gemm_operator,
            (*given, "silu"),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_torch_compile_sees_the_operator():
    leaves, results = [t.requires_grad_() for t in operands(8, 24, 16)], []
    with sim.device():
        for function in (gated_gemm, torch.compile(gated_gemm, fullgraph=True, backend="aot_eager")):
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_vmap_and_what_has_no_derivative():
    a, gate, up = operands(8, 24, 16)
    with sim.device():
        samples = torch.randn(2, *a.shape).to(BF16)
        found = torch.vmap(lambda x: gated_gemm(x, gate, up))(samples)
        assert torch.equal(found, torch.stack([gated_gemm(x, gate, up) for x in samples]))
        with refused("gated_gemm: it has no forward-mode derivative", ValueError):
            torch.func.jvp(lambda x: gated_gemm(x, gate, up), (a,), (a,))
        (first,) = torch.autograd.grad(gated_gemm(a.requires_grad_(), gate, up).sum(), a, create_graph=True)
        with refused("gated_activation_backward has no second derivative", NotImplementedError):
            torch.autograd.grad(first.sum(), a)


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
def test_contract(arch):
    gpu = Device.of_gpu(GPUS["H200" if arch == "sm_90a" else "B200"])
    report = inspect(recorded(inspectable["gated_gemm"].call, gpu)[-1].compile(arch))
    assert report.mma.get("HGMMA" if arch == "sm_90a" else "UTCHMMA", 0) > 0
    assert report.wgmma_serialized is not True and not report.remarks
    assert report.spill_instructions == report.spill_store_bytes == report.spill_load_bytes == 0
    assert report.counts["UTMALDG"] > 0 and report.counts["UTMASTG"] > 0


# ---------------------------------------------------------------- the benchmark


def test_the_benchmark(monkeypatch):
    """Ours and a peer are right, and a wrong result is found out."""
    monkeypatch.setattr("bench.gemm.DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with sim.device():
        trial = bench_gated.trial(argparse.Namespace(knobs=[]), 3, 64, 32)
        for make in (*trial.ours.values(), *trial.peers.values()):
            found = make()()
            assert trial.error(found) < trial.bound < trial.error(1.1 * found)
