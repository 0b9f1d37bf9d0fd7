"""What can be said of the kernels for Blackwell without one: `python -m bench.blackwell [--beside NAME=CUBIN …]`.

Counts of instructions in the loops of the machine code for sm_100a, of the shipped kernels and of other kernels' cubins
beside them; and how busy the simulator's model of time has the tensor cores. Nothing is measured. Needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

import tritonkittens.lang as tk
from bench.harness import RESULTS
from tritonkittens import sim
from tritonkittens.arch import GPUS
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.gemm.device.gemm import Gemm
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded
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
DEPTH, TILES = 2048, 4  # of the modelled product: K, and tiles of 256 × 256 of a pair


def gemm(**knobs: Any) -> bytes:
    """The cubin of a GEMM."""
    x = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    cubin: bytes = Gemm(**TILE, **knobs).compile(x, x, x, arch=ARCH).asm["cubin"]
    return cubin


def attention_forward(dim: int) -> bytes:
    """The cubin of the attention forward without a mask."""
    q, k, v = (torch.empty(1, 16, 4096, dim, dtype=torch.bfloat16, device="meta") for _ in range(3))
    (launch,) = recorded(lambda: attention(q, k, v), Device.of_gpu(GPUS["B200"]))
    cubin: bytes = launch.compile(ARCH).asm["cubin"]
    return cubin


KERNELS: dict[str, Callable[[], bytes]] = {
    "gemm": gemm,
    "gemm, CTA pairs": lambda: gemm(cluster=2),
    "attention forward, D 128": lambda: attention_forward(128),
    "attention forward, D 64": lambda: attention_forward(64),
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


def busy(**knobs: Any) -> float:
    """The modelled share of a launch in which the tensor cores multiply."""
    ctas = knobs.get("cluster", 1)
    a = torch.randn(TILES * ctas * 128, DEPTH, dtype=torch.float32, device="cpu").half()
    b = torch.randn(256, DEPTH, dtype=torch.float32, device="cpu").half()
    c = torch.empty(len(a), 256, dtype=torch.float16, device="cpu")
    timeline = Timeline()
    with sim.device(ARCH, recorder=timeline):
        Gemm(**TILE, **knobs)(a, b, c, blocks=1)
    return max(share.busy for share in timeline.summary() if share.lane == "tensor core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=CUBIN", help="another kernel's cubin")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    given = parser.parse_args()
    others = [text.split("=", 1) for text in given.beside]
    cubins = {name: make() for name, make in KERNELS.items()}
    cubins |= {name: pathlib.Path(path).read_bytes() for name, path in others}
    rows = [{"kernel": name, **counts} for name, cubin in cubins.items() for counts in loops(cubin)]
    for name, knobs in {"gemm": {}, "gemm, CTA pairs": dict(cluster=2)}.items():
        rows.append({"kernel": name, "modelled": "tensor cores busy", "share": round(busy(**knobs), 3)})
    for row in rows:
        print(row, flush=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    info = {"arch": ARCH, "triton": triton.__version__, "date": now, "measured": "nothing"}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "blackwell.json").write_text(json.dumps({"info": info, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
