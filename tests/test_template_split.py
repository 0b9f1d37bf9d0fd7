"""Tasks that blocks share: mistakes, `explain()`, and the compiled code. No GPU needed."""

import dataclasses
import re

import pytest
import torch

import tritonkittens.lang as tk
from tests.cases_split import Extremes, Product
from tests.test_template import Copy, tile
from tests.util import crossed, refused


def test_split_tasks_need_accumulators_to_sum_up():
    for schedule in (tk.SplitK(2), tk.SplitTail(), tk.SplitRest(), tk.StreamK(), tk.ClusterSplitK(2)):
        with refused(
            f"Copy(schedule={schedule!r}): tasks that are split are summed up by their accumulators; declare them in "
            "the layout"
        ):
            Copy(schedule=schedule)
    Copy(schedule=tk.SplitK(1))  # is not split


@pytest.mark.parametrize("knobs", [dict(cluster=2), dict(pingpong=True, consumers=2)], ids=str)
def test_a_cluster_that_shares_iterations_shares_nothing_else(knobs):
    given = f"cluster={knobs.get('cluster', 1)}, pingpong={knobs.get('pingpong', False)}"
    with refused(
        f"Product(schedule=ClusterSplitK(parts=2), {given}): the blocks of a cluster share a task's iterations and "
        "all their consumers its rows; "
        "that needs cluster=1 and pingpong=False"
    ):
        Product(schedule=tk.ClusterSplitK(2), **knobs)


def test_columns_that_no_cluster_can_share():
    class Narrow(Copy):
        def layout(self):
            return tk.layout(
                globals=dict(A=tile, B=tile), input=dict(A=tile, B=tile), accumulators=dict(acc=tk.rt(tk.fp32, 64, 32))
            )

    Narrow(schedule=tk.ClusterSplitK(4))
    with refused(
        "Narrow(schedule=ClusterSplitK(parts=8)): accumulator 'acc', rt(fp32, 64, 32): its columns are split between "
        "8 blocks and must be a "
        "multiple of 64"
    ):
        Narrow(schedule=tk.ClusterSplitK(8))


def test_what_is_merged_is_declared():
    class Merging(tk.SplitTask, Copy):
        merged: tuple = ()

        def layout(self):
            return dataclasses.replace(super().layout(), merged=dict(self.merged))

        def tasks(self, *_):
            return 4

    acc = ("acc", tk.rt(tk.fp32, 64, 64))
    for cls, missing in ((Merging, "part"), (type("Half", (Merging,), {"part": Extremes.part}), "merge")):
        with refused(f"{cls.__name__}: its layout has merged=…, but hook {missing!r} is missing"):
            cls(merged=(acc,), schedule=tk.ClusterSplitK(2))
    whole = type("Whole", (Merging,), {"part": Extremes.part, "merge": Extremes.merge})
    name = "Whole(schedule=ClusterSplitK(parts=2))"
    with refused(f"{name}: what is merged 'acc', rt(bf16, 64, 64), must be of fp32"):
        whole(merged=(("acc", tk.rt(tk.bf16, 64, 64)),), schedule=tk.ClusterSplitK(2))
    with refused(f"{name}: what is merged 'x', rv(fp32, 16): its length must be a multiple of 32"):
        whole(merged=(("x", tk.rv(tk.fp32, 16)),), schedule=tk.ClusterSplitK(2))
    with refused("layout(merged={'x': st(bf16, 64, 64)}): must be rt or rv"):
        whole(merged=(("x", tile),))
    assert (
        "8192 bytes for the parts that they send each other"
        in whole(merged=(acc,), schedule=tk.ClusterSplitK(2)).explain()
    )
    a = torch.empty(64, 128, dtype=torch.bfloat16)
    with refused(
        "Whole.part: must return a tk.struct of fp32 as layout(merged={'other': (64, 64)}) says, not acc [64, 64] of "
        "fp32"
    ):
        whole(merged=(("other", acc[1]),), schedule=tk.ClusterSplitK(2)).compile(a, a, a)


def test_a_cluster_that_shares_iterations_is_explained():
    text = Product(schedule=tk.ClusterSplitK(4), consumers=2).explain()
    assert "clusters of 4 blocks share a task's iterations; 24576 bytes for the sums that they send each other" in text


def test_sums_for_the_other_blocks_of_a_cluster_go_in_whole_lines():
    a, b, c = (torch.empty(64, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32))
    ptx = Product(schedule=tk.ClusterSplitK(2), consumers=1).compile(a, b, c).asm["ptx"]
    assert len(re.findall(r"st\.async\S*\.v4\.f32", ptx)) == 2 * 64 * 32 // (4 * 128), (
        "each of two blocks may be the one that stores its sums in the other"
    )
    assert not re.findall(r"(ld|st)\.global\.v4", ptx), "no sums go through global memory"


@pytest.mark.parametrize(
    "schedule, arch", crossed([tk.SplitK(2), tk.SplitK(3), tk.StreamK()], ["sm_90a", "sm_100a"]), ids=str
)
def test_parts_of_a_task_are_read_and_written_in_whole_lines(schedule, arch):
    """Sixteen bytes a thread, in whatever layout the architecture has its accumulators."""
    a, b, c = (torch.empty(64, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32))
    ptx = Product(schedule=schedule).compile(a, b, c, arch=arch).asm["ptx"]
    widths = {kind: re.findall(rf"{kind}\.global\S*?\.v(\d)", ptx) for kind in ("ld", "st")}
    assert all(found and set(found) == {"4"} for found in widths.values()), widths
