"""Thousands of random products against float64: no further from it than cuBLAS on the same operands."""

from dataclasses import replace

import pytest
import torch

from tests.cases_gemm import BF16, E4M3, FP16, FP32, HALF_ULP, KINDS, matrix, randn, rounded_before
from tests.util import DEVICE
from tritonkittens.kernels.gemm import family, gemm
from tritonkittens.kernels.gemm.call_plan import described
from tritonkittens.kernels.gemm.reference import epilogue

pytestmark = pytest.mark.gpu

PROBLEMS, LARGEST = 134, 2048  # of each sort: 2,546 in all
AT_ONCE = 77  # products between two synchronisations
# kernels of a sort that the default may compile; products that would need another take the fixed configuration of their
# kind
DEFAULT_KERNELS = 2
SLACK = 2.0**-18  # of the sums of magnitudes: another order of summation

# dtype, A and B transposed?, batch, operands of the epilogue, activation, configuration. Each is one kernel, whatever
# the extents.
SORTS = [
    (BF16, False, True, (), ("bias",), None, "two consumers"),
    (BF16, False, False, (), (), None, "cluster"),
    (BF16, True, False, (), ("residual",), None, "pingpong"),
    (BF16, True, True, (), (), None, "split_tail"),
    (BF16, False, True, (), ("bias", "gate_col"), "silu", "swap_ab"),
    (BF16, False, True, (), ("bias",), "silu", "deferred"),
    (BF16, False, True, (), ("bias", "gate_col", "residual"), None, "deferred"),
    (E4M3, False, True, (), (), None, "deferred, split_tail"),
    (BF16, False, True, (), (), None, "split_k"),
    (BF16, False, True, (), ("bias", "residual"), None, "cluster_split_k"),
    (BF16, False, False, (3,), ("residual", "gate_tile"), None, "two consumers"),
    (BF16, False, True, (), ("bias", "residual"), "gelu", "sub-tiles, pingpong"),
    (FP16, False, True, (), ("bias",), "gelu_tanh", "small"),
    (FP16, True, False, (), ("gate_row", "residual"), None, "stream_k"),
    (FP16, False, False, (2,), ("bias",), "gelu", "one_per_block"),
    (E4M3, False, True, (), (), None, "two consumers"),
    (E4M3, False, True, (), ("residual",), None, "sub-tiles, pingpong"),
    (E4M3, False, True, (), ("bias",), None, "swap_ab"),
    (E4M3, False, True, (), ("residual",), None, "streamed"),
]


def extent(rng, multiple=1):
    """Log-uniform from 1 to LARGEST."""
    return -(-round(LARGEST ** rng.random()) // multiple) * multiple


def operands_of(names, batch, m, n, dtype):
    made = {}
    for name in names:
        kind, _, place = name.partition("_")
        shape = {
            "bias": (n,),
            "residual": (*batch, m, n),
            "gate": {"col": (n,), "row": (m, 1)}.get(place, (*batch, m, n)),
        }[kind]
        made[kind] = randn(*shape, dtype=dtype)
    return made


def by_torch(a, b, activation, operands):
    """cuBLAS, and the epilogue in fp32 before anything is rounded where cuBLAS gives fp32 sums of these operands (of 16
    bits it gives them rounded)."""
    if a.dtype == E4M3:
        one = torch.ones((), device=a.device)
        total = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)
    else:
        total = a @ b
    return epilogue(total.to(FP32), operands.get("bias"), activation, operands.get("gate"), operands.get("residual"))


def errors(out, ref):
    difference = out.double() - ref
    return torch.stack([difference.norm(), difference.abs().max()])


def try_one(rng, sort, default_kernels):
    """One product; what it was, the errors of ours, and what they may be."""
    dtype, a_transposed, b_transposed, batch, names, activation, kind = sort
    # cuBLAS takes no other fp8
    m, n, k = extent(rng), extent(rng, 16 if dtype == E4M3 else 1), extent(rng, 16 if dtype == E4M3 else 1)
    result = BF16 if dtype == E4M3 else dtype
    if batch:
        a, b = randn(*batch, m, k, dtype=dtype), randn(*batch, k, n, dtype=dtype)
    else:
        a, b = matrix(m, k, dtype, a_transposed), matrix(k, n, dtype, b_transposed)
    operands = operands_of(names, batch, m, n, result)
    config = replace(KINDS[kind], group=4)  # a supergroup chosen by the extents would be a kernel of its own
    if rng.random() < 0.5:
        plan = described(a, b, activation=activation, **operands)
        kernel = plan._template(family.choose(plan.problem, device=a.device), a.device)
        if kernel in default_kernels or len(default_kernels) < DEFAULT_KERNELS:
            default_kernels.add(kernel)
            config = None
    out = gemm(a, b, activation=activation, config=config, **operands)
    exact = [a.double(), b.double()]
    sums = exact[0] @ exact[1]
    ref = epilogue(sums, operands.get("bias"), activation, operands.get("gate"), operands.get("residual"))
    magnitude = epilogue(
        exact[0].abs() @ exact[1].abs(),
        None,
        None,
        *(x if x is None else x.abs() for x in (operands.get("gate"), None)),
    )
    theirs, rounded = errors(by_torch(a, b, activation, operands).to(result), ref), errors(ref.to(result), ref)
    allowed = 1.5 * torch.maximum(theirs, rounded) + SLACK * torch.stack([magnitude.norm(), magnitude.max()])
    if KINDS[kind].deferred_epilogue:
        allowed += HALF_ULP[result] * errors(rounded_before(sums, activation=activation, **operands), 0)
    what = f"{dtype} {m}×{n}×{k} batch={batch} transposed={a_transposed, b_transposed} {names} {activation} {config}"
    return what, errors(out, ref), allowed


@pytest.mark.parametrize("sort", SORTS, ids=str)
def test_random_products(rng, sort):
    """The largest error and the norm of all, each against cuBLAS' and one rounding's."""
    default_kernels: set = set()
    failures = []
    for done in range(0, PROBLEMS, AT_ONCE):
        tried = [try_one(rng, sort, default_kernels) for _ in range(min(AT_ONCE, PROBLEMS - done))]
        ours, allowed = (torch.stack([t[i] for t in tried]).cpu() for i in (1, 2))
        failures += [
            f"{tried[i][0]}: {ours[i].tolist()}, allowed {allowed[i].tolist()}"
            for i in (~(ours <= allowed)).any(1).nonzero().flatten().tolist()
        ]
    assert not failures, f"{len(failures)} of {PROBLEMS} on {DEVICE}:\n" + "\n".join(failures[:20])
