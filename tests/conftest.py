"""Fixtures and the gpu marker.

Triton's compile cache is left where it is (~/.triton/cache, or TRITON_CACHE_DIR): its key covers a kernel's source.
`compiled_anew` is for where it does not.
"""

import collections
import functools
import gc
import os
import secrets
import sys
import zlib

import numpy as np
import pytest
import torch
from triton import knobs

pytest_plugins = ["tritonkittens.testing"]  # also where the package is on PYTHONPATH only, without its entry point


def pytest_configure(config):
    # The controller of pytest-xdist runs this before it starts its workers, which inherit the environment: one seed a
    # session.
    os.environ.setdefault("TRITONKITTENS_SEED", str(secrets.randbits(31)))
    if getattr(config.option, "hypothesis_seed", None) is None:
        # its plugin reads this after the hooks of conftest.py
        config.option.hypothesis_seed = os.environ["TRITONKITTENS_SEED"]
    # What torch and Triton have made so far stays, and a kernel that is traced makes objects by the hundred thousand:
    # looking through them all the time takes a tenth of what tracing and simulating take.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure():
    gc.unfreeze()  # what stays frozen outlives the interpreter, and nanobind reports Triton's part of it as leaked


def pytest_report_header(config):
    return f"tritonkittens: TRITONKITTENS_SEED={os.environ['TRITONKITTENS_SEED']} repeats this session's random inputs"


@functools.cache
def _no_gpu_reason():
    if not torch.cuda.is_available():
        return "needs a CUDA device of capability 9.x; there is none"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"needs a CUDA device of capability 9.x; {torch.cuda.get_device_name()} has {major}.{minor}"
    return None


SIMULATED = 1  # cases of a parametrised test of tests/gpu behind which `make test` simulates every sixteenth


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(items):
    _leave_cases_to_the_gpu(items)
    reason = None
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords: the folder tests/gpu is in there too
            reason = reason or _no_gpu_reason()
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def rng(request):
    """A numpy generator, with torch seeded alike: from TRITONKITTENS_SEED and the test's name. pytest shows the print
    of a failing test. Every test has it: one that asks torch alone for numbers gets the same ones again, too."""
    seed = int(os.environ["TRITONKITTENS_SEED"])
    print(f"TRITONKITTENS_SEED={seed}")
    entropy = [seed, zlib.crc32(request.node.nodeid.encode())]
    torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
    return np.random.default_rng(entropy)


@pytest.fixture
def compiled_anew(tmp_path):
    """For functions that are compiled as plain and as explicit kernels by Triton itself: its cache's key tells neither
    these apart, nor what the trace-time builtins emit that they call. In a folder that other processes write, too, one
    kind's code may come with the other's metadata: on a GPU a kernel without its shared memory, "illegal memory
    access"."""
    with knobs.compilation.scope(), knobs.cache.scope():
        knobs.compilation.always_compile = True
        knobs.cache.dir = str(tmp_path / "triton")
        yield


@pytest.fixture(autouse=True)
def no_plans():
    """Tests replace functions that plans call: without this the plans of earlier tests would be used."""
    for name in ("backward_plan", "varlen_plan", "varlen_backward_plan"):
        module = sys.modules.get(f"tritonkittens.kernels.attention.{name}")
        if module is not None:
            module._plans.clear()


def _leave_cases_to_the_gpu(items):
    """Where there is no GPU, most cases of a test of kernels behind the first few are slow: `make test-slow` simulates
    them."""
    if _no_gpu_reason() is None:
        return
    seen = collections.Counter()
    for item in items:
        seeded = "seed" in item.fixturenames  # tests.util.seeds says which of its cases are slow
        if item.path.parent.name == "gpu" and not seeded and not item.get_closest_marker("slow"):
            test = item.path, item.originalname
            seen[test] += 1
            if seen[test] > SIMULATED and seen[test] % 16:
                item.add_marker(pytest.mark.slow)
