"""What the programs of this folder do when they run: compare with a reference, and on a GPU measure beside PyTorch."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tritonkittens import sim, tune
from tritonkittens.testing import has_gpu
from tritonkittens.tune.timing import burst, flush_buffer

ROUNDS, BURST_MS = 20, 5.0
SLEEP_CLOCK = 2e9  # cycles a second, at most, of a GPU that waits
BOOST_CLOCK = 1.83e9  # cycles a second for which Hopper's data sheets give the peak of the tensor cores
BOUND = 1e-2  # of the relative error: operands and results are rounded to bf16
DEVICE = "cuda" if has_gpu() else "cpu"  # where tensors are: on a Hopper GPU, or on the CPU for the simulator
Call = Callable[..., torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers: zeros or ones draw less power than real data and run faster."""
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """PyTorch's attention by cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def medians(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each call, with a cold L2.

    The calls take turns, in one order and then in the reverse one: all of them see the same clocks.
    """
    flush = flush_buffer(None).zero_
    times: dict[str, list[float]] = {name: [] for name in calls}
    lengths: dict[str, tuple[int, int]] = {}
    for name, call in calls.items():
        call()  # compiles
        first = burst(call, 3, flush)
        number = max(3, min(40, round(BURST_MS / first.typical)))
        lengths[name] = number, int(number * first.queued * 1e-3 * SLEEP_CLOCK)  # the GPU waits for the host's launches
    for i in range(ROUNDS):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            number, lead = lengths[name]
            times[name].append(burst(calls[name], number, flush, lead).typical)
    return {name: statistics.median(ms) for name, ms in times.items()}


def show(
    name: str,
    ours: Call,
    reference: Call,
    operands: Sequence[Any],
    *,
    peers: Mapping[str, Call] = MappingProxyType({}),
    flop: float = 0.0,
    nbytes: float = 0.0,
    arch: str | None = None,
    **options: Any,
) -> None:
    """Run a function, compare with its reference and print the error; on a GPU print what it and its peers reach.

    Args:
        ours, reference: functions of the operands and the options; the reference computes in float64.
        peers: functions of the operands.
        flop, nbytes: operations of the tensor cores of a call, or the bytes that it must read and write.
        arch: the chip to simulate, also where there is a GPU. None: Hopper, simulated where there is none.
    """
    on_gpu = arch is None and has_gpu()
    with contextlib.nullcontext() if on_gpu else sim.device(arch or "sm_90a"):
        out = ours(*operands, **options).double()
    expected = reference(*operands, **options)
    error = ((out - expected).norm() / expected.norm()).item()
    print(f"{name}: relative error {error:.1e}{'' if on_gpu else ' (simulated)'}")
    if not error < BOUND:  # also NaN
        raise SystemExit(f"{name}: the relative error is above {BOUND:.0e}")
    if on_gpu:
        gpu = tune.Device.of(None)
        tensor_peak = gpu.chip.tensor_flops * gpu.multiprocessors * BOOST_CLOCK
        work, unit, peak = (flop, "TFLOP/s", tensor_peak) if flop else (nbytes, "TB/s", gpu.hbm_bytes_per_second)
        calls = {peer: lambda call=call: call(*operands) for peer, call in peers.items()}
        calls["tritonkittens"] = lambda: ours(*operands, **options)
        for contender, ms in medians(calls).items():
            rate = work / ms * 1e3
            print(f"  {contender:<16} {ms * 1e3:8.1f} µs {rate / 1e12:8.2f} {unit}, {rate / peak:.0%} of the peak")
