"""What `gemm` takes: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors, check_written
from tritonkittens.kernels._tensors import check_tensor
from tritonkittens.kernels.gemm.config import UNSPLIT, Config
from tritonkittens.kernels.gemm.epilogue import BUILT_IN, Applied, Function, names_of
from tritonkittens.kernels.gemm.microscaling import FP4, SCALES, are_microscaled, check_scales
from tritonkittens.kernels.gemm.reference import BLOCK, checked_activation

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OPERANDS = (torch.bfloat16, torch.float16, *FP8)  # and FP4, with scales
RESULTS = (torch.bfloat16, torch.float16, torch.float32, *FP8)
VECTORS = (torch.bfloat16, torch.float16, torch.float32)
Operands = tuple[Tensor | None, ...]  # bias, gate, residual, scale_a, scale_b, and those of a user's function


def check_kinds(a: Tensor, b: Tensor, operands: Operands, out: Tensor | None) -> None:
    """Raise TypeError for an operand that is no tensor."""
    bias, gate, residual, scale_a, scale_b = operands[:5]
    check_tensors("gemm", a=a, b=b)
    check_tensors(
        "gemm", optional=True, bias=bias, gate=gate, residual=residual, scale_a=scale_a, scale_b=scale_b, out=out
    )


def check_config(config: object) -> None:
    """Raise TypeError for what is neither None nor a `Config`."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"gemm(config={config!r}): must be a Config")


def check_accumulation(a: Tensor, accumulate: str, config: Config | None) -> None:
    """Raise ValueError for an `accumulate` that the dtype of `a`, or the schedule of `config`, does not have."""
    if accumulate not in ("fp32", "fp16") or (accumulate == "fp16" and a.dtype != torch.float16):
        raise ValueError(
            f"gemm(accumulate={accumulate!r}) of {a.dtype}: must be 'fp32', or 'fp16' for operands of torch.float16"
        )
    if accumulate == "fp16" and config is not None and config.schedule not in UNSPLIT:
        raise ValueError(f"gemm(accumulate='fp16', config={config}): tasks that are split are summed up in fp32")


def result_dtype(a: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result: `out_dtype`, or by default that of `a`, and bf16 for fp8 and fp4."""
    return out_dtype if out_dtype is not None else torch.bfloat16 if a.dtype in (*FP8, FP4) else a.dtype


def is_empty(a: Tensor, b: Tensor) -> bool:
    """Has one of two matrices, or batches of them, no elements? No kernel runs then."""
    return 0 in (a.numel(), b.numel())


def result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The result's shape. Raises ValueError for operands that do not multiply."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            raise ValueError(f"gemm: {name} has shape {tuple(x.shape)}; it must have at least 2 dimensions")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; they must be (…, M, K) and (…, K, N)")
    lead, other = a.shape[:-2], b.shape[:-2]
    try:  # torch's function imports sympy, which takes half a second: not for what needs no rule
        lead = torch.broadcast_shapes(lead, other) if lead and other else lead or other
        return (*lead, a.shape[-2], b.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; their leading dimensions do not broadcast"
        ) from None


def check(
    a: Tensor, b: Tensor, operands: Operands, activation: Applied, out_dtype: torch.dtype | None, out: Tensor | None
) -> None:
    """Devices, dtypes and shapes that fit together; errors name the argument."""
    bias, gate, residual, scale_a, scale_b = operands[:5]
    check_kinds(a, b, operands, out)
    for name, x in (("a", a), ("b", b)):
        check_tensor("gemm", name, x, (*OPERANDS, FP4), "a", a)
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TypeError(f"gemm: a has dtype {a.dtype}, b {b.dtype}; they must be equal (fp8 kinds may mix)")
    shape, dtype = result_shape(a, b), result_dtype(a, out_dtype)
    if not isinstance(activation, Function):
        checked_activation(activation)
    if dtype not in RESULTS:
        raise TypeError(f"gemm(out_dtype={dtype}): must be {', '.join(map(str, RESULTS))}")
    for name, x in zip(names_of(activation)[len(BUILT_IN) :], operands[len(BUILT_IN) :], strict=True):
        check_tensor("gemm", name, x, tuple(dict.fromkeys((*VECTORS, dtype))), "a", a)
    for name, x, kinds in (
        ("bias", bias, VECTORS),
        ("gate", gate, VECTORS),
        ("scale_a", scale_a, (torch.float32, *SCALES)),
        ("scale_b", scale_b, (torch.float32, *SCALES)),
        ("residual", residual, (dtype,)),
        ("out", out, (dtype,)),
    ):
        if x is not None:
            check_tensor("gemm", name, x, kinds, "a", a)
            if name in ("residual", "out") and tuple(x.shape) != shape:
                raise ValueError(
                    f"gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}, {name} is {tuple(x.shape)}; it must be "
                    f"{shape}"
                )
    if are_microscaled(scale_a, scale_b):
        check_scales(a, b, scale_a, scale_b)
    elif a.dtype == FP4:
        raise TypeError(f"gemm: a has dtype {FP4}; its scale_a and scale_b must be {' or '.join(map(str, SCALES))}")
    if out is not None:
        check_written("gemm", out)


def places_of(a: Tensor, b: Tensor, operands: Operands, names: tuple[str, ...] = BUILT_IN) -> dict[str, str]:
    """Where the values of each epilogue operand, of these names, lie in C: "scalar", "row", "col", "tile", or "block"
    for block scales, or "micro" for those that the tensor cores apply."""
    bias, gate, residual, scale_a, scale_b = operands[:5]
    shape = result_shape(a, b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if are_microscaled(scale_a, scale_b):
        places = places_of(a, b, (bias, gate, residual, None, None, *operands[5:]), names)
        return places | dict(scale_a="micro", scale_b="micro")
    blocks = -(-k // BLOCK)
    rows, cols = ((m, 1),), ((n,), (1, n))
    allowed: dict[str, tuple[Tensor | None, dict[str, tuple[tuple[int, ...], ...]]]] = {
        "bias": (bias, {"col": cols}),
        "gate": (gate, {"col": cols, "row": rows, "tile": (shape,)}),
        "scale_a": (scale_a, {"row": ((m,), *rows), "block": ((m, blocks),)}),
        "scale_b": (scale_b, {"col": cols, "block": ((blocks, -(-n // BLOCK)),)}),
    }
    allowed |= {
        name: (x, {"col": cols, "row": rows, "tile": (shape,)})
        for name, x in zip(names[len(BUILT_IN) :], operands[len(BUILT_IN) :], strict=True)
    }
    found = {} if residual is None else {"residual": "tile"}
    for name, (x, kinds) in allowed.items():
        if x is None:
            continue
        place = (
            "scalar"
            if x.numel() == 1 and x.ndim <= 2
            else next((p for p, shapes in kinds.items() if tuple(x.shape) in shapes), None)
        )
        if place is None:
            known = ", ".join(str(s) for shapes in kinds.values() for s in shapes)
            raise ValueError(f"gemm: {name} is {tuple(x.shape)}; it must be one number or {known}")
        found[name] = place
    if "block" in found.values():
        have = [None if s is None else tuple(s.shape) for s in (scale_a, scale_b)]
        want = [(m, blocks), (blocks, -(-n // BLOCK))]
        if a.ndim != 2 or b.ndim != 2 or a.dtype not in FP8 or have != want:
            raise ValueError(
                f"gemm: scale_a is {have[0]}, scale_b is {have[1]}; block scales are for two fp8 matrices and come "
                f"together, {want[0]} and "
                f"{want[1]} here"
            )
        found["scale_a"] = found["scale_b"] = "block"
    return found
