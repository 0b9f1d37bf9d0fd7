"""Names of hooks, knobs and layout fields that templates no longer have, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

from tritonkittens.lang.core.errors import TileError

# By kind and old name: the rest of a sentence that begins with both. CHANGELOG.md has the same as tables
RENAMED: dict[str, dict[str, str]] = {
    "hook": {
        "first": "is now 'compute_first'",
        "drain": "is now 'compute_last'",
        "load_scratch": "is now 'load_task', for task tiles with per='consumer'",
        "load_common": "is now 'load_task', for task tiles with per='block'",
        "load_deferred": "is now 'load_late_task'",
        "load_trailing": "is now 'load_lagged'",
        "load_finish": "is now 'load_epilogue'",
        "fetch": "is now 'load_params'",
        "entry": "is now 'page_index' of tk.IndexPrefetch",
        "send": "is now 'reduce_store' of tk.ReduceStoreWarp",
        "sent": "is now 'reduce_store_done' of tk.ReduceStoreWarp",
        "pack": "is now 'defer_results' of tk.DeferredEpilogue",
        "store_packed": "is now 'store_deferred' of tk.DeferredEpilogue",
        "finish_packed": "is now 'finish_deferred' of tk.DeferredEpilogue",
        "fill_packed": "is now 'prefetch_deferred' of tk.DeferredEpilogue",
        "prefetch": "is gone: call tk.prefetch in hook 'load', under `if ctx.iter == 0:`",
        "follow": "is gone: launch a kernel after this one for what needs the results of several tasks",
        "tally": "is gone: launch a kernel after this one for what needs the results of several tasks",
    },
    "knob": {
        "independent": "is now 'pingpong'",
        "ordered": "is now 'warp_scheduler_barrier'",
        "staggered": "is now 'staggered_epilogue'",
        "single": "is now 'one_tile_per_block'",
        "tells_tasks": "is now 'broadcast_tile'",
        "trailing_producer": "is now 'lagged_producer'",
        "producer_warps": "is gone: a producer has one warp",
        "following_stages": "is gone with hook 'follow'",
    },
    "function": {
        "tk.my_turn": "is now tk.warp_scheduler_sync",
        "tk.pass_turn": "is now tk.warp_scheduler_arrive",
        "tk.hand_over": "is now tk.exchange_commit",
        "tk.take_over": "is now tk.exchange_wait",
        "tk.hand_back": "is now tk.exchange_release",
        "tk.take_back": "is now tk.exchange_acquire",
        "tk.call_sender": "is now tk.reduce_commit",
        "tk.await_call": "is now tk.reduce_wait",
        "tk.await_sender": "is now tk.reduce_acquire",
    },
    "configuration": {
        "rows": "is now 'tile_m'",
        "cols": "is now 'tile_n'",
        "depth": "is now 'tile_k'",
        "panel": "is now 'epilogue_n'",
        "swapped": "is now 'swap_ab'",
        "packed": "is now 'deferred_epilogue'",
        "independent": "is now 'pingpong'",
        "ordered": "is now 'warp_scheduler_barrier'",
        "drawn": "is now 'dynamic'",
    },
    "field": {
        "common": "is now 'task' with per='block'",
        "deferred": "is now 'late_task'",
        "trailing": "is now 'lagged'",
        "finish": "is now 'epilogue'",
        "preload": "is now 'epilogue_loads'",
        "refill": "is now 'epilogue_reloads'",
        "working": "is now 'scratch'",
        "packed": "is now 'deferred_results' of tk.DeferredEpilogue",
        "packed_steps": "is now 'deferred_steps' of tk.DeferredEpilogue",
        "entries": "is now 'page_indices' of tk.IndexPrefetch",
        "following": "is gone with hook 'follow'",
        "following_ring": "is gone with hook 'follow'",
    },
}


def refuse_old(owner: str, kind: str, names: Iterable[str]) -> None:
    """Raise `TileError` for the first of these names that a `kind` of `RENAMED` had once. `owner`: what the message
    calls the template or layout."""
    for name in names:
        if name in RENAMED[kind]:
            raise TileError(f"{owner}: {kind} {name!r} {RENAMED[kind][name]}")
