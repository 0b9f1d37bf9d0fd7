"""What the GPU runs of a compiled kernel, without the names, lines and files that it was compiled from.

`bench.same_code` runs this file as a script with the Python path of one revision: it imports that revision's
`tritonkittens` and nothing of `bench`. The script reads requests from stdin, `NAME ARCH` a line or `NAMES`, and answers
each with a line of JSON.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import json
import pathlib
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

CODE = ".text."
# sections whose bytes a kernel reads, or whose size it takes
DATA = (".nv.constant", ".nv.global", ".nv.shared", ".nv.local")
INFO = ".nv.info"
NO_BITS = 8  # type of a section that has a size and no bytes
INSTRUCTION = 16  # bytes
REGISTERS = 0x2F  # attribute of registers of a thread
# those that begin with a symbol's number: parameters, frame, least and largest stack, registers
BY_SYMBOL = {0x0A, 0x11, 0x12, 0x23, REGISTERS}
OF_NAMES = {0x0F}  # those of numbers of symbols only: external functions
METADATA = (
    "num_warps",
    "num_ctas",
    "shared",
    "tmem_size",
    "maxnreg",
    "launch_pdl",
    "launch_cooperative_grid",
    "global_scratch_size",
    "profile_scratch_size",
)


class Section(NamedTuple):
    """A section of a cubin, without content where it has a size only."""

    name: str
    content: bytes
    size: int


def sections(cubin: bytes) -> list[Section]:
    """The sections of a 64-bit ELF file. Raises ValueError for other bytes."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin begins with a 64-bit ELF header; these bytes begin with {cubin[:5]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    each, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q2I", cubin, table + each * i) for i in range(count)]
    _, _, _, _, strings, *_ = headers[names]
    found = []
    for name, kind, _, _, offset, size, _, _ in headers:
        begin = strings + name
        text = cubin[begin : cubin.index(b"\0", begin)].decode()
        found.append(Section(text, b"" if kind == NO_BITS else cubin[offset : offset + size], size))
    return found


def records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of a section `.nv.info`, without numbers of symbols."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, word = struct.unpack_from("<2BH", info, at)
        value = info[at + 4 : at + 4 + word] if form == 4 else info[at + 2 : at + 4]
        at += 4 + (word if form == 4 else 0)
        if attribute not in OF_NAMES:
            yield attribute, value[4:] if attribute in BY_SYMBOL else value


def fingerprint(compiled: Any) -> dict[str, Any]:
    """Of a Triton CompiledKernel: number of instructions, registers, shared memory, a digest of what else a launch
    depends on, and the instructions' bytes (`code`, compressed, in base64). Equal for kernels that differ in names,
    files and lines only."""
    found, metadata = sections(compiled.asm["cubin"]), compiled.metadata
    kernel = metadata.name
    data = sorted((s.name.replace(kernel, "kernel"), s.size, s.content) for s in found if s.name.startswith(DATA))
    info = sorted((s.name != INFO, sorted(records(s.content))) for s in found if s.name.startswith(INFO))
    registers = [
        int.from_bytes(value, "little") for _, some in info for attribute, value in some if attribute == REGISTERS
    ]
    settings = {name: getattr(metadata, name, None) for name in METADATA}
    text = b"".join(sorted(s.content for s in found if s.name.startswith(CODE)))
    return {
        "instructions": len(text) // INSTRUCTION,
        "registers": sum(registers),
        "shared": metadata.shared,
        "warps": metadata.num_warps,
        "tensor memory": settings["tmem_size"],
        "code digest": hashlib.sha256(text).hexdigest(),
        "constants and attributes": hashlib.sha256(
            repr((data, info, sorted(settings.items(), key=lambda x: x[0]))).encode()
        ).hexdigest(),
        "code": base64.b64encode(zlib.compress(text, 9)).decode(),
    }


def answer(kernels: dict[str, Any], name: str, arch: str, root: pathlib.Path) -> dict[str, Any]:
    """The fingerprint of a kernel, or `refused`: the error that its compilation raises, with paths from `root` on."""
    try:
        return fingerprint(kernels[name](arch))
    except Exception as error:  # any error is the answer: a kernel may be refused in either revision
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0].replace(f"{root}/", "")[:300]}


def serve(root: pathlib.Path) -> None:
    """Answer the requests on stdin, with the package under `root`."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a kernel prints is no answer
        import tritonkittens
        from tritonkittens.inspect.cli import registry

        # tracing makes objects by the hundred thousand, and looking through all of the package's each time takes a
        # tenth of it
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        assert pathlib.Path(tritonkittens.__file__).resolve().is_relative_to(root.resolve()), (
            f"{tritonkittens.__file__} is not in {root}"
        )
        kernels = registry()
        for line in sys.stdin:
            name, *arch = line.split()  # an architecture of a kernel, none of NAMES
            print(
                json.dumps(list(kernels) if name == "NAMES" else answer(kernels, name, arch[0], root)),
                file=out,
                flush=True,
            )


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]))
