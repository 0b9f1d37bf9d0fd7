"""The compiler's results for a kernel: registers, spills, shared and tensor memory, tensor-core instructions, the
main loop. No GPU needed.

    report = inspect(compiled)          # a Triton CompiledKernel
    print(report.table())
    assert report.spill_instructions == 0 and not report.wgmma_serialized

On the command line: `python -m tritonkittens inspect KERNEL [--arch sm_90a] [--json]`.
"""

from ._inspect import inspect
from ._tiles import BankConflicts
from .report import Buffer, Loop, Report, Role

__all__ = ["BankConflicts", "Buffer", "Loop", "Report", "Role", "inspect"]
