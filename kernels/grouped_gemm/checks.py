"""What grouped products take: dtypes and shapes that fit together. Errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._dispatch import check_tensors, check_written
from tritonkittens.kernels._tensors import HALF_TYPES, check_tensor
from tritonkittens.kernels.gated_gemm.choice import gates
from tritonkittens.kernels.gemm.checks import FP8, RESULTS, VECTORS, result_dtype
from tritonkittens.kernels.gemm.config import Config
from tritonkittens.kernels.gemm.reference import ACTIVATIONS, BLOCK
from tritonkittens.kernels.grouped_gemm.choice import selects

MAX_GROUPS = 1024
GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}  # activations of the first half of the columns, which gate the second
SHAPES = {
    (2, 3): "(M, K) and (G, K, N), with groups of rows",
    (2, 2): "(M, K) and (K, N), with groups of K",
    (3, 2): "(G, M, K) and (K, N), with groups of columns",
    (3, 3): "(G, M, K) and (G, K, N), without offsets",
}


class Operands(NamedTuple):
    """The operands of the epilogue, and which rows of a and of the result are meant; None for one that is left out."""

    bias: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    rows: Tensor | None = None
    out_rows: Tensor | None = None

    @property
    def epilogue(self) -> tuple[Tensor | None, ...]:
        """Those of the epilogue."""
        return self[:-2]

    def height(self, a: Tensor) -> int:
        """Rows of the product."""
        return a.shape[-2] if self.rows is None else self.rows.shape[0]


def check_kinds(a: Tensor, b: Tensor, offsets: Tensor | None, operands: Operands, out: Tensor | None) -> None:
    """Raise TypeError for an operand that is no tensor."""
    check_tensors("grouped_gemm", a=a, b=b)
    check_tensors("grouped_gemm", optional=True, offsets=offsets, **operands._asdict(), out=out)


def result_shape(
    a: Tensor, b: Tensor, offsets: Tensor | None, activation: str | None = None, rows: Tensor | None = None
) -> tuple[int, ...]:
    """The result's shape. Raises ValueError for operands that do not multiply, or offsets that do not fit."""
    kinds = (a.ndim, b.ndim)
    given = f"grouped_gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}"
    if kinds not in SHAPES:
        raise ValueError(f"{given}; they must be {', or '.join(SHAPES.values())}")
    if a.shape[-1] != b.shape[-2] or (kinds == (3, 3) and a.shape[0] != b.shape[0]):
        raise ValueError(f"{given}; they must be {SHAPES[kinds]}")
    if (offsets is None) != (kinds == (3, 3)):
        raise ValueError(
            f"{given}; two batches have no offsets" if offsets is not None else f"{given}; give the groups' offsets"
        )
    if offsets is None:
        return (*a.shape[:2], b.shape[2])
    groups = {(2, 3): b.shape[0], (3, 2): a.shape[0]}.get(kinds)
    if offsets.ndim != 1 or groups not in (None, offsets.shape[0]):
        wanted = "one for each group" if groups is None else f"({groups},), one for each matrix of the batch"
        raise ValueError(f"grouped_gemm: offsets is {tuple(offsets.shape)}; it must be {wanted}")
    if offsets.shape[0] > MAX_GROUPS:
        raise ValueError(f"grouped_gemm: {offsets.shape[0]} groups; there may be {MAX_GROUPS}")
    if kinds == (2, 2):
        return (offsets.shape[0], a.shape[0], b.shape[1])
    if activation in GATED and b.shape[-1] % 2:
        raise ValueError(f"{given}; activation={activation!r} needs an even number of columns")
    m = a.shape[-2] if rows is None else rows.shape[0]
    return (m, b.shape[-1] // (2 if activation in GATED else 1))


def places_of(a: Tensor, b: Tensor, operands: Operands, activation: str | None = None) -> dict[str, str]:
    """Where the values of each epilogue operand lie in the result: "scalar", "row", "col", "tile", or "block" for block
    scales. Raises ValueError for another shape."""
    m, (groups, k, n) = operands.height(a), b.shape
    blocks = -(-k // BLOCK)
    n = n // 2 if activation in GATED else n
    rows: dict[str, tuple[tuple[int, ...], ...]] = {"row": ((m,), (m, 1))}
    allowed: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = dict(
        bias={"col": ((groups, n),)},
        gate=rows,
        residual={"tile": ((m, n),)},
        scale_a=rows | {"block": ((m, blocks),)},
        scale_b={"col": ((groups, n),), "block": ((groups, blocks, -(-n // BLOCK)),)},
    )
    found = {}
    for name, x in operands._asdict().items():
        if x is None or name not in allowed:
            continue
        shapes = allowed[name]
        place = next((place for place, known in shapes.items() if tuple(x.shape) in known), None)
        if place is None and x.numel() == 1 and name in ("gate", "scale_a", "scale_b"):
            place = "scalar"
        if place is None:
            one = "" if name in ("bias", "residual") else "one number or "
            known = " or ".join(str(shape) for known in shapes.values() for shape in known)
            raise ValueError(f"grouped_gemm: {name} is {tuple(x.shape)}; it must be {one}{known}")
        found[name] = place
    if "block" in found.values():
        have = [None if x is None else tuple(x.shape) for x in (operands.scale_a, operands.scale_b)]
        want = [(m, blocks), (groups, blocks, -(-n // BLOCK))]
        if have != want or a.dtype not in FP8:
            raise ValueError(
                f"grouped_gemm: scale_a is {have[0]}, scale_b is {have[1]}; block scales are for fp8 and come "
                f"together, {want[0]} and {want[1]} here"
            )
        found["scale_a"] = found["scale_b"] = "block"
    return found


def check(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None,
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> None:
    """Raise TypeError or ValueError for what does not fit together."""
    name, by_rows = "grouped_gemm", (a.ndim, b.ndim) == (2, 3)
    check_tensor(name, "a", a, (*HALF_TYPES, *FP8), "a", a)
    check_tensor(name, "b", b, (*HALF_TYPES, *FP8), "a", a)
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise TypeError(f"{name}: a has dtype {a.dtype}, b {b.dtype}; they must be equal (fp8 kinds may mix)")
    shape, dtype = result_shape(a, b, offsets, activation, operands.rows), result_dtype(a, out_dtype)
    if offsets is not None:
        check_tensor(name, "offsets", offsets, (torch.int32,), "a", a)
    if dtype not in RESULTS:
        raise TypeError(f"{name}: out_dtype is {dtype}; it must be {' or '.join(map(str, RESULTS))}")
    given = [option for option, x in (*operands._asdict().items(), ("activation", activation)) if x is not None]
    if not by_rows and (given or a.dtype in FP8):
        what = ", ".join(given) or f"operands of {a.dtype}"
        raise ValueError(f"{name}: {what}: only products with groups of rows, (M, K) and (G, K, N), have it")
    if activation not in (*ACTIVATIONS, *GATED):
        known = ", ".join(map(repr, (*ACTIVATIONS, *GATED)))
        raise ValueError(f"{name}(activation={activation!r}): must be one of {known}")
    if activation in GATED and (
        operands.bias is not None or operands.scale_a is not None or operands.scale_b is not None or a.dtype in FP8
    ):
        raise ValueError(f"{name}(activation={activation!r}): it takes no bias and no scales, and 16-bit operands")
    _check_rows(a, operands)
    for option, x in zip(operands._fields, operands.epilogue, strict=False):
        if x is not None:
            kinds = (dtype,) if option == "residual" else (torch.float32,) if "scale" in option else VECTORS
            check_tensor(name, option, x, kinds, "a", a)
    if by_rows:
        places_of(a, b, operands, activation)
    if out is not None:
        check_tensor(name, "out", out, (dtype,), "a", a)
        if tuple(out.shape) != shape and (operands.out_rows is None or out.ndim != 2 or out.shape[1] != shape[1]):
            wanted = shape if operands.out_rows is None else f"(rows, {shape[1]})"
            raise ValueError(f"{name}: out is {tuple(out.shape)}; it must be {wanted}")
        check_written(name, out)


def _check_rows(a: Tensor, operands: Operands) -> None:
    """Raise TypeError or ValueError for what selects no rows of a or of the result."""
    for name in ("rows", "out_rows"):
        x = getattr(operands, name)
        if x is not None:
            check_tensor("grouped_gemm", name, x, (torch.int32,), "a", a)
            if x.ndim != 1 or (name == "out_rows" and x.shape[0] != operands.height(a)):
                wanted = "one dimension" if name == "rows" else f"({operands.height(a)},), a number for each row"
                raise ValueError(f"grouped_gemm: {name} is {tuple(x.shape)}; it must be {wanted}")
    scale = operands.scale_b
    if scale is not None and scale.ndim == 3 and (operands.rows is not None or operands.out_rows is not None):
        raise ValueError("grouped_gemm: rows and out_rows go with no block scales")
    if operands.out_rows is not None and operands.residual is not None:
        raise ValueError("grouped_gemm: out_rows with a residual; add it to the result")


def check_config(config: object, a: Tensor, b: Tensor, operands: Operands, activation: str | None) -> None:
    """Raise TypeError for what is neither None nor a `Config`, ValueError for one that grouped products do not have."""
    if config is None:
        return
    if not isinstance(config, Config):
        raise TypeError(f"grouped_gemm(config={config!r}): must be a Config")
    said = f"grouped_gemm(config={config}):"
    if config.schedule != "persistent":
        raise ValueError(f"{said} the host does not know the tasks; it needs schedule='persistent'")
    if config.cluster > 1 and (config.swap_ab or a.ndim == b.ndim == 2):
        raise ValueError(f"{said} the CTAs of a cluster share a tile of B, which here is packed; it needs cluster=1")
    if activation in GATED and not gates(config):
        raise ValueError(
            f"{said} activation={activation!r} needs tile_n=128 or 256, whose half epilogue_n divides twice or more; "
            "swap_ab=False, cluster=1 and not three consumers"
        )
    if not selects(config, operands.rows is not None, operands.out_rows is not None):
        raise ValueError(
            f"{said} rows needs cluster=1 and tiles of 8 to 128 of them, a power of two; out_rows swap_ab=False and "
            "deferred_epilogue=False"
        )
    if config.swap_ab and a.ndim < b.ndim and "row" in places_of(a, b, operands, activation).values():
        raise ValueError(f"{said} TMA loads no values for each row that begin anywhere; it needs swap_ab=False")


def check_counts(counts: Tensor, groups: int, rows: int | None) -> None:
    """Raise TypeError or ValueError for counts of another kind, or where `rows` is given, beyond it. That waits for the
    device."""
    check_tensors("grouped_gemm", counts=counts)
    if counts.dtype != torch.int32:
        raise TypeError(f"grouped_gemm: counts has dtype {counts.dtype}; it must be torch.int32")
    if tuple(counts.shape) != (groups,):
        raise ValueError(f"grouped_gemm: counts is {tuple(counts.shape)}; it must be ({groups},), one for each group")
    if rows is not None and not all(0 <= n <= rows for n in counts.tolist()):
        raise ValueError(f"grouped_gemm: counts is {counts.tolist()}; each must be 0 to {rows}")
