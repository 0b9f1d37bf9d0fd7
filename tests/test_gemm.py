"""`gemm` before any kernel runs: its errors, its configurations, what the cost model says of them, its reference, and
how long its source is."""

import ast
import inspect
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import tritonkittens.lang as tk
from tests.cases_gemm import BF16, E4M3, E5M2, FP16, FP32, SMALL, problem
from tests.util import logical_lines, slow
from tritonkittens import sim, tune
from tritonkittens.kernels.gemm import Config, Gemm, family, gemm, gemm_torch, interface, tune_gemm
from tritonkittens.kernels.gemm.call_plan import described
from tritonkittens.kernels.gemm.candidates import candidates
from tritonkittens.kernels.gemm.choice import alike
from tritonkittens.kernels.gemm.cost_model import cost
from tritonkittens.kernels.gemm.device.blockwise import BlockwiseGemm
from tritonkittens.kernels.gemm.device.epilogue import ACTIVATIONS as OF_KERNELS
from tritonkittens.kernels.gemm.device.epilogue import Operand, Steps
from tritonkittens.kernels.gemm.reference import ACTIVATIONS as OF_REFERENCE
from tritonkittens.kernels.gemm.reference import activated, activation_gradient


def empty(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype)


RESIDUAL, GATE = Operand("residual", "staged", "bf16"), Operand("gate", "col", "bf16")  # of a template's epilogue

# ---------------------------------------------------------------- errors

A, B = empty(8, 16), empty(16, 24)
A8, B8 = empty(8, 256, dtype=E4M3), empty(24, 256, dtype=E4M3).T
ACTIVATIONS = "must be one of None, 'gelu', 'gelu_tanh', 'silu'"
VECTORS = "torch.bfloat16 or torch.float16 or torch.float32"
OPERANDS = "torch.bfloat16 or torch.float16 or torch.float8_e4m3fn or torch.float8_e5m2"
BLOCKS = "block scales are for two fp8 matrices and come together, (8, 2) and (2, 1) here"

