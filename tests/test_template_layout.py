"""What a template's layout refuses, and where `place` puts its tiles."""

import dataclasses
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as hyp

import tritonkittens.lang as tk
from tests.util import refused
from tritonkittens.kernels.gemm import Gemm
from tritonkittens.lang.template.smem_plan import ALIGNMENT, MAX_STAGES, Placement, nbytes, place

KIB = 1024
LIMIT = {90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
tile = tk.st(tk.bf16, 64, 64)  # 8 KiB


def plan(input=None, task=None, epilogue=None):
    return tk.layout(globals={}, input=input or dict(X=tile), task=task or {}, epilogue=epilogue or {})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(globals=dict(A=tk.rt(tk.bf16, 64, 64)), input=dict(X=tile)),
            "layout(globals={'A': rt(bf16, 64, 64)}): must be st or sv",
        ),
        (dict(globals=dict(A=(tile, 3)), input=dict(X=tile)), "layout(globals={'A': 3}): must be st or sv"),
        (
            dict(globals={}, input=dict(X=tk.rt(tk.fp32, 64, 64))),
            "layout(input={'X': rt(fp32, 64, 64)}): must be st or sv",
        ),
        (dict(globals={}, input=dict(X=tile), task=dict(S=64)), "layout(task={'S': 64}): must be st or sv"),
        (dict(globals={}, input=dict(X=tile), epilogue=dict(F=None)), "layout(epilogue={'F': None}): must be st or sv"),
        (
            dict(globals={}, input=dict(X=tile), accumulators=dict(a=tile)),
            "layout(accumulators={'a': st(bf16, 64, 64)}): must be rt; chips that have tensor memory keep them there",
        ),
        (
            dict(globals={}, input=dict(full=tile)),
            "layout(input={'full': …}): the name is taken by the full barrier of the tiles",
        ),
        (
            dict(globals={}, input=dict(X=tile), task=dict(group=tile)),
            "layout(task={'group': …}): the name is taken by what they are tiles of",
        ),
        (
            dict(globals={}, input=dict(empty=tile)),
            "layout(input={'empty': …}): the name is taken by the empty barrier of the tiles",
        ),
        (
            dict(globals={}, input=dict(X=tile), lagged=dict(phase=tile)),
            "layout(lagged={'phase': …}): the name is taken by the phase of their barriers",
        ),
        (
            dict(globals={}, input=dict(X=tile), lagged=dict(X=tile)),
            "layout: 'X' is an input and a lagged tile; names of ring tiles are different",
        ),
        (
            dict(globals={}, input=dict(X=tile), scratch=dict(W=tile), exchange=dict(W=tile)),
            "layout: 'W' is a scratch and an exchange tile; their names are different",
        ),
        (dict(globals={}, input=dict(X=tile), per="warp"), "layout(per='warp'): must be one of 'consumer', 'block'"),
        (dict(globals={}), "layout(input={}): a template streams at least one tile"),
        (dict(globals={}, input=dict(X=tile), output=dict(Y=3)), "layout(output={'Y': 3}): must be st or sv"),
        (dict(globals={}, input=dict(X=tile), output=dict(full=tile)), "layout(output={'full': …}): the name is taken"),
        (
            dict(globals={}, input=dict(X=tile, Y=tile), multicast=("X", "Z")),
            "layout(multicast=('X', 'Z')): 'Z' is no input tile; there are X, Y",
        ),
        (
            dict(globals={}, input=dict(X=tile), epilogue=dict(Y=tile), epilogue_loads=("X",)),
            "layout(epilogue_loads=('X',)): 'X' is no epilogue tile; there are Y",
        ),
        (
            dict(globals={}, input=dict(X=tile), epilogue_loads=("Y",)),
            "layout(epilogue_loads=('Y',)): 'Y' is no epilogue tile; there are none",
        ),
        (
            dict(globals={}, input=dict(X=tile), epilogue=dict(Y=tile), epilogue_reloads=("X",)),
            "layout(epilogue_reloads=('X',)): 'X' is no epilogue tile; there are Y",
        ),
    ],
)
def test_layout_refuses(arguments, message):
    with pytest.raises(tk.TileError, match=re.escape(message)):
        tk.layout(**arguments)


