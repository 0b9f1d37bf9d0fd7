"""Seeded faults with scales: each of `scale_faults.py` and `scaled_pair_faults.py` is found, with the guilty line; the
kernels without it give no report in 50 schedules and the right numbers."""

import pytest

from tests.sim import scaled_pair_faults  # noqa: F401  adds to the list
from tests.sim.scale_faults import SCALE_FAULTS
from tests.sim.test_faults import check_fault, check_twin
from tests.util import explored


@pytest.mark.parametrize("case", SCALE_FAULTS, ids=str)
def test_fault_is_found(case, rng):
    check_fault(case, rng)


TWINS = {case.kernel.__name__: case for case in SCALE_FAULTS}


@pytest.mark.parametrize("kernel", TWINS)
@explored(5, 50)
def test_twin_is_clean_and_right(kernel, rng, schedules):
    check_twin(TWINS[kernel], rng, schedules)