ERRORS = [
    (dict(a=[[1.0]]), TypeError, "gemm: a is list; it must be a torch tensor"),
    (dict(a=None), TypeError, "gemm: a is NoneType; it must be a torch tensor"),
    (dict(b=3), TypeError, "gemm: b is int; it must be a torch tensor"),
    (dict(bias=1.0), TypeError, "gemm: bias is float; it must be a torch tensor"),
    (dict(gate="gelu"), TypeError, "gemm: gate is str; it must be a torch tensor"),
    (dict(residual=[0]), TypeError, "gemm: residual is list; it must be a torch tensor"),
    (dict(scale_a=1.0), TypeError, "gemm: scale_a is float; it must be a torch tensor"),
    (dict(scale_b=1.0), TypeError, "gemm: scale_b is float; it must be a torch tensor"),
    (dict(out=()), TypeError, "gemm: out is tuple; it must be a torch tensor"),
    (dict(a=empty(8, 16, dtype=FP32)), TypeError, f"gemm: a has dtype torch.float32; it must be {OPERANDS}"),
    (dict(b=empty(16, 24, dtype=torch.int8)), TypeError, f"gemm: b has dtype torch.int8; it must be {OPERANDS}"),
    (
        dict(b=empty(16, 24, dtype=FP16)),
        TypeError,
        "gemm: a has dtype torch.bfloat16, b torch.float16; they must be equal (fp8 kinds may mix)",
    ),
    (
        dict(a=empty(8, 16, dtype=E5M2)),
        TypeError,
        "gemm: a has dtype torch.float8_e5m2, b torch.bfloat16; they must be equal (fp8 kinds may mix)",
    ),
    (dict(b=empty(16, 24).to("meta")), ValueError, "gemm: b is on meta; it must be on a CUDA device"),
    (dict(a=empty(16)), ValueError, "gemm: a has shape (16,); it must have at least 2 dimensions"),
    (dict(b=empty(16)), ValueError, "gemm: b has shape (16,); it must have at least 2 dimensions"),
    (dict(b=empty(15, 24)), ValueError, "gemm: a is (8, 16), b is (15, 24); they must be (…, M, K) and (…, K, N)"),
    (
        dict(a=empty(3, 8, 16), b=empty(2, 16, 24)),
        ValueError,
        "gemm: a is (3, 8, 16), b is (2, 16, 24); their leading dimensions do not broadcast",
    ),
    (dict(activation="relu"), ValueError, f"gemm(activation='relu'): {ACTIVATIONS}"),
    (dict(activation=["gelu"]), ValueError, f"gemm(activation=['gelu']): {ACTIVATIONS}"),
    (
        dict(out_dtype=torch.float64),
        TypeError,
        "gemm(out_dtype=torch.float64): must be torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, "
        "torch.float8_e5m2",
    ),
    (dict(out_dtype="bf16"), TypeError, "gemm(out_dtype=bf16): must be"),
    (dict(bias=empty(23)), ValueError, "gemm: bias is (23,); it must be one number or (24,), (1, 24)"),
    (dict(bias=empty(8, 1)), ValueError, "gemm: bias is (8, 1); it must be one number or (24,), (1, 24)"),
    (dict(bias=empty(24, dtype=torch.float64)), TypeError, f"gemm: bias has dtype torch.float64; it must be {VECTORS}"),
    (dict(gate=empty(8)), ValueError, "gemm: gate is (8,); it must be one number or (24,), (1, 24), (8, 1), (8, 24)"),
    (dict(gate=empty(8, dtype=torch.int32)), TypeError, f"gemm: gate has dtype torch.int32; it must be {VECTORS}"),
    (dict(residual=empty(24)), ValueError, "gemm: a is (8, 16), b is (16, 24), residual is (24,); it must be (8, 24)"),
    (
        dict(residual=empty(8, 24, dtype=FP32)),
        TypeError,
        "gemm: residual has dtype torch.float32; it must be torch.bfloat16",
    ),
    (
        dict(residual=empty(8, 24), out_dtype=FP16),
        TypeError,
        "gemm: residual has dtype torch.bfloat16; it must be torch.float16",
    ),
    (dict(out=empty(8, 25)), ValueError, "gemm: a is (8, 16), b is (16, 24), out is (8, 25); it must be (8, 24)"),
    (dict(out=empty(8, 24, dtype=FP32)), TypeError, "gemm: out has dtype torch.float32; it must be torch.bfloat16"),
    (dict(out=empty(8, 24), out_dtype=FP32), TypeError, "gemm: out has dtype torch.bfloat16; it must be torch.float32"),
    (dict(scale_a=empty(8)), TypeError, "gemm: scale_a has dtype torch.bfloat16; it must be torch.float32"),
    (
        dict(scale_a=empty(24, dtype=FP32)),
        ValueError,
        "gemm: scale_a is (24,); it must be one number or (8,), (8, 1), (8, 1)",
    ),
    (
        dict(scale_b=empty(8, dtype=FP32)),
        ValueError,
        "gemm: scale_b is (8,); it must be one number or (24,), (1, 24), (1, 1)",
    ),
    (
        dict(a=A8, b=B8, scale_a=empty(8, 2, dtype=FP32)),
        ValueError,
        f"gemm: scale_a is (8, 2), scale_b is None; {BLOCKS}",
    ),
    (
        dict(a=A8, b=B8, scale_b=empty(2, 1, dtype=FP32)),
        ValueError,
        f"gemm: scale_a is None, scale_b is (2, 1); {BLOCKS}",
    ),
    (
        dict(a=A8, b=B8, scale_a=empty(8, 1, dtype=FP32), scale_b=empty(2, 1, dtype=FP32)),
        ValueError,
        f"gemm: scale_a is (8, 1), scale_b is (2, 1); {BLOCKS}",
    ),
    (
        dict(a=A8.to(BF16), b=B8.to(BF16), scale_a=empty(8, 2, dtype=FP32), scale_b=empty(2, 1, dtype=FP32)),
        ValueError,
        BLOCKS,
    ),
    (dict(config="fastest"), TypeError, "gemm(config='fastest'): must be a Config"),
    (dict(config=dict(tile_m=64)), TypeError, "gemm(config={'tile_m': 64}): must be a Config"),
]


@pytest.mark.parametrize(
    ("given", "kind", "message"), ERRORS, ids=[f"{'-'.join(e[0])}-{i}" for i, e in enumerate(ERRORS)]
)
def test_errors(given, kind, message):
    arguments = {"a": A, "b": B, **given}
    with sim.device("sm_90a"), pytest.raises(kind, match=re.escape(message)):
        gemm(**arguments)


def test_errors_also_where_a_call_like_it_was_right():
    with sim.device("sm_90a"):
        out = empty(8, 24)
        gemm(A, B, out=out, config=SMALL)
        for given, kind in (
            (dict(residual=empty(8, 23)), ValueError),
            (dict(gate=empty(9)), ValueError),
            (dict(scale_b=empty(24)), TypeError),
        ):
            with pytest.raises(kind):
                gemm(A, B, out=out, config=SMALL, **given)


