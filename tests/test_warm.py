"""Compiling ahead: `tritonkittens.warm`, its command, kernels in threads, and what a first call begins."""

import functools
import io
import os
import queue
import subprocess
import sys
import threading
import types

import pytest
import torch
import triton
import triton.language as tl
from torch.fx.experimental.proxy_tensor import make_fx

import tritonkittens
import tritonkittens.lang as tk
import tritonkittens.sim as sim
from tritonkittens import warming
from tritonkittens.__main__ import main
from tritonkittens.kernels import _ahead
from tritonkittens.kernels._inspection import h200
from tritonkittens.kernels.attention import attention, attention_varlen
from tritonkittens.kernels.gemm import gemm
from tritonkittens.lang.core import backend
from tritonkittens.launch import ahead
from tritonkittens.launch.arguments import leaves
from tritonkittens.launch.recorder import recorded
from tritonkittens.nn import Linear

TILE = tk.st(tk.bf16, 64, 64)
CALLS = """
import functools
import torch
from tests.test_warm import doubled
x = torch.empty(128, 64, dtype=torch.bfloat16)
assert x.is_meta
calls = [functools.partial(doubled, x)]
"""


@tk.kernel
@triton.jit
def double(X, Y, tile: tl.constexpr, times: tl.constexpr):
    x = tk.load(X, tk.rt(tk.bf16, 64, 64), (0, tk.block_index()))
    tk.store(Y, tk.mul(x, times), (0, tk.block_index()))


@tk.kernel
@triton.jit
def mistaken(X, tile: tl.constexpr):
    tk.load(X, tk.rt(tk.bf16, 60, 64), (0, 0))


