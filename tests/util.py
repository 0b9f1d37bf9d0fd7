"""What tests share."""

import io
import itertools
import random
import re
import textwrap
import tokenize
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tritonkittens.kernels.attention import decode_plan
from tritonkittens.lang import TileError
from tritonkittens.launch import multiprocessor_count
from tritonkittens.testing import has_gpu


def poison(tensor):
    """Fills an output with what no kernel should leave behind: NaN, or the smallest value of an integer type. Returns
    the tensor."""
    if tensor.is_floating_point():
        # fp8 has no fill on every build of torch; all bits but the sign set is NaN in e4m3 and e5m2
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def assert_wide_offsets(kernel):
    """Places of elements of matrices are numbers of 64 bits: a matrix may have 2³¹ elements and more."""
    narrow = r"tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+xi32>"
    found = re.search(narrow, kernel.asm["ttir"])
    assert not found, found.group()


def relative_error(out, ref):
    """||out - ref|| / ||ref|| in float64, equal infinities counting as equal; infinite where either has any other NaN
    or infinity."""
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    assert out.shape == ref.shape, f"shapes differ: {tuple(out.shape)} and {tuple(ref.shape)}"
    error = torch.where(out == ref, 0.0, out - ref)
    if not torch.isfinite(error).all():
        return float("inf")
    norm = ref[torch.isfinite(ref)].norm()
    return float(error.norm() / norm) if norm > 0 else float(error.norm())


def meta(*shape, dtype=torch.bfloat16):
    """A tensor of no memory, to compile for."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def refused(message, kind=TileError):
    """What follows is refused with this message."""
    return pytest.raises(kind, match=re.escape(message))


# where the tests of kernels put their tensors: a Hopper GPU, or, with the fixture `kernel_device`, the simulator
DEVICE = "cuda" if has_gpu() else "cpu"


def synchronize():
    """Wait for the GPU, where there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def bytes_at_once(run):
    """The most bytes of GPU memory that `run` asks for at a time.

    The caching allocator gives up to 1 MiB more a tensor, by what it has cached.
    """
    kind = "requested_bytes.all"
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()[f"{kind}.current"]
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.memory_stats()[f"{kind}.peak"] - before


def on_gpu_or_simulated(gpu, simulated):
    """A size or count for a GPU, and the smaller one for the simulator."""
    return gpu if DEVICE == "cuda" else simulated


def multiprocessors():
    """Of the GPU, or of the simulated device."""
    return multiprocessor_count(torch.cuda.current_device() if DEVICE == "cuda" else -1)


def in_types(cases, first, *others):
    """(*case, type) for each of some tuples in the first type, and in the others: on the GPU each, simulated every
    fourth, for types differ in little there."""
    few = on_gpu_or_simulated(cases, cases[::4])
    return [(*case, first) for case in cases] + [(*case, dtype) for dtype in others for case in few]


def logical_lines(source):
    """Lines of a function's source, a statement, decorator or docstring one each, however the formatter wraps it."""
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)
    return sum(token.type == tokenize.NEWLINE for token in tokens)


def slow(*case, **named):
    """One case of a parametrised test that `make test` leaves out: `make test-slow` and, of the tests of kernels, `make
    test-gpu` run it."""
    return pytest.param(*case, marks=pytest.mark.slow, **named)


def some_slow(cases, quick):
    """The cases of a parametrised test, tuples where it has several arguments, `slow` but for those in `quick`."""
    assert all(case in cases for case in quick), "a quick case is no case"
    return [case if case in quick else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def crossed(*axes):
    """All combinations of some axes as cases of a parametrised test. The n-th values of all axes, shorter axes
    repeated, are a quick case; others are `slow`. So each value of each axis is in a quick case, and there are as many
    of these as the longest axis has values."""
    quick = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    combinations = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        (pytest.param if at in quick else slow)(*(axis[i] for axis, i in zip(axes, at, strict=True)))
        for at in combinations
    ]


