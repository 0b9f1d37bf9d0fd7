"""What can be said of the kernels for Blackwell without one: `python -m bench.blackwell [--beside NAME=CUBIN …]`.

Counts of instructions in the loops of the machine code for sm_100a, of the shipped kernels and of other kernels' cubins
beside them; how busy the simulator's model of time has the tensor cores; and how long it has decoding take beside
reading K and V. Nothing is measured. Needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton

import tritonkittens.lang as tk
from bench.harness import RESULTS
from tritonkittens import sim
from tritonkittens.arch import CHIPS, GPUS
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.attention import attention, attention_decode, num_splits, tmem_decode_plan
from tritonkittens.kernels.attention.num_splits import DecodeKind
from tritonkittens.kernels.gemm.device.block_scaled import BlockScaledGemm
from tritonkittens.kernels.gemm.device.gemm import Gemm
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded
from tritonkittens.sim.costs import CLOCK_GHZ
from tritonkittens.sim.spans import total
from tritonkittens.sim.timeline import Timeline

ARCH = "sm_100a"
# opcodes by what they occupy
KINDS: dict[str, tuple[str, ...]] = {
    "products": ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA"),
    "exponentials": ("MUFU.EX2",),
    "shared memory": ("LDS", "STS", "ATOMS"),
    "tensor memory": ("LDTM", "STTM", "UTCCP"),
    "barriers": ("BAR", "SYNCS", "UTCBAR"),
}
TILE = dict(tile_m=128, tile_n=256, consumers=1, b_stored_nk=True, epilogue_n=64, dtype=tk.fp16, out_dtype=tk.fp16)
# operands in bytes of K, scales, and numbers of K for a scale
SCALED = {
    "MXFP8": (torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
    "NVFP4": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
}
DEPTH, TILES = 4096, 4  # of what is modelled: bytes of K, and tiles of 256 × 256 of a pair
GPU = GPUS["B200"]
KEYS = 2048  # of the modelled attention forward; queries of its backward
# of modelled decoding: sequences, key heads, query heads of each, keys of a sequence
DECODED = ((8, 8, 4, 4096), (32, 8, 4, 4096), (64, 8, 8, 1024), (16, 32, 1, 4096), (1, 8, 4, 65536))


def gemm(**knobs: Any) -> bytes:
    """The cubin of a GEMM."""
    x = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    cubin: bytes = Gemm(**TILE, **knobs).compile(x, x, x, arch=ARCH).asm["cubin"]
    return cubin


def block_scaled(kind: str, **knobs: Any) -> BlockScaledGemm:
    """The template of a GEMM whose scales the tensor cores apply."""
    dtype, scales, _ = SCALED[kind]
    tile = TILE | dict(dtype=tk.from_torch(dtype), epilogue_n=128)
    return BlockScaledGemm(**tile, scale_dtype=tk.from_torch(scales), **knobs)


def scaled_operands(kind: str, lines: tuple[int, ...], k: int, device: str) -> Iterator[torch.Tensor]:
    """Operands of so many lines, and bytes of K, then their scales, all of them 1."""
    dtype, scales, numbers = SCALED[kind]
    blocks = k * (2 if dtype == torch.float4_e2m1fn_x2 else 1) // (4 * numbers)
    for n in lines:
        yield torch.full((n, k), 0x22, dtype=torch.uint8, device=device).view(dtype)
    for n in lines:
        one = 0x7F if scales == torch.float8_e8m0fnu else 0x38
        yield torch.full((-(-n // 128), blocks, 2, 256), one, dtype=torch.uint8, device=device).view(scales)


def block_scaled_gemm(kind: str, **knobs: Any) -> bytes:
    """The cubin of a block-scaled GEMM with 4096 bytes of K."""
    a, b, scales_a, scales_b = scaled_operands(kind, (4096, 4096), 4096, "meta")
    c = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    cubin: bytes = block_scaled(kind, **knobs).compile(a, b, c, scales_a, scales_b, arch=ARCH).asm["cubin"]
    return cubin


def attention_forward(dim: int) -> bytes:
    """The cubin of the attention forward without a mask."""
    q, k, v = (torch.empty(1, 16, 4096, dim, dtype=torch.bfloat16, device="meta") for _ in range(3))
    (launch,) = recorded(lambda: attention(q, k, v), Device.of_gpu(GPU))
    cubin: bytes = launch.compile(ARCH).asm["cubin"]
    return cubin


def attention_backward(dim: int, value_dim: int) -> bytes:
    """The cubin of the attention backward without a mask."""
    shapes = ((1, 16, 4096, n) for n in (dim, value_dim))
    x, v = (torch.empty(*n, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in shapes)
    launches = recorded(lambda: torch.autograd.grad(attention(x, x, v), x, v), Device.of_gpu(GPU))
    (launch,) = (launch for launch in launches if launch.name == "attention_backward_tmem")
    cubin: bytes = launch.compile(ARCH).asm["cubin"]
    return cubin


def decode(dim: int) -> bytes:
    """The cubin of the decode kernel of a batch of sequences, with groups of four query heads."""
    q, k, v = (torch.empty(8, n, s, dim, dtype=torch.bfloat16, device="meta") for n, s in ((32, 1), *[(8, 4096)] * 2))
    launch = recorded(lambda: attention_decode(q, k, v, num_splits=2), Device.of_gpu(GPU))[0]
    cubin: bytes = launch.compile(ARCH).asm["cubin"]
    return cubin


def hoppers_decode(dim: int) -> bytes:
    """The cubin of the kernel that a Hopper GPU runs for `decode`."""
    q, k, v = (torch.empty(8, 8, n, dim, dtype=torch.bfloat16, device="meta") for n in (4, 4096, 4096))
    o, lse = (torch.empty(8, 8, 2, 4, *n, dtype=torch.float32, device="meta") for n in ((dim,), ()))
    kernel = num_splits.decode_kernel(DecodeKind(torch.bfloat16, dim, dim, lengths=False))
    cubin: bytes = kernel.compile(q, k, v, o, lse, arch=ARCH, scale=1.0, queries=1).asm["cubin"]
    return cubin


KERNELS: dict[str, Callable[[], bytes]] = {
    "gemm": gemm,
    "gemm, CTA pairs": lambda: gemm(cluster=2),
    "gemm, MXFP8": lambda: block_scaled_gemm("MXFP8"),
    "gemm, MXFP8, CTA pairs": lambda: block_scaled_gemm("MXFP8", cluster=2),
    "gemm, NVFP4": lambda: block_scaled_gemm("NVFP4"),
    "gemm, NVFP4, CTA pairs": lambda: block_scaled_gemm("NVFP4", cluster=2),
    "attention forward, D 128": lambda: attention_forward(128),
    "attention forward, D 64": lambda: attention_forward(64),
    "attention backward, D 192, D_v 128": lambda: attention_backward(192, 128),
    "attention backward, D 128": lambda: attention_backward(128, 128),
    "attention backward, D 64": lambda: attention_backward(64, 64),
    "attention decode, D 128": lambda: decode(128),
    "attention decode, D 64": lambda: decode(64),
    "attention decode, D 128, Hopper's kernel": lambda: hoppers_decode(128),
    "attention decode, D 64, Hopper's kernel": lambda: hoppers_decode(64),
}


def loops(cubin: bytes) -> Iterator[dict[str, int]]:
    """Counts of each innermost loop that multiplies, exponentiates, or accesses tensor memory."""
    graph = _sass.Graph(*_sass.parse(*_tools.disassemble(cubin)))
    found = {loop: _counts(graph, loop) for loop in graph.loops}
    heavy = [loop for loop, counts in found.items() if counts["products"] or counts["tensor memory"]]
    for loop in heavy:
        if not any(other.blocks < loop.blocks for other in heavy):
            yield found[loop]


def _counts(graph: _sass.Graph, loop: _sass.Loop) -> dict[str, int]:
    opcodes = [i.opcode for block in loop.blocks for i in graph.blocks[block]]
    counts = {kind: sum(op.startswith(names) for op in opcodes) for kind, names in KINDS.items()}
    return {**counts, "instructions": len(opcodes)}


def busy(run: Callable[[], object]) -> float:
    """The modelled share of `run()` in which the tensor cores multiply."""
    timeline = Timeline()
    with sim.device(ARCH, recorder=timeline):
        run()
    shares = (
        total([s.busy for s in timeline.spans(cta) if s.name.startswith("tcgen05.mma") and s.busy is not None])
        / cta.end
        for cta in timeline.ctas
    )
    return round(max(shares), 3)


def busy_in_gemm(kind: str, **knobs: Any) -> float:
    """`busy` of a launch that computes `TILES` tiles, in fp16 ("") or a format with scales."""
    lines = (TILES * knobs.get("cluster", 1) * 128, 256)
    c = torch.empty(*lines, dtype=torch.float16, device="cpu")
    if kind:
        a, b, *scales = scaled_operands(kind, lines, DEPTH, "cpu")
        return busy(lambda: block_scaled(kind, **knobs)(a, b, c, *scales, blocks=1))
    a, b = (torch.ones(n, DEPTH // 2, dtype=torch.float16, device="cpu") for n in lines)
    return busy(lambda: Gemm(**TILE, **knobs)(a, b, c, blocks=1))


def busy_in_attention(dim: int) -> float:
    """`busy` of one task of the attention forward without a mask."""
    q, k, v = (torch.randn(1, 1, n, dim, dtype=torch.float32, device="cpu").bfloat16() for n in (256, KEYS, KEYS))
    return busy(lambda: attention(q, k, v))


def busy_in_backward(dim: int, value_dim: int | None = None) -> float:
    """`busy` of one task of the attention backward, 128 keys of all queries, without a mask."""
    shapes = (KEYS, dim), (128, dim), (128, value_dim or dim)
    q, k, v = (torch.randn(1, 1, *n, dtype=torch.float32, device="cpu").bfloat16().requires_grad_() for n in shapes)
    with sim.device(ARCH):
        out = attention(q, k, v)
    return busy(lambda: torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


MODELLED: Mapping[str, Callable[[], float]] = (
    {
        ", ".join(part for part in ("gemm", kind, pairs) if part): functools.partial(busy_in_gemm, kind, **knobs)
        for kind in ("", *SCALED)
        for pairs, knobs in {"": {}, "CTA pairs": {"cluster": 2}}.items()
    }
    | {
        f"attention {name}, D {dim}": functools.partial(model, dim)
        for name, model in (("forward", busy_in_attention), ("backward", busy_in_backward))
        for dim in (128, 64)
    }
    | {"attention backward, D 192, D_v 128": functools.partial(busy_in_backward, 192, 128)}
)


def over_reading(dim: int, shape: tuple[int, int, int, int], hoppers: bool) -> float:
    """The modelled time of decoding, without the kernel that combines splits, over that of reading K and V.

    A CTA is simulated that has as many tasks as any other. As many CTAs as run at once on average share the bandwidth
    of HBM evenly, and nothing else. `hoppers`: of the kernel that a Hopper GPU runs.
    """
    batch, kv_heads, group, keys = shape
    kind, tiles = DecodeKind(torch.bfloat16, dim, dim), batch * kv_heads
    rings = num_splits.rings_of(kind) if hoppers else tmem_decode_plan.rings_of(kind, group, (10, 0))
    split = num_splits.choose_split(tiles, keys, GPU.multiprocessors, GPU.hbm_bytes_per_second, rings)
    kernel: Any
    if hoppers:
        kernel = num_splits.kernel_for(kind, split, tiles, GPU.multiprocessors)
        slots = GPU.multiprocessors * kernel.blocks_per_sm
    else:
        kernel, slots = (
            tmem_decode_plan.kernel_of(kind, group, (10, 0), split.num_splits > 1, True),
            GPU.multiprocessors,
        )
    ctas = tiles * split.num_splits * split.cluster
    cycles_a_second, tasks = CLOCK_GHZ * 1e9, -(-ctas // slots)
    share = min(GPU.chip.l2_bytes, GPU.hbm_bytes_per_second * tasks / ctas / cycles_a_second)
    with unittest.mock.patch.dict(CHIPS, {100: dataclasses.replace(GPU.chip, l2_bytes=share)}):
        cycles = _decoded(kernel, tasks, group, dim, -(-keys // split.num_splits))
    nbytes = tiles * keys * kind.key_bytes
    return cycles / (nbytes / GPU.hbm_bytes_per_second * cycles_a_second)


def _decoded(kernel: Any, tasks: int, rows: int, dim: int, keys: int) -> float:
    """Modelled cycles of a CTA, or cluster, with so many tasks of a decode kernel."""
    q, k, v, result = (
        torch.randn(tasks, 1, n, dim, dtype=torch.float32, device="cpu").bfloat16() for n in (rows, keys, keys, rows)
    )
    tensors = dict(Q=q, K=k, V=v, O=(result.float() if kernel.partial else result)[:, :, None])
    tensors |= dict(
        L=torch.empty(tasks, 1, 1, rows, dtype=torch.float32, device="cpu"),
        lengths=torch.full((tasks,), keys, dtype=torch.int32, device="cpu"),
    )
    given, numbers = [tensors[name] for name in kernel.tensors], dict(scale=dim**-0.5, queries=1)
    timeline = Timeline()
    with sim.device(ARCH, multiprocessors=1, recorder=timeline):
        if isinstance(kernel, tmem_decode_plan.TmemDecode):
            kernel.bind(*given, **numbers)(*given)
        else:
            kernel(*given, **numbers, blocks=None if kernel.one_tile_per_block else 1)
    return max(share.cycles for share in timeline.summary())


def decodings() -> Iterator[dict[str, Any]]:
    """`over_reading` of both kernels."""
    for dim in (128, 64):
        for shape in DECODED:
            for kernel, hoppers in (("attention decode", False), ("attention decode, Hopper's kernel", True)):
                over = round(over_reading(dim, shape, hoppers), 3)
                yield {
                    "kernel": kernel,
                    "modelled": "time over that of reading K and V",
                    "D": dim,
                    "shape": shape,
                    "ratio": over,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=CUBIN", help="another kernel's cubin")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    given = parser.parse_args()
    others = [text.split("=", 1) for text in given.beside]
    cubins = {name: make() for name, make in KERNELS.items()}
    cubins |= {name: pathlib.Path(path).read_bytes() for name, path in others}
    rows = [{"kernel": name, **counts} for name, cubin in cubins.items() for counts in loops(cubin)]
    rows += [{"kernel": name, "modelled": "tensor cores busy", "share": model()} for name, model in MODELLED.items()]
    rows += decodings()
    for row in rows:
        print(row, flush=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    info = {"arch": ARCH, "triton": triton.__version__, "date": now, "measured": "nothing"}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "blackwell.json").write_text(json.dumps({"info": info, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
