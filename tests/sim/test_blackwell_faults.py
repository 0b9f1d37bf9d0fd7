"""Seeded faults that only Blackwell has: each of `blackwell_faults.py` is found, with the guilty line; the kernels
without it give no report in 50 schedules and the right numbers."""

import pytest

from tests.sim.blackwell_faults import BLACKWELL_FAULTS
from tests.sim.test_faults import check_fault, check_twin


@pytest.mark.parametrize("case", BLACKWELL_FAULTS, ids=str)
def test_fault_is_found(case, rng):
    check_fault(case, rng)


@pytest.mark.parametrize("case", {case.kernel.__name__: case for case in BLACKWELL_FAULTS}.values(), ids=lambda case: case.kernel.__name__)
def test_twin_is_clean_and_right(case, rng):
    check_twin(case, rng)
