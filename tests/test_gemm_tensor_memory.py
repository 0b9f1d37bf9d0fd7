"""`gemm` on a simulated chip with tensor memory, against float64."""

import pytest
import torch

import tritonkittens.lang as tk
from tests.util import poison, slow
from tritonkittens import sim
from tritonkittens.kernels.gemm import Config, gemm

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
PAIR = Config(tile_m=128, tile_n=128, consumers=1, cluster=2)
# (what is fixed, the options of `product`); else the operator chooses
CASES = [
    (None, {}),
    (Config(tile_m=128, tile_n=64, consumers=2), dict(batch=3, residual=True)),
    (PAIR, dict(bias=True, a_km=True)),
    (Config(tile_m=128, tile_n=64, consumers=1, schedule="split_k", splits=3), dict(k=512, activation="silu")),
    slow(Config(tile_m=128, tile_n=128, consumers=1, swap_ab=True, epilogue_n=32), dict(residual=True, b_nk=True)),
    slow(Config(tile_m=128, tile_n=64, consumers=1, schedule="launch_control"), dict(batch=2)),
    slow(Config(tile_m=128, tile_n=128, consumers=1, cluster=2, schedule="launch_control"), dict(b_nk=True)),
    slow(Config(tile_m=128, tile_n=128, consumers=1, cluster=2, schedule="split_tail"), dict(k=256)),
    slow(Config(tile_m=128, tile_n=64, consumers=1, schedule="stream_k"), dict(k=512)),
    slow(Config(tile_m=128, tile_n=64, consumers=1, schedule="cluster_split_k", splits=2), dict(k=512, bias=True)),
    slow(Config(), {}),  # Hopper's default
    slow(Config(tile_m=128, tile_n=128, pingpong=True), {}),
    slow(Config(epilogue_n=64, deferred_epilogue=True), dict(residual=True)),
    slow(None, dict(dtype=E4M3, b_nk=True)),
    slow(PAIR, dict(dtype=E4M3, b_nk=True)),
    slow(PAIR, dict(dtype=FP16, accumulate="fp16")),
]


def product(config, *, dtype=BF16, batch=None, k=104, a_km=False, b_nk=False, activation=None, **options):
    """Check a random product of ragged extents."""
    m, n, k = 296, 200, 112 if dtype == E4M3 else k
    lead = () if batch is None else (batch,)
    accumulate = options.pop("accumulate", "fp32")
    wide = FP16 if dtype == FP16 else BF16

    def operand(rows, cols, transposed):
        x = torch.randn(*lead, *((cols, rows) if transposed else (rows, cols))).to(dtype)
        return x.mT if transposed else x

    a, b = operand(m, k, a_km), operand(k, n, b_nk)
    terms = {}
    if options.get("bias"):
        terms["bias"] = torch.randn(n).to(wide)
    if options.get("residual"):
        terms["residual"] = torch.randn(*lead, m, n).to(wide)
    out = poison(torch.empty(*lead, m, n, dtype=wide))
    with sim.device("sm_100a"):
        gemm(a, b, out=out, config=config, activation=activation, accumulate=accumulate, out_dtype=wide, **terms)
    exact = a.double() @ b.double() + terms.get("bias", torch.zeros(())).double()
    exact = torch.nn.functional.silu(exact) if activation else exact
    exact = exact + terms.get("residual", torch.zeros(())).double()
    assert ((out.double() - exact).norm() / exact.norm()) < (2e-2 if accumulate == "fp16" else 4e-3)


@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_products_are_those_of_float64(config, options):
    product(config, **options)


def test_pairs_are_formed_where_a_configuration_has_clusters_of_two():
    x = torch.empty(512, 512, dtype=BF16)
    from tritonkittens.kernels.gemm.device.gemm import Gemm

    assert Gemm(tile_m=128, tile_n=128, consumers=1, cluster=2).pairs(100)
    ptx = Gemm(tile_m=128, tile_n=128, consumers=1, cluster=2).compile(x, x, x, arch="sm_103a").asm["ptx"]
    assert "tcgen05.mma.cta_group::2.kind::f16" in ptx
    # a square tile of B, 128 bytes of K: 8-bit numbers have K along the columns
    square = dict(tile_m=128, tile_n=128, consumers=1, cluster=2, b_stored_nk=True)
    assert Gemm(**square, tile_k=128, dtype=tk.fp8e4m3).pairs(100) and not Gemm(**square, tile_k=128).pairs(100)


def test_launch_control_needs_blackwell():
    x = torch.randn(64, 64).bfloat16()
    needs = "ClusterLaunchControl .clusterlaunchcontrol.try_cancel. needs sm_100 or newer"
    with sim.device("sm_90a"), pytest.raises(tk.ArchitectureError, match=needs):
        gemm(x, x, config=Config(schedule="launch_control"))
