"""Exploration, shrinking and replay; the `check` command; the pytest fixture."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests import cases_explicit
from tests.util import poison
from tritonkittens import sim
from tritonkittens.__main__ import main
from tritonkittens.inline_ptx import memory
from tritonkittens.kernels.gemm import gemm

pytest_plugins = ["pytester"]


@triton.jit
def give(memory, WAITS: tl.constexpr):
    for i in range(3):
        if WAITS:
            tk.wait(memory.taken[0], (i & 1) ^ 1)
        tk.store(memory.box, tk.full(tk.rt(tk.fp32, 16, 64, "memory"), i + 1.0))
        tk.arrive(memory.given[0], per="role")


@triton.jit
def take(memory, Y):
    for i in range(3):
        tk.wait(memory.given[0], i & 1)
        tk.store(Y, tk.load(memory.box, layout="memory"), (i, 0))
        tk.arrive(memory.taken[0], per="role")


@tk.kernel
@triton.jit
def mailbox(Y, WAITS: tl.constexpr):
    """Three tiles through one box between two roles; without WAITS the giver does not look whether the box is empty."""
    memory = tk.struct(box=tk.allocate(tk.st(tk.fp32, 16, 64)), given=tk.semaphores(1), taken=tk.semaphores(1))
    tk.specialize([(take, (memory, Y)), (give, (memory, WAITS))], (4, 4), (64, 64))


def test_a_race_is_found_shrunk_and_replayed():
    y = poison(torch.empty(48, 64))
    with pytest.raises(sim.SimulationError) as caught:
        sim.explore(mailbox, (1,), tk.gl(y), WAITS=False, schedules=50)
    text = str(caught.value)
    assert "race: box" in text and "overwrite of a stage in use" in text or "phase-wrap" in text, text
    assert "take" in text and "give" in text and "test_explore.py" in text
    result = sim.explore(mailbox, (1,), tk.gl(y), WAITS=False, schedules=50, raise_findings=False)
    assert not result.ok and len(result.choices) <= 30
    kinds = {f.kind for f in result.findings}
    assert {f.kind for f in result.replay()} & kinds
    assert [str(f) for f in result.replay()] == [str(f) for f in result.replay()]


def test_the_right_kernel_passes_and_gives_its_result():
    y = poison(torch.empty(48, 64))
    result = sim.explore(mailbox, (1,), tk.gl(y), WAITS=True, schedules=60)
    assert result.ok and result.seeds == 60
    assert torch.equal(y, torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(16)[:, None].expand(48, 64))


def test_a_schedule_is_deterministic_by_its_seed():
    a, b = torch.randn(128, 128).bfloat16(), torch.randn(128, 256).bfloat16()
    for seed in (0, 7, 23):
        seen = []
        for _ in range(2):
            with sim.device(schedule=seed) as device:
                out = gemm(a, b)
            seen.append((device.launches[0].simulation.steps, device.launches[0].simulation.time, out))
        assert seen[0][:2] == seen[1][:2] and torch.equal(seen[0][2], seen[1][2])


@triton.jit
def first_come(X, Y):
    """The result depends on the order of the blocks."""
    turn = tl.atomic_xchg(X, tl.program_id(0))
    tl.store(Y + tl.program_id(0), turn)


def test_a_result_that_depends_on_the_schedule_is_found():
    x, y = torch.full((1,), -1, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    assert sim.explore(first_come, (4,), x, y, schedules=5).ok  # atomics may depend on the order: not compared


@triton.jit
def last_word(X, Word, Y):
    """Every block leaves its number, and stores a row times the number that it finds: in order, but not always one."""
    i = tl.arange(0, 64)
    memory.store_release(Word, tl.program_id(0) + 1)
    tl.store(Y + tl.program_id(0) * 64 + i, tl.load(X + i) * memory.load_acquire(Word))


def test_a_result_that_depends_on_the_order_of_blocks_is_named():
    """Blocks this short take turns at their accesses of global memory."""
    x, word, y = torch.ones(64), torch.zeros(1, dtype=torch.int32), poison(torch.empty(3, 64))
    result = sim.explore(last_word, (3,), x, word, y, schedules=50, raise_findings=False)
    (found,) = result.findings
    assert found.kind == "nondeterministic", found
    told = re.search(r"Y differs in (64|128|192) of 192 elements, first at (Y\[\d, 0\])", found.message)
    assert told and f"schedule {result.failing_seed} gives another result than schedule 0" in found.message, found
    writers = [p for p in found.places if f"writes {told[2]} in schedule" in p.what]
    assert len(writers) == 2 and all("test_explore.py" in str(p) for p in writers), found


@triton.jit
def stores_for_another(X, W, tile, stored, ALL: tl.constexpr):
    tk.store(tile, tk.load(X, tk.rt(tk.fp32, 16, 64), (0, 0)))
    tk.fence_async()
    tk.named_sync(8, 128)
    tk.store_async(W, tile, (0, 0))
    if ALL:
        tk.store_wait()
    else:
        tk.store_read_wait()
    tk.arrive(stored)


@triton.jit
def loads_behind(W, Y, stored):
    tk.wait(stored, 0)
    tk.store(Y, tk.load(W, tk.rt(tk.fp32, 16, 64), (0, 0)), (0, 0))


@tk.kernel
@triton.jit
def through_memory(X, W, Y, ALL: tl.constexpr):
    tile, stored = tk.allocate(tk.st(tk.fp32, 16, 64)), tk.semaphores(1)
    tk.specialize(
        ((loads_behind, (W[1], Y, stored[0])), (stores_for_another, (X, W[0], tile, stored[0], ALL))), warps=(4, 4)
    )


@pytest.mark.parametrize("whole", [False, True])
def test_the_reads_of_a_bulk_store_are_over_before_its_writes(whole):
    """Whoever waits for the reads of a store by TMA (.read) may tell others of bytes that are not there yet."""
    x, w, y = torch.randn(16, 64), torch.zeros(16, 64), poison(torch.empty(16, 64))
    arguments = tk.gl(x), (tk.gl(w, tk.st(tk.fp32, 16, 64)), tk.gl(w)), tk.gl(y), whole
    result = sim.explore(through_memory, (1,), *arguments, schedules=20, raise_findings=False)
    assert result.ok == whole and [f.kind for f in result.findings] == ([] if whole else ["race"]), str(result)


@pytest.mark.parametrize("blocks, rows", [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_claims(blocks, rows):
    """Blocks look at memory until others have stored: also where the stores complete as late as they may, they do."""
    y, words = poison(torch.empty(rows, 64)), torch.zeros(rows, dtype=torch.int32)
    assert sim.explore(cases_explicit.claimed_sums, (blocks,), tk.gl(y), tk.gl(words), rows, 64, schedules=20).ok
    assert (y == blocks * (blocks + 1) // 2).all() and (words == 2).all()


FILE = """
    import torch, triton, triton.language as tl

    @triton.jit
    def add(X, Y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(Y + i, tl.load(X + i, mask=i < n) + 1, mask=i < n{mistake})

    def example_add():
        return (2,), (torch.randn(100), torch.empty(100), 100), dict(BLOCK=64)

    def launch_it():
        (grid, args, options) = example_add()
        add[grid](*args, **options)

    def lonely(x):
        pass
"""


@pytest.mark.parametrize(("mistake", "code"), [("", 0), (" + 1", 1)])
@pytest.mark.parametrize("name", ["add", "launch_it"])
def test_the_check_command(tmp_path, capsys, mistake, code, name):
    file = tmp_path / f"checked_{code}_{name}.py"
    file.write_text(textwrap.dedent(FILE).replace("{mistake}", mistake))
    assert main(["check", f"{file}:{name}", "--schedules", "3"]) == code
    out = capsys.readouterr().out
    assert (
        ("3 schedules, no finding" in out)
        if code == 0
        else ("out-of-bounds" in out and ".py:7  tl.store" in out or ".py:7\n" in out)
    ), out


def test_the_check_command_refuses(tmp_path, capsys):
    file = tmp_path / "refused.py"
    file.write_text(textwrap.dedent(FILE).replace("{mistake}", ""))
    for arguments, message in (
        (["nothing"], "give FILE:NAME"), ([f"{tmp_path}/none.py:x"], "no such file"), ([f"{file}:x"], "has no x"),
        ([f"{file}:lonely"], "write a function example_lonely()"),
        ([f"{file}:add", "--arch", "sm_70"], "arch='sm_70': must be one of sm_80"),
        ([f"{file}:add", "--schedules", "0"], "at least 1"), ([f"{file}:example_add"], "launched no kernel"),
    ):  # fmt: skip
        assert main(["check", *arguments]) == 2
        assert message in capsys.readouterr().err, arguments


def test_the_fixture_gives_a_device_on_which_kernels_run(pytester):
    pytester.makepyfile(
        test_it="""
        import pytest, torch
        from tritonkittens.kernels.gemm import gemm

        @pytest.mark.simulated(always=True, schedule=3)
        def test_simulated(kernel_device):
            assert kernel_device.type == "cpu"
            a, b = torch.eye(64).bfloat16(), torch.randn(64, 64).bfloat16()
            assert torch.equal(gemm(a, b), b)

        @pytest.mark.simulated(arch="sm_100a", always=True)
        def test_blackwell(kernel_device):
            a, b = torch.eye(64).bfloat16(), torch.randn(64, 64).bfloat16()
            assert torch.equal(gemm(a, b), b)
        """
    )
    root = Path(__file__).resolve().parents[2]
    plugin = ["-p", "tritonkittens.testing"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", str(pytester.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert "2 passed" in done.stdout, done.stdout[-3000:]
