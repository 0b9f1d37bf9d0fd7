"""Seeded faults that only Blackwell has: each of `blackwell_faults.py` and `blackwell_cluster_faults.py` is found, with
the guilty line; the kernels without it give no report in 50 schedules and the right numbers."""

import pytest

from tests.sim import blackwell_cluster_faults  # noqa: F401  adds to the list
from tests.sim.blackwell_faults import BLACKWELL_FAULTS
from tests.sim.test_faults import check_fault, check_twin
from tests.test_template_mma_warp import CASES
from tests.util import explored

TWINS = {case.kernel.__name__: case for case in BLACKWELL_FAULTS}


@pytest.mark.parametrize("case", BLACKWELL_FAULTS, ids=str)
def test_fault_is_found(case, rng):
    check_fault(case, rng)


@pytest.mark.parametrize("kernel", TWINS)
@explored(5, 50)
def test_twin_is_clean_and_right(kernel, rng, schedules):
    check_twin(TWINS[kernel], rng, schedules)


def test_there_are_enough():
    names, kinds = ({getattr(case, what) for case in BLACKWELL_FAULTS} for what in ("name", "kind"))
    assert len(names) == len(BLACKWELL_FAULTS) >= 60 and len(kinds) >= 12
    assert len(TWINS) + len(CASES) >= 20  # correct kernels: those here, and the templates with an MMA warp
