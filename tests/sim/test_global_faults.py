"""Seeded faults between CTAs: every mistake of `global_faults.py` is found within 50 schedules, with its lines. The
same kernel without it gives no report in 50 schedules, and the right numbers."""

import pytest
import torch

from tests.sim.global_faults import GLOBAL_FAULTS
from tests.sim.test_faults import SCHEDULES, launch, names_line
from tritonkittens.sim.schedule import nth


def tensors_of(arguments):
    """The tensors among arguments, also in tuples and tk.gl."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from tensors_of(x)
        elif isinstance(getattr(x, "tensor", x), torch.Tensor):
            yield getattr(x, "tensor", x)


@pytest.mark.parametrize("case", GLOBAL_FAULTS, ids=str)
def test_fault_between_ctas_is_found(case, rng):
    run, _, _ = launch(case, case.name, rng, 0)
    seeds = iter(range(1, SCHEDULES))
    while not any(f.kind == case.kind and names_line(f, case.name) for f in run.findings):
        seed = next(seeds, None)
        assert seed is not None, f"not found in {SCHEDULES} schedules: {[str(f) for f in run.findings]}"
        run.run(nth(seed, len(run.program.role_names)))
    assert run.findings[0].kind == case.kind, "\n".join(map(str, run.findings))


@pytest.mark.parametrize("kernel", dict.fromkeys(c.kernel for c in GLOBAL_FAULTS), ids=lambda k: k.__name__)
def test_kernel_without_faults_is_clean_and_right(kernel, rng):
    case = next(c for c in GLOBAL_FAULTS if c.kernel is kernel)
    grid, arguments, outputs, expected = case.inputs(rng)
    before = [x.clone() for x in tensors_of(arguments)]

    def again(rng):
        return grid, arguments, outputs, expected

    run, _, _ = launch(type(case)("", case.kind, kernel, again), "", rng, 0)
    for seed in range(SCHEDULES):
        for x, old in zip(tensors_of(arguments), before):
            x.copy_(old)
        run.run(nth(seed, len(run.program.role_names)))
        assert not run.findings, f"schedule {seed}: " + "\n".join(map(str, run.findings))
        for out, want in zip(outputs, expected, strict=True):
            assert torch.equal(out.float(), want.float()), f"schedule {seed}"
