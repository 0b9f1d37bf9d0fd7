"""Templates used wrongly: every mistake is refused with one message that says what was given and what the rule is. No
GPU needed."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.streaming import (
    CountedStream,
    ExchangingStream,
    IndexedStream,
    LaggedStream,
    LateTaskStream,
    PipelinedStream,
    Prefix,
    ReducingStream,
    SharingStream,
    Stream,
)
from tests.util import meta, refused
from tritonkittens.lang.memory.multicast import slices_of
from tritonkittens.lang.schedule.tile_scheduler import RESERVED
from tritonkittens.lang.template.hook_table import HOOKS, STORE, hooks_of, signature

tile = tk.st(tk.bf16, 64, 64)


class Copy(tk.lcf):
    """Y = the sum of the two inputs' tiles: the smallest whole template."""

    consumers: int = 1

    def layout(self):
        return tk.layout(globals=dict(A=tile, B=tile, Y=tile), input=dict(A=tile, B=tile), epilogue=dict(Y=tile))

    @triton.jit
    def setup(ctx):
        return tk.task(2, when=ctx.task_id < 4)

    @triton.jit
    def load(ctx, input):
        tk.load_async(input.A, ctx.globals.A, (ctx.task_id, ctx.iter), input.full)
        tk.load_async(input.B, ctx.globals.B, (ctx.task_id, ctx.iter), input.full)

    @triton.jit
    def start(ctx):
        return tk.struct(acc=tk.zero(tk.rt(tk.fp32, 64, 64)))

    @triton.jit
    def compute(ctx, state, input):
        return state.replace(acc=state.acc + tk.load(input.A).to(tl.float32) + tk.load(input.B).to(tl.float32))

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.Y, state.acc)
        tk.fence_async()
        tk.store_async(ctx.globals.Y, epilogue.Y, (ctx.task_id, 0))


def tensors():
    return meta(256, 128), meta(256, 128), meta(256, 64)


# ---------------------------------------------------------------- at construction: hooks


@pytest.mark.parametrize("name", ["setup", "load", "compute", "finish"])
def test_a_required_hook_is_missing(name):
    hooks = {n: vars(Copy)[n] for n in ("layout", "setup", "load", "compute", "finish") if n != name}
    with refused(f"Bare: hook {name!r} is missing; a template needs setup, load, compute, finish"):
        type("Bare", (tk.lcf,), hooks)()


def test_layout_is_missing_or_no_layout():
    hooks = {n: vars(Copy)[n] for n in ("setup", "load", "compute", "finish")}
    with refused("Bare: hook 'layout' is missing"):
        type("Bare", (tk.lcf,), hooks)()
    with refused("Bare.layout must return tk.layout(…), got {'A': st(bf16, 64, 64)}"):
        type("Bare", (tk.lcf,), {**hooks, "layout": lambda self: {"A": tile}})()


def test_a_misspelt_hook():
    class Misspelt(Copy):
        @triton.jit
        def load_taks(ctx, task):
            pass

    hooks = (
        "setup, load_task, load_late_task, load, load_lagged, load_epilogue, load_params, start, compute_first, "
        "compute, compute_last, finish"
    )
    with refused(f"Misspelt: unknown hook 'load_taks'; hooks are {hooks} (start a helper's name with an underscore)"):
        Misspelt()


def test_a_helper_under_an_underscore_is_no_hook():
    class Helped(Copy):
        @triton.jit
        def _helper(x):
            return x

    assert Helped().pipelined is False


def test_a_hook_without_jit():
    class Plain(Copy):
        def start(ctx):
            return tk.struct()

    with refused("Plain.start: put @triton.jit over the hook"):
        Plain()


@triton.jit
def _no_parameters():
    pass


@triton.jit
def _four_parameters(ctx, state, input, previous):
    return state


@pytest.mark.parametrize(
    "name, hook, message",
    [
        ("setup", _no_parameters, "Odd.setup(): must take (ctx)"),
        ("start", _four_parameters, "Odd.start(ctx, state, input, previous): must take (ctx)"),
        ("compute", _four_parameters, "Odd.compute(ctx, state, input, previous): must take (ctx, state, input)"),
        ("load_task", _no_parameters, "Odd.load_task(): must take (ctx, task)"),
    ],
)
def test_a_hook_with_wrong_parameters(name, hook, message):
    with refused(message):
        type("Odd", (Copy,), {name: hook})()


def test_a_pipelined_compute_takes_the_stage_before():
    with refused("Late.compute(ctx, state, input): must take (ctx, state, input, previous)"):
        type("Late", (Copy,), {"compute_last": vars(Copy)["compute"]})()


def test_compute_first_without_compute_last():
    with refused("First: hook 'compute_first' is for a pipelined computation, which needs hook 'compute_last' too"):
        type("First", (Copy,), {"compute_first": vars(Copy)["compute"]})()


# ---------------------------------------------------------------- at construction: knobs


def test_unknown_knobs():
    known = (
        "blocks_per_sm, broadcast_tile, cluster, consumer_registers, consumers, lagged_producer, launch_pdl, "
        "one_tile_per_block, order, pingpong, "
        "producer_registers, schedule, stages, staggered_epilogue, warp_scheduler_barrier"
    )
    with refused(f"Copy(consumer=2): no such knob; it has {known}"):
        Copy(consumer=2)
    for name in ("load", "layout", "tasks", "registers", "placement", "cache_key", "compile"):
        with refused(f"Copy({name}=None): no such knob"):
            Copy(**{name: None})


@pytest.mark.parametrize("consumers", [0, 9, 5, -1, 2.0, "2", None])
def test_impossible_consumers(consumers):
    with refused(f"Copy(consumers={consumers!r}): must be 1 to 4 warpgroups"):
        Copy(consumers=consumers)


@pytest.mark.parametrize("blocks", [0, 1.5])
def test_impossible_blocks_per_sm(blocks):
    with refused(f"Copy(blocks_per_sm={blocks!r}): must be at least 1"):
        Copy(blocks_per_sm=blocks)


