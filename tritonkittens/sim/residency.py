"""The number of resident CTAs of a launch. Further CTAs start when these have ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tritonkittens.arch import REGISTERS, SHARED_RESERVED, TENSOR_COLUMNS, chip_of

from .program import Program


@dataclass(frozen=True)
class Residency:
    """`clusters` are resident at a time: `ctas` on each of `multiprocessors`, limited by `limit`, in clusters of
    `size`.
    """

    clusters: int
    ctas: int = 0
    multiprocessors: int = 0
    size: int = 1
    limit: str = ""

    @staticmethod
    def of(program: Program, cluster: int, multiprocessors: int | None) -> Residency:
        """Return an upper bound of the residency; None without a limit.

        Registers limit it only where the compiler fixed their number. Clusters may fit worse than their CTAs.
        """
        if multiprocessors is None:
            return Residency(sys.maxsize)
        warps, chip = program.total_warps, chip_of(program.arch)
        shared = program.shared_bytes + SHARED_RESERVED
        limits = {
            f"{program.shared_bytes} bytes of shared memory": chip.shared_per_multiprocessor // shared,
            f"{warps} warps": chip.warps // warps,
            "the blocks of a multiprocessor": chip.blocks,
        }
        registers = program.module.attributes.get("ttg.maxnreg")
        if isinstance(registers, int) and registers > 0:
            limits[f"{registers} registers a thread"] = REGISTERS // (warps * 32 * (registers + -registers % 8))
        if program.tensor_columns:
            limits[f"{program.tensor_columns} columns of tensor memory"] = TENSOR_COLUMNS // program.tensor_columns
        limit, ctas = min(limits.items(), key=lambda item: item[1])
        size = max(cluster, program.num_ctas)
        return Residency(max(1, multiprocessors * ctas // size), max(1, ctas), multiprocessors, size, limit)

    def __str__(self) -> str:
        fit = f"{self.clusters} CTAs fit" if self.size == 1 else f"{self.clusters} clusters of {self.size} CTAs fit"
        return f"{fit} at a time ({self.multiprocessors} multiprocessors, {self.ctas} CTAs on each: {self.limit})"
