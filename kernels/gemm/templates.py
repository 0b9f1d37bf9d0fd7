"""The kernel that computes a configuration."""

from __future__ import annotations

import functools

import tritonkittens.lang as tk
from tritonkittens.kernels.gemm.config import UNSPLIT, Config
from tritonkittens.kernels.gemm.device.block_scaled import BlockScaledGemm
from tritonkittens.kernels.gemm.device.blockwise import BlockwiseGemm
from tritonkittens.kernels.gemm.device.epilogue import Steps
from tritonkittens.kernels.gemm.device.gemm import Gemm
from tritonkittens.kernels.gemm.reference import BLOCK

MICROSCALES = {"float8_e8m0fnu": tk.fp8e8m0, "float8_e4m3fn": tk.fp8e4m3}  # by `Problem.scales`


@functools.lru_cache(maxsize=4096)
def template_of(
    config: Config,
    order: tk.Order,
    a_order: str,
    b_order: str,
    batched: bool,
    epilogue: Steps,
    scales: str,
    accumulate: str,
    launch_pdl: bool,
    template: type[tk.lcf] | None = None,
    **types: object,
) -> tk.lcf:
    """The kernel of a configuration. `launch_pdl`: the knob, for operands that copies before this kernel write.
    `template`: in place of `Gemm` or `BlockwiseGemm`; `types` are more of its knobs."""
    knobs = dict(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        consumers=config.consumers,
        stages=config.stages,
        blocks_per_sm=config.blocks_per_sm,
        cluster=config.cluster,
        order=order,
        epilogue_n=config.epilogue_n if config.stages_sub_tiles(epilogue.residual) else None,
        cache_hint="evict_first" if config.streamed else None,
        launch_pdl=launch_pdl,
        **types,
    )
    if scales in MICROSCALES:
        if config.swap_ab or config.pingpong:
            raise ValueError(f"{config}: block-scaled products need swap_ab=False and pingpong=False")
        return BlockScaledGemm(
            batched=batched,
            epilogue=epilogue,
            scale_dtype=MICROSCALES[scales],
            tile_k=config.k_of(1),
            schedule=config.scheduler(),
            **knobs,
        )
    if scales:
        plain = config.schedule in UNSPLIT and not (config.swap_ab or config.pingpong)
        if config.k_of(1) != BLOCK or 2 * BLOCK % config.tile_n or not plain or config.deferred_epilogue:
            raise ValueError(
                f"{config}: block scales need tile_k={BLOCK}, tile_n that divides {2 * BLOCK}, swap_ab=False, "
                "pingpong=False, deferred_epilogue=False and a schedule that splits no tasks"
            )
        return (template or BlockwiseGemm)(epilogue=epilogue, schedule=config.scheduler(), **knobs)
    if config.swap_ab:
        a_order, b_order = ("km" if b_order == "kn" else "mk"), ("nk" if a_order == "mk" else "kn")
        epilogue = epilogue.transposed()
        knobs["dtype"], knobs["b_dtype"] = knobs["b_dtype"], knobs["dtype"]
    itemsize = tk.to_torch(knobs["dtype"]).itemsize
    return (template or Gemm)(
        a_stored_km=a_order == "km",
        b_stored_nk=b_order == "nk",
        c_stored_nm=config.swap_ab,
        batched=batched,
        epilogue=epilogue,
        pingpong=config.pingpong,
        tile_k=config.k_of(itemsize),
        schedule=config.scheduler(),
        deferred_epilogue=epilogue.may_wait
        and config.defers(epilogue.residual, tk.to_torch(knobs["out_dtype"]).itemsize),
        accumulate=tk.fp16 if accumulate == "fp16" else tk.fp32,
        **knobs,
    )
