"""Chips: the features, limits and names of each architecture. `inline_ptx` states each instruction's targets; no
other module writes a limit of a chip.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; PTX ISA, "Target ISA Notes" of
each instruction; data sheets (`GPUS`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB = 1024
WARP = 32  # threads
REGISTERS = 64 * KIB  # 32-bit registers of an SM, on every chip
SHARED_RESERVED = 1 * KIB  # bytes of shared memory that the system reserves for each resident CTA
LANES = 128  # of tensor memory
TENSOR_COLUMNS = 512  # columns of tensor memory, on chips that have it


class ArchitectureError(RuntimeError):
    """The target GPU lacks an instruction that the kernel needs."""


class UnknownArchitectureError(ArchitectureError, ValueError):
    """A name that is not in `ARCHITECTURES`."""


@dataclass(frozen=True)
class Chip:
    """One architecture.

    Args:
        name: its PTX name ("sm_90a").
        capability: compute capability as an integer (90).
        family: "Hopper".
        shared_per_block: the most bytes of shared memory of a CTA.
        multiprocessors: SMs of its largest GPU.
        warps: the most resident warps of an SM.
        blocks: the most resident CTAs of an SM.
        tensor_flops: dense 16-bit FLOP of an SM's tensor cores per clock; 0 where the cost model does not know it.
        l2_bytes: bytes of L2 that a clock brings to an SM, in the models of time.
        narrowest: the fewest operand bits down to which half the bits double `tensor_flops`.
        tma: TMA, bulk copies, clusters and setmaxnreg, which explicit tiles need together.
        wgmma, tcgen05, tcgen05_int8, tcgen05_load_max: the instructions of that name.
    """

    name: str
    capability: int
    family: str = ""
    shared_per_block: int = 99 * KIB
    multiprocessors: int = 0
    warps: int = 64
    blocks: int = 32
    tensor_flops: float = 0.0
    # 12 TB/s of an H100 ("GPUs Go Brrr", hazyresearch.stanford.edu, 2024) shared by 132 SMs at 1.7 GHz
    l2_bytes: float = 53.0
    narrowest: int = 16
    tma: bool = False
    wgmma: bool = False
    tcgen05: bool = False
    tcgen05_int8: bool = False
    tcgen05_load_max: bool = False

    @property
    def clusters(self) -> bool:
        """elect.sync, mbarrier.try_wait, arrivals by several, and the cluster scope: every chip from sm_90 on."""
        return self.capability >= 90

    @property
    def f32x2(self) -> bool:
        """Arithmetic on two fp32 numbers an instruction: every chip from sm_100 on."""
        return self.capability >= 100

    @property
    def e4m3(self) -> bool:
        """Conversions of the 8-bit float e4m3: every chip from sm_89 on."""
        return self.capability >= 89

    @property
    def e2m1(self) -> bool:
        """Conversions of the 4-bit float e2m1, and of the scales e8m0."""
        return self.capability in (100, 103, 120)

    @property
    def shared_per_multiprocessor(self) -> int:
        """Bytes of shared memory of an SM, including the system's share."""
        return self.shared_per_block + SHARED_RESERVED

    def shared_for(self, blocks: int) -> int:
        """Return the bytes of shared memory for each of `blocks` CTAs on an SM."""
        return self.shared_per_multiprocessor // blocks - SHARED_RESERVED


_BLACKWELL = Chip(
    "sm_100a",
    100,
    "Blackwell data centre",
    227 * KIB,
    148,
    tensor_flops=8192.0,
    # an assumption, not a measurement: two sectors of 32 bytes, what an SM's L1 takes from the crossbar a clock
    l2_bytes=64.0,
    narrowest=4,
    tma=True,
    tcgen05=True,
    tcgen05_int8=True,
)
CHIPS: dict[int, Chip] = {chip.capability: chip for chip in (
    Chip("sm_80", 80, "Ampere", 163 * KIB, 108),
    Chip("sm_86", 86, "Ampere", 99 * KIB, 84, warps=48, blocks=24),
    Chip("sm_89", 89, "Ada", 99 * KIB, 128, warps=48, blocks=24),
    Chip("sm_90a", 90, "Hopper", 227 * KIB, 132, tensor_flops=4096.0, narrowest=8, tma=True, wgmma=True),
    _BLACKWELL,
    replace(_BLACKWELL, name="sm_103a", capability=103, tcgen05_int8=False, tcgen05_load_max=True),
    Chip("sm_120a", 120, "Blackwell", 99 * KIB, 170, warps=48, blocks=24),
)}  # fmt: skip
ARCHITECTURES: dict[str, int] = {chip.name: chip.capability for chip in CHIPS.values()}


def capability_of(arch: str | int) -> int:
    """Return the compute capability of an architecture: 90 for "sm_90a" or 90.

    Raises `UnknownArchitectureError` for anything else.
    """
    if isinstance(arch, str) and arch in ARCHITECTURES:
        return ARCHITECTURES[arch]
    if isinstance(arch, int) and arch in CHIPS:
        return arch
    raise UnknownArchitectureError(f"arch={arch!r}: must be one of {', '.join(ARCHITECTURES)}")


def chip_of(capability: int | tuple[int, int]) -> Chip:
    """Return the chip of a compute capability, 90 or (9, 0). An unlisted chip has none of the newer instructions."""
    if isinstance(capability, tuple):
        capability = 10 * capability[0] + capability[1]
    return CHIPS.get(capability) or Chip(f"sm_{capability}", capability)


def names_of_chips_with(feature: str) -> str:
    """Return the chips with a feature (a field of `Chip`), as messages list them: "sm_90a (Hopper), sm_100a or
    sm_103a (Blackwell data centre)".
    """
    families: dict[str, list[str]] = {}
    for chip in CHIPS.values():
        if getattr(chip, feature):
            families.setdefault(chip.family, []).append(chip.name)
    return ", ".join(f"{' or '.join(names)} ({family})" for family, names in families.items())


def require_feature(what: str, feature: str, capability: int) -> None:
    """Raise `ArchitectureError` where the chip of a compute capability lacks a feature (a field of `Chip`) that `what`
    needs."""
    chip = chip_of(capability)
    if not getattr(chip, feature):
        instead = "" if chip.tma else ". Kernels of register tiles (@triton.jit with tk operations) run on every GPU"
        raise ArchitectureError(
            f"{what} needs {names_of_chips_with(feature)}; this kernel is compiled for sm_{capability}{instead}"
        )


@dataclass(frozen=True)
class Gpu:
    """A product: full name, chip, number of SMs, bytes of L2, and bytes per second of HBM."""

    name: str
    chip: Chip
    multiprocessors: int
    l2_bytes: int
    hbm_bytes_per_second: float


GPUS: dict[str, Gpu] = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", CHIPS[90], 132, 50 << 20, 3.35e12),
    "H200": Gpu("NVIDIA H200", CHIPS[90], 132, 60 << 20, 4.8e12),
    "B200": Gpu("NVIDIA B200", CHIPS[100], 148, 126 << 20, 8.0e12),
}