@pytest.mark.parametrize(("name", "nearest"), [("inputs", "input"), ("multicasts", "multicast"), ("arg", "args")])
def test_an_unknown_field_is_refused_with_the_known_ones_and_the_nearest(name, nearest):
    known = ", ".join(field.name for field in dataclasses.fields(tk.layout))
    with refused(f"layout({name}=…): no such field; the nearest is {nearest!r}; fields are {known}"):
        tk.layout(globals={}, input=dict(X=tile), **{name: dict(X=tile)})
    with refused(f"layout(zzz=…): no such field; fields are {known}"):
        tk.layout(globals={}, input=dict(X=tile), zzz=1)


def test_a_layout_without_globals_is_refused():
    with refused("layout(): give globals=…, the tile types of each tensor of the call, in order"):
        tk.layout(input=dict(X=tile))


def test_layout_counts_the_bytes_that_tma_counts():
    vector = tk.sv(tk.fp32, 64)
    mixed = tk.layout(globals=dict(A=(tile, vector), P=None), input=dict(A=tile, v=vector, w=tk.st(tk.bf16, 48, 80)))
    assert nbytes(mixed.input) == 64 * 64 * 2 + 64 * 4 + 48 * 80 * 2
    assert dict(mixed.globals) == {"A": (tile, vector), "P": ()}


def test_automatic_stages():
    small = plan()
    assert place(small, 2, 1, None, 90, "T") == Placement(16, 16, None), "enough is enough"
    assert place(plan(dict(X=tk.st(tk.bf16, 96, 128))), 2, 1, None, 90, "T") == Placement(9, 9, None), (
        "226 KiB hold 9 tiles of 24"
    )
    assert place(tk.layout(globals={}, input=dict(X=tile), spare=130 << 10), 2, 1, None, 90, "T") == Placement(
        12, 12, None
    ), "96 KiB are left"
    big = tk.st(tk.bf16, 128, 256)  # 64 KiB
    assert place(plan(dict(X=big)), 1, 1, None, 90, "T") == Placement(3, 3, None)
    # 2 stages beside 64 KiB of epilogue tiles, or 3 under them: these go over the last stage
    over = place(plan(dict(X=big), epilogue=dict(F=big)), 1, 1, None, 90, "T")
    assert over == Placement(3, 2, ((("X", 2, 0, 1),),))
    # sm_120 has 99 KiB: one stage, and epilogue tiles fit only over it
    assert place(plan(dict(X=big)), 1, 1, None, 120, "T") == Placement(1, 1, None)
    assert place(plan(dict(X=big), epilogue=dict(F=big)), 1, 1, None, 120, "T") == Placement(1, 0, ((("X", 0, 0, 1),),))
    # epilogue tiles that are no single piece cannot lie over the ring
    odd = tk.st(tk.bf16, 96, 256)
    assert place(plan(dict(X=big), epilogue=dict(F=odd)), 1, 1, None, 90, "T") == Placement(2, 2, None)


def test_scratch_tiles():
    """Two of an exchange tile, one scratch tile for each consumer; epilogue tiles lie over the second where they
    fit."""

    def plan(**more):
        return tk.layout(globals={}, input=dict(X=tile), scratch=dict(W=tile), exchange=dict(E=tile), **more)

    assert place(plan(), 2, 1, 24, 90, "T") == Placement(24, 24, None), "226 KiB hold 28 tiles"
    with pytest.raises(tk.TileError, match="shared memory over budget: task 8192 bytes"):
        place(plan(task=dict(C=tile), per="block"), 2, 1, 24, 90, "T")
    over = ((("W", 0, 0, 1), ("W", 1, 0, 1)),)
    assert place(plan(epilogue=dict(F=tile)), 2, 1, 24, 90, "T") == Placement(24, 24, None, over)
    assert place(plan(epilogue=dict(F=tile, G=tile)), 2, 1, None, 90, "T") == Placement(16, 16, None), (
        "two do not fit over one"
    )