def test_tensors_that_no_kernel_reaches():
    a, b = empty(8, 8), empty(8, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="on cpu"):
            gemm(a, b, config=SMALL)
        with sim.device("sm_90a"):
            gemm(a, b, config=SMALL)


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            dict(schedule="fast"),
            "Config(schedule='fast'): must be one of 'persistent', 'one_per_block', 'launch_control', 'split_k', "
            "'cluster_split_k', 'split_tail', 'stream_k'",
        ),
        (dict(order="hilbert"), "Config(order='hilbert'): must be one of 'supergroup', 'row_major', 'column_major'"),
        (
            dict(splits=2),
            "Config(schedule='persistent', splits=2): schedules 'split_k' and 'cluster_split_k' take 2 to 16 splits, "
            "the others 1",
        ),
        (
            dict(schedule="split_k"),
            "Config(schedule='split_k', splits=1): schedules 'split_k' and 'cluster_split_k' take 2 to 16 splits, the "
            "others 1",
        ),
        (
            dict(schedule="split_k", splits=17),
            "Config(schedule='split_k', splits=17): schedules 'split_k' and 'cluster_split_k' take 2 to 16 splits, "
            "the others 1",
        ),
        *(
            (
                dict(schedule="cluster_split_k", splits=splits, **knobs),
                f"Config(schedule='cluster_split_k', splits={splits}, tile_n={knobs.get('tile_n', 256)}, "
                f"cluster={knobs.get('cluster', 1)}, "
                f"pingpong={knobs.get('pingpong', False)}): 2, 4 or 8 blocks of a cluster finish a multiple of 16 "
                "columns each; that needs cluster=1 and ",
            )
            for splits, knobs in (
                (3, {}),
                (16, {}),
                (4, dict(tile_n=32)),
                (2, dict(cluster=2)),
                (2, dict(pingpong=True)),
            )
        ),
        (
            dict(schedule="cluster_split_k", splits=4, epilogue_n=48),
            "Config(epilogue_n=48, tile_n=64): sub-tiles must divide the columns",
        ),
        (dict(epilogue_n=48), "Config(epilogue_n=48, tile_n=256): sub-tiles must divide the columns"),
        (dict(epilogue_n=0), "Config(epilogue_n=0, tile_n=256): sub-tiles must divide the columns"),
        (
            dict(deferred_epilogue=True),
            "Config(deferred_epilogue=True, epilogue_n=None, schedule='persistent'): results that wait in registers "
            "leave in sub-tiles, of tasks that a block ",
        ),
        (
            dict(deferred_epilogue=True, epilogue_n=16, schedule="cluster_split_k", splits=2),
            "Config(deferred_epilogue=True, epilogue_n=16, schedule='cluster_split_k'): results that wait",
        ),
        (
            dict(splits=0),
            "Config(schedule='persistent', splits=0): schedules 'split_k' and 'cluster_split_k' take 2 to 16 splits, "
            "the others 1",
        ),
    ],
)
def test_configurations_that_are_none(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**given)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_candidates_fit_where_a_residual_comes_with_an_activation(activation, scaled):
    """Results in fp32 take most; the problem does not say that there is a residual, which is staged whole where its
    sub-tiles are an odd number."""
    a, b = (empty(512, 512, dtype=E4M3 if scaled else BF16) for _ in range(2))
    scaling = dict(scale_a=empty(512, 4, dtype=FP32), scale_b=empty(4, 4, dtype=FP32)) if scaled else {}
    with sim.device("sm_90a"):
        vectors = dict(bias=empty(512, dtype=FP32), gate=empty(1, 512, dtype=FP32))
        plan = described(
            a, b.T, activation=activation, residual=empty(512, 512, dtype=FP32), out_dtype=FP32, **vectors, **scaling
        )
        for config in candidates(plan.problem, H200):
            assert plan._template(config, torch.device("cpu")).placement(90).stages >= 1


@pytest.mark.parametrize(
    "arch, parts",
    [("sm_90a", 8), ("sm_100a", 2), slow("sm_90a", 2), slow("sm_90a", 4), slow("sm_100a", 4), slow("sm_100a", 8)],
)
def test_products_that_clusters_share_fit(parts, arch):
    x = torch.empty(512, 512, dtype=BF16)
    Gemm(tile_n=128, schedule=tk.ClusterSplitK(parts), b_stored_nk=True).compile(x, x, x, arch=arch)


def test_tiles_that_run_all_at_once_have_no_order():
    """What a kernel computes before its first copy takes as long as some of its products."""
    small, large = problem(m=1024, n=1024, k=1024), problem(m=4096, n=4096, k=1024)
    assert Config(tile_n=64).ordering(small, 50 << 20) == tk.RowMajor() and Config(tile_n=64, group=2).ordering(
        small, 50 << 20
    ) == tk.Supergroup(2)
    assert Config(tile_n=64).ordering(large, 50 << 20) == tk.Supergroup(8)
    assert Config(tile_n=64, order="column_major").ordering(small, 50 << 20) == tk.ColumnMajor()


