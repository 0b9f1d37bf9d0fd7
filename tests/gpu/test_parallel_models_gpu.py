"""Tensor, sequence and data parallelism of models on two GPUs, with NCCL."""

import pytest
import torch

from tests.parallel_models import CASES, WORLD, outcomes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_of(tmp_path_factory.mktemp("processes"), "nccl")


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_two_gpus_agree_with_one_process(outcomes, case):
    for found in outcomes:
        assert found.get(case, found) == ""
