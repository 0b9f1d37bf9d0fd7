"""Which knobs, layout fields, schedules and extensions of a template go together: docs/hooks.md has the table of the
pairs that are refused (`table`), and every other pair of them is accepted here."""

import itertools

import pytest
import triton

import tritonkittens.lang as tk

TILE, SUMS, RESULT = tk.st(tk.bf16, 64, 64), tk.rt(tk.fp32, 64, 64), tk.rt(tk.bf16, 64, 64)


@triton.jit
def _of_task(ctx):
    pass


@triton.jit
def _of_tiles(ctx, tiles):
    pass


@triton.jit
def _of_state(ctx, state, tiles):
    pass


@triton.jit
def _of_more(ctx, state, tiles, more):
    pass


KNOBS = {
    "`pingpong`": dict(pingpong=True),
    "`warp_scheduler_barrier`": dict(warp_scheduler_barrier=True),
    "`staggered_epilogue`": dict(staggered_epilogue=True),
    "`one_tile_per_block`": dict(one_tile_per_block=True),
    "`broadcast_tile`": dict(broadcast_tile=True),
    "`lagged_producer`": dict(lagged_producer=True),
    '`launch_pdl` "overlap"': dict(launch_pdl="overlap"),
    "`cluster` > 1": dict(cluster=2),
}
SCHEDULES = {
    "`OnePerBlock`": tk.OnePerBlock(),
    "`Dynamic`": tk.Dynamic(),
    "`ClusterLaunchControl`": tk.ClusterLaunchControl(),
    "`SplitK`": tk.SplitK(2),
    "`SplitTail`": tk.SplitTail(),
    "`SplitRest`": tk.SplitRest(),
    "`StreamK`": tk.StreamK(),
    "`ClusterSplitK`": tk.ClusterSplitK(2),
}
KNOBS |= {name: dict(schedule=schedule) for name, schedule in SCHEDULES.items()}
FIELDS = {
    "`lagged_producer`": dict(lagged=dict(V=TILE)),
    "`task` tiles": dict(task=dict(Q=TILE)),
    "`late_task` tiles": dict(late_task=dict(Q=TILE)),
    "`exchange` tiles": dict(exchange=dict(P=TILE)),
    "`scratch` tiles": dict(scratch=dict(W=TILE)),
    "`epilogue_reloads`": dict(epilogue=dict(Y=TILE), epilogue_reloads=("Y",)),
    "`lcsf`": dict(output=dict(Y=TILE)),
    "`SplitTask`": dict(merged=dict(sums=SUMS)),
    "`DeferredEpilogue`": dict(deferred_results=dict(Y=RESULT)),
    "`ReduceStoreWarp`": dict(scratch=dict(W=TILE)),
    "`IndexPrefetch`": dict(page_indices=1),
    "`GatherWarps`": dict(input=dict(X=TILE, Z=TILE), gathered=("Z",)),
}
HOOKS = {
    "`lagged_producer`": dict(load_lagged=_of_tiles),
    "`task` tiles": dict(load_task=_of_tiles),
    "`late_task` tiles": dict(load_late_task=_of_tiles),
    "`lcsf`": dict(store=_of_tiles),
    "`SplitTask`": dict(part=_of_tiles, merge=_of_state),
    "`DeferredEpilogue`": dict(defer_results=_of_state, store_deferred=_of_more),
    "`ReduceStoreWarp`": dict(reduce_store=_of_tiles),
    "`IndexPrefetch`": dict(page_index=_of_tiles),
    "`GatherWarps`": dict(row_numbers=_of_task, load_gathered=_of_state),
}
EXTENSIONS = ("`SplitTask`", "`DeferredEpilogue`", "`ReduceStoreWarp`", "`IndexPrefetch`", "`GatherWarps`")
OPTIONS = tuple(dict.fromkeys([*KNOBS, *FIELDS]))
SPLITS = ("`SplitK`", "`SplitTail`", "`SplitRest`", "`StreamK`", "`ClusterSplitK`")