@pytest.mark.parametrize(
    "knobs", [dict(lagged_producer=1), dict(lagged_producer=None), dict(lagged_producer=True, cluster=2)]
)
def test_impossible_lagged_producers(knobs):
    shown = f"lagged_producer={knobs['lagged_producer']!r}, cluster={knobs.get('cluster', 1)}"
    with refused(f"LaggedStream({shown}): must be False, or True where blocks load alone"):
        LaggedStream(**knobs)


def test_a_lagged_producer_without_lagged_tiles():
    with refused("Copy(lagged_producer=True): its layout has no lagged tiles"):
        Copy(lagged_producer=True)


def test_a_lagged_producer_is_explained():
    line = "a warp of its own loads lagged tiles"
    assert line in LaggedStream(lagged_producer=True).explain() and line not in LaggedStream().explain()


@pytest.mark.parametrize("mode", ["early", None, 2])
def test_impossible_dependencies_of_launches(mode):
    with refused(f"Copy(launch_pdl={mode!r}): must be False, True or 'overlap'"):
        Copy(launch_pdl=mode)


@pytest.mark.parametrize("number", [-1, 17, 2.0])
def test_impossible_numbers_of_page_indices(number):
    with refused(
        f"IndexedStream: its layout has page_indices={number!r}; with tk.IndexPrefetch an iteration has 1 to 16"
    ):
        IndexedStream(page_indices=number)


@pytest.mark.parametrize("number", [0, None])
def test_index_prefetch_needs_page_indices(number):
    with refused("IndexedStream: tk.IndexPrefetch needs page_indices=… in its layout"):
        type(
            "IndexedStream",
            (IndexedStream,),
            {"layout": lambda self: dataclasses.replace(LaggedStream.layout(self), page_indices=number)},
        )()


def test_page_indices_need_their_hook():
    hooks = {"layout": lambda self: dataclasses.replace(LaggedStream.layout(self), page_indices=1)}
    with refused("Indexed: its layout has page_indices=…, but hook 'page_index' is missing"):
        type("Indexed", (tk.IndexPrefetch, LaggedStream), hooks)()


def test_page_indices_are_explained():
    assert "  5 indices an iteration, read ahead, 32 at a time" in IndexedStream(page_indices=5).explain().splitlines()
    assert "indices" not in LaggedStream().explain()


@triton.jit
def _no_pointers(ctx, n):
    return n


@triton.jit
def _one_pointer(ctx, n):
    return tk.pointer_to(ctx.globals.P, (ctx.task_id, ctx.iter))


@pytest.mark.parametrize("hook", [_no_pointers, _one_pointer])
def test_a_page_index_that_is_no_pointer_for_each_number(hook):
    x, e, s, y = (meta(*shape, dtype=torch.float32) for shape in ((2, 192, 64), (2, 192, 64), (128, 64), (128, 64)))
    with refused("Wrong.page_index must return pointers to int32, one for each of its numbers, got "):
        lengths, indices = meta(2, dtype=torch.int32), meta(2, 3, dtype=torch.int32)
        type("Wrong", (IndexedStream,), {"page_index": hook})(consumers=1).compile(
            x, e, s, y, lengths, indices, tasks=2
        )


@pytest.mark.parametrize("cluster", [0, 3, 16, "2", None])
def test_impossible_clusters(cluster):
    with refused(f"Copy(cluster={cluster!r}): must be one of 1, 2, 4, 8 blocks"):
        Copy(cluster=cluster)


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("schedule", tk.SplitK, "Schedule"),
        ("schedule", None, "Schedule"),
        ("schedule", tk.RowMajor(), "Schedule"),
        ("order", "rows", "Order"),
        ("order", tk.Persistent(), "Order"),
    ],
)
def test_schedules_and_orders_of_another_type(name, value, kind):
    with refused(f"Copy({name}={value!r}): must be a tk.{kind}"):
        Copy(**{name: value})


@pytest.mark.parametrize("parts", [0, 65, -1, 2.0, "2", None])
def test_impossible_parts(parts):
    with refused(f"SplitK(parts={parts!r}): must be 1 to 64"):
        tk.SplitK(parts)


@pytest.mark.parametrize("parts", [0, 1, 3, 16, None])
def test_impossible_parts_of_a_cluster(parts):
    with refused(f"ClusterSplitK(parts={parts!r}): must be 2, 4 or 8, the blocks of a cluster"):
        tk.ClusterSplitK(parts)


@pytest.mark.parametrize("rows", [0, -3, 1.5, None])
def test_impossible_supergroups(rows):
    with refused(f"Supergroup(rows={rows!r}): must be at least 1"):
        tk.Supergroup(rows)


def test_which_consumers_end_one_after_the_other():
    line = (
        "  each consumer lets the one ahead end a long task first, 2 iterations before its own end; those hide "
        "its results"
    )
    assert line in PipelinedStream(staggered_epilogue=True, stages=3).explain().splitlines()
    apart = dict(stages=3, staggered_epilogue=True)
    for template in (
        PipelinedStream(stages=3),
        Stream(**apart),
        PipelinedStream(**apart, consumers=1),
        PipelinedStream(**apart, schedule=tk.Dynamic()),
        PipelinedStream(**apart, pingpong=True, weighted=False),
        PipelinedStream(**apart, consumers=3, cols=128),
    ):
        assert line not in template.explain() and not template.staggers(90), template.explain()


def test_schedules_are_plain_values():
    assert tk.SplitK(3) == tk.SplitK(3) != tk.SplitK(4) and len({tk.StreamK(), tk.StreamK(), tk.SplitTail()}) == 2
    schedules = (
        tk.Persistent(),
        tk.Dynamic(),
        tk.OnePerBlock(),
        tk.SplitK(2),
        tk.SplitK(3),
        tk.SplitTail(),
        tk.SplitRest(),
        tk.StreamK(),
    )
    assert len({Stream(schedule=schedule).cache_key for schedule in schedules}) == 8
    assert len({Stream(order=order).cache_key for order in (tk.RowMajor(), tk.Supergroup(2), tk.Supergroup(3))}) == 3
    with pytest.raises(AttributeError):
        tk.SplitK(3).parts = 4


