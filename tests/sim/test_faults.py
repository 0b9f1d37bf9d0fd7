"""Seeded faults: every mistake of `faults.py` is found, by the right kind of report and with the guilty line; the same
kernel without it gives no report in 50 schedules and the right numbers."""

import itertools
import linecache
import re

import pytest
import torch

from tests.sim import faults
from tests.sim.faults import FAULTS, TILE, integers
from tests.util import poison
from tritonkittens import sim
from tritonkittens.sim.schedule import nth

SCHEDULES = 50


def launch(case, bug, rng, schedule):
    """One launch on a simulated device, that can be run again with other schedules, and its outputs."""
    grid, arguments, outputs, expected = case.inputs(rng)
    with sim.device(case.arch, schedule=schedule, raise_findings=False, **case.device) as device:
        case.kernel[grid](*arguments, BUG=bug, **case.options)
    return device.launches[-1], outputs, expected


def names_line(finding, fault):
    """Does one end of a finding lie on a line marked with the fault, or below such comments, in the kernel or in what
    called it?"""
    frames = [frame for place in finding.places for frame in place.location.frames]
    marks = [linecache.getline(frame.file, frame.line) for frame in frames]
    for frame in frames:
        above = (linecache.getline(frame.file, number) for number in range(frame.line - 1, 0, -1))
        marks += itertools.takewhile(lambda line: line.lstrip().startswith("# reports:"), above)
    return any(re.search(rf"# reports:.*\b{fault}\b", line) for line in marks)


def check_fault(case, rng):
    """The fault is reported with its kind and line by the schedule of its seed."""
    run, _, _ = launch(case, case.name, rng, case.seed)
    right = [f for f in run.findings if f.kind == case.kind]
    assert right, f"no {case.kind} with schedule {case.seed}: {[str(f) for f in run.findings]}"
    assert any(names_line(f, case.line or case.name) for f in right), "\n".join(map(str, right))
    # what a reader sees first
    assert run.findings[0].kind in (case.kind, *case.also), "\n".join(map(str, run.findings))


def check_twin(case, rng, schedules=SCHEDULES):
    """The kernel without the fault is clean and right in every schedule."""
    run, outputs, expected = launch(case, "", rng, 0)
    for seed in range(schedules):
        for out in outputs:
            poison(out)
        run.run(nth(seed, len(run.program.role_names)))
        assert not run.findings, f"schedule {seed}: " + "\n".join(map(str, run.findings))
        for out, want in zip(outputs, expected, strict=True):
            assert torch.equal(out.float(), want.float()), (
                f"schedule {seed}: differs by up to {(out.float() - want.float()).abs().max()}"
            )


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_fault_is_found(case, rng):
    check_fault(case, rng)


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_twin_is_clean_and_right(case, rng):
    check_twin(case, rng)


def test_there_are_enough():
    assert len(FAULTS) >= 44 and len({f.name for f in FAULTS}) == len(FAULTS)
    assert len({f.kernel.__name__ for f in FAULTS}) >= 20
    kinds = {f.kind for f in FAULTS}
    wanted = """deadlock race missing-fence bytes arrivals phase-wrap barrier-life uninitialized in-flight out-of-bounds misaligned loop unfinished
                assert""".split()
    assert kinds >= set(wanted) and kinds <= set(sim.KINDS)


def test_a_report_is_the_same_again(rng):
    """A seed decides everything: the same findings twice."""
    case = next(f for f in FAULTS if f.name == "lapped_consumer")
    run, _, _ = launch(case, case.name, rng, case.seed)
    first = [str(f) for f in run.findings]
    run.run(nth(case.seed, len(run.program.role_names)))
    assert [str(f) for f in run.findings] == first


def test_more_shared_memory_than_there_is(rng):
    """tk and Triton refuse such a kernel when it is compiled; as TTGIR from elsewhere it comes to the simulator."""
    x, y = integers(rng, 64, 32), torch.empty(16, 32)
    compiled = faults.ring_sum.compile(faults.tk.gl(x, TILE), faults.tk.gl(y), 4, 1, 2, BUG="", arch="sm_90a")
    text = compiled.asm["ttgir"]
    large = text.replace("2x16x32xf32", "120x16x32xf32")
    assert large != text
    program = sim.lowering.load_ttgir(large, 90)
    found = sim.simulation.Simulation(program, sim.simulation.Grid((1, 1, 1)), [], sim.memory.Global())
    found.check_budgets()
    assert [f.kind for f in found.findings] == ["budget"]
    assert f"{program.shared_bytes} bytes of shared memory; a block on sm_90 has 232448" in str(found.findings[0])