def test_given_stages():
    big, half = tk.st(tk.bf16, 128, 256), tk.st(tk.bf16, 64, 256)
    two = plan(dict(X=big), epilogue=dict(F=half))
    assert place(two, 2, 1, 2, 90, "T") == Placement(2, 2, None)
    assert place(two, 2, 1, 3, 90, "T") == Placement(3, 2, ((("X", 2, 0, 2), ("X", 2, 1, 2)),)), (
        "two halves in one stage"
    )
    assert place(plan(), 1, 1, 28, 90, "T") == Placement(28, 28, None), "226 KiB hold 28 stages of 8"
    tiny = plan(dict(X=tk.st(tk.bf16, 16, 16)))
    assert place(tiny, 1, 1, MAX_STAGES, 90, "T").stages == MAX_STAGES


@pytest.mark.parametrize("stages", [0, -1, MAX_STAGES + 1, 2.0])
def test_impossible_stages(stages):
    with pytest.raises(tk.TileError, match=re.escape(f"T(stages={stages!r}): a ring has 1 to 32 stages")):
        place(plan(), 1, 1, stages, 90, "T")


def test_a_pipelined_ring_has_two_stages():
    """With one, the consumers wait for iteration 1 while they still hold the stage of iteration 0."""
    message = r"T\(stages=1\): a ring has 2 to 32 stages \(pipelined: a stage is released one iteration later\)"
    with pytest.raises(tk.TileError, match=message):
        place(plan(), 1, 1, 1, 90, "T", True)
    assert place(plan(), 1, 1, 2, 90, "T", True).stages == 2
    huge = plan(dict(X=tk.st(tk.bf16, 256, 256)))  # 128 KiB
    assert place(huge, 1, 1, None, 90, "T").stages == 1
    with pytest.raises(
        tk.TileError, match="T: shared memory over budget: .*input 131072 bytes a stage.*; it needs 2 stages"
    ):
        place(huge, 1, 1, None, 90, "T", True)


def test_errors_show_the_bill():
    big = tk.st(tk.bf16, 128, 256)
    bill = (
        "task 16384 bytes, input 65536 bytes a stage, epilogue 131072 bytes, of 231424 for one of 1 blocks an SM "
        "on sm_90"
    )
    with pytest.raises(tk.TileError, match=re.escape(f"T(stages=4): shared memory over budget: {bill}")):
        place(plan(dict(X=big), task=dict(S=tile), epilogue=dict(F=big)), 2, 1, 4, 90, "T")
    message = "T: shared memory over budget: task 0 bytes, input 65536 bytes a stage.* of 2 blocks an SM on sm_120"
    with pytest.raises(tk.TileError, match=message):
        place(plan(dict(X=big)), 1, 2, None, 120, "T")


POWERS = hyp.sampled_from([16, 32, 64, 128, 256])
EXTENTS = hyp.one_of(POWERS, hyp.integers(1, 12).map(lambda n: 16 * n))
DTYPES = hyp.sampled_from([tk.bf16, tk.fp32])


def tiles(extents):
    kind = hyp.builds(tk.st, DTYPES, extents, extents)
    return hyp.lists(kind, min_size=1, max_size=3).map(lambda items: {f"T{i}": item for i, item in enumerate(items)})


