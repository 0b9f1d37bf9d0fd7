"""Tasks that several CTAs share, joined by the kernel's own hooks instead of by adding accumulators
(attention: partial softmax results).

The schedules that share tasks (`SplitK`, `StreamK`, `ClusterSplitK`, …) need no extension: without hooks they add the
accumulators.
"""

from __future__ import annotations

from typing import ClassVar

from tritonkittens.lang.template.extension import Extension
from tritonkittens.lang.template.hook_table import CONSUMER, Hook


class SplitTask(Extension):
    """Joins the parts of a task that the tile scheduler splits. Hook `part` returns the result of a part, and `merge`
    combines two results.

    The layout's `merged` declares these results: fp32 tiles (`rt`) and vectors (`rv`, a value for each row). `finish`
    gets all parts, merged in their order. With `ClusterSplitK` each CTA of the cluster gets its columns of the tiles,
    and the vectors whole."""

    added_hooks: ClassVar[tuple[Hook, ...]] = (
        Hook(
            "part",
            CONSUMER,
            "after the iterations of a part",
            ("ctx", "state"),
            "a `tk.struct` of the layout's `merged`",
            "Returns the result of a part.",
            "merged",
        ),
        Hook(
            "merge",
            CONSUMER,
            "once for each further part",
            ("ctx", "mine", "theirs"),
            "a `tk.struct` of the layout's `merged`",
            "Combines the results of two parts.",
            "merged",
        ),
    )
    needs_fields: ClassVar[bool] = False
    added_fields: ClassVar[tuple[str, ...]] = ("merged",)
