"""pytest: one test of a kernel that runs on the GPU where there is one and in the simulator where there is none.

    def test_my_kernel(kernel_device):
        x = torch.randn(64, 64, device=kernel_device)
        my_kernel[(1,)](x)

pip installs this as a pytest plugin; without pip, `pytest_plugins = ["tritonkittens.testing"]` in conftest.py does the
same. The marker `simulated(arch=…, …)` passes options to `tritonkittens.sim.device` (`arch`, `schedule`,
`multiprocessors`, …); `simulated(always=True)` keeps a test in the simulator also where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tritonkittens.arch import capability_of


def has_gpu(arch: str | int = "sm_90a") -> bool:
    """Is there a CUDA device that runs kernels compiled for `arch`?"""
    wanted = divmod(capability_of(arch), 10)
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == wanted


def pytest_configure(config: Any) -> None:
    config.addinivalue_line(
        "markers",
        "simulated(arch='sm_90a', always=False, **options): how `kernel_device` simulates where there is no such GPU",
    )


@pytest.fixture
def kernel_device(request: Any) -> Iterator[torch.device]:
    """The device to put tensors on: "cuda" where the architecture is there, else "cpu" with every launch simulated."""
    options: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("simulated"))):
        options.update(marker.kwargs)
    arch, always = options.pop("arch", "sm_90a"), options.pop("always", False)
    if has_gpu(arch) and not always:
        yield torch.device("cuda")
        return
    from tritonkittens import sim

    with sim.device(arch, **options):
        yield torch.device("cpu")