def test_consumers_with_tasks_of_their_own_take_no_turns_and_have_no_task_tiles():
    with refused("Copy(pingpong=True, warp_scheduler_barrier=True): consumers with tasks of their own take no turns"):
        Copy(pingpong=True, warp_scheduler_barrier=True)
    for knobs in (dict(cluster=2), dict(pingpong=True)):
        both = {"cluster": 1, "pingpong": False, **knobs}
        with refused(
            f"Copy(schedule=Dynamic(), cluster={both['cluster']}, pingpong={both['pingpong']}): a thread block "
            "fetches one task for all its "
            "consumers; that needs cluster=1 and pingpong=False"
        ):
            Copy(schedule=tk.Dynamic(), **knobs)
    with refused("Prefix(schedule=Dynamic()): only an lcf template fetches its tasks"):
        Prefix(schedule=tk.Dynamic())
    for knobs in (dict(schedule=tk.Dynamic()), dict(schedule=tk.StreamK()), dict(pingpong=True)):
        wrong = {"schedule": tk.Persistent(), "pingpong": False, **knobs}
        with refused(
            f"Copy(one_tile_per_block=True, schedule={wrong['schedule']!r}, pingpong={wrong['pingpong']}): a block "
            "with one work tile neither "
            "fetches it nor enters a task in the middle, and its consumers share it; that needs another schedule and "
            "pingpong=False"
        ):
            Copy(one_tile_per_block=True, **knobs)
    with refused("Copy(staggered_epilogue=True, warp_scheduler_barrier=True): consumers that take turns end together"):
        Copy(staggered_epilogue=True, warp_scheduler_barrier=True)
    with refused(
        "SharingStream(staggered_epilogue=True): consumers that write exchange tiles for each other end together"
    ):
        SharingStream(staggered_epilogue=True)
    message = "(pingpong=True): consumers with tasks of their own have no task, late_task, exchange or output tiles"
    for cls, knobs in ((Stream, {}), (Prefix, dict(weighted=False))):
        with refused(f"{cls.__name__}{message}"):
            cls(pingpong=True, **knobs)


def test_output_tiles_and_stores_go_together():
    class Written(Copy):
        def layout(self):
            return tk.layout(globals=dict(A=tile, B=tile, Y=tile), input=dict(A=tile, B=tile), output=dict(Y=tile))

    with refused("Written: output tiles are for the store hook of an lcsf template"):
        Written()
    with refused("Silent: its layout has no output tiles to store"):
        type("Silent", (Prefix,), {"layout": Stream.layout})()


@pytest.mark.parametrize("stages", [0, 33, 1.0, None])
def test_impossible_output_stages(stages):
    with refused(f"Prefix(output_stages={stages!r}): must be 1 to 32"):
        Prefix(output_stages=stages)


@pytest.mark.parametrize(
    "schedule", [tk.SplitK(2), tk.ClusterSplitK(2), tk.SplitTail(), tk.SplitRest(), tk.StreamK()], ids=str
)
def test_tasks_that_store_in_every_iteration_cannot_be_split(schedule):
    with refused(
        f"Prefix(schedule={schedule!r}): an lcsf template stores in every iteration; its tasks cannot be split"
    ):
        Prefix(schedule=schedule)


@pytest.mark.parametrize("template", [tk.lcf, tk.lcsf], ids=lambda x: x.__name__)
def test_help_describes_every_hook_of_the_table(template):
    for hook in hooks_of(template._stores).values():
        assert f"`{signature(hook, template._stores)}`" in template.__doc__ and hook.text in template.__doc__
    last = ", output" if template._stores else "[, previous]"
    assert f"`compute(ctx, state, input{last})`" in template.__doc__
    assert ("`store(ctx, output)`" in template.__doc__) == template._stores


def test_the_table_of_hooks_says_which_are_required_and_what_they_fill():
    """The table says of each hook whether a template must have it; what it names of the layout exists there."""
    assert [hook.name for hook in HOOKS if hook.required] == ["setup", "load", "compute", "finish"]
    fields = {field.name for field in dataclasses.fields(tk.layout)}
    assert {hook.layout for hook in (*HOOKS, STORE) if hook.layout} <= fields and len(
        {hook.name for hook in HOOKS}
    ) == len(HOOKS)


def test_hooks_of_an_lcsf():
    with refused("Mute: hook 'store' is missing; a template needs setup, load, compute, store"):
        type("Mute", (tk.lcsf,), {n: vars(Copy)[n] for n in ("layout", "setup", "load", "compute", "finish")})()
    with refused("Odd.compute(ctx, state, input): must take (ctx, state, input, output)"):
        type("Odd", (Prefix,), {"compute": vars(Copy)["compute"]})()
    with refused(
        "Late: unknown hook 'compute_last'; hooks are setup, load_task, load, load_epilogue, load_params, start, "
        "compute, finish, store ("
    ):
        type("Late", (Prefix,), {"compute_last": vars(Copy)["compute"]})()


@pytest.mark.parametrize("tile, blocks, extents", [
    (tk.st(tk.bf16, 176, 64, contiguous=True), 2, [[(80, 64), (96, 64)]]),
    (tk.st(tk.bf16, 192, 64, contiguous=True), 4, [[(48, 64)] * 4]),
    (tk.st(tk.bf16, 112, 64, contiguous=True), 4, [[(16, 64), (32, 64), (32, 64), (32, 64)]]),
    (tk.st(tk.bf16, 64, 256), 2, [[(64, 128)] * 2]),
    (tk.st(tk.bf16, 128, 64), 4, [[(32, 64)] * 4]),
    (tk.st(tk.bf16, 64, 128), 4, [[(32, 64)] * 4]),
    (tk.st(tk.bf16, 96, 128), 2, [[(64, 64)] * 2, [(32, 64)] * 2]),
    (tk.st(tk.bf16, 64, 144), 4, [[(32, 64)] * 4, [(16, 16)] * 4]),
    (tk.st(tk.bf16, 64, 144), 8, [[(16, 64)] * 8, [(16, 16)] * 4]),  # four blocks load nothing of 16 columns
    (tk.st(tk.bf16, 48, 64), 2, [[(16, 64)] * 2, [(16, 64)]]),
    (tk.st(tk.fp32, 32, 64), 8, [[(16, 32)] * 4]),  # two swizzle lines of two base tiles each
])  # fmt: skip
def test_parts_in_which_a_cluster_loads_a_tile(tile, blocks, extents):
    assert [[(part.rows, part.cols) for part in parts] for parts in slices_of(tile, blocks, "test")] == extents