def doubled(x, times=2.0):
    y = torch.empty_like(x)
    double[(x.shape[0] // 64,)](tk.gl(x), tk.gl(y), TILE, times)
    return y


def operand(*shape, **options):
    return torch.empty(*(shape or (128, 64)), dtype=torch.bfloat16, device="meta", **options)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Empty caches of this test only."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "tk"))
    return tmp_path


@pytest.fixture
def traced(monkeypatch):
    """The number of times that kernels are traced, by thread."""
    found = []
    original = backend.GluonASTSource.make_ir

    def counted(*args, **kwargs):
        found.append(threading.current_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(backend.GluonASTSource, "make_ir", counted)
    return found


# ---- warm


def test_warm_compiles_what_later_calls_find(traced):
    warmed = tritonkittens.warm(functools.partial(doubled, operand()), lambda: doubled(operand(), 3.0), gpu="H200")
    assert (warmed.kernels, warmed.gpu, len(traced)) == (2, "NVIDIA H200", 2)
    assert str(warmed).startswith("2 kernels for NVIDIA H200 in ")
    (launch,) = recorded(lambda: doubled(operand(256, 64)), h200())
    launch.compile()
    assert len(traced) == 2, "the kernel is on disk"


def test_kernels_that_threads_compile_are_those_that_one_compiles(traced, monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    launches = [*recorded(lambda: [doubled(operand(), float(n)) for n in range(6)], h200())]
    found = [future.result().asm["cubin"] for future in ahead.begin(launches)]
    assert found == [launch.compile().asm["cubin"] for launch in launches]
    assert len(traced) == 12


def test_equal_launches_are_compiled_once(traced):
    assert tritonkittens.warm(*[functools.partial(doubled, operand(64 * n, 64)) for n in (1, 2, 3)]).kernels == 1
    assert len(traced) == 1


def test_a_call_makes_its_tensors_without_memory():
    (launch,), _ = warming._recorded(lambda: doubled(torch.empty(1 << 30, 64, dtype=torch.bfloat16)), h200())
    assert all(x.is_meta for _, x in leaves(launch.args) if isinstance(x, torch.Tensor))


def test_operands_and_parameters_of_a_partial_are_replaced():
    layer = Linear(256, 128, device="cpu", dtype=torch.bfloat16)
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    forward, backward = warming._recorded(functools.partial(layer, x), h200())
    assert (len(forward), len(backward)) == (1, 2), "the gradients of the operand and of the weight"
    assert layer.weight.grad is None and x.grad is None
    with torch.no_grad():
        assert len(warming._recorded(functools.partial(layer, x), h200())[1]) == 0


def test_a_call_on_tensors_without_memory_launches_what_one_on_others_does():
    def both_ways(device):
        x = torch.empty(300, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
        unaligned = torch.empty(3000, 2001, dtype=torch.bfloat16, device=device)
        q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        layer = Linear(256, 128, device=device, dtype=torch.bfloat16, activation="gelu")
        yield layer(x)
        yield attention(q, q, q, causal=True)
        yield gemm(unaligned, unaligned[:2001, :2000])

    def launches(device):
        return [
            launch.identity
            for part in _ahead.launches_both_ways(lambda: [*both_ways(device)], h200())
            for launch in part
        ]

    assert launches("meta") == launches("cpu") and len(launches("meta")) > 8


def test_what_torch_has_traced():
    def product(a, b):
        return torch.relu(torch.ops.tritonkittens.gemm(a, b, *[None] * 8))

    graph = make_fx(product, tracing_mode="fake")(*[torch.empty(64, 64, dtype=torch.bfloat16, device="cpu")] * 2)
    assert len(warming._recorded(graph, h200())[0]) == 1

    class Model(torch.nn.Module):
        forward = staticmethod(product)

    program = torch.export.export(Model(), (torch.empty(64, 64, dtype=torch.bfloat16, device="cpu"),) * 2)
    assert len(warming._recorded(program, h200())[0]) == 1


def test_errors_of_calls_and_of_kernels_are_told_after_the_others_are_compiled(traced):
    def misread():
        return gemm(operand(64, 32), operand(64, 32))

    with pytest.raises(warming.WarmError) as caught:
        tritonkittens.warm(
            misread, lambda: mistaken[(1,)](tk.gl(operand()), TILE), functools.partial(doubled, operand())
        )
    first, second = str(caught.value).split("\n", 1)
    assert first.startswith("call 0, misread: ValueError: gemm: a is (64, 32), b is (64, 32)")
    assert second.startswith("mistaken: TileError: ") and "60" in second
    assert len(traced) == 2


def test_a_bar_is_drawn_where_it_is_wanted(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    tritonkittens.warm(functools.partial(doubled, operand()), progress=True)
    assert stream.getvalue().startswith("\rwarm [........................] 0/1 ") and stream.getvalue().endswith("\r")
    stream.truncate(0)
    tritonkittens.warm(functools.partial(doubled, operand()))
    assert not stream.getvalue().strip("\0")


def test_an_interruption_keeps_what_is_compiled_and_drops_what_has_not_begun(monkeypatch, traced):
    monkeypatch.setenv("TK_COMPILE_WORKERS", "1")

    def interrupted(futures, progress):
        futures[0].result()
        raise KeyboardInterrupt

    monkeypatch.setattr(warming, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tritonkittens.warm(*[functools.partial(doubled, operand(), float(n)) for n in range(20)])
    assert 1 <= len(traced) < 20


@pytest.mark.parametrize("gpu", ["A100", "sm_80"])
def test_an_unknown_gpu_is_refused(gpu):
    with pytest.raises(ValueError, match=rf"warm\(gpu='{gpu}'\): must be one of H100, H200, B200, sm_90a, sm_100a"):
        tritonkittens.warm(gpu=gpu)


def test_modules_are_attributes_of_the_package_that_are_imported_late():
    names = ", ".join(f"tritonkittens.{name}" for name in ("warm", *tritonkittens.MODULES))
    code = f"import sys, tritonkittens; assert 'torch' not in sys.modules; {names}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="module 'tritonkittens' has no attribute 'warn'"):
        tritonkittens.warn  # noqa: B018


# ---- the command


def test_the_command(caches, capsys, traced):
    (caches / "calls.py").write_text(CALLS)
    assert main(["warm", str(caches / "calls.py"), "--gpu", "H100", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.startswith("1 kernel for NVIDIA H100 80GB HBM3 in ")
    assert len(traced) == 1
    os.environ.pop("TK_COMPILE_WORKERS")


@pytest.mark.parametrize(
    "text, status, said",
    [
        ("x = 1", 2, "it defines no `calls`, a list of functions without arguments"),
        ("calls = lambda: [lambda: 1 / 0]", 1, "call 0, <lambda>: ZeroDivisionError: division by zero"),
        (None, 2, "No such file"),
    ],
)
def test_what_the_command_refuses(caches, capsys, text, status, said):
    path = caches / "calls.py"
    if text is not None:
        path.write_text(text)
    assert main(["warm", str(path)]) == status
    assert said in capsys.readouterr().err


# ---- kernels in threads


def waiting_launch(name="kernel", result="compiled"):
    """A launch whose kernel is compiled when its event is set."""
    event, begun = threading.Event(), threading.Event()

    def compile():
        begun.set()
        event.wait(10)
        if isinstance(result, Exception):
            raise result
        return result

    return types.SimpleNamespace(identity=(name, "key", (), (9, 0)), compile=compile, event=event, begun=begun)


@pytest.fixture
def one_worker(monkeypatch):
    monkeypatch.setenv("TK_COMPILE_WORKERS", "1")
    monkeypatch.setattr(ahead, "capability", lambda device: (9, 0))


def test_a_launch_waits_for_the_kernel_that_is_being_compiled(one_worker):
    launch = waiting_launch()
    (future,) = ahead.begin([launch])
    assert ahead.begin([launch]) == [future], "an equal one is compiled once"
    launch.begun.wait(10)
    threading.Timer(0.05, launch.event.set).start()
    assert ahead.take("kernel", "key", (), 0) == "compiled"
    assert ahead.take("kernel", "key", (), 0) is None, "it is on disk from now on"


def test_a_launch_compiles_what_has_not_begun_or_failed(one_worker):
    first, second = waiting_launch("first", ValueError("spills")), waiting_launch("second")
    _, waiting = ahead.begin([first, second])
    first.begun.wait(10)
    assert ahead.take("second", "key", (), 0) is None and waiting.cancelled()
    first.event.set()
    assert ahead.take("first", "key", (), 0) is None


def test_a_forked_process_waits_for_no_thread_of_its_parent(one_worker):
    launch = waiting_launch()
    ahead.begin([launch])
    child = os.fork()
    if child == 0:
        os._exit(0 if ahead.take("kernel", "key", (), 0) is None and ahead.prepared(int) == 0 else 1)
    launch.event.set()
    assert os.waitpid(child, 0)[1] == 0


def test_the_number_of_workers_is_a_number(monkeypatch):
    monkeypatch.setenv("TK_COMPILE_WORKERS", "many")
    with pytest.raises(ValueError, match="TK_COMPILE_WORKERS='many': the number of threads that compile"):
        ahead.workers()


def test_a_process_ends_without_what_has_not_begun():
    program = """
import time
from tritonkittens.lang.core import backend
from tritonkittens.launch import ahead
for _ in range(500):
    ahead.submit(lambda: time.sleep(0.2))
"""
    environment = {**os.environ, "TK_COMPILE_WORKERS": "2"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=40, env=environment)


# ---- what a first call begins


def test_what_follows_begins_when_a_kernel_is_traced_and_not_when_it_is_on_disk(traced):
    begun = queue.SimpleQueue()
    for _ in range(2):
        with ahead.followed_by(lambda: begun.put(threading.current_thread())):
            double.compile(*[tk.gl(operand()) for _ in range(2)], TILE, 2.0)
    assert begun.get(timeout=5) is not threading.current_thread()
    assert begun.empty() and len(traced) == 1


def test_nothing_follows_in_the_simulator_on_other_devices_or_without_workers(monkeypatch):
    def follows(device="cuda"):
        return _ahead._is_followed(torch.device(device))

    monkeypatch.setenv("TK_COMPILE_WORKERS", "2")
    assert follows() and not follows("cpu")
    with sim.device():
        assert not follows() and not follows("cpu")
    monkeypatch.setenv("TK_COMPILE_WORKERS", "0")
    assert not follows()


def test_an_operand_on_the_wrong_device_is_still_named():
    a, b = (torch.empty(64, 64, dtype=torch.bfloat16, device="cpu", requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match="gemm: a is on cpu; it must be on a CUDA device"):
        gemm(a, b)


@pytest.mark.parametrize("of", ["gemm", "attention", "attention_varlen"])
def test_the_first_forward_begins_its_backward(monkeypatch, of):
    monkeypatch.setattr(_ahead, "device_facts", lambda device: h200())
    monkeypatch.setattr(_ahead, "_is_followed", lambda device: True)
    tasks, begun = [], []
    monkeypatch.setattr(_ahead, "followed_by", lambda task: tasks.append(task) or ahead.followed_by(task))
    monkeypatch.setattr(_ahead, "begin", begun.extend)
    q = operand(1, 3, 256, 64, requires_grad=True)
    a, b = operand(192, 256, requires_grad=True), operand(256, 320, requires_grad=True)
    packed, ends = operand(700, 3, 64, requires_grad=True), torch.empty(4, dtype=torch.int32, device="meta")
    call = {
        "gemm": lambda: gemm(a, b),
        "attention": lambda: attention(q, q, q, causal=True),
        "attention_varlen": lambda: attention_varlen(packed, packed, packed, ends, ends),
    }[of]
    forward, backward = _ahead.launches_both_ways(call, h200())
    assert len(tasks) >= 1, "the first call of a kind"
    tasks[0]()
    of_forward = {launch.identity for launch in forward}  # which the forward compiles itself
    only_backward = {launch.identity for launch in backward} - of_forward
    assert {launch.identity for launch in begun} == only_backward and only_backward
    tasks.clear()
    _ahead.launches_both_ways(call, h200())
    assert not tasks, "a later call"


def test_threads_take_turns_as_before_once_triton_is_hashed():
    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.004)
        assert ahead.hash_of_triton() == triton.runtime.cache.triton_key()
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(usual)


def test_imports_leave_out_what_takes_seconds():
    program = """
import sys
import torch, triton
before = set(sys.modules)
import tritonkittens.kernels.gemm, tritonkittens.kernels.attention, tritonkittens.nn
new = set(sys.modules) - before
late = {"torch._dynamo", "sympy", "torch._inductor", "torch.distributed.tensor", "tritonkittens.sim"}
assert not new & late, new
"""
    subprocess.run([sys.executable, "-c", program], check=True)