@settings(max_examples=400, deadline=None)
@given(
    input=hyp.one_of(tiles(POWERS), tiles(EXTENTS)),
    task=hyp.one_of(hyp.just({}), tiles(EXTENTS)),
    epilogue=hyp.one_of(hyp.just({}), tiles(POWERS), tiles(EXTENTS)),
    consumers=hyp.integers(1, 4),
    blocks=hyp.integers(1, 3),
    stages=hyp.one_of(hyp.none(), hyp.integers(1, 8)),
    arch=hyp.sampled_from([90, 100, 120]),
    pipelined=hyp.booleans(),
)
def test_placements_fit_and_never_overlap(input, task, epilogue, consumers, blocks, stages, arch, pipelined):
    layout = plan(input, task, epilogue)
    try:
        placed = place(layout, consumers, blocks, stages, arch, "T", pipelined)
    except tk.TileError:
        assume(False)
    assert placed.stages >= (2 if pipelined else 1) and stages in (None, placed.stages)

    def padded(group):
        return sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in group.values())

    apart = placed.stages * padded(input) + consumers * padded(task)
    apart += consumers * padded(epilogue) if placed.over_ring is None else 0
    beside = 2 * KIB  # semaphores, and what the system takes of every block
    assert blocks * (apart + beside) <= LIMIT[arch] + KIB, "all blocks fit a multiprocessor"
    if placed.over_ring is None:
        assert placed.safe_stages == placed.stages
        return
    assert epilogue, "without epilogue tiles nothing lies over the ring"
    taken, lowest = {}, placed.stages
    for result, places in zip(epilogue.values(), placed.over_ring, strict=True):
        assert len(places) == consumers
        for name, stage, part, parts in places:
            assert 0 <= stage < placed.stages and 0 <= part < parts
            assert parts * result.nbytes == input[name].nbytes, "the stage is cut into whole parts"
            span = range(part * result.nbytes, (part + 1) * result.nbytes)
            for other in taken.setdefault((name, stage), []):
                assert span.stop <= other.start or other.stop <= span.start, (
                    f"{name} stage {stage}: {span} overlaps {other}"
                )
            taken[name, stage].append(span)
            lowest = min(lowest, stage)
    assert placed.safe_stages == lowest


def test_output_tiles_take_their_share():
    big = tk.st(tk.bf16, 128, 256)  # 64 KiB
    one = tk.layout(globals={}, input=dict(X=big), output=dict(Y=tile))
    assert place(one, 1, 1, None, 90, "T", output_stages=2) == Placement(3, 3, None)
    assert place(one, 1, 1, None, 90, "T", output_stages=8) == Placement(2, 2, None)
    with pytest.raises(tk.TileError, match=re.escape("T(stages=3): shared memory over budget: ")):
        place(one, 1, 1, 3, 90, "T", output_stages=8)


def test_epilogue_tiles_stay_beside_the_ring_where_consumers_end_apart():
    """Over the ring they need every consumer of the block at the end of a task."""
    big = tk.st(tk.bf16, 128, 256)
    two = plan(dict(X=big), epilogue=dict(F=big))
    assert place(two, 1, 1, None, 90, "T").over_ring
    assert place(two, 1, 1, None, 90, "T", may_overlap=False) == Placement(2, 2, None)
    with pytest.raises(tk.TileError, match=re.escape("T(stages=3): shared memory over budget: ")):
        place(two, 1, 1, 3, 90, "T", may_overlap=False)


def test_rounds_are_even_unless_memory_is_the_limit():
    square, flat = (4096, 4096), (4096, 256)
    gemm = Gemm()
    assert gemm.tasks(square, square, square) == 512
    assert gemm.blocks(132, square, square, square) == 128  # 4 rounds of 128, not 3 of 132 and one of 116
    assert gemm.blocks(132, flat, (256, 4096), square) == 132
    assert gemm.blocks(132, (128, 4096), (4096, 256), (128, 256)) == 1
    assert gemm.blocks(132, (0, 4096), square, (0, 4096)) == 0
    assert tk.lcf.blocks(gemm, 132, (128, 4096), (4096, 256 * 133), (128, 256 * 133)) == 67
