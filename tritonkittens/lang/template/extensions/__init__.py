"""Extensions of the templates: a mixin class in a file of its own each, listed here."""

from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.extensions.deferred_epilogue import DeferredEpilogue
from tritonkittens.lang.template.extensions.gather_warps import GatherWarps
from tritonkittens.lang.template.extensions.index_prefetch import IndexPrefetch
from tritonkittens.lang.template.extensions.reduce_store_warp import ReduceStoreWarp
from tritonkittens.lang.template.extensions.split_task import SplitTask

__all__ = ["EXTENSIONS", "DeferredEpilogue", "GatherWarps", "IndexPrefetch", "ReduceStoreWarp", "SplitTask"]

EXTENSIONS: tuple[type[Extension], ...] = (SplitTask, DeferredEpilogue, ReduceStoreWarp, IndexPrefetch, GatherWarps)
