"""Extensions of templates: each owns its hooks and fields of the layout, and users write their own. No GPU needed."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.streaming import (
    CountedStream,
    DeferredStream,
    IndexedStream,
    PipelinedStream,
    Prefix,
    ReducingStream,
    add_listed,
    operands,
    prefixes,
)
from tests.test_template import Copy, tile
from tests.util import meta, poison, refused
from tritonkittens import sim
from tritonkittens.lang.template.extension import POINTS
from tritonkittens.lang.template.extensions import EXTENSIONS
from tritonkittens.lang.template.hook_table import CONSUMER, Hook, hooks_of

HOOKS = [(extension, hook.name) for extension in EXTENSIONS for hook in extension.added_hooks]
ACC, HALF = tk.rt(tk.fp32, 64, 64), tk.rt(tk.bf16, 64, 64)
FIELDS = {"merged": dict(acc=ACC), "deferred_results": dict(Y=HALF), "deferred_steps": 1, "page_indices": 1}
FIELDS |= {"gathered": ("X",)}


@triton.jit
def _hook(ctx):
    pass


# ---------------------------------------------------------------- the library's


@pytest.mark.parametrize(("extension", "name"), HOOKS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_hook_without_its_extension(extension, name):
    with refused(f"Bare: hook {name!r} is of an extension; derive the class from tk.{extension.__name__} too"):
        type("Bare", (Copy,), {name: _hook})()
    with refused(f"Bare: unknown hook {name!r}; hooks are setup, "):
        type("Bare", (Prefix,), {name: _hook})()


@pytest.mark.parametrize(
    ("extension", "field"),
    [(extension, field) for extension in EXTENSIONS for field in extension.added_fields],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_field_without_its_extension(extension, field):
    fields = {field: FIELDS[field]} | (
        {"deferred_results": FIELDS["deferred_results"]} if field == "deferred_steps" else {}
    )
    first = extension.added_fields[0]
    with refused(
        f"Bare: its layout has {first}=…, which is of an extension; derive the class from tk.{extension.__name__} too"
    ):
        type("Bare", (Copy,), {"layout": lambda self: dataclasses.replace(Copy.layout(self), **fields)})()


def test_an_extension_has_hooks_and_fields_that_nobody_else_has():
    names, fields = [name for _, name in HOOKS], [field for extension in EXTENSIONS for field in extension.added_fields]
    assert (
        len(set(names)) == len(names) and not set(names) & set(hooks_of(False)) and not set(names) & set(hooks_of(True))
    )
    assert len(set(fields)) == len(fields) and set(fields) <= {field.name for field in dataclasses.fields(tk.layout)}
    assert all(set(extension.points) <= set(POINTS) for extension in EXTENSIONS)


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda x: x.__name__)
def test_help_of_an_extension_describes_its_hooks(extension):
    assert getattr(tk, extension.__name__) is extension and extension.__name__ in tk.lcf.__doc__
    for hook in extension.added_hooks:
        assert f"`{hook.name}({', '.join(hook.arguments)})`" in extension.__doc__ and hook.text in extension.__doc__
    assert all(field in extension.__doc__ for field in extension.added_fields)


def test_an_extension_is_active_where_the_layout_has_its_fields():
    assert CountedStream().extensions == PipelinedStream().extensions == ()
    found = [cls(stages=2).extensions for cls in (DeferredStream, IndexedStream, ReducingStream)]
    assert found == [(tk.DeferredEpilogue,), (tk.IndexPrefetch,), (tk.ReduceStoreWarp,)]
    plain = type("Plain", (tk.DeferredEpilogue, tk.SplitTask, Copy), {})()
    assert plain.extensions == () and plain.compile(*(meta(256, cols) for cols in (128, 128, 64)))


def test_a_reduce_store_warp_needs_its_hook():
    with refused("Mute: tk.ReduceStoreWarp needs hook 'reduce_store'"):
        type(
            "Mute",
            (tk.ReduceStoreWarp, Copy),
            {"layout": lambda self: dataclasses.replace(Copy.layout(self), scratch=dict(W=tile))},
        )()


# ---------------------------------------------------------------- a user's


@triton.jit
def _consumer_begins(ctx, A, T: tl.constexpr):
    return ctx.globals.counts.pointer


@triton.jit
def _iteration_ends(counts, ctx, memory, i):
    tl.atomic_add(counts + ctx.consumer, ctx.config.weight(ctx))


@triton.jit
def _consumer_ends(counts, ctx, memory, CONSUMER: tl.constexpr, turn):
    tl.atomic_add(counts + 2 + CONSUMER, turn)


@triton.jit
def _producer_iteration_ends(ctx, memory, i, PART: tl.constexpr, T: tl.constexpr):
    tl.atomic_add(ctx.globals.counts.pointer + 4, 1)


class Counting(tk.Extension):
    """Adds up, in tensor `counts` of the call: what hook `weight` says of every iteration that follows another (0, 1:
    by consumer), the tasks of every consumer (2, 3), and the iterations that producers load in their loop (4)."""

    added_hooks = (
        Hook(
            "weight",
            CONSUMER,
            "after an iteration",
            ("ctx",),
            "a number",
            "Returns what the iteration counts.",
            required=True,
        ),
    )
    points = dict(consumer_begins=_consumer_begins, iteration_ends=_iteration_ends, consumer_ends=_consumer_ends,
                  producer_iteration_ends=_producer_iteration_ends)  # fmt: skip

    @staticmethod
    def check_template(T):
        if T.consumers > 2:
            raise T._error(f"(consumers={T.consumers}): there are counters for two")

    @staticmethod
    def explained_lines(T, arch):
        return [f"  iterations are counted for {T.consumers} consumers"]


def counted(plan):
    """The layout of a template whose iterations are counted."""
    return dataclasses.replace(plan, globals={**{n: tiles or None for n, tiles in plan.globals}, "counts": None})


class CountingStream(Counting, PipelinedStream):
    """A stream whose iterations are counted, those of task t as t + 1."""

    def layout(self):
        return counted(super().layout())

    @triton.jit
    def weight(ctx):
        return ctx.task_id + 1


class CountingIndexedStream(Counting, IndexedStream):
    """The same, with the points of another extension in the same places."""

    def layout(self):
        return counted(super().layout())

    weight = CountingStream.weight


def test_an_extension_of_a_user_runs_at_its_points(rng):
    template, lengths = CountingStream(consumers=2, stages=2), (2, 0, 3, 1, 4)
    x, e, s, number = operands(template, lengths, rng, "cpu")
    expected = prefixes(template, x, e, s, number)[:, -1].reshape(-1, template.cols).float()
    y, found = poison(torch.empty(expected.shape)), []

    def run():
        found.append(torch.zeros(5, dtype=torch.int32))
        template(x, e, s, y, number, found[-1], tasks=len(lengths), blocks=2)

    sim.explore(run, schedules=10)
    later = sum((task + 1) * max(length - 1, 0) for task, length in enumerate(lengths))
    assert torch.equal(y, expected)
    assert all(counts[:4].tolist() == [later, later, len(lengths), len(lengths)] for counts in found), found
    assert {int(counts[4]) for counts in found} == {sum(lengths) - early_loads(template, lengths)}


def test_extensions_share_points(rng):
    template, lengths = CountingIndexedStream(consumers=2, stages=2, page_indices=5), (2, 0, 3, 1, 4)
    assert template.extensions == (Counting, tk.IndexPrefetch)
    x, e, s, number = operands(template, lengths, rng, "cpu")
    expected, found = prefixes(template, x, e, s, number)[:, -1].reshape(-1, template.cols).float(), []

    def run():
        counts = torch.zeros(5, dtype=torch.int32)
        found.append((add_listed(template, x, e, s, number, 2, counts), counts))

    sim.explore(run, schedules=10)
    later = sum((task + 1) * max(length - 1, 0) for task, length in enumerate(lengths))
    assert all(torch.equal(y, expected) and counts[:2].tolist() == [later, later] for y, counts in found)
    assert {int(counts[4]) for _, counts in found} == {sum(lengths) - early_loads(template, lengths)}


def early_loads(template, lengths):
    """Iterations that two blocks load of their first tasks before the roles begin."""
    limit = min(2, template.placement(90).stages)
    return sum(min(length, limit) for length in lengths[:2])


def test_an_extension_of_a_user_is_checked_and_explained():
    template = CountingStream(consumers=1)
    assert (
        template.extensions == (Counting,)
        and "  iterations are counted for 1 consumers" in template.explain().splitlines()
    )
    with refused("CountingStream(consumers=3): there are counters for two"):
        CountingStream(consumers=3)
    with refused("Silent: hook 'weight' is missing; a template needs setup, load, compute, finish, weight"):
        type("Silent", (Counting, PipelinedStream), {"layout": CountingStream.layout})()
    with refused("Odd.weight(ctx, state, input, output): must take (ctx)"):
        type("Odd", (CountingStream,), {"weight": Prefix.compute})()
    with refused("Bare: unknown hook 'weight'; hooks are setup, "):
        type("Bare", (PipelinedStream,), {"weight": CountingStream.weight})()


def test_points_of_an_extension_are_part_of_the_key():
    kept = [Counting.points, {}, {"consumer_ends": _consumer_ends}, {"consumer_ends": _iteration_ends}]
    extensions = [type("Same", (tk.Extension,), {"points": points}) for points in kept]
    assert len({type("Template", (extension, PipelinedStream), {})().cache_key for extension in extensions}) == len(
        kept
    )


def test_a_point_that_there_is_not_is_refused():
    with refused("Late.points['iteration_end']: no such point; points are consumer_begins, task_begins"):
        type("Late", (tk.Extension,), {"points": dict(iteration_end=None)})
