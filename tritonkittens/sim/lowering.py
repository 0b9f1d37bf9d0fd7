"""Lowering of TTGIR to the simulated form, by Triton's own passes up to the step before LLVM. Memory is then
allocated, and barriers and fences are in place.

Everything that changes between Triton releases is here and in `ttgir_parser`: the passes and their order (`make_llir`
of the NVIDIA backend), and the export of generic text.
Triton has no printer for that, but MLIR prints every operation generically once a module does not verify. So an
operation is added after a terminator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.compiler import compiler

from .patches import Patch
from .program import Program, prepare
from .ttgir import Module
from .ttgir_parser import parse

PTX_VERSION = 88  # an argument of the allocation passes; in Triton 3.9 it does not affect TTGIR
# part of the cache key, because other passes give another text
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
_MARK = 0x7461696C  # the value of the constant that makes the module invalid


def lower(module: Any, capability: int) -> str:
    """Lower an MLIR module in place; returns its generic text with locations."""
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, PTX_VERSION)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    nvidia.passes.ttnvgpuir.add_proxy_fence_insertion(manager, capability)
    nvidia.passes.ttnvgpuir.add_tmem_barrier_insertion(manager)
    nvidia.passes.ttgpuir.add_membar(manager, capability, PTX_VERSION)
    nvidia.passes.ttnvgpuir.add_tmem_wait_insertion(manager)
    manager.run(module, "simulate")
    return generic(module)


def generic(module: Any) -> str:
    """Return the generic form of a module. The module is invalid afterwards."""
    operations: list[Any] = []
    module.walk(operations.append)
    last = [op for op in operations if op.get_name() == "tt.return"][-1]
    builder = ir.builder(module.context)
    builder.set_insertion_point_to_end(last.get_block())
    builder.get_int32(_MARK)
    return str(module)


def parse_lowered(text: str) -> Module:
    """Parse the result of `lower`, without the added operation."""
    module = parse(text)
    for function in module.functions.values():
        for block in function.regions[0].blocks:
            tail = block.operations[-1] if block.operations else None
            if tail is not None and tail.name == "arith.constant" and tail.attributes.get("value") == _MARK:
                block.operations.pop()
    return module


def load_ttgir(text: str, capability: int | None = None) -> Program:
    """Return a program from the TTGIR of a compiled kernel (`compiled.asm["ttgir"]`)."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    handle, path = tempfile.mkstemp(suffix=".ttgir")
    try:
        os.write(handle, text.encode())
        os.close(handle)
        module = ir.parse_mlir_module(path, context)
    finally:
        os.unlink(path)
    module.context = context
    if capability is None:
        target = text.partition('ttg.target = "cuda:')[2]
        capability = int(target.split('"')[0]) if target else 90
    return prepare(parse_lowered(lower(module, capability)))


@functools.cache
def load_lowered(text: str) -> Program:
    """Return a program from the text that `stages` stores in place of a binary."""
    return prepare(parse_lowered(text))


# ---- compiling for the simulator: Triton's pipeline with other last stages


def stages(
    backend: Any = None,
    table: dict[str, Any] | None = None,
    options: Any = None,
    language: Any = None,
    capability: Any = None,
) -> Any:
    """Replace all stages after TTGIR by one that lowers for the simulator. No ptxas, no GPU.

    It is Triton's hook `knobs.runtime.add_stages_inspection_hook`.
    """
    key = f"tritonkittens.sim {_SOURCE}"
    if table is None:
        return key, key

    def simulate(module: Any, metadata: dict[str, Any]) -> bytes:
        text = lower(module, capability)
        metadata["name"] = load_lowered(text).module.kernel.attributes["sym_name"]
        metadata["shared"] = load_lowered(text).shared_bytes
        metadata["num_warps"] = load_lowered(text).total_warps
        metadata["tmem_size"] = load_lowered(text).tensor_columns
        metadata.update(global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1)
        return text.encode()

    for name in ("llir", "ptx"):
        table.pop(name, None)
    table["cubin"] = simulate
    return key, key


def _with_file(key_of: Any) -> Any:
    """Add the kernel's file to Triton's compile key. Triton treats equal functions of two files as one, and the
    cached text has the first file's lines.
    """

    def cache_key(source: Any, *rest: Any, **named: Any) -> str:
        function = getattr(source, "fn", None)
        return key_of(source, *rest, **named) + str(getattr(function, "file_name", ""))

    return cache_key


def _read_compiler() -> tuple[Any, Any]:
    return knobs.runtime.add_stages_inspection_hook, compiler.get_cache_key


def _write_compiler(both: tuple[Any, Any]) -> None:
    knobs.runtime.add_stages_inspection_hook, compiler.get_cache_key = both


_compiler = Patch(_read_compiler, _write_compiler)


def compiling_for_simulation() -> contextlib.AbstractContextManager[None]:
    """Make `triton.compile` stop at TTGIR and store the simulator's text in place of the binary, inside this
    context."""
    hook, key_of = _read_compiler()
    return _compiler((stages, key_of if hook is stages else _with_file(key_of)))
