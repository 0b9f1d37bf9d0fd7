import pytest, torch
from tests.cases_gemm import BF16, E4M3, check, matrix, randn, scales
from tests.util import poison
from tritonkittens import sim
from tritonkittens.kernels.gemm import Config, gemm
C = {"a": (dict(cols=64, panel=16, stages=2, in_turn=True), 200), "b": (dict(cols=64, panel=16, stages=2, in_turn=True, together=4), 1100), "z": (dict(cols=128, panel=16, stages=2, in_turn=True, together=2), 0), "y": (dict(cols=128, panel=32, stages=3, in_turn=True, together=4), 3000), "c": (dict(cols=128, panel=16, stages=2, in_turn=True, together=2), 1100),
     "d": (dict(cols=64, panel=16, stages=2, in_turn=True, together=2, cluster=2), 1100), "e": (dict(cols=64, panel=16, stages=2, in_turn=True, together=2, schedule="split_tail"), 300)}
@pytest.mark.parametrize("name", C)
def test_products(name, rng, monkeypatch):
    knobs, k = C[name]
    import tritonkittens.launch as launch
    m, n = 300, 136
    a, b = (x.cpu() for x in (randn(m, k), matrix(k, n, transposed=False)))
    bias = randn(n).cpu()
    out = poison(torch.empty(m, n, dtype=BF16))
    result = sim.explore(lambda: gemm(a, b, out=out, config=Config(**knobs), bias=bias), schedules=6, multiprocessors=2)
    check(out, a, b, name, bias=bias)