@pytest.mark.parametrize("template", [Gemm, BlockwiseGemm])
def test_widths_of_sub_tiles_that_are_refused(template):
    with pytest.raises(tk.TileError, match=rf"{template.__name__}\(epilogue_n=48\): must divide its 256 columns"):
        template(tile_n=256, epilogue_n=48)
    with pytest.raises(
        tk.TileError,
        match=rf"{template.__name__}\(epilogue_n=64\): a residual needs an even number of sub-tiles; 192 columns have "
        "3",
    ):
        template(tile_n=192, epilogue_n=64, epilogue=Steps.built_in(residual=RESIDUAL))


def test_results_that_cannot_be_deferred():
    why = "deferred results need epilogue_n, and with a residual a schedule that splits no task"
    for knobs, shown in (
        (dict(), "epilogue_n=None, schedule=Persistent()"),
        (
            dict(epilogue_n=64, epilogue=Steps.built_in(residual=RESIDUAL), schedule=tk.SplitTail()),
            "epilogue_n=64, schedule=SplitTail()",
        ),
    ):
        with pytest.raises(tk.TileError, match=re.escape(f"Gemm(deferred_epilogue=True, {shown}): {why}")):
            Gemm(deferred_epilogue=True, **knobs)
    config = Config(epilogue_n=64, deferred_epilogue=True)
    assert [config.defers(False, size) for size in (1, 2, 4)] == [True, True, False] and [
        config.defers(True, size) for size in (1, 2, 4)
    ] == [False, True, False]
    assert not Config(epilogue_n=64).defers(False, 2)
    assert not replace(config, tile_n=192).defers(True, 2) and not replace(config, schedule="split_tail").defers(
        True, 2
    )


@pytest.mark.parametrize(
    "epilogue, out, steps",
    [
        (Steps.built_in(activation="gelu"), tk.bf16, 4),
        (Steps.built_in(activation="silu", bias=Operand("bias", "col", "bf16")), tk.bf16, 4),
        (Steps.built_in(), tk.bf16, 0),
        (Steps.built_in(activation="gelu"), tk.fp16, 0),
        (Steps.built_in(activation="silu", gate=Operand("gate", "col", "bf16")), tk.bf16, 0),
        (Steps.built_in(activation="silu", residual=RESIDUAL), tk.bf16, 0),
    ],
)
def test_where_the_activation_is_applied_to_deferred_results(epilogue, out, steps):
    assert Gemm(epilogue=epilogue, out_dtype=out, epilogue_n=64, deferred_epilogue=True).activation_steps == steps
    assert Gemm(
        epilogue=epilogue, out_dtype=out, epilogue_n=16, tile_m=64, tile_n=64, deferred_epilogue=True
    ).activation_steps == bool(steps)
    uneven = Gemm(epilogue=epilogue, out_dtype=out, tile_n=192, epilogue_n=48, deferred_epilogue=not epilogue.residual)
    assert uneven.activation_steps == 0, "its tiles are no single piece"
    assert Gemm(epilogue=epilogue, out_dtype=out, epilogue_n=64).activation_steps == 0
    # whose rows are two swizzle lines
    assert Gemm(epilogue=epilogue, out_dtype=out, epilogue_n=128, deferred_epilogue=True).activation_steps == 0


@pytest.mark.parametrize(
    "late, gate, more",
    [
        (True, GATE, {}),
        (False, Operand("gate", "col", "fp32"), {}),
        (False, Operand("gate", "row", "bf16"), {}),
        (False, None, {}),
        (False, GATE, dict(out_dtype=tk.fp16)),
        (False, GATE, dict(c_stored_nm=True)),
        (False, GATE, dict(tile_n=192, epilogue_n=48)),
        (False, GATE, dict(deferred_epilogue=False)),
    ],
)
def test_where_deferred_results_are_multiplied_by_a_gate(late, gate, more):
    """A gate that comes with the residual is not among what the producer loads for `defer_results`."""
    gemm = Gemm(
        **{
            **dict(
                epilogue=Steps.built_in(bias=Operand("bias", "col", "bf16"), gate=gate, residual=RESIDUAL),
                epilogue_n=64,
                deferred_epilogue=True,
            ),
            **more,
        }
    )
    assert gemm.gates_late == late and ("gate" in gemm._plan.epilogue_reloads) == late
    loads = gemm._plan.epilogue_loads
    assert ("gate" in loads) == (not late and gate is not None and gate.place == "col") and "bias" in loads


def test_rows_of_a_consumer_that_are_no_power_of_two():
    with pytest.raises(tk.TileError, match=r"Gemm\(tile_m=96\): a consumer's rows must be a power of two"):
        Gemm(tile_m=96, consumers=1)


