"""Names of hooks, knobs and layout fields that templates no longer have, and what to write instead."""
from __future__ import annotations

from collections.abc import Iterable

from tritonkittens.lang.core.errors import TileError

# By kind and old name: the rest of a sentence that begins with both. CHANGELOG.md has the same as tables
RENAMED: dict[str, dict[str, str]] = {
    "hook": {
        "prefetch": "is gone: call tk.prefetch in hook 'load', under `if ctx.iter == 0:`",
        "follow": "is gone: launch a kernel behind this one for what needs the results of several tasks",
        "tally": "is gone: launch a kernel behind this one for what needs the results of several tasks",
    },
    "knob": {
        "producer_warps": "is gone: a producer has one warp",
        "following_stages": "is gone with hook 'follow'",
    },
    "field": {
        "following": "is gone with hook 'follow'",
        "following_ring": "is gone with hook 'follow'",
    },
}


def refuse_old(owner: str, kind: str, names: Iterable[str]) -> None:
    """Raise `TileError` for the first of these names that a `kind` of `RENAMED` had once. `owner`: what the message calls the template or layout."""
    for name in names:
        if name in RENAMED[kind]:
            raise TileError(f"{owner}: {kind} {name!r} {RENAMED[kind][name]}")
