"""The kernels of `gemm` for `python -m tritonkittens inspect`: every schedule, kind of tile, epilogue, scale mode and
dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import tritonkittens.lang as tk
from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels._tensors import HALF_TYPES
from tritonkittens.kernels.gemm.checks import FP8
from tritonkittens.kernels.gemm.config import ORDERS, SCHEDULES, SPLIT, Config
from tritonkittens.kernels.gemm.device.epilogue import ACTIVATIONS
from tritonkittens.kernels.gemm.epilogue import Epilogue
from tritonkittens.kernels.gemm.interface import gemm
from tritonkittens.kernels.gemm.microscaling import E8M0, FP4, blocks_of
from tritonkittens.kernels.gemm.reference import BLOCK

Kind = dict[str, Any]  # arguments of `_product`
SIDE = 4096
E4M3, E5M2 = FP8


def _matrix(rows: int, cols: int, names: str, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor:
    """(…, rows, cols), of which `names` lists the dimensions as they are stored: the reverse of "mk" or "kn" is a
    transposed matrix."""
    is_transposed = names in ("km", "nk")
    stored = torch.empty(*batch, *((cols, rows) if is_transposed else (rows, cols)), dtype=dtype, device="cpu")
    return stored.mT if is_transposed else stored


def _vector(place: str | None, m: int, n: int, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor | None:
    """An operand of the epilogue with a value for each of what `place` says (see `Operand`)."""
    shapes = {"scalar": (1,), "row": (m, 1), "col": (n,), "tile": (*batch, m, n)}
    return None if place is None else torch.empty(shapes[place], dtype=dtype, device="cpu")


def _scales(kind: str | None, m: int, n: int, k: int) -> tuple[Tensor | None, Tensor | None]:
    blocks = -(-k // BLOCK)
    shapes = {"tensor": ((1,), (1,)), "row": ((m, 1), (1, n)), "block": ((m, blocks), (blocks, -(-n // BLOCK)))}
    if kind is None:
        return None, None
    scale_a, scale_b = (torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes[kind])
    return scale_a, scale_b


def _microscales(kind: str | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales that the tensor cores apply, where `kind` names their dtype."""
    dtype = {"e8m0": E8M0, "e4m3": E4M3}.get(kind or "")
    if dtype is None:
        return None
    blocks = (blocks_of(x, torch.empty(0, dtype=dtype, device="cpu")) for x in (a, b.mT))
    scale_a, scale_b = (torch.empty(*n, 32, 16, dtype=dtype, device="cpu") for n in blocks)
    return scale_a, scale_b


@triton.jit
def squared_relu(acc):
    """An epilogue of a user without operands."""
    x = tl.maximum(acc, 0.0)
    return x * x


@triton.jit
def scaled_gelu(acc, scale, bias, residual, alpha):
    """An epilogue of a user with an operand of each kind."""
    return tk.gelu(acc * scale + bias, fast=True) * alpha + residual


def _scaled_gelu(m: int, n: int, dtype: torch.dtype) -> Epilogue:
    """Of an operand of each kind."""
    matrices = {
        name: torch.empty(shape, dtype=dtype, device="cpu")
        for name, shape in (("scale", (m, 1)), ("bias", (n,)), ("residual", (m, n)))
    }
    return Epilogue(scaled_gelu, **matrices, alpha=0.5)


OF_USERS = {"squared_relu": lambda m, n, dtype: Epilogue(squared_relu), "scaled_gelu": _scaled_gelu}


@dataclass(frozen=True)
class Product:
    """A `gemm` of uninitialised operands, and its options.

    Args:
        a, b: the dimensions of the operands as they are stored: "mk" or "km", "kn" or "nk" (fp8 and fp4: always "nk").
        b_dtype, out_dtype: None: as `dtype`, and a bf16 result for fp8.
        batch: leading dimensions.
        scales, bias, gate: what they have values for, see `_scales`, `_microscales` and `_vector`; None: not given.
        user: the name of an epilogue in `OF_USERS`.
    """

    m: int = SIDE
    n: int = SIDE
    k: int = SIDE
    a: str = "mk"
    b: str = "kn"
    dtype: torch.dtype = torch.bfloat16
    b_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    batch: tuple[int, ...] = ()
    scales: str | None = None
    bias: str | None = None
    gate: str | None = None
    residual: bool = False
    activation: str | None = None
    accumulate: str = "fp32"
    user: str | None = None

    def __call__(self, config: Config | None) -> Tensor:
        """The result with a configuration, or with the one that `gemm` chooses."""
        m, n, k, batch, dtype = self.m, self.n, self.k, self.batch, self.dtype
        vectors = torch.bfloat16 if dtype in (*FP8, FP4) else dtype
        result = self.out_dtype or vectors
        a = _matrix(m, k, self.a, dtype, batch)
        b = _matrix(k, n, self.b if dtype in HALF_TYPES else "nk", self.b_dtype or dtype, batch)
        scale_a, scale_b = _microscales(self.scales, a, b) or _scales(self.scales, m, n, k)
        return gemm(
            a,
            b,
            bias=_vector(self.bias, m, n, vectors),
            gate=_vector(self.gate, m, n, vectors, batch),
            residual=torch.empty(*batch, m, n, dtype=result, device="cpu") if self.residual else None,
            scale_a=scale_a,
            scale_b=scale_b,
            activation=self.activation,
            out_dtype=self.out_dtype,
            accumulate=self.accumulate,
            config=config,
            epilogue=OF_USERS[self.user](m, n, result) if self.user else None,
        )