@pytest.mark.parametrize("stored_nk, cols", [(True, 112), slow(True, 160), (False, 192)])
def test_four_consumers_whose_columns_are_no_power_of_two(stored_nk, cols):
    """A block of five warpgroups starts with 96 registers a thread: an instruction of more columns than 128 does not
    compile, one of each piece does."""
    x = torch.empty(512, 512, dtype=BF16, device="meta")
    Gemm(consumers=4, tile_n=cols, epilogue_n=16, b_stored_nk=stored_nk).compile(x, x, x, arch="sm_90a")


@pytest.mark.parametrize("arch, copies", [("sm_90a", 4), ("sm_100a", 3)])
def test_what_clusters_load_of_a_tile_in_pieces(arch, copies):
    """176 rows lie one after the other on Hopper: one block loads 64 + 16 of them, the other 64 + 32. Elsewhere 128, 32
    and 16 lie for themselves: both load 64 and 16 of the first two, and one the last."""
    x = torch.empty(512, 512, dtype=BF16, device="meta")
    ptx = Gemm(consumers=1, tile_n=176, cluster=2, b_stored_nk=True).compile(x, x, x, arch=arch).asm["ptx"]
    assert sum("cp.async.bulk" in line and "multicast::cluster" in line for line in ptx.splitlines()) == copies


@pytest.mark.parametrize(
    ("knobs", "of_a", "of_b"),
    [
        (dict(cluster=2), 2, 3),
        (dict(tile_n=192), 2, 6),
        (dict(consumers=3, tile_n=192, cluster=2, epilogue_n=32), 6, 5),
    ],
)
def test_all_copies_of_b_are_streamed(knobs, of_a, of_b):
    """Also those that blocks make together, and those of columns that are no power of two."""
    x = torch.empty(512, 512, dtype=BF16, device="meta")
    lines = Gemm(cache_hint="evict_first", **knobs).compile(x, x, x, arch="sm_90a").asm["ptx"].splitlines()
    loads = [line for line in lines if "cp.async.bulk.tensor" in line and "mbarrier" in line]
    hinted = ["L2::cache_hint" in line for line in loads]
    assert (hinted.count(False), hinted.count(True)) == (of_a, of_b)
    assert all(hint for line, hint in zip(loads, hinted) if "multicast" in line)


def test_blocks_of_a_cluster_meet_once_and_load_their_first_input_alone():
    """A barrier at the end would have every thread wait until all that it wrote is visible on the device: 0.3 µs. The
    first input waits for no other block."""
    x = torch.empty(512, 512, dtype=BF16, device="meta")
    compiled = Gemm(consumers=1, tile_n=128, cluster=2).compile(x, x, x, arch="sm_90a")
    ptx = compiled.asm["ptx"]
    # roles
    assert (
        "barrier.cluster.arrive.release" not in ptx
        and ptx.count("barrier.cluster.arrive.relaxed") == ptx.count("barrier.cluster.wait") == 3
    )
    first, meeting = ptx.index("cp.async.bulk.tensor"), ptx.index("barrier.cluster")
    assert first < meeting and "multicast::cluster" not in ptx[:meeting] and "multicast::cluster" in ptx[meeting:]


def test_a_tile_is_what_a_cluster_computes():
    assert (
        Config().tile == (128, 256)
        and Config(pingpong=True).tile == (64, 256)
        and Config(cluster=2, consumers=1, tile_n=64).tile == (128, 64)
    )
    assert Config().k_of(2) == 64 and Config().k_of(1) == 128 and Config(tile_k=32).k_of(2) == 32


EXTENTS = st.one_of(st.sampled_from([1, 2, 8, 63, 64, 65, 512, 4096]), st.integers(1, 9000))
EPILOGUES = st.sampled_from(["", "vector", "tile", "silu", "gelu_tanh", "gelu"])
H200, B200 = tune.Device.named("H200"), tune.Device.named("B200")


