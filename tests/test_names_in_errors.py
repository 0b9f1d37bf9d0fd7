"""Errors of a launch name the tensor as the user does."""

import re
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.test_template_memory import Exchanged
from tests.util import meta, refused
from tritonkittens import sim
from tritonkittens.launch.arguments import leaves
from tritonkittens.launch.plain import plain_kernel
from tritonkittens.testing import has_gpu


class Pair(NamedTuple):
    first: object
    second: object


@tk.kernel
@triton.jit
def copies(X, PAIR, n):
    tk.store(PAIR.first, tk.load(X, tk.rv(tk.fp32, 16), (0,)), (0,))
    tk.store(PAIR.second, tk.load(X, tk.rv(tk.fp32, 16), (n,)), (0,))


@plain_kernel
@triton.jit
def scaled(X, n, Y):
    tl.store(Y, tl.load(X) * n)


def message(run, kind=Exception):
    with pytest.raises(kind) as error:
        run()
    return str(error.value)


BF16 = torch.zeros(128, 64).bfloat16()
ON_CPU = (
    "a tensor on cpu (shape {}, {}); kernels take tensors on cuda, or on the CPU in the simulator (`with "
    "tritonkittens.sim.device():`)"
)


@pytest.mark.skipif(
    has_gpu(), reason="kernels take CPU tensors nowhere but in the simulator; messages are the same with a GPU"
)
def test_a_tensor_on_the_cpu_is_called_by_its_name_and_the_simulator_is_mentioned():
    x = torch.zeros(16)
    assert message(lambda: Exchanged()(BF16, BF16), ValueError) == "X: " + ON_CPU.format("(128, 64)", "torch.bfloat16")
    g = tk.gl(x)
    assert message(lambda: copies[(1,)](g, Pair(g, g), 0), ValueError) == "X: " + ON_CPU.format(
        "(16,)", "torch.float32"
    )
    assert message(lambda: scaled[(1,)](x, 1, x), ValueError) == "X: " + ON_CPU.format("(16,)", "torch.float32")


def test_a_tensor_elsewhere_than_the_simulator_is_called_by_its_name():
    x, elsewhere = torch.zeros(16), tk.gl(meta(16, dtype=torch.float32))
    g = tk.gl(x)
    with sim.device():
        with refused("Y: a tensor on meta (shape (128, 64), torch.bfloat16); kernels take tensors on cpu", ValueError):
            Exchanged()(BF16, meta(128, 64))
        with refused(
            "PAIR.second: a tensor on meta (shape (16,), torch.float32); kernels take tensors on cpu", ValueError
        ):
            copies[(1,)](g, Pair(g, elsewhere), 0)
        with refused("Y: a tensor on meta", ValueError):  # though 1 is compiled in
            scaled[(1,)](x, 1, elsewhere.tensor)
        with refused("Exchanged: grid (2147483648,); its extent along x must lie in 0 to 2147483647", ValueError):
            Exchanged()(BF16, BF16, blocks=1 << 31)


def test_a_tensor_that_tma_cannot_address_is_called_by_its_name():
    odd = meta(128, 71)[:, :64]
    assert message(lambda: Exchanged().compile(meta(128, 64), odd), ValueError).startswith(
        "Y: shape (128, 64), strides (71, 1), 2-byte elements: stride 71"
    )
    with sim.device():
        assert re.match(
            r"Y: shape \(128, 64\), strides \(71, 1\)",
            message(lambda: Exchanged()(BF16, torch.zeros(128, 71).bfloat16()[:, :64])),
        )


def test_a_dtype_that_tiles_do_not_hold_is_called_by_its_name():
    known = "tiles hold fp32, bf16, fp16, fp8e4m3, fp8e5m2, int8, uint8, int32, int64"
    with refused(f"Exchanged: X: gl of torch.float64: {known}"):
        Exchanged()(BF16.double(), BF16)
    with refused("Exchanged: Y: gl of fp32 with st(bf16, 128, 64): the tile's element type must be the tensor's"):
        Exchanged()(BF16, BF16.float())
    g = tk.gl(torch.zeros(16))
    with refused(f"PAIR: torch.float64: {known}"):
        copies.compile(g, Pair(g, torch.zeros(16).double()), 0)


def test_names_of_nested_arguments():
    g = torch.zeros(1)
    args = ((g, Pair(g, (g,))), tk.gl(g).plain(), g)
    assert [name for name, value in leaves(args, ("A", "B")) if value is g] == [
        "A[0]",
        "A[1].first",
        "A[1].second[0]",
        "B",
        "argument 2",
    ]
    assert [name for name, _ in leaves(args[:1], (("P", "Q"),))] == ["P", "Q.first", "Q.second[0]"]