def test_vectors_cannot_be_loaded_in_parts():
    vector = tk.sv(tk.fp32, 64)

    class Shared(Copy):
        def layout(self):
            return tk.layout(globals=dict(v=vector), input=dict(v=vector), multicast=("v",))

    with refused(f"Shared: {vector!r} cannot be loaded in 2 parts, one by each block of the cluster"):
        Shared(cluster=2)


def test_registers_beyond_what_the_block_starts_with():
    """Otherwise the compiler drops the reallocation silently, and the consumers do not get the producer's registers."""
    with refused("Copy: registers over budget: (240, 240, 240, 32) a thread of 4 warpgroups are 96256 of 65536"):
        Copy(consumers=3, consumer_registers=240)
    start = "what a block of 384 threads, 2 an SM, starts with"
    with refused(f"Copy: registers over budget: (160, 160, 24) a thread of 3 warpgroups are 44032 of 30720, {start}"):
        Copy(consumers=2, consumer_registers=160, blocks_per_sm=2)


@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
@pytest.mark.parametrize("blocks", [1, 2])
def test_default_registers_fit_and_waste_little(consumers, blocks):
    *mine, producer = Copy(consumers=consumers, blocks_per_sm=blocks).registers()
    threads = 128 * (consumers + 1)
    start = 65536 // (blocks * threads) // 8 * 8  # a thread, at launch
    assert len(set(mine)) == 1 and len(mine) == consumers
    assert sum(mine) + producer <= (consumers + 1) * start
    assert mine[0] == 240 or sum(mine) + producer + 8 * consumers > (consumers + 1) * start, (
        "8 more for each consumer do not fit"
    )


# ---------------------------------------------------------------- at compilation


BILL = "shared memory over budget: task 0 bytes, input 16384 bytes a stage, epilogue 8192"


@pytest.mark.parametrize("stages, message", [(0, "a ring has 1 to 32 stages"), (15, BILL)])
def test_impossible_stages(stages, message):
    with refused(f"Copy(stages={stages}): {message}"):
        Copy(stages=stages).compile(*tensors())


