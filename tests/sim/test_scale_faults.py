"""Seeded faults with scales: each of `scale_faults.py` is found, with the guilty line; the kernels without it give no
report in 50 schedules and the right numbers."""

import pytest

from tests.sim.scale_faults import SCALE_FAULTS
from tests.sim.test_faults import check_fault, check_twin


@pytest.mark.parametrize("case", SCALE_FAULTS, ids=str)
def test_fault_is_found(case, rng):
    check_fault(case, rng)


@pytest.mark.parametrize("case", {case.kernel: case for case in SCALE_FAULTS}.values(), ids=str)
def test_twin_is_clean_and_right(case, rng):
    check_twin(case, rng)