def _product(chosen: bool = False, **kind: Any) -> Tensor:
    """A `Product` and the knobs of its `Config`, or with the configuration that is `chosen` for it."""
    given = {field.name: kind.pop(field.name) for field in fields(Product) if field.name in kind}
    return Product(**given)(None if chosen else Config(**kind))


EPILOGUES: dict[str, Kind] = {
    "bias": dict(bias="col"),
    "scalar_bias": dict(bias="scalar"),
    **{f"{place}_gate": dict(gate=place) for place in ("scalar", "tile")},
    "residual": dict(residual=True),
    "gate_residual": dict(gate="col", residual=True),
    **{f"bias_{name}": dict(bias="col", activation=name) for name in ACTIVATIONS if name},
}
NK: Kind = dict(b="nk")
SMALL: Kind = dict(m=1024, n=1024)  # few enough tiles to be split
SUBTILES: Kind = dict(epilogue_n=64)
DEFERRED: Kind = dict(epilogue_n=64, deferred_epilogue=True)
PINGPONG: Kind = dict(tile_m=128, tile_n=128, pingpong=True, epilogue_n=32)
BY_BLOCK: Kind = dict(dtype=E4M3, scales="block", tile_k=BLOCK)
FEW_ROWS: Kind = dict(m=16, swap_ab=True, tile_n=16, tile_k=128)