def some_of_each(*axes):
    """The quick cases of `crossed`."""
    return [case for case in crossed(*axes) if not case.marks]


SEEDS, QUICK_SEEDS, ALIKE = 500, 10, 5


def seeds(test):
    """A test of random configurations, each of which is a function of its `seed` alone: `make test` runs the first ten
    of 500. They are simulated on a few multiprocessors, whose persistent CTAs have several tiles each."""
    cases = [*range(QUICK_SEEDS), *map(slow, range(QUICK_SEEDS, SEEDS))]
    return pytest.mark.simulated(multiprocessors=4)(pytest.mark.parametrize("seed", cases)(test))


def drawn(seed, kinds):
    """(a generator, one of the `kinds` for which kernels are compiled). A few seeds next to each other share a kind:
    the first ones take few kernels, all of them take each."""
    return random.Random(seed), kinds[seed // ALIKE % len(kinds)]


def some_length(draw, most=130):
    """A length of a sequence, often at an edge of a chunk."""
    return draw.choice(
        [draw.randint(1, most), draw.choice([n for n in (1, 2, 63, 64, 65, 127, 128, 129) if n <= most])]
    )


def some_lengths(draw, most=130):
    """Lengths of packed sequences, some of them empty, of at most so many rows in all."""
    found, rest = [], most
    for _ in range(draw.randint(1, 5)):
        found.append(draw.choice([0, 1, some_length(draw, rest), draw.randint(0, rest)]) if rest else 0)
        rest -= found[-1]
    return found


def some_sequences(draw, most=130):
    """(batch, rows, lengths) of packed sequences, some of them with rows after the last, or alike: lengths are None."""
    if draw.random() < 0.5:
        return draw.randint(1, 2), some_length(draw, most), None
    lengths = some_lengths(draw, most)
    return 1, sum(lengths) + draw.choice([0, 9]), lengths


def explored(few, many):
    """A test gets `schedules`, how many interleavings it explores: few, and in a `slow` case many."""
    return pytest.mark.parametrize("schedules", [few, slow(many)])


def decode_split(split):
    """Inside, `attention_decode` uses this split, and has no plans of earlier calls."""
    return mock.patch.multiple(decode_plan, choose_split=lambda *_: split, _plans={})


def in_pages(k, v, lengths, page_size):
    """(pools of pages, table) with the first `lengths[b]` keys of caches (B, H_kv, S, …) in pages anywhere. Everything
    else in the pools is NaN; entries of the table behind a sequence's last key are no page of the pools. The pools are
    (pages, page_size, H_kv, …) in memory, seen as (pages, H_kv, page_size, …)."""
    counts = [-(-n // page_size) for n in lengths]
    pages = 2 * sum(counts) + 1
    free = torch.randperm(pages).tolist()
    table = torch.randint(pages, 2**31 - 1, (len(lengths), max(counts)), dtype=torch.int32)
    pools = [
        torch.full((pages, page_size, x.shape[1], x.shape[3]), float("nan"), dtype=x.dtype, device=x.device).transpose(
            1, 2
        )
        for x in (k, v)
    ]
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        for j in range(count):
            table[b, j] = free.pop()
            for x, pool in zip((k, v), pools, strict=True):
                part = x[b, :, j * page_size : min((j + 1) * page_size, n)]
                pool[table[b, j], :, : part.shape[1]] = part
    return *pools, table.to(k.device)


class Seen(TorchDispatchMode):
    """Writes down the names of the operators that torch dispatches inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def assert_eager_is_operator(run, function, *operators):
    """`run()`, (result, gradients), is a call of the autograd function of this name; a dispatch mode sees these
    operators instead. Both give the same bits."""
    out, found = run()
    assert type(out.grad_fn).__name__ == f"{function}Backward"
    with Seen() as seen:
        again, others = run()
    assert {f"tritonkittens::{name}" for name in operators} <= seen.names and torch.equal(out, again)
    assert all(torch.equal(x, y) for x, y in zip(found, others, strict=True))
