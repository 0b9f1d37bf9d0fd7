"""What tests of a few rows of recurrences share: calls of each function, and comparisons with its recurrence."""

import torch

from tests import cases_gated_delta, cases_linear_attention, cases_mamba
from tests.cases_linear_attention import BF16, FP16, FP32, near
from tests.util import DEVICE, drawn
from tritonkittens.kernels.gated_delta_net import gated_delta_rule, gated_delta_rule_torch
from tritonkittens.kernels.linear_attention import linear_attention, linear_attention_torch
from tritonkittens.kernels.mamba2 import mamba_chunk_scan, mamba_chunk_scan_torch

BOUNDS = {BF16: 4.5e-3, FP16: 5.5e-4}  # results are rounded once; a fast silu of bf16 has an error of 5e-4
STATE_BOUND = 1e-5  # logarithms and exponentials of a GPU are approximate
FUNCTIONS = {
    "decays": (linear_attention, linear_attention_torch),
    "gates": (linear_attention, linear_attention_torch),
    "no gates": (linear_attention, linear_attention_torch),
    "delta": (gated_delta_rule, gated_delta_rule_torch),
    "mamba": (mamba_chunk_scan, mamba_chunk_scan_torch),
}
OF_ROWS = ("q", "k", "v", "g", "beta", "x", "dt", "B", "C", "z")


def operands(name, batch, rows, heads, keys, values, group=1, dtype=BF16, state=True, gates=FP32, options="all"):
    """Arguments by name. group: heads of v for each of q and k, where the function has such."""
    if name == "mamba":
        kind = dict(groups=heads, dtype=dtype, steps=gates, options=options, state=state)
        return cases_mamba.operands(batch, rows, heads * group, (values, keys), **kind)
    if name == "delta":
        given = cases_gated_delta.operands(batch, rows, heads, keys, values, group, dtype, gates=gates, state=state)
        return dict(zip(("q", "k", "v", "g", "beta", "initial_state"), given, strict=True))
    q, k, v, decay, before = cases_linear_attention.operands(batch, rows, heads, keys, values, dtype, state=state)
    of_gates = dict(decay=decay) if name == "decays" else {}
    if name == "gates":
        of_gates = dict(g=-torch.rand(batch, rows, heads, device=DEVICE).to(gates))
    return dict(q=q, k=k, v=v, **of_gates, initial_state=before)


def run(name, given, final=True):
    function = FUNCTIONS[name][0]
    return function(**given, **{"return_final_states" if name == "mamba" else "output_final_state": final})


def state_of(name, state):
    """The argument of the states before."""
    return {"initial_states" if name == "mamba" else "initial_state": state}


def some_rows(given, rows):
    return {n: x[:, rows] if n in OF_ROWS and x is not None else x for n, x in given.items()}


def check(name, given):
    """The result and the state after, against the recurrence in float64."""
    found, expected = run(name, given), FUNCTIONS[name][1](**given)
    first = given["x" if name == "mamba" else "q"]
    assert found[0].dtype == first.dtype and found[1].dtype == FP32
    near("result", found[0], expected[0], BOUNDS[first.dtype], 0.1 * found[0].numel() ** 0.5)
    near("state", found[1], expected[1], STATE_BOUND, 0.1 * found[1].numel() ** 0.5)
    return found


# function, columns of keys and values, heads of v for each of k, dtypes of rows and gates, options of Mamba-2
SORTS = [
    ("delta", 64, 64, 2, BF16, FP32, None),
    ("mamba", 16, 40, 2, FP16, FP32, "all"),
    ("gates", 128, 64, 1, BF16, FP32, None),
    ("decays", 16, 24, 1, FP16, FP32, None),
    ("mamba", 128, 64, 3, BF16, BF16, "D of columns"),
    ("no gates", 40, 72, 1, BF16, FP32, None),
    ("delta", 128, 128, 1, FP16, BF16, None),
    ("gates", 24, 16, 1, FP16, FP16, None),
    ("mamba", 64, 64, 1, FP16, FP32, "z"),
    ("mamba", 40, 24, 2, BF16, FP16, "plain"),
]


def random_call(seed):
    """(name of a function, arguments)."""
    draw, (name, keys, values, group, dtype, gates, options) = drawn(seed, SORTS)
    sizes = draw.randint(0 if draw.random() < 0.1 else 1, 3), draw.randint(1, 8), draw.randint(1, 2)
    kind = dict(dtype=dtype, state=draw.random() < 0.8, gates=gates, options=options)
    return name, operands(name, *sizes, keys, values, group, **kind)
