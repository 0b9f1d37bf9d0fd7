"""Kernels of the norms for `python -m tritonkittens inspect`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonkittens.arch import chip_of
from tritonkittens.kernels._inspection import Inspectable, launches_of
from tritonkittens.kernels.norm.call_plan import Backward, Gradients, Wanted, run_backward, run_mask
from tritonkittens.kernels.norm.config import Tiles, backward_tiles
from tritonkittens.kernels.norm.interface import layer_norm, rms_norm

ROWS, WIDTHS, WIDE = 16384, (128, 1024, 4096, 8192, 16384), 32768
BF16 = torch.bfloat16


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _forward(rms: bool, width: int, fused: bool) -> Any:
    x, w = _empty(ROWS, width), _empty(width)
    residual = _empty(ROWS, width) if fused else None
    dropout = dict(dropout_p=0.1, seed=_empty(2, dtype=torch.int64)) if fused else {}
    return (rms_norm if rms else layer_norm)(x, w, None if rms else w, residual, prenorm=fused, **dropout)


def _backward(rms: bool, width: int, fused: bool, tiles: Tiles | None = None) -> Any:
    z, w, rows = _empty(ROWS, width), _empty(width), _empty(ROWS, dtype=torch.float32)
    seed = _empty(2, dtype=torch.int64) if fused else None
    mean = None if rms else rows
    given = Gradients(z, None, z if fused else None, z, w, None, None, seed, mean, rows)
    wanted = Wanted(BF16, None, BF16, fused, "weight" if rms else "weight bias", 0.1 * fused, rms, False)
    return Backward(given, wanted, tiles)(given) if tiles else run_backward(given, wanted)


def _mask() -> Any:
    return run_mask(_empty(ROWS, 1024), _empty(2, dtype=torch.int64), 0.1, 0)


inspectable: dict[str, Inspectable] = {
    name: kernel
    for rms in (True, False)
    for width in WIDTHS
    for fused in (False, True)
    for kind in [f"{'rms' if rms else 'layer'}_norm_{width}{'_fused' if fused else ''}"]
    for name, kernel in {
        **launches_of(functools.partial(_forward, rms, width, fused), kind),
        **launches_of(
            functools.partial(_backward, rms, width, fused),
            f"{kind}_backward",
            "norm_sum_partials" if (rms, width, fused) == (True, 1024, False) else None,
        ),
    }.items()
}
inspectable |= {
    **launches_of(
        functools.partial(_backward, False, WIDE, False),
        f"layer_norm_{WIDE}_backward", None,
    ),
    **launches_of(
        functools.partial(_backward, False, WIDE, False, backward_tiles(WIDE, 1, chip_of((8, 0)))),
        f"layer_norm_{WIDE}_projections", f"layer_norm_{WIDE}_backward_chunks", None,
    ),
    **launches_of(_mask, "norm_dropout_mask"),
}  # fmt: skip
