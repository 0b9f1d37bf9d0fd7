"""What PyTorch entry points do before a kernel sees a tensor: check it, look up what is known of such calls, allocate
what TMA can address."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import triton

from tritonkittens.kernels._dispatch import PLAIN
from tritonkittens.launch import is_reachable, signature_reader, simulated_facts

power_of_two = functools.cache(triton.next_power_of_2)  # a constexpr function is slow to call
HALF_TYPES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF_TYPES)
TMA_BYTES = 16
CACHE_LINE = 128  # bytes
LONG_ROW = 8 * CACHE_LINE  # from which on a part of a line is little memory
_transforms_are_active = torch._C._are_functorch_transforms_active
MAX_REMEMBERED = 4096  # kinds of calls
K = TypeVar("K")
V = TypeVar("V")


def check_tensor(
    name: str, argument: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], first_name: str, first: torch.Tensor
) -> None:
    """A tensor on a CUDA device, that of `first`, of one of `dtypes`. Raises TypeError or ValueError naming the
    argument."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {argument} is {type(x).__name__}; it must be a torch tensor")
    if not is_reachable(x.device):
        raise ValueError(
            f"{name}: {argument} is on {x.device}; it must be on a CUDA device, or on the CPU within "
            "tritonkittens.sim.device()"
        )
    if x.device != first.device:
        raise ValueError(
            f"{name}: {argument} is on {x.device}, {first_name} on {first.device}; all tensors must be on one device"
        )
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: {argument} has dtype {x.dtype}; it must be {' or '.join(str(d) for d in dtypes)}")


def check_operands(name: str, dtypes: tuple[torch.dtype, ...], rank: int, **tensors: torch.Tensor) -> None:
    """One device (CUDA), one dtype out of `dtypes`, `rank` dimensions. Raises TypeError or ValueError naming the
    argument."""
    first_name, first = next(iter(tensors.items()))
    for argument, x in tensors.items():
        check_tensor(name, argument, x, dtypes, first_name, first)
        if x.dtype != first.dtype:
            raise TypeError(f"{name}: {argument} has dtype {x.dtype}, {first_name} {first.dtype}; they must be equal")
        if x.ndim != rank:
            raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; it must have {rank} dimensions")


def check_eps(name: str, eps: float) -> None:
    """Raise TypeError or ValueError for an eps that is no number of at least 0."""
    if not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: eps is {type(eps).__name__}; it must be a number")
    if not eps >= 0:
        raise ValueError(f"{name}: eps={eps!r}; it must be at least 0")


def check_rising(name: str, argument: str, offsets: torch.Tensor | None, most: int, *, are_ends: bool = False) -> None:
    """Raise ValueError for offsets, or the ends of all parts, that do not rise from 0 to at most `most`. Waits for the
    device."""
    found = [] if offsets is None else offsets.tolist()
    rising = [0, *found] if are_ends or not found else found
    if rising[0] or any(end < begin for begin, end in itertools.pairwise(rising)) or rising[-1] > most:
        raise ValueError(f"{name}: {argument} is {found}; it must rise from 0 to at most {most}")


def check_small(
    name: str,
    argument: str,
    x: torch.Tensor,
    like: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    wanted: str,
) -> None:
    """A tensor beside `like` on its device, of this dtype and shape (None: any extent), which the message calls
    `wanted`. Raises TypeError or ValueError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {argument} is {type(x).__name__}; it must be a torch tensor")
    fits = x.ndim == len(shape) and all(extent in (n, None) for n, extent in zip(x.shape, shape, strict=True))
    if not fits or x.dtype != dtype or x.device != like.device:
        raise ValueError(
            f"{name}: {argument} is {tuple(x.shape)}, {x.dtype}, on {x.device}; it must be {wanted}, {dtype}, on "
            f"{like.device}"
        )


def signature(*tensors: torch.Tensor | None) -> Hashable:
    """The key of a plan: everything about these tensors on which checks and launch parameters depend.

    That is shapes, strides, dtypes, alignment, devices and subclasses, and the simulated device. None stands for an
    operand left out. Raises AttributeError, TypeError or RuntimeError for other arguments, and for fake tensors.
    """
    # A transform's tensor (`torch.func`) is one by its type, but has no memory.
    if (
        tensors[0].is_cuda  # type: ignore[union-attr]
        and not _transforms_are_active()
        and (found := signature_reader()(*tensors)) is not None
    ):
        return found
    out: list[Hashable] = [simulated_facts()]
    for x in tensors:
        if x is None:
            out.append(None)
            continue
        kind = None if x.__class__ in PLAIN else x.__class__
        out += (kind, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % TMA_BYTES)
    return tuple(out)


def remember(memo: dict[K, V], key: K, value: V) -> V:
    """Store `value` under `key`, and return it. A full memo is cleared first. While a CUDA graph is captured nothing is
    stored: the graph's memory is not ours to keep, and holds no numbers before a replay."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return value
    if len(memo) >= MAX_REMEMBERED:
        memo.clear()
    memo[key] = value
    return value


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def allocator(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None
) -> Callable[[], torch.Tensor]:
    """Return a function that allocates an uninitialised tensor, contiguous unless it has `strides`.

    It calls the function that torch.compile's generated code calls. That takes half the host time of `torch.empty`, but
    allocates on the current device only.
    """
    shape = tuple(shape)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride() if strides is None else strides
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if allocate is None:
        return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    if device.type != "cuda":
        return functools.partial(allocate, shape, strides, dtype)
    current, index = torch._C._cuda_getDevice, device.index

    def run() -> torch.Tensor:
        return (
            allocate(shape, strides, dtype)
            if current() == index
            else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        )

    return run


def allocator_like(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates an uninitialised tensor of the shape, strides, dtype and device of `x`."""
    return allocator(x.shape, x.dtype, x.device, x.stride())


def addressable(x: torch.Tensor) -> bool:
    """Can TMA address this tensor (last stride 1, the others and the address multiples of 16 bytes)?"""
    shape, strides, unit = x.shape, x.stride(), TMA_BYTES // x.element_size()
    if x.data_ptr() % TMA_BYTES or (strides[-1] != 1 and shape[-1] != 1):
        return False
    # a loop: this is asked of every operand of every call
    for extent, stride in zip(shape[:-1], strides, strict=False):
        if stride % unit and extent != 1:
            return False
    return True


def storable(x: torch.Tensor) -> bool:
    """Can TMA write this tensor and nothing else? It writes rows up to the next multiple of 16 bytes, so their length
    must be one."""
    return addressable(x) and x.shape[-1] * x.element_size() % TMA_BYTES == 0


def storable_home(out: torch.Tensor) -> torch.Tensor:
    """`out` itself, or a tensor like it that TMA can write, from which it is to be copied."""
    return out if storable(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def addressable_pitch(row_bytes: int) -> int:
    """Bytes from row to row that TMA can address: those of a row if it can. Else long rows begin cache lines; elsewhere
    a line of a tile is part of two."""
    if row_bytes % TMA_BYTES == 0:
        return row_bytes
    step = CACHE_LINE if row_bytes >= LONG_ROW else TMA_BYTES
    return -(-row_bytes // step) * step


def padded_empty(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor on the device of `like`, of its dtype unless given, whose rows TMA can address."""
    dtype = dtype or like.dtype
    width = addressable_pitch(shape[-1] * dtype.itemsize) // dtype.itemsize
    return torch.empty((*shape[:-1], width), dtype=dtype, device=like.device)[..., : shape[-1]]