# An option, what it is refused with, a part of the message, and the reason as the page has it
REFUSED: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    (
        "`pingpong`",
        ("`warp_scheduler_barrier`",),
        "consumers with tasks of their own take no turns",
        "consumers with tasks of their own take no turns",
    ),
    (
        "`pingpong`",
        ("`task` tiles", "`late_task` tiles", "`exchange` tiles", "`lcsf`"),
        "consumers with tasks of their own have no task, late_task, exchange or output tiles",
        "these tiles belong to consumers that share a task",
    ),
    (
        "`pingpong`",
        ("`one_tile_per_block`",),
        "its consumers share it",
        "a CTA with one work tile has none for a second consumer",
    ),
    (
        "`Dynamic`",
        ("`pingpong`", "`cluster` > 1"),
        "a thread block fetches one task for all its consumers",
        "each CTA fetches one task for all its consumers",
    ),
    (
        "`ClusterLaunchControl`",
        ("`pingpong`",),
        "a CTA fetches one task for all its consumers",
        "each CTA fetches one task for all its consumers",
    ),
    (
        "`ClusterSplitK`",
        ("`pingpong`", "`cluster` > 1"),
        "the blocks of a cluster share a task's iterations",
        "the CTAs of the cluster share the iterations of a task already",
    ),
    (
        "`one_tile_per_block`",
        ("`Dynamic`", "`ClusterLaunchControl`", "`StreamK`"),
        "neither fetches it nor enters a task in the middle",
        "these schedules give a CTA more than one work tile",
    ),
    (
        "`staggered_epilogue`",
        ("`warp_scheduler_barrier`", "`exchange` tiles"),
        "end together",
        "consumers that take turns or exchange tiles end a task together",
    ),
    (
        '`launch_pdl` "overlap"',
        ("`Dynamic`", "`SplitK`", "`SplitTail`", "`SplitRest`", "`StreamK`"),
        "kernels of a stream share the counters of this schedule",
        "kernels of a stream share the counters of these schedules, so they run one after the other",
    ),
    ("`lagged_producer`", ("`cluster` > 1",), "where blocks load alone", "its warp loads for its own CTA alone"),
    (
        "`lcsf`",
        ("`Dynamic`", "`ClusterLaunchControl`", *SPLITS),
        "an lcsf template stores in every iteration|only an lcf template fetches its tasks",
        "it stores in each iteration of a task that one CTA computes whole",
    ),
    (
        "`lcsf`",
        ("`lagged_producer`", "`late_task` tiles", "`DeferredEpilogue`"),
        "unknown hook|that needs hook 'compute_last'",
        "its computation is not pipelined by an iteration (`compute_last`)",
    ),
    (
        "`DeferredEpilogue`",
        ("`ClusterSplitK`", "`scratch` tiles", "`ReduceStoreWarp`"),
        "whole tasks of a block, and no scratch tiles",
        "results leave during the next task, which needs the scratch tiles and all columns in one CTA",
    ),
    (
        "`ReduceStoreWarp`",
        ("`pingpong`", "`cluster` > 1", *SPLITS),
        "hook 'reduce_store' is for whole tasks that the consumers of a block share",
        "it serves whole tasks that the consumers of one CTA share",
    ),
    (
        "`GatherWarps`",
        ("`cluster` > 1", "`ClusterSplitK`"),
        "the gather warps load for their own CTA alone",
        "its warps load for their own CTA alone",
    ),
)
PAIRS = {frozenset((option, other)): message for option, others, message, _ in REFUSED for other in others}


def table() -> list[str]:
    """The rows of the page."""
    return [
        "| option | refused with | because |",
        "|---|---|---|",
        *(f"| {option} | {', '.join(others)} | {reason} |" for option, others, _, reason in REFUSED),
    ]


def construct(*options):
    """A template with these options, and what they need."""
    base = tk.lcsf if "`lcsf`" in options else tk.lcf
    pipelined = {} if base is tk.lcsf else dict(compute_first=_of_state, compute_last=_of_state)
    hooks = dict(setup=_of_task, load=_of_tiles, start=_of_task, compute=_of_more, finish=_of_state, **pipelined)
    fields = dict(globals=dict(X=TILE), input=dict(X=TILE), accumulators=dict(sums=SUMS))
    knobs = {}
    for option in options:
        hooks |= HOOKS.get(option, {})
        fields |= FIELDS.get(option, {})
        knobs |= KNOBS.get(option, {})
    extensions = [getattr(tk, option.strip("`")) for option in options if option in EXTENSIONS]
    return type("Pair", (*extensions, base), {**hooks, "layout": lambda self: tk.layout(**fields)})(**knobs)


def pairs():
    return [pair for pair in itertools.combinations(OPTIONS, 2) if not set(pair) <= set(SCHEDULES)]


def test_each_option_is_accepted_alone():
    for option in OPTIONS:
        construct(option)


def test_all_pairs_but_the_refused_ones_are_accepted():
    assert len(PAIRS) == sum(len(others) for _, others, _, _ in REFUSED)
    for pair in pairs():
        if frozenset(pair) not in PAIRS:
            construct(*pair)


@pytest.mark.parametrize("pair", [pair for pair in pairs() if frozenset(pair) in PAIRS], ids=" × ".join)
def test_a_refused_pair_raises(pair):
    with pytest.raises(tk.TileError, match=PAIRS[frozenset(pair)]):
        construct(*pair)
