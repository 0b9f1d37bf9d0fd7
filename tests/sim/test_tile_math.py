"""Tile math in the simulator: the same cases, places, element types and shapes as on the GPU, to the same tolerances,
with the compiler's code for Hopper."""

import pytest

import tritonkittens.lang as tk
import tritonkittens.sim as sim

from ..gpu.test_tile_math_gpu import COMBINATIONS, LAYOUTS, launch


@pytest.mark.parametrize(
    "place, name, dtype, shape", COMBINATIONS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v)
)
def test_values(rng, place, name, dtype, shape):
    with sim.device("sm_90a") as simulated:
        launch(rng, place, name, dtype, shape, device="cpu")
    assert len(simulated.launches) == 1


@pytest.mark.parametrize(
    "name, layout, shape", LAYOUTS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v)
)
def test_other_register_layouts(rng, name, layout, shape):
    with sim.device("sm_90a") as simulated:
        launch(rng, "explicit", name, tk.fp32, shape, layout, device="cpu")
    assert len(simulated.launches) == 1


@pytest.mark.parametrize("name", ["vector", "scans", "masks"])
def test_compiled_for_blackwell(rng, name):
    with sim.device("sm_100a") as simulated:
        launch(rng, "explicit", name, tk.fp32, (128, 48), device="cpu")
    assert len(simulated.launches) == 1