@st.composite
def calls(draw):
    """Operands of a `gemm` as keywords; memory that nobody touches."""
    m, n, k = (draw(EXTENTS) for _ in range(3))
    dtype, out = draw(st.sampled_from([BF16, FP16, E4M3, E5M2])), draw(st.sampled_from([BF16, FP32, E4M3]))
    batch = draw(st.sampled_from([(), (), (3,)]))
    a, b = (
        empty(*batch, m, k, dtype=dtype),
        empty(*batch, n, k, dtype=dtype).mT if draw(st.booleans()) else empty(*batch, k, n, dtype=dtype),
    )
    given = dict(a=a, b=b, out_dtype=out, activation=draw(st.sampled_from([None, "silu"])))
    if dtype == E4M3 and not batch and draw(st.booleans()):
        given |= dict(scale_a=empty(m, -(-k // 128), dtype=FP32), scale_b=empty(-(-k // 128), -(-n // 128), dtype=FP32))
    for name, shape in (("bias", (n,)), ("gate", (*batch, m, n)), ("residual", (*batch, m, n))):
        if draw(st.booleans()):
            given[name] = empty(*shape, dtype=out if name == "residual" else FP32)
    return given


@settings(max_examples=25, deadline=None)
@given(calls())
def test_candidates_fit_and_cost_something(call):
    """In shared memory as the template places them, with the stages that they need; and the model can tell their
    time."""
    if call["out_dtype"] == E4M3 and "residual" in call:
        del call["residual"]
    with sim.device("sm_90a"):
        plan = described(**call)
        found = candidates(plan.problem, H200)
        assert found and len(set(found)) == len(found)
        for config in found:
            template = plan._template(config, torch.device("cpu"))
            assert template.placement(90).stages >= 1
            predicted = cost(plan.problem, config, H200)
            assert all(0 <= seconds < 1e3 for seconds in predicted.components().values()) and predicted.total > 0


@settings(max_examples=100, deadline=None)
@given(
    m=EXTENTS,
    n=EXTENTS,
    k=EXTENTS,
    epilogue=EPILOGUES,
    a=st.sampled_from(["mk", "km"]),
    b=st.sampled_from(["kn", "nk"]),
)
def test_what_is_chosen_for_blackwell_fits_in_tensor_memory(m, n, k, epilogue, a, b):
    chosen = family.choose(problem(m=m, n=n, k=k, epilogue=epilogue, a=a, b=b), device=B200)
    assert chosen.consumers * chosen.tile_n <= 512


def test_three_consumers_have_no_room_for_their_sums_in_tensor_memory():
    it = problem(m=4104, n=4104, k=4104, b="nk")
    tall = [config for config in candidates(it, H200) if config.consumers == 3 and config.tile_n > 170]
    assert tall and all(
        cost(it, config, B200).total == math.inf and cost(it, config, H200).total < 1 for config in tall
    )
    x = torch.empty(512, 512, dtype=BF16)
    with pytest.raises(tk.TileError, match="tensor memory over budget: 576 columns of 512"):
        Gemm(consumers=3, tile_n=192, epilogue_n=32, b_stored_nk=True).compile(x, x, x, arch="sm_100a")


@settings(max_examples=200, deadline=None)
@given(
    m=EXTENTS,
    n=EXTENTS,
    k=EXTENTS,
    more=st.integers(1, 5000),
    epilogue=EPILOGUES,
    dtype=st.sampled_from(["bf16", "fp8e4nv"]),
)
def test_more_work_costs_no_less(m, n, k, more, epilogue, dtype):
    """Of one configuration in one raster order. Not so for more rows or columns where the last tasks are split: fewer
    of them have more parts. Nor where a cluster shares a task: more tasks of a GPC read the same rows or columns."""
    # rows that begin inside a cache line cost more than a few elements
    m, n, k, more = (128 * -(-x // 128) for x in (m, n, k, more))
    before = problem(m=m, n=n, k=k, b="nk", epilogue=epilogue, dtype=dtype)
    for config in (*candidates(before, H200), Config(schedule="stream_k")):
        known, order = cost(before, config, H200).total, config.ordering(before, H200.l2_bytes)
        for extent in ("m", "n", "k", "batch"):
            after = before._replace(**{extent: getattr(before, extent) + more})
            alike = extent == "k" or config.schedule not in ("split_tail", "stream_k", "cluster_split_k")
            if alike and config.ordering(after, H200.l2_bytes) == order:
                assert cost(after, config, H200).total >= known * (1 - 1e-9), (config, extent)


def test_the_model_prefers_what_it_should():
    """Blocks that have much of a large product, in one tile or two; parts of a task on several blocks where there are
    few tasks and each is long."""

    def best(**extents):
        it = problem(b="nk", **extents)
        return min(candidates(it, H200), key=lambda config: cost(it, config, H200).total)

    large = best(m=8192, n=8192, k=8192)
    rows, cols = large.tile
    assert rows * cols * (large.consumers if large.pingpong else 1) >= 128 * 192
    assert best(m=128, n=128, k=16384).schedule in ("split_k", "split_tail", "stream_k")


NT, NN, TN = dict(b="nk"), dict(), dict(a="km")
NARROW, WIDE = dict(tile_n=192, epilogue_n=64, deferred_epilogue=True), dict(epilogue_n=64, deferred_epilogue=True)


@pytest.mark.parametrize(
    "stored, config, microseconds",
    [
        (NT, dict(NARROW), 94.2),
        (NT, dict(NARROW, cluster=2), 92.3),
        (NT, dict(WIDE, group=8), 94.9),
        (NT, dict(WIDE, cluster=4), 95.2),
        (NN, dict(NARROW), 117.1),
        (NN, dict(NARROW, cluster=2), 94.3),
        (NN, dict(WIDE, group=8), 114.1),
        (NN, dict(WIDE, cluster=4), 95.9),
        (TN, dict(NARROW), 129.8),
        (TN, dict(NARROW, cluster=2), 99.9),
        (TN, dict(WIDE, group=8), 123.0),
        (TN, dict(WIDE, cluster=4), 98.2),
    ],
)
def test_the_model_knows_what_rows_cost_that_begin_inside_a_line_or_a_sector(stored, config, microseconds):
    """3000 × 5000 × 2000, as an H200 has measured it (docs/notes/gemm.md)."""
    assert cost(problem(m=3000, n=5000, k=2000, **stored), Config(**config), H200).total * 1e6 == pytest.approx(
        microseconds, rel=0.13
    )


@pytest.mark.parametrize("stored", [NN, TN], ids=["NN", "TN"])
@pytest.mark.parametrize("m, n, k", [(3000, 5000, 2008), (5000, 5000, 5000), (2504, 8200, 4104), (4104, 12344, 1000)])
def test_blocks_share_operands_whose_rows_begin_inside_a_sector(m, n, k, stored):
    it = problem(m=m, n=n, k=k, **stored)
    assert min(candidates(it, H200), key=lambda config: cost(it, config, H200).total).cluster > 1


@pytest.mark.parametrize("m, n, k", [(8192, 8192, 8192), (10240, 6144, 5120), (16384, 5120, 8192), (5120, 25600, 8192)])
def test_consumers_of_products_at_the_power_limit_share_tiles(m, n, k):
    it = problem(m=m, n=n, k=k, b="nk")
    assert not min(candidates(it, H200), key=lambda config: cost(it, config, H200).total).pingpong


def test_every_kind_of_operand_has_candidates():
    with sim.device("sm_90a"):
        for dtype in (BF16, FP16, E4M3, E5M2):
            plan = described(empty(64, 64, dtype=dtype), empty(64, 64, dtype=dtype).T)
            assert family.choose(plan.problem, device=tune.Device.named("H200")) in candidates(plan.problem, H200)


def test_the_choice_explains_itself():
    it = problem(m=4096, n=4096, k=4096)
    report = family.explain(it, H200)
    chosen = family.choose(it, device=H200)
    assert (
        report.config == chosen.__dict__
        and report.rows[0].config == report.config
        and len(report.rows) == len(candidates(it, H200))
    )
    assert (
        f"tile_n={chosen.tile_n}" in str(report)
        and f"schedule={chosen.schedule}" in str(report)
        and "m=4096 n=4096 k=4096" in str(report)
    )


def test_a_product_is_computed_like_one_that_was_measured():
    """Of the H200's table: in fp16, with operands stored otherwise, with an epilogue; but not in fp8, or of other
    extents."""
    known = problem(m=512, n=1024, k=4096, b="nk")
    winner = family.choose(known, device=H200)
    assert family.explain(known, H200).source == "table"
    for change in (
        dict(dtype="fp16", out="fp16"),
        dict(out="fp16"),
        dict(b="kn"),
        dict(b="kn", epilogue="gelu"),
        dict(epilogue="tile"),
    ):
        report = family.explain(known._replace(**change), H200)
        assert report.source == "alike" and report.config == winner.__dict__, (change, report.reason)
        assert (
            report.reason
            == "Won when " + tune.report.plain(known._asdict()) + " was measured, which is computed alike."
        )
    for change in (dict(dtype="fp8e4nv"), dict(k=4104), dict(batch=2), dict(out="fp32")):
        assert family.explain(known._replace(**change), H200).source in ("model", "nearest"), change
    others = [*alike(known._replace(epilogue="silu"))]
    assert (
        known._replace(epilogue="silu") not in others
        and len(set(others)) == len(others)
        and others[0].epilogue == "silu"
        and known in others
    )


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("name", ["relu", "GELU", "", "gelu_fast"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, name: gemm(x, x, activation=name),
        lambda x, name: gemm_torch(x, x, activation=name),
        lambda x, name: activated(x, name),
        lambda x, name: activation_gradient(x, x, name),
        lambda x, name: Steps.built_in(activation=name),
    ],
    ids=["gemm", "gemm_torch", "activated", "activation_gradient", "Steps"],
)
def test_an_unknown_activation_is_refused_everywhere(call, name):
    with sim.device(), pytest.raises(ValueError, match=re.escape(f"gemm(activation={name!r}): {ACTIVATIONS}")):
        call(torch.randn(64, 64, dtype=torch.bfloat16), name)


def test_the_kernel_and_the_reference_have_the_same_activations():
    assert tuple(OF_KERNELS) == OF_REFERENCE


def test_the_model_refuses_an_unknown_epilogue():
    known = "must be one of '', 'vector', 'tile', 'silu', 'gelu_tanh', 'gelu'"
    with pytest.raises(ValueError, match=re.escape(f"Problem(epilogue='relu'): {known}")):
        cost(problem(m=512, n=512, k=512, epilogue="relu"), Config(), H200)


@pytest.mark.parametrize("call", [gemm, tune_gemm])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
def test_a_gpu_without_tma_is_refused_as_any_kernel_of_it(call, arch):
    needs = "needs sm_90a (Hopper), sm_100a or sm_103a (Blackwell data centre)"
    message = f"Gemm (TMA, warp roles) {needs}; this kernel is compiled for {arch.rstrip('a')}"
    with sim.device(arch), pytest.raises(tk.ArchitectureError, match=re.escape(message)):
        call(*torch.zeros(2, 64, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("m, n, k", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_empty_matrices_are_not_measured(m, n, k):
    a, b = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(k, n, dtype=torch.bfloat16)
    message = f"tune_gemm: a is {(m, k)}, b is {(k, n)}; no kernel multiplies empty matrices"
    with sim.device():
        with pytest.raises(ValueError, match=re.escape(message)):
            tune_gemm(a, b)
        assert torch.equal(gemm(a, b, tune=True), torch.zeros(m, n, dtype=torch.bfloat16))


def test_only_products_whose_kernel_has_configurations_are_measured(monkeypatch):
    tuned = []
    monkeypatch.setattr(interface, "_tuned", {})
    monkeypatch.setattr(interface, "_may_measure", lambda device: True)
    monkeypatch.setattr(interface, "tune_gemm", lambda a, b, **options: tuned.append((a, b)))
    monkeypatch.setattr(interface, "product", lambda *_: None)
    monkeypatch.setattr(family, "is_measured", lambda *_: False)
    a, b = torch.randn(40, 96, dtype=torch.float16), torch.randn(96, 80, dtype=torch.float16)
    odd = a[:, :91].contiguous(), b[:91]  # read by ordinary loads, which sum up in fp32
    with sim.device():
        for left, right, options in ((a, b, {}), (*odd, {}), (*odd, dict(accumulate="fp16"))):
            for _ in range(2):
                gemm(left, right, tune=True, **options)
        with pytest.raises(ValueError, match=re.escape("out is (); it must be (40, 80)")):
            gemm(*odd, out=torch.empty((), dtype=torch.float16), tune=True)
    assert [(x.shape, y.shape) for x, y in tuned] == [(a.shape, b.shape), (odd[0].shape, odd[1].shape)]


def test_the_reference_is_torchs_arithmetic(rng):
    a, w, bias, gate, residual = (
        torch.randn(s, dtype=torch.float64) for s in ((8, 16), (24, 16), (24,), (8, 1), (8, 24))
    )
    total = functional.linear(a, w, bias)
    functions = {
        None: lambda x: x,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    for name, function in functions.items():
        out = gemm_torch(a, w.T, bias=bias, activation=name, gate=gate, residual=residual)
        torch.testing.assert_close(out, residual + gate * function(total))
    scale_a, scale_b = torch.rand(8, 1), torch.rand(1, 24)
    torch.testing.assert_close(gemm_torch(a, w.T, scale_a=scale_a, scale_b=scale_b), a @ w.T * scale_a * scale_b)
    assert gemm_torch(a.bfloat16(), w.bfloat16().T).dtype == torch.float64


def test_the_reference_scales_blocks(rng):
    a, b = torch.randn(3, 300, dtype=torch.float64), torch.randn(300, 200, dtype=torch.float64)
    scale_a, scale_b = torch.rand(3, 3), torch.rand(3, 2)
    expected = torch.zeros(3, 200, dtype=torch.float64)
    for block in range(3):
        depth = slice(128 * block, 128 * (block + 1))
        for column in range(2):
            cols = slice(128 * column, 128 * (column + 1))
            expected[:, cols] += a[:, depth] @ b[depth, cols] * scale_a[:, block, None] * scale_b[block, column]
    torch.testing.assert_close(gemm_torch(a, b, scale_a=scale_a, scale_b=scale_b), expected)


# ---------------------------------------------------------------- the source


def hooks(cls):
    """The @triton.jit functions of a template's class body."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    return [
        f
        for f in body.body
        if isinstance(f, ast.FunctionDef) and any(ast.unparse(d) == "triton.jit" for d in f.decorator_list)
    ]


def test_the_hooks_are_no_longer_than_those_of_thunderkittens():
    """About 40 lines there, signatures included. A statement is a line, however the formatter wraps it."""
    found = hooks(Gemm)
    assert {"setup", "load", "start", "compute", "finish"} <= {f.name for f in found}
    lines = {f.name: logical_lines(ast.unparse(f)) - len(f.decorator_list) for f in found}
    assert sum(lines.values()) <= 40, lines
