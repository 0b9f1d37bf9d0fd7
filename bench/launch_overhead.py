"""Host time of one kernel launch with three TMA descriptors, against torch.add(out=) and torch.mm(out=) in the same
process.

    python bench/launch_overhead.py [--rounds 9] [--launches 3000] [--out bench/results]

Every contender runs ``launches`` times in each round, the rounds interleave the contenders in rotating order, and the
GPU is idle when a measurement starts. The kernel moves one small tile per tensor, so that the GPU keeps up and only the
host is measured. Prints a table (median over the rounds, range, ratio to torch.add) and writes launch_overhead.json.
"""

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonkittens.launch import GlobalArg, Launcher, TensorMapSpec, device_facts
from tritonkittens.launch.arguments import Types

ROWS, COLUMNS = 64, 64
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}


@triton.jit
def touch(a, b, c):
    """c = a + b for one tile."""
    c.store([0, 0], a.load([0, 0]) + b.load([0, 0]))


def compile_touch(key: Hashable, types: Types, device: int, target: GPUTarget | None = None) -> CompiledKernel:
    signature = {name: f"tensordesc<bf16[{ROWS}, {COLUMNS}]>" for name in touch.arg_names}
    return triton.compile(ASTSource(touch, signature), target=target, options=OPTIONS)


def contenders() -> dict[str, Callable[[], object]]:
    a, b, c = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    small, square = (
        [torch.randn(shape, dtype=torch.float32, device="cuda") for _ in range(3)] for shape in ((64,), (64, 64))
    )
    specs = (TensorMapSpec((ROWS, COLUMNS), 128),)
    kept = tuple(GlobalArg(tensor, specs) for tensor in (a, b, c))
    elsewhere = itertools.cycle(
        [tuple(GlobalArg(torch.empty_like(tensor), specs) for tensor in (a, b, c)) for _ in range(64)]
    )
    native, python = Launcher(compile_touch, name="touch"), Launcher(compile_touch, name="touch", native=False)
    grid = (1,)
    native(grid, kept, 0)
    torch.cuda.synchronize()
    assert torch.equal(c[:ROWS, :COLUMNS], (a + b)[:ROWS, :COLUMNS])
    native(grid, kept, 0)
    if not native.is_native:
        print("native.c could not be built or loaded: the first rows measure the Python path")

    descriptors = [TensorDescriptor.from_tensor(tensor, [ROWS, COLUMNS]) for tensor in (a, b, c)]
    compiled = native.compiled(kept, 0)
    utils, run = triton.runtime.driver.active.utils, compiled.run
    maps = []
    for meta, tensor in zip(compiled.metadata.tensordesc_meta, (a, b, c)):
        swizzle, box = meta["swizzle"], meta["block_size"]
        maps += [
            utils.fill_tma_descriptor_tiled(tensor.data_ptr(), swizzle, 2, 9, box, tensor.shape, tensor.stride(), 0)
        ]
        maps += [*tensor.shape, *tensor.stride()]

    def driver_launch() -> None:
        stream = torch._C._cuda_getCurrentRawStream(0)
        utils.launch(
            1, 1, 1, stream, compiled.function, False, False, compiled.packed_metadata, None, None, None, None, None,
            run.arg_annotations, run.kernel_signature, maps,
        )  # fmt: skip

    def rebuilt() -> None:
        touch[grid](*[TensorDescriptor.from_tensor(tensor, [ROWS, COLUMNS]) for tensor in (a, b, c)], **OPTIONS)

    return {
        "Launcher, GlobalArgs kept": lambda: native(grid, kept, 0),
        "Launcher, GlobalArgs built": lambda: native(
            grid, (GlobalArg(a, specs), GlobalArg(b, specs), GlobalArg(c, specs)), 0
        ),
        "Launcher, other addresses": lambda: native(grid, next(elsewhere), 0),
        "Launcher(native=False)": lambda: python(grid, kept, 0),
        "driver.launch, maps kept": driver_launch,
        "compiled[grid], descriptors kept": lambda: compiled[(1, 1, 1)](*descriptors),
        "kernel[grid], descriptors kept": lambda: touch[grid](*descriptors, **OPTIONS),
        "kernel[grid], descriptors rebuilt": rebuilt,
        "torch.add(out=)": lambda: torch.add(small[0], small[1], out=small[2]),
        "torch.mm(out=)": lambda: torch.mm(square[0], square[1], out=square[2]),
    }


def measure(functions: dict[str, Callable[[], object]], rounds: int, launches: int) -> dict[str, list[float]]:
    """Microseconds per call of every function, one figure a round."""
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for function in functions.values():
        for _ in range(50):
            function()
    for step in range(rounds):
        for name in names[step % len(names) :] + names[: step % len(names)]:
            function = functions[name]
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(launches):
                function()
            times[name].append((time.perf_counter_ns() - start) / launches / 1000)
    torch.cuda.synchronize()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launches", type=int, default=3000)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder for launch_overhead.json"
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.launches < 1:
        parser.error(f"--rounds {options.rounds} --launches {options.launches}: both must be at least 1")
    if not torch.cuda.is_available():
        parser.exit(1, "launch_overhead.py needs a CUDA device\n")
    times = measure(contenders(), options.rounds, options.launches)
    reference = statistics.median(times["torch.add(out=)"])
    rows = {
        name: {
            "median_us": statistics.median(t),
            "min_us": min(t),
            "max_us": max(t),
            "ratio_to_add": statistics.median(t) / reference,
        }
        for name, t in times.items()
    }
    print(f"{'host time of one launch':36} {'median':>8} {'range':>15} {'x add':>6}")
    for name, row in rows.items():
        print(
            f"{name:36} {row['median_us']:6.2f}us {row['min_us']:6.2f} - {row['max_us']:6.2f} "
            f"{row['ratio_to_add']:6.2f}"
        )
    facts = device_facts()
    report = {
        "what": "host microseconds per launch, three TMA descriptors",
        "gpu": facts.name,
        "capability": facts.capability,
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": sys.version.split()[0],
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "rounds": options.rounds,
        "launches": options.launches,
        "results": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "launch_overhead.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
