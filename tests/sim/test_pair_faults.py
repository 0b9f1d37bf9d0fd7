"""Seeded faults between the CTAs of one program: each of `pair_faults.py` is found, with the guilty line; the kernels
without it give no report in 50 schedules and the right numbers."""

import pytest

from tests.sim.pair_faults import PAIR_FAULTS
from tests.sim.test_faults import check_fault, check_twin


def names(case):
    return f"{case.name}-{case.options.get('num_ctas', 1)}"


@pytest.mark.parametrize("case", PAIR_FAULTS, ids=names)
def test_fault_is_found(case, rng):
    check_fault(case, rng)


@pytest.mark.parametrize(
    "case", {(case.kernel.__name__, case.options.get("num_ctas")): case for case in PAIR_FAULTS}.values(), ids=names
)
def test_twin_is_clean_and_right(case, rng):
    check_twin(case, rng)
