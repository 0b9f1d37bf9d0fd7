"""Plain `@triton.jit` kernels on our launch path: the same results, and the same specialisation, as Triton's own."""

import re
import tempfile
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.fake_libcuda import run_beside_triton
from tests.util import poison
from tritonkittens import sim
from tritonkittens.launch import plain_kernel
from tritonkittens.launch.arguments import argument_types

N = 256


@plain_kernel(num_warps=1)
@triton.jit
def scaled(X, Y, pair, stride, scale, FLAG: tl.constexpr, COUNT: tl.constexpr):
    """Y = scale · X (+ an offset), every `stride`-th number."""
    i = tl.arange(0, COUNT)
    x = tl.load(X + i * stride)
    if pair[0] is not None:
        x += tl.load(pair[0] + i) * pair[1]
    tl.store(Y + i, x * scale + (1.0 if FLAG else 0.0))


@pytest.mark.parametrize("stride", [1, 2, 3, 16])
@pytest.mark.parametrize("offset", [None, 5])
def test_results(stride, offset):
    x, more = torch.randn(N * stride), torch.randn(N)
    for flag in (False, True):
        y = poison(torch.empty(N))
        with sim.device():
            scaled[(1,)](x, y, (None if offset is None else more, offset), stride, 0.5, flag, N)
        expected = (x[::stride].double() + (0 if offset is None else offset * more.double())) * 0.5 + flag
        assert torch.allclose(y.double(), expected, rtol=1e-6, atol=1e-6)


def ptx(stride, start=0):
    """What a call with this stride compiles on sm_90, and for an input that begins so many numbers behind a multiple of
    16 bytes."""
    kernel = plain_kernel(scaled.fn, num_warps=1)
    x, y = torch.zeros(N * 64 + start)[start:], torch.zeros(N)
    with sim.device():
        kernel[(1,)](x, y, (None, None), stride, 2.0, False, N)
    (key,) = kernel._found.values()
    return kernel.compile(key, argument_types((x, y, (None, None), *([] if stride == 1 else [stride]), 2.0)), 90).asm[
        "ptx"
    ]


def test_a_stride_of_one_is_compiled_in():
    assert "ld.global.v4" in ptx(1), "four numbers at once"
    assert "ld.global.v4" not in ptx(2)
    assert "ld.global.v4" not in ptx(1, start=1), "an address that is no multiple of 16"


def test_specialisations_are_told_apart():
    """A kernel for every combination of ones, multiples of 16 and constants; True is not 1."""
    kernel = plain_kernel(scaled.fn, num_warps=1)
    x, y = torch.randn(N * 48), torch.empty(N)
    with sim.device():
        for stride, flag in ((1, False), (16, False), (32, False), (2, False), (3, False), (2, True), (2, 1)):
            kernel[(1,)](x, y, (None, None), stride, 2.0, flag, N)
    found = [(dict(key.constants), dict(key.multiples)) for key in kernel._found.values()]
    assert [(c.get("stride"), c["FLAG"], type(c["FLAG"]), m) for c, m in found] == [
        (1, False, bool, {}),
        (None, False, bool, {"stride": 16}),
        (None, False, bool, {}),
        (None, True, bool, {}),
        (None, 1, int, {}),
    ]


def test_a_wrong_number_of_arguments():
    with pytest.raises(
        TypeError, match=re.escape("scaled: 2 arguments; it takes 7 (X, Y, pair, stride, scale, FLAG, COUNT)")
    ):
        scaled[(1,)](torch.zeros(1), 3)


def test_other_arguments_that_no_kernel_takes():
    with sim.device(), pytest.raises(TypeError, match="^X: str 'x'; a kernel takes torch tensors"):
        scaled[(1,)]("x", torch.zeros(N), (None, None), 1, 1.0, False, N)


def test_its_name_and_text_are_those_of_the_function():
    assert scaled.__name__ == "scaled" and "every `stride`-th number" in scaled.__doc__


TRITON_SCRIPT = """
import sys, time, torch, triton
from pathlib import Path

from tests.fake_libcuda import FakeCuda
fake = FakeCuda(Path(sys.argv[1]))
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
driver = CudaDriver()
driver.get_current_device = lambda: 0
driver.get_current_stream = fake.driver.current_stream = lambda device: 0x55
driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(driver)
from tests.test_plain_kernel import N, scaled
from tritonkittens.kernels.attention.device.decode import combine
from tritonkittens.launch import plain
plain.capability = lambda device: (9, 0)

x, y = torch.empty(64 * N), torch.empty(N)
o, l, out = torch.empty(8, 4, 4, 128), torch.empty(8, 4, 4), torch.empty(1, 32, 1, 128, dtype=torch.bfloat16)
calls = [(scaled, (1,), (x, y, (y, 3), stride, 0.5, True, N), dict(num_warps=1), [8, 8, 8, 4, *([4] if stride != 1 else []), 4]) for stride in (1, 7, 32)]
calls.append((combine, (4, 8, 1), (o, l, out, l, *out.stride(), 4, 4, 1, 128, 4, 128, False), dict(launch_pdl=True), [8] * 4 + [4] * 5))
for kernel, grid, args, options, sizes in calls:
    fake.expect([*sizes, 8, 8])  # and the compiler's scratch memory
    theirs = kernel.fn[grid](*args, **options)
    expected = {k: v for k, v in vars(fake.last).items() if k != "function"}  # each loads the code for itself
    kernel.launcher._driver = fake.driver
    kernel.launcher._codes.clear()
    for _ in range(2):
        kernel[grid](*args)
        assert {k: v for k, v in vars(fake.last).items() if k != "function"} == expected
    (code,) = kernel.launcher._codes.values()
    assert code.compiled.asm["ptx"] == theirs.asm["ptx"], kernel.__name__
print("identical")

times = []
for launch in (lambda: combine.fn[grid](*args, **options), lambda: combine[grid](*args)):
    begun = time.perf_counter()
    for _ in range(int(sys.argv[2])):
        launch()
    times.append((time.perf_counter() - begun) / int(sys.argv[2]) * 1e6)
print("microseconds of the host a launch of combine: Triton %.1f, ours %.1f" % tuple(times))
"""


def test_identical_to_tritons_own_launch(tmp_path):
    """The same code, and the driver gets the same bytes and attributes."""
    done = run_beside_triton(tmp_path, TRITON_SCRIPT, 1)
    assert done.returncode == 0 and "identical" in done.stdout, done.stdout + done.stderr


if __name__ == "__main__":  # python -m tests.test_plain_kernel: the times
    with tempfile.TemporaryDirectory() as folder:
        print(run_beside_triton(Path(folder), TRITON_SCRIPT, 5000).stdout)