TILES: dict[str, Kind] = {
    "": {},
    "transposed": NK,
    "a_transposed": dict(a="km"),
    "both_transposed": dict(a="km", b="nk"),
    **{
        schedule: dict(schedule=schedule, splits=2 if schedule in SPLIT else 1, **SMALL)
        for schedule in SCHEDULES
        if schedule != "persistent"
    },
    **{order: dict(order=order) for order in ORDERS if order != "supergroup"},
    "cluster": dict(cluster=2),
    "three_consumers": dict(consumers=3, tile_n=176, epilogue_n=16, **NK),
    "four_consumers": dict(consumers=4, tile_n=112, **NK),
    "two_blocks": dict(blocks_per_sm=2, consumers=1, tile_n=64),
    **{f"cols_{cols}": dict(tile_n=cols, consumers=1, **NK) for cols in (96, 160, 224)},
    "cols_144_in_pieces": dict(tile_n=144, consumers=1, cluster=4),
    "swap_ab": dict(swap_ab=True, tile_n=128),
    "epilogue_n": SUBTILES,
    "streamed": dict(streamed=True, **SUBTILES),
    "deferred": DEFERRED,
    "deferred_cluster": dict(cluster=2, **DEFERRED),
    "deferred_split_tail": dict(schedule="split_tail", **DEFERRED),
    "pingpong": PINGPONG,
    "pingpong_split_tail": dict(schedule="split_tail", **PINGPONG),
    "pingpong_swap_ab": dict(swap_ab=True, streamed=True, **PINGPONG),
    "few_rows": FEW_ROWS,
    "few_rows_cluster_split_k": dict(schedule="cluster_split_k", splits=4, **FEW_ROWS | dict(tile_n=64)),
    "batched": dict(batch=(2,), m=1024),
}
DTYPES: dict[str, Kind] = {
    "fp16": dict(dtype=torch.float16),
    "fp16_sums": dict(dtype=torch.float16, accumulate="fp16"),
    "fp8": dict(dtype=E4M3, **SUBTILES),
    "fp8_mixed": dict(dtype=E5M2, b_dtype=E4M3),
    "fp8_pingpong": dict(dtype=E4M3, streamed=True, **PINGPONG),
    "fp8_deferred_fp8_result": dict(dtype=E4M3, out_dtype=E4M3, epilogue_n=128, deferred_epilogue=True),
    "fp8_tensor_scales": dict(dtype=E4M3, scales="tensor"),
    "fp8_row_scales": dict(dtype=E4M3, scales="row"),
    "fp8_row_scales_swap_ab_deferred_bias_silu": dict(
        dtype=E4M3, scales="row", swap_ab=True, bias="col", activation="silu", **DEFERRED
    ),
    "fp8_block_scales": dict(tile_n=128, consumers=1, **BY_BLOCK),
    "fp8_block_scales_two_consumers": dict(tile_n=256, **BY_BLOCK),
    "fp8_block_scales_cluster": dict(tile_n=128, cluster=2, **BY_BLOCK),
    "fp8_block_scales_epilogue_n_bias_silu": dict(tile_n=256, bias="col", activation="silu", **SUBTILES, **BY_BLOCK),
    "fp8_block_scales_residual": dict(tile_n=128, residual=True, **BY_BLOCK),
}
ONE_PRODUCT: Kind = dict(tile_m=128, consumers=1)
MICROSCALED: dict[str, Kind] = {
    "mxfp8": dict(dtype=E4M3, scales="e8m0", tile_n=128, **ONE_PRODUCT),
    "mxfp8_mixed_bias_silu": dict(
        dtype=E5M2, b_dtype=E4M3, scales="e8m0", bias="col", activation="silu", **SUBTILES, **ONE_PRODUCT
    ),
    "mxfp4": dict(dtype=FP4, k=SIDE // 2, scales="e8m0", tile_n=128, **ONE_PRODUCT),
    "nvfp4": dict(dtype=FP4, k=SIDE // 2, scales="e4m3", **SUBTILES, **ONE_PRODUCT),
}
FINISHED: dict[str, Kind] = {
    **EPILOGUES,
    "epilogue_n_bias_silu_gate_residual": dict(bias="col", activation="silu", gate="col", residual=True, **SUBTILES),
    **{
        f"deferred_{name}": EPILOGUES[name] | DEFERRED
        for name in ("bias_gelu", "bias_gelu_tanh", "bias_silu", "residual", "gate_residual")
    },
    "deferred_silu_fp16": dict(dtype=torch.float16, activation="silu", **DEFERRED),
    "deferred_residual_one_by_one": dict(residual=True, consumers=1, tile_n=128, **DEFERRED),
    "deferred_swap_ab_silu": dict(swap_ab=True, activation="silu", **DEFERRED),
    "deferred_swap_ab_gate_residual": dict(swap_ab=True, gate="col", residual=True, **DEFERRED),
    "fp32_result_gelu": dict(out_dtype=torch.float32, activation="gelu"),
    "swap_ab_residual": dict(swap_ab=True, tile_n=128, residual=True),
    "pingpong_bias_silu": dict(bias="col", activation="silu", **PINGPONG),
    "pingpong_gate_residual": dict(gate="col", residual=True, **PINGPONG),
    "split_tail_gate_residual": dict(schedule="split_tail", gate="col", residual=True, **SMALL),
    "batched_gate_residual": dict(batch=(2,), m=1024, gate="tile", residual=True),
}
USERS: dict[str, Kind] = {
    **{f"user_{name}": dict(user=name) for name in OF_USERS},
    "user_scaled_gelu_epilogue_n": dict(user="scaled_gelu", **SUBTILES),
    "user_scaled_gelu_swap_ab": dict(user="scaled_gelu", swap_ab=True, tile_n=128),
    "user_scaled_gelu_split_k": dict(user="scaled_gelu", schedule="split_k", splits=2, **SMALL),
    "user_squared_relu_deferred": dict(user="squared_relu", **DEFERRED),
    "user_squared_relu_deferred_gate_residual": dict(user="squared_relu", gate="col", residual=True, **DEFERRED),
}
UNALIGNED: dict[str, Kind] = {
    **{f"one_row_{b}": dict(m=1, b=b) for b in ("kn", "nk")},
    "one_row_fp16_fp32_result": dict(m=1, dtype=torch.float16, out_dtype=torch.float32),
    "small": dict(m=100, n=301, k=1001),
    "medium": dict(m=255, n=1023, k=251),
}
# A is packed, and the parts are added by a kernel of its own
PACKED: dict[str, Kind] = {
    **{f"16_rows_{b}": dict(m=16, b=b) for b in ("kn", "nk")},
    "100_rows": dict(m=100),
    "16_rows_scaled_bias_silu_gate_residual": dict(
        m=16, bias="col", activation="silu", gate="row", residual=True, scales="row"
    ),
    "16_rows_gelu": dict(m=16, activation="gelu"),
    "16_rows_user_scaled_gelu": dict(m=16, user="scaled_gelu"),
}
COPIED: Kind = dict(m=3000, n=5001, k=2001, chosen=True)


def _named(table: dict[str, Kind], prefix: str = "gemm", gpu: str = "H200", **options: Any) -> dict[str, Inspectable]:
    found: dict[str, Inspectable] = {}
    for name, kind in table.items():
        call = functools.partial(_product, **options | kind)
        found |= launches_of(call, "_".join(filter(None, (prefix, name))), gpu=gpu)
    return found


def _packed() -> dict[str, Inspectable]:
    found: dict[str, Inspectable] = {}
    for name, kind in PACKED.items():
        call = functools.partial(_product, n=4095, k=4097, chosen=True, **kind)
        pack = f"pack_rows_{name}" if len(kind) == 1 + ("b" in kind) else None  # epilogues do not change it
        found |= launches_of(call, pack, f"gemm_packed_{name}", f"add_parts_{name}")
    return found


inspectable: dict[str, Inspectable] = {
    **_named(TILES | DTYPES | FINISHED | USERS),
    **_named(MICROSCALED, gpu="B200"),
    **_named(UNALIGNED, "gemm_unaligned", n=4095, k=4097, chosen=True),
    **_packed(),
    **launches_of(functools.partial(_product, **COPIED), "copy_rows", None, "gemm_copied", None),
    **launches_of(functools.partial(_product, **COPIED | dict(dtype=E4M3)), "copy_rows_fp8", None, None, None),
}