def test_one_stage_of_a_pipelined_template():
    x, s = meta(2, 128, 64, dtype=torch.float32), meta(256, 64, dtype=torch.float32)
    with refused(
        "PipelinedStream(stages=1): a ring has 2 to 32 stages (pipelined: a stage is released one iteration later)"
    ):
        PipelinedStream(stages=1).compile(x, x, s, s, meta(2, dtype=torch.int32), tasks=2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120a"])
def test_architectures_without_the_hardware(arch):
    have = "sm_90a (Hopper), sm_100a or sm_103a (Blackwell data centre)"
    message = f"Copy (TMA, warp roles) needs {have}; this kernel is compiled for {arch.rstrip('a')}"
    with refused(message, tk.ArchitectureError):
        Copy().compile(*tensors(), arch=arch)
    with refused(message, tk.ArchitectureError):  # not its shared memory, which is smaller there
        Copy(stages=12).compile(*tensors(), arch=arch)


def test_an_architecture_that_no_gpu_has():
    with refused("arch='sm_91': must be one of sm_80,", tk.ArchitectureError):
        Copy().compile(*tensors(), arch="sm_91")


@triton.jit
def _nothing(ctx):
    return ctx.task_id


@triton.jit
def _endless(ctx):
    return tk.task(2)


@triton.jit
def _reserved(ctx):
    return tk.task(2, when=ctx.task_id < 4, consumer=1)


@triton.jit
def _narrow(ctx, state, input):
    return state.replace(acc=state.acc.to(tl.bfloat16))


@triton.jit
def _stateless(ctx, state, input):
    pass


@triton.jit
def _two_edges(ctx):
    return tk.task(3, when=ctx.task_id < 2, edges=2)


@triton.jit
def _load_one(ctx, input):
    tk.load_async(input.A, ctx.globals.A, (ctx.task_id, ctx.iter), input.full)


@triton.jit
def _load_three(ctx, input):
    tk.load_async(input.A, ctx.globals.A, (ctx.task_id, ctx.iter), input.full)
    tk.load_async(input.B, ctx.globals.B, (ctx.task_id, ctx.iter), input.full)
    tk.load_async(input.B, ctx.globals.B, (ctx.task_id, ctx.iter), input.full)


@triton.jit
def _load_nothing(ctx, input):
    pass


@triton.jit
def _load_unknown(ctx, input):
    tk.load_async(input.C, ctx.globals.A, (ctx.task_id, ctx.iter), input.full)


COPIES = (
    "bytes, but its barrier expects 16384, the bytes of all its tiles: load every tile of the argument exactly "
    "once, with its `full` as the barrier"
)
MISTAKES = [
    ("setup", _nothing, "Wrong.setup must return tk.task(iterations, …)"),
    (
        "setup",
        _endless,
        "task(iterations): give `when`, false past the last task; without it the loop over tasks never ends",
    ),
    ("setup", _reserved, f"task(consumer=…): reserved names of the context; these are {', '.join(sorted(RESERVED))}"),
    ("setup", _two_edges, "task(edges=2): as a constant it is 0 or 1, else a number of the task"),
    ("compute", _narrow, "Wrong.compute returns a state of type struct<acc: "),
    ("compute", _stateless, "Wrong.compute must return the state (a tk.struct), got None"),
    ("start", _nothing, "Wrong.start must return the state (a tk.struct), got "),
    ("load", _load_one, f"Wrong: hook 'load' copies 8192 {COPIES}"),
    ("load", _load_three, f"Wrong: hook 'load' copies 24576 {COPIES}"),
    ("load", _load_nothing, f"Wrong: hook 'load' copies 0 {COPIES}"),
    ("load", _load_unknown, "'C': this record has 'A', 'B', 'full'"),
]


@pytest.mark.parametrize("name, hook, message", MISTAKES, ids=[hook.__name__ for _, hook, _ in MISTAKES])
def test_a_hook_that_does_something_wrong(name, hook, message):
    template = type("Wrong", (Copy,), {name: hook})()
    for _ in range(2):  # a failed compilation leaves nothing behind that would let the second pass
        with refused(message):
            template.compile(*tensors())
    with refused(message):  # nor for another instance, on another architecture
        type("Wrong", (Copy,), {name: hook})(stages=2).compile(*tensors(), arch="sm_100a")


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("setup", _nothing),
        ("start", _nothing),
        ("load", _load_one),
        ("load", _load_nothing),
        ("compute", _stateless),
        ("compute", _narrow),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_what_is_seen_after_a_hook_points_to_the_hook(name, hook):
    """Not to the line of the role that calls it."""
    with pytest.raises(tk.TileError, match=rf"^Wrong.*{name}") as caught:
        type("Wrong", (Copy,), {name: hook})().compile(*tensors())
    line = hook.src.split("\n")[0]
    assert str(caught.value).endswith(f" [in {hook.__name__}: {line}, {__file__}:{hook.def_file_line_number}]")


@triton.jit
def _in_flight(ctx, state, input):
    return state.replace(acc=tk.mma_ABt(input.A, input.B, state.acc, wait=False))


def test_a_product_in_flight_where_the_state_has_a_tile():
    template = type("Wrong", (Copy,), {"compute": _in_flight})()
    with refused(
        "Wrong.compute returns state.acc as a product in flight (wait=False), and got it as a tile: begin the state "
        "with tk.mma_zero or tk.mma_begin in hook 'start', and end it with tk.mma_wait or tk.mma_retire"
    ) as caught:
        template.compile(*tensors())
    assert "object at 0x" not in str(caught.value)


@triton.jit
def _begun(ctx):
    return tk.struct(acc=tk.mma_zero(tk.rt(tk.fp32, 64, 64)))


@triton.jit
def _waited(ctx, state, input):
    return state.replace(acc=tk.mma_wait(tk.mma_ABt(input.A, input.B, state.acc, wait=False)))


@pytest.mark.parametrize("compute, message", [
    (_waited, "Wrong.compute returns state.acc as a tile, and got it as a product in flight (tk.mma_zero, "
     "tk.mma_begin): issue the product with wait=False and end with tk.mma_retire, or begin with a tile, tk.zero, in "
     "hook 'start'"),
    (_in_flight, "Wrong.compute returns state.acc with other products in flight than it got: end with tk.mma_retire, "
     "which leaves only the newest in flight"),
])  # fmt: skip
def test_what_must_become_of_a_product_in_flight_in_the_state(compute, message):
    with refused(message):
        type("Wrong", (Copy,), {"start": _begun, "compute": compute})().compile(*tensors())


def test_a_changed_state_shows_both_types():
    with pytest.raises(tk.TileError, match=r"struct<acc: .*bf16.*it must keep the type struct<acc: .*fp32") as caught:
        type("Wrong", (Copy,), {"compute": _narrow})().compile(*tensors())
    assert "[in " in str(caught.value), "and where it happened"


def test_bytes_are_checked_beside_a_good_template_with_the_same_hook():
    """The hook is the same; only the layout of the second template asks for more."""

    class More(Copy):
        def layout(self):
            return tk.layout(
                globals=dict(A=tile, B=tile, Y=tile), input=dict(A=tile, B=tile, C=tile), epilogue=dict(Y=tile)
            )

    Copy().compile(*tensors())
    with refused("hook 'load' copies 16384 bytes, but its barrier expects 24576"):
        More().compile(*tensors())
    Copy(stages=3).compile(*tensors())


# ---------------------------------------------------------------- consumers with tasks of their own


@triton.jit
def _by_consumers(ctx):
    return tk.task(2, when=ctx.task_id * ctx.config.consumers < 4)


@triton.jit
def _by_a_constant(ctx):
    CONFIG: tl.constexpr = ctx.config
    return tk.task(2, when=ctx.task_id * CONFIG.consumers < 4)


@triton.jit
def _number_of_tasks(ctx):
    return 4 // ctx.config.consumers


@triton.jit
def _by_a_helper(ctx):
    return tk.task(2, when=ctx.task_id < _number_of_tasks(ctx))


@triton.jit
def _by_team(ctx):
    return tk.task(2, when=ctx.task_id * ctx.config.team < 4)


@pytest.mark.parametrize(
    ("hook", "reader"),
    [(_by_consumers, _by_consumers), (_by_a_constant, _by_a_constant), (_by_a_helper, _number_of_tasks)],
    ids=lambda function: function.__name__,
)
def test_pingpong_refuses_hooks_that_count_by_the_consumers_of_the_block(hook, reader):
    reads = "reads" if hook is reader else f"calls {reader.__name__}, which reads"
    cls = type("Wrong", (Copy,), {"setup": hook})
    with refused(
        f"Wrong(pingpong=True): setup {reads} config.consumers, but each consumer has a task of its own; read "
        "config.team, the consumers that share a task"
    ):
        cls(consumers=2, pingpong=True)
    cls(consumers=2)


def test_pingpong_takes_hooks_that_count_by_the_team():
    type("Right", (Copy,), {"setup": _by_team})(consumers=2, pingpong=True).compile(*tensors())


# ---------------------------------------------------------------- lagged tiles


@triton.jit
def _release_twice(ctx, state, input):
    tk.release(ctx, input)
    tk.release(ctx, input)
    return state


@triton.jit
def _wait_first(ctx, state, input):
    tk.wait_for(input)
    return state


@triton.jit
def _no_wait(ctx, state, input):
    return state


@triton.jit
def _wait_twice(ctx, state, input, previous):
    tk.release(ctx, input)
    tk.wait_for(previous)
    tk.wait_for(previous)
    return state


@triton.jit
def _release_last(ctx, state, input):
    tk.wait_for(input)
    tk.release(ctx, input)
    return state


LAGGED_MISTAKES = [
    (
        "compute_first",
        _release_twice,
        "Wrong.compute_first calls tk.release 2 times; 'compute_first' and 'compute' release their input once, in the "
        "hook "
        "itself, 'compute_last' has none",
    ),
    ("compute_first", _no_wait, "Wrong.compute_first calls tk.release 0 times; "),
    ("compute_first", _wait_first, "this record has 'X', 'empty'"),
    (
        "compute",
        _wait_twice,
        "Wrong.compute calls tk.wait_for 2 times; 'compute' and 'compute_last' wait once, in the hook itself, for "
        "their lagged tiles, "
        "'compute_first' has none",
    ),
    ("compute_last", _no_wait, "Wrong.compute_last calls tk.wait_for 0 times"),
    ("compute_last", _release_last, "this record has 'E', 'full', 'phase'"),
]


def compile_stream(template):
    x, y = torch.empty(4, 4 * template.rows, 64, device="meta"), torch.empty(4 * template.team * 64, 64, device="meta")
    return template.compile(x, x, y, y, torch.empty(4, dtype=torch.int32, device="meta"), tasks=4)


def check_that_a_hook_is_refused(base, name, hook, message):
    """Also where the hook is already in the module."""
    template = type("Wrong", (base,), {name: hook})()
    for _ in range(2):
        with refused(message):
            compile_stream(template)


@pytest.mark.parametrize("name, hook, message", LAGGED_MISTAKES, ids=[hook.__name__ for _, hook, _ in LAGGED_MISTAKES])
def test_a_hook_that_does_something_wrong_with_lagged_tiles(name, hook, message):
    check_that_a_hook_is_refused(LaggedStream, name, hook, message)


def holding(kind, name, base, fields=None, **hooks):
    """A template whose layout also has tiles of a kind, and these fields."""

    def layout(self):
        return dataclasses.replace(base.layout(self), globals=dict(X=tile), **{kind: dict(V=tile)}, **(fields or {}))

    return type(name, (base,), dict(layout=layout, **hooks))


def test_lagged_tiles_without_their_hooks():
    with refused("Late: its layout has lagged=…, but hook 'load_lagged' is missing"):
        holding("lagged", "Late", PipelinedStream)()
    with refused(
        "Early: its layout has lagged tiles, which are used one iteration later: that needs hook 'compute_last'"
    ):
        holding("lagged", "Early", Stream, load_lagged=LaggedStream.load_lagged)()


# ---------------------------------------------------------------- tiles that consumers share


@pytest.mark.parametrize("knobs", [dict(consumers=1, extra=64), dict(warp_scheduler_barrier=True)], ids=str)
def test_an_exchange_where_there_are_not_two(knobs):
    with refused(
        "in ExchangingStream: exchange tiles go from one consumer to the other; that needs consumers=2, which share "
        "tasks and take no turns"
    ):
        compile_stream(ExchangingStream(stages=2, **knobs))


@pytest.mark.parametrize("per", ["consumer", "block"])
def test_task_tiles_without_their_hook(per):
    with refused("Bare: its layout has task=…, but hook 'load_task' is missing"):
        holding("task", "Bare", Copy, dict(per=per))()


def test_consumers_that_share_no_task_share_no_tiles():
    with refused(
        "SharingStream(pingpong=True): consumers with tasks of their own have no task, late_task, exchange or output "
        "tiles"
    ):
        SharingStream(pingpong=True)


def test_late_task_tiles_without_their_hooks():
    with refused("Later: its layout has late_task=…, but hook 'load_late_task' is missing"):
        holding("late_task", "Later", PipelinedStream)()
    with refused(
        "Plain: its layout has late_task tiles, for which hook 'compute_first' of a pipelined computation waits; hook "
        "'compute_first' is missing"
    ):
        holding("late_task", "Plain", Copy, load_late_task=LateTaskStream.load_late_task)()


@triton.jit
def _release_task_twice(ctx, state, input):
    tk.release(ctx, ctx.task)
    tk.release(ctx, ctx.task)
    return state


@triton.jit
def _release_at_once(ctx, state, input):
    tk.wait_for(ctx.late_task)
    tk.release(ctx, ctx.late_task)
    return state


@triton.jit
def _wait_for_task(ctx, state, input):
    tk.wait_for(ctx.task)
    return state


@triton.jit
def _prefetch_another(ctx, input):
    tk.prefetch(ctx.globals.S, tk.st(tk.fp32, 32, 32), (ctx.task_id, 0))


@pytest.mark.parametrize(
    ("hook", "value", "message"),
    [
        (
            "compute_last",
            _release_task_twice,
            "Wrong.compute_last calls tk.release(ctx, ctx.task) 2 times; 'compute_last' may release them, once",
        ),
        (
            "compute_first",
            _release_at_once,
            "Wrong.compute_first calls tk.release(ctx, ctx.late_task) 1 times; 'compute_last' may release them, once",
        ),
        (
            "compute_first",
            _wait_for_task,
            "wait_for(ctx.task): task tiles are full when a task begins; those that `compute_first` waits for itself "
            "are late_task "
            "tiles",
        ),
        (
            "load",
            _prefetch_another,
            "prefetch of st(fp32, 32, 32): the global layout has no descriptor for st(fp32, 32, 32)",
        ),
    ],
)
def test_task_tiles_used_wrongly(hook, value, message):
    check_that_a_hook_is_refused(LateTaskStream, hook, value, message)


@pytest.mark.parametrize(("cols", "requests"), [(32, 1), (64, 2)])
def test_prefetched_tiles_come_by_the_copies_that_would_load_them(cols, requests):
    """A copy has as many columns as its swizzle, 128 bytes. Hook `load` is compiled for what is loaded before the roles
    begin, too."""
    compiled = compile_stream(LateTaskStream(stages=2, cols=cols, schedule=tk.Dynamic()))
    assert compiled.asm["ptx"].count("cp.async.bulk.prefetch.tensor.2d.L2.global.tile") == requests


@pytest.mark.parametrize("cls", [SharingStream, ReducingStream])
def test_epilogue_tiles_over_scratch_tiles(cls):
    placed = cls(stages=2).placement(90)
    assert placed.over_ring is None and placed.over_scratch == ((("W", 0, 0, 1), ("W", 1, 0, 1)),)
    assert "epilogue tiles over the scratch tiles: Y st(" in cls(stages=2).explain()
    assert "scratch tiles" not in PipelinedStream(stages=2).explain()


@triton.jit
def _odd_order(ctx):
    row, col = tk.tile_at(ctx.config.consumers, ctx.task_id, 2, 2)
    return tk.task(2, when=ctx.task_id < 4, row=row, col=col)


def test_an_order_that_is_none():
    with refused("tile_at(order=1): must be RowMajor(), ColumnMajor(), Supergroup(rows) or LongestFirst()"):
        type("Wrong", (Copy,), {"setup": _odd_order})().compile(*tensors())


@triton.jit
def _store_nothing(ctx, output):
    pass


@triton.jit
def _store_twice(ctx, output):
    tk.store_async(ctx.globals.Z, output.Z, (ctx.task_id, ctx.iter, 0))
    tk.store_async(ctx.globals.Z, output.Z, (ctx.task_id, ctx.iter, 0))


def stream_tensors(template, tasks=2):
    """What a `Stream` or `Prefix` takes."""
    x, s = (
        meta(tasks, 128, 64, dtype=torch.float32),
        meta(tasks * template.cluster * template.team * 64, 64, dtype=torch.float32),
    )
    return (
        x,
        x,
        s,
        s,
        meta(tasks, dtype=torch.int32),
        *([meta(tasks, 128 * template.team, 64, dtype=torch.float32)] if isinstance(template, Prefix) else []),
    )


@pytest.mark.parametrize("hook, stores", [(_store_nothing, 0), (_store_twice, 2)])
def test_a_store_hook_that_does_not_store_every_tile_once(hook, stores):
    template = type("Wrong", (Prefix,), {"store": hook})()
    tile = sum(z.nbytes for _, z in template.layout().output)
    for _ in range(2):
        with refused(
            f"hook 'store' stores {stores * tile} bytes, but its output tiles have {tile}: store every tile of the "
            "argument exactly once"
        ):
            template.compile(*stream_tensors(template), tasks=2)
    Prefix().compile(*stream_tensors(Prefix()), tasks=2)


@pytest.mark.parametrize(
    "knobs",
    [
        dict(schedule=schedule)
        for schedule in (tk.OnePerBlock(), tk.SplitK(2), tk.SplitTail(), tk.SplitRest(), tk.StreamK())
    ]
    + [dict(one_tile_per_block=True, schedule=tk.Persistent())],
    ids=str,
)
def test_schedules_that_must_know_how_many_tasks_there_are(knobs):
    template = Stream(**knobs)
    given = ", ".join(f"{name}={value!r}" for name, value in knobs.items())
    with refused(f"Stream({given}): write method 'tasks', which says how many tasks tensors of given shapes make"):
        template.compile(*stream_tensors(template), tasks=2)


def test_the_state_of_split_tasks_is_their_accumulators():
    """`PipelinedStream` has weights in its state, which no sum over the parts contains."""

    class Forgetful(PipelinedStream):
        def tasks(self, X, *_):
            return X[0]

    template = Forgetful(schedule=tk.SplitK(2))
    message = (
        r"Forgetful\(schedule=SplitK\(parts=2\)\): tasks that are split are summed up by their accumulators; the "
        r"state must be the fp32 tiles of "
        r"layout\(accumulators=\{'acc': \(64, 64\)\}\), it has acc \[64, 64\], weights \[64, 64\]"
    )
    with pytest.raises(tk.TileError, match=message):
        template.compile(*stream_tensors(template), tasks=2)


# ---------------------------------------------------------------- what was chosen


@pytest.mark.parametrize(
    "cls, knobs",
    [
        (Stream, dict(consumers=2)),
        (Stream, dict(consumers=2, stages=12)),
        (
            CountedStream,
            dict(
                consumers=4,
                pingpong=True,
                weighted=False,
                schedule=tk.StreamK(),
                blocks_per_sm=2,
                dtype=tk.bf16,
                out=tk.bf16,
            ),
        ),
        (Stream, dict(cluster=2, consumer_registers=120, order=tk.Supergroup(4))),
        (Prefix, dict(consumers=1)),
        (Stream, dict(one_tile_per_block=True)),
    ],
)
def test_explain_says_what_was_chosen(cls, knobs):
    template = cls(**knobs)
    placed, text = template.placement(90), template.explain()
    assert text.splitlines()[0] == f"{cls.__name__} on sm_90"
    given = "given" if "stages" in knobs else "as many as fit"
    assert f"stages {placed.stages} ({given}" in text and "X st(" in text
    assert (f"over the ring from stage {placed.safe_stages} on" in text) == (placed.over_ring is not None)
    assert ("beside the ring" in text) == (placed.over_ring is None)
    mine, *_, others = template.registers()
    why = "given" if "consumer_registers" in knobs else "what the block's share"
    assert (
        f"registers {mine} a consumer thread ({why}" in text
        and f"{others} of the other roles; {template.blocks_per_sm} block(s) an SM" in text
    )
    assert (
        f"{template.consumers} consumer warpgroup(s) take {'a task each' if template.pingpong else 'one task together'}"
        in text
    )
    assert repr(template.schedule) in text and repr(template.order) in text
    assert ("no loop over tasks" in text) == template.one_tile_per_block
    assert ("clusters of 2 blocks load X together" in text) == (template.cluster == 2)
    assert template.explain(100).splitlines()[0] == f"{cls.__name__} on sm_100"


class Weighted(Copy):
    def layout(self):
        return tk.layout(
            globals=dict(A=tile, B=tile, Y=tile), input=dict(A=tile, B=tile), task=dict(S=tile), epilogue=dict(Y=tile)
        )


def test_epilogue_loads_without_their_hook():
    class Added(Copy):
        def layout(self):
            return tk.layout(
                globals=dict(A=tile, B=tile, Y=tile),
                input=dict(A=tile, B=tile),
                epilogue=dict(Y=tile),
                epilogue_loads=("Y",),
            )

    with refused("Added: its layout has epilogue_loads=…, but hook 'load_epilogue' is missing"):
        Added()

    class Forgetful(Added):
        @triton.jit
        def load_epilogue(ctx, epilogue):
            pass

    with refused("hook 'load_epilogue' copies 0 bytes, but its barrier expects 8192"):
        Forgetful().compile(*tensors())


def test_bytes_of_task_tiles_are_checked_for_every_consumer():
    class Uneven(Weighted):
        consumers: int = 2

        @triton.jit
        def load_task(ctx, task):
            if ctx.consumer == 0:
                tk.load_async(task.S, ctx.globals.A, (ctx.task_id, 0), task.full)

    with refused("hook 'load_task' copies 0 bytes, but its barrier expects 8192"):
        Uneven().compile(*tensors())


# ---------------------------------------------------------------- at the call


def test_wrong_tensors_and_numbers():
    a, b, y = tensors()
    template = Copy()
    with refused("Copy: 2 tensors; it takes A, B, Y", TypeError):
        template.compile(a, b)
    with refused("Copy: arguments ['scale']; it takes []", TypeError):
        template.compile(a, b, y, scale=1.0)
    with refused("Stream: arguments []; it takes ['tasks']", TypeError):
        Stream(dtype=tk.bf16, out=tk.bf16).compile(a[None], a, a, y, a)
    with refused("gl of a one-dimensional tensor with st(bf16, 64, 64): tiles have rows and columns; use sv"):
        template.compile(a.reshape(-1), b, y)
    with refused("2 coordinates for a tensor of 3 dimensions; give one per dimension, in tiles"):
        template.compile(a, b, y[None])
    with refused("Copy(Tensor, Tensor, NoneType): it takes the tensors A, B, Y; numbers go by name", TypeError):
        template.compile(a, b, None)


def test_wrong_element_types_also_after_a_good_call():
    a, b, y = tensors()
    template = Copy()
    wrong = "Copy: Y: gl of fp32 with st(bf16, 64, 64): the tile's element type must be the tensor's"
    with refused(wrong):
        template.compile(a, b, y.float())
    template.compile(a, b, y)
    with refused(wrong):
        template.compile(a, b, y.float())
    with refused("Copy: A: gl of torch.float64: tiles hold fp32, bf16,"):
        template.compile(a.double(), b, y)
    assert template.compile(a, b, y).metadata.shared > 0, "after all these the template still works"


# ---------------------------------------------------------------- what the compile cache sees


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _cube(x):
    return x * x * x


class Applied(Copy):
    tile: tk.st = tile
    epilogue: object = None

    @triton.jit
    def finish(ctx, state, epilogue):
        tk.store(epilogue.Y, ctx.config.epilogue(state.acc))
        tk.fence_async()
        tk.store_async(ctx.globals.Y, epilogue.Y, (ctx.task_id, 0))


def test_knobs_are_part_of_the_key():
    knobs = [
        dict(epilogue=_square),
        dict(epilogue=_cube),
        dict(),
        dict(stages=2),
        dict(consumers=2),
        dict(tile=tk.st(tk.bf16, 32, 64)),
    ]
    templates = [Copy(), *(Applied(**k) for k in knobs)]
    assert len({t.cache_key for t in templates}) == len(set(templates)) == len(templates)
    assert Applied(epilogue=_square) == Applied(epilogue=_square) and hash(Copy()) == hash(Copy())


def test_properties_are_part_of_the_key():
    """Hooks read them as constants: with another body a kernel from the compiler's cache would be the one of before."""
    twice, thrice, again = (type("Factor", (Copy,), {"factor": property(lambda self, n=n: n)})() for n in (2, 3, 2))
    assert twice != thrice and twice.cache_key != thrice.cache_key and twice == again


def test_a_hook_may_call_a_knob():
    square, cube = (Applied(epilogue=f).compile(*tensors()) for f in (_square, _cube))
    assert square.asm["cubin"] != cube.asm["cubin"]


# ---------------------------------------------------------------- programmatic dependent launch


@pytest.mark.parametrize("mode", [False, True, "overlap"])
def test_when_a_kernel_waits_for_the_previous_one(mode):
    """In PTX, roles come in the order of the program: the producer's last load before a wait at its end."""
    x, s = torch.empty(2, 128, 64), torch.empty(256, 64)
    lengths = torch.empty(2, dtype=torch.int32)
    compiled = PipelinedStream(launch_pdl=mode).compile(x, x, s, s, lengths, tasks=2, arch="sm_90a")
    events = r"mbarrier\.init|griddepcontrol\.\w+|cp\.async\.bulk\.tensor\S*mbarrier"
    order = [found.split(".")[-1] for found in re.findall(events, compiled.asm["ptx"])]
    steps = [name for name, _ in itertools.groupby(order)]
    waits = {
        False: [],
        True: ["init", "wait", "launch_dependents", "mbarrier"],
        "overlap": ["init", "launch_dependents", "mbarrier", "wait"],
    }
    assert steps == (waits[mode] or ["init", "mbarrier"])


# ---------------------------------------------------------------- the interpreter


def test_templates_do_not_run_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", "import tests.streaming as s; s.Stream()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "do not run in Triton's interpreter (TRITON_INTERPRET=1)" in last, done.stderr
