"""Every kernel compiled without a GPU and held to a contract.

Tensor cores in use, nothing spilled or serialised, registers where they were asked for.
"""

import functools
import inspect as python_inspect
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.cases_gemm import NO_OPERANDS
from tests.util import logical_lines, slow, some_slow
from tritonkittens.arch import CHIPS, GPUS, SHARED_RESERVED
from tritonkittens.inspect import _sass, _tools, inspect
from tritonkittens.inspect.cli import registry
from tritonkittens.kernels import attention, gemm
from tritonkittens.kernels.attention.config import Shape, suited
from tritonkittens.kernels.attention.device.decode import AttentionDecode
from tritonkittens.kernels.attention.num_splits import DecodeKind, decode_kernel
from tritonkittens.kernels.gemm.call_plan import unaligned_plan
from tritonkittens.kernels.gemm.device import unaligned_tiles
from tritonkittens.launch import Device
from tritonkittens.launch.recorder import recorded

KERNELS = registry()  # compiled where a test asks for them: all of them take many minutes
# Each kind of kernel once: what `make test` compiles. Others are `slow`.
QUICK = {
    "gemm",
    "gemm_fp8_pingpong",
    "attention_d64_causal",
    "attention_varlen_d128_causal",
    "attention_fp8_d64_causal",
    "attention_dkdv_d64",
    "attention_backward_d128_causal",
    "attention_decode_d64_3_at_once",
}
HOOKS = (
    "setup",
    "load_task",
    "load",
    "load_lagged",
    "start",
    "_softmax",
    "compute_first",
    "compute",
    "compute_last",
    "finish",
)
# Kernels held to all of the contract, what their templates say included; those of `CHECKED` beside them are held to the
# part that needs none
FROM_TEMPLATES = (
    "gemm",
    "gemm_transposed",
    *(f"attention_d{dim}{'_causal' * causal}" for dim in (64, 128) for causal in (False, True)),
    "attention_shifted_d64_causal",
    "attention_shifted_d128_causal",
    "attention_varlen_d128_causal",
    "attention_d64_short",
    "attention_d64_long_causal",
)
WITH_EDGE_LOOP = [
    name
    for name in FROM_TEMPLATES
    if "shifted" in name or "varlen" in name or name in ("attention_d64", "attention_d64_long_causal")
]
# Accesses of shared and local memory by threads: what a loop of tensor-core products should not have
THREAD_MEMORY = ("LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LDG", "STG")
# What a loop needs of it: two numbers (offset, Δ) of each query, which are columns of the accumulators there, two at
# once; in the single pass, where those are added by products, dS, for the other consumer, and dQ on its way to global
# memory
NEEDED = {
    f"attention_{name}d{dim}{'_causal' * causal}": needed
    for causal in (False, True)
    for name, dim, needed in (
        ("dkdv_", 64, {"LDS": 16}),
        ("dkdv_", 128, {"LDS": 16}),
        ("backward_", 64, {"STS": 8, "STSM": 8}),
        ("backward_", 128, {"STS": 8, "STSM": 4}),
    )
}
NEEDED |= {
    f"attention_backward_{name}": NEEDED[f"attention_backward_{name.split('_')[0]}"]
    for name in ("d64_parts", "d128_causal_parts")
}
# of dimensions above 128: an offset or a Δ of each query, and P, which one consumer writes and the other reads
WIDE_KINDS = ("d192_window_softcap", "d256_causal")
NEEDED |= {f"attention_dkdv_{kind}": ({"LDS": 8, "STSM": 4}, {"LDS": 8, "LDSM": 4}) for kind in WIDE_KINDS}
# results of the previous task: four sub-tiles are staged (each place once), and the activation is applied to one there
NEEDED["gemm_user_squared_relu_deferred"] = {"LDS": 1, "STS": 1, "STSM": 16}
NEEDED["attention_decode_lengths_d128"] = {"LDS": 8, "STS": 8}  # of the last block, zeros behind a sequence
# The single pass holds 192 to 224 registers of a thread in accumulators and operands: addresses that a task computes
# once lie in local memory
MOST_SPILLS = {name: 8 for name in NEEDED if "backward" in name}  # in a loop
MOST_SPILLS["attention_backward_d64_causal"] = 14  # of the second consumer, on the diagonal: a block or two of a task
# what a task computes once, too
MOST_SPILLS |= dict.fromkeys(("attention_d64", "attention_d64_long_causal", "attention_varlen_d128_causal"), 2)
MOST_SPILLS["attention_shifted_d128_causal"] = 0  # that only
MOST_SPILLS |= {f"attention_dq_{kind}": 0 for kind in WIDE_KINDS}
CHECKED = (
    *FROM_TEMPLATES,
    *NEEDED,
    "gemm_cluster",
    "gemm_fp8_pingpong",
    "gemm_user_scaled_gelu_epilogue_n",
    *(f"attention_dq_{kind}" for kind in WIDE_KINDS),
    *(
        f"attention_{name}_d{dim}{'_causal' * causal}"
        for name in ("fp8", "dq")
        for dim in (64, 128)
        for causal in (False, True)
    ),
    *(
        f"attention_decode_{name}"
        for name in ("d64", "d128", "d64_3_at_once", "d64_4_at_once", "d64_single", "d64_even")
    ),
)


def each_kind(cases, prefix=""):
    """Cases of a test, each a kernel's name behind the prefix, or a tuple that begins with it: `slow` but for one of
    each kind."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [(pytest.param if prefix + case[0] in QUICK else slow)(*case) for case in tuples]


def graph_of(compiled):
    """The control flow of a compiled kernel's machine code."""
    return _sass.Graph(*_sass.parse(*_tools.disassemble(compiled.asm["cubin"])))


@functools.cache
def graph(name):
    """That of a registered kernel for Hopper, which several tests look at."""
    return graph_of(KERNELS[name]("sm_90a"))


@pytest.mark.parametrize("name", each_kind(CHECKED))
def test_contract_on_hopper(name):
    report = inspect(KERNELS[name]("sm_90a"))
    print(report.table())
    assert report.mma.get("QGMMA" if "fp8" in name else "HGMMA", 0) > 0 and report.wgmma_serialized is False
    assert not report.remarks, "ptxas makes no product wait for another, nor for registers"
    assert name in MOST_SPILLS or report.spill_instructions == report.spill_store_bytes == report.spill_load_bytes == 0
    assert report.shared_bytes <= CHIPS[90].shared_per_block
    stores = "UBLKRED" if name.endswith("_parts") else "UTMASTG"  # sums leave as bytes
    assert report.counts.get("UTMALDG", 0) > 0 and report.counts.get(stores, 0) > 0, "tiles move by TMA"
    assert report.loops
    for loop in report.loops:
        spills = sum(loop.counts.get(i, 0) for i in ("LDL", "STL"))
        assert spills <= MOST_SPILLS.get(name, 0), f"{loop.source}: {spills} spills in the main loop"
        through_memory = {i: n for i, n in loop.counts.items() if i in THREAD_MEMORY and i not in ("LDL", "STL")}
        needed = NEEDED.get(name, {})
        assert through_memory in (needed if isinstance(needed, tuple) else (needed,)), (
            f"{loop.source}: the main loop goes through memory"
        )
    if name not in FROM_TEMPLATES:
        return
    template = KERNELS[name].template
    *consumers, producer = template.registers()
    assert report.reallocation_requested and report.reallocated
    assert [r.registers for r in report.roles] == [*consumers, producer]
    for role in report.roles[:-1]:
        assert role.mma and role.mma["HGMMA"] > 0
    assert not report.roles[-1].mma and report.roles[-1].warps == 1
    looping, loops = sorted(role for loop in report.loops for role in loop.roles), 2 if name in WITH_EDGE_LOOP else 1
    assert looping == sorted([r.name for r in report.roles[:-1]] * loops), (
        "one main loop a consumer, and one for blocks that mask"
    )
    assert report.buffer("input.full").slots == template.placement(90).stages


@pytest.mark.parametrize(
    "name, at_once, registers",
    [
        ("attention_decode_d64", 2, [128, 128]),
        ("attention_decode_d64_3_at_once", 3, [136, 24]),
        slow("attention_decode_d64_4_at_once", 4, [104, 24]),
    ],
)
def test_registers_of_several_thread_blocks(name, at_once, registers):
    """Where an equal share is enough none are moved, by the compiler neither; all thread blocks fit onto a
    multiprocessor."""
    report = inspect(KERNELS[name]("sm_90a"))
    moved = registers[0] != registers[1]
    assert report.reallocation_requested == report.reallocated == moved
    assert report.registers * 256 * at_once <= 65536 and (
        not moved or [role.registers for role in report.roles] == registers
    )


def test_where_each_block_has_one_task_it_neither_loops_nor_divides_for_the_next():
    looping, single = (inspect(KERNELS[f"attention_decode_d64_{name}"]("sm_90a")) for name in ("3_at_once", "single"))
    assert single.counts["MUFU"] < looping.counts["MUFU"], "a division begins with a reciprocal"
    assert single.counts["SYNCS"] < looping.counts["SYNCS"] and len(single.loops) == len(looping.loops) == 1
    assert single.counts["UTMASTG"] == looping.counts["UTMASTG"] and single.mma == looping.mma


def test_decoding_has_one_loop_and_fences_only_where_threads_write():
    """No loop for blocks that mask, which only a sequence's last may; where V is zeroed behind a sequence's end, in the
    loop and behind it, a fence each."""
    assert len(inspect(KERNELS["attention_decode_d64_even"]("sm_90a")).loops) == 1
    fences = {
        name: KERNELS[name]("sm_90a").asm["ptx"].count("fence.proxy.async")
        for name in ("attention_decode_d128", "attention_decode_lengths_d128")
    }
    assert fences["attention_decode_lengths_d128"] == fences["attention_decode_d128"] + 2


@pytest.mark.parametrize(("dim", "at_once"), [slow(64, 0), slow(64, 1), slow(64, 3), (64, 4), (128, 0), slow(128, 1)])
def test_decoding_from_pages_leaves_shared_memory_for_as_many_blocks(dim, at_once):
    """Numbers of pages and of the first task lie beside the tiles, where a reserve is for what is small."""
    kernel = decode_kernel(
        DecodeKind(torch.bfloat16, dim, dim, page_size=16), partial=at_once < 2, blocks_per_sm=at_once
    )
    shapes = dict(
        Q=(4, 8, 4, dim),
        K=(99, 8, 16, dim),
        V=(99, 8, 16, dim),
        O=(4, 8, 1, 4, dim),
        L=(4, 8, 1, 4),
        lengths=(4,),
        pages=(4, 9),
    )
    types = dict(
        O=torch.float32 if kernel.partial else torch.bfloat16, L=torch.float32, lengths=torch.int32, pages=torch.int32
    )
    tensors = [torch.empty(shapes[n], dtype=types.get(n, torch.bfloat16), device="meta") for n in kernel.tensors]
    compiled = kernel.compile(*tensors, scale=1.0, queries=1)
    assert (compiled.metadata.shared + SHARED_RESERVED) * kernel.blocks_per_sm <= CHIPS[90].shared_per_multiprocessor


class Modest(AttentionDecode):
    """Says that fewer registers are enough than the compiler would take."""

    needed_registers = 8


def test_equal_registers_leave_room_for_all_thread_blocks():
    q, k, o = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((4, 8, 4, 128), (4, 8, 4096, 128), (4, 8, 1, 4, 128))
    )
    taken = {}
    for at_once in (1, 2):
        template = Modest(
            head_dim=128,
            value_dim=128,
            tile_n=64,
            stages=2,
            blocks_per_sm=at_once,
            lengths=False,
            partial=False,
            lse=False,
        )
        report = inspect(template.compile(q, k, k, o, scale=1.0, queries=1))
        assert not report.reallocation_requested and not report.reallocated
        taken[at_once] = report.registers
    assert taken[1] > 128 >= taken[2]


@pytest.mark.parametrize("name", ["gemm", "gemm_transposed"])
def test_contract_on_blackwell(name):
    report = inspect(KERNELS[name]("sm_100a"))
    print(report.table())
    assert report.mma.get("UTCHMMA", 0) > 0 and "HMMA" not in report.mma, (
        "the fifth-generation tensor cores and no older ones"
    )
    assert report.spill_instructions == 0
    assert report.shared_bytes <= CHIPS[100].shared_per_block and 0 < report.tensor_columns <= 512
    assert (
        report.counts.get("UTMALDG", 0) > 0 and report.counts.get("UTMASTG", 0) > 0 and report.counts.get("LDTM", 0) > 0
    )


def in_tensor_memory(arch, call, value_dim):
    """What the attention kernel of `call()` compiles to for `arch`. Nothing spills but numbers of threads, where P is
    apart from S: they are stored once, and loaded once a task by the softmax roles."""
    gpu = replace(Device.of_gpu(GPUS["B200"]), capability=divmod(CHIPS[int(arch[3:6])].capability, 10))
    report = inspect(recorded(call, gpu)[-1].compile(arch))
    print(report.table())
    assert report.spill_instructions <= (4 if value_dim <= 64 else 0)
    assert all(report.role(f"softmax{t}").counts.get("LDL", 0) <= 1 for t in range(2))
    assert report.reallocated and report.registers == 128
    assert report.tensor_columns == 512 and report.shared_bytes <= CHIPS[100].shared_per_block
    return report


# (D, D_v, of tiles, causal)
TILES = [(64, 64), (64, 128), (128, 64), (128, 128), (192, 64), (192, 128)]
DIMS = [(*tile, *tile, causal) for tile in TILES for causal in (False, True)] + [(80, 16, 128, 64, True)]


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize("d, d_v, dim, value_dim, causal", some_slow(DIMS, [(128, 128, 128, 128, True)]))
def test_contract_of_attention_in_tensor_memory(d, d_v, dim, value_dim, causal, arch):
    """Per element of a row of scores: one exponential at most, and nothing through shared memory. Nothing spills,
    though the softmax roles hold a row of scores each."""
    x, v = (torch.empty(4, 16, 4096, n, dtype=torch.bfloat16, device="cpu") for n in (d, d_v))
    report = in_tensor_memory(arch, lambda: attention.attention(x, x, v, causal=causal), value_dim)
    # S of two tiles and two products with V, each in the loop over blocks and beside it; 16 of depth an instruction
    assert report.mma == {"UTCHMMA": 4 * (dim + 128) // 16}
    softmax, correct, multiply = (report.role(name).counts for name in ("softmax1", "correct", "multiply"))
    exponentials = 128 if arch == "sm_103a" else 96  # of 128 scores of a row; the others are polynomials
    assert exponentials < softmax["MUFU"] <= exponentials + 4  # the factor of earlier sums, logarithms and quotients
    # a row of S and of P in four parts; the factor, in shared memory where P is apart; the row's share after a task
    apart = value_dim <= 64
    assert (softmax["LDTM"], softmax["STTM"]) == (2, 5 - apart)
    assert not any(softmax.get(name) for name in THREAD_MEMORY if name not in ("STSM", "STS", "STG", "LDL", "STL"))
    assert softmax.get("STSM", 0) + softmax.get("STS", 0) <= 1 + apart
    # per tile the factor, and O in the loop and at the end
    assert (correct["LDTM"], correct["STTM"]) == (2 * (1 - apart + 2 * value_dim // 32), 2 * value_dim // 32)
    assert not any(multiply.get(name) for name in THREAD_MEMORY)


PACKED = [(64, 64, False), (128, 128, True), (192, 128, True)]


@pytest.mark.parametrize("dim, value_dim, softcap", some_slow(PACKED, [(128, 128, True)]))
def test_contract_of_packed_attention_in_tensor_memory(dim, value_dim, softcap):
    """Nothing spills. A soft-cap costs a row of 128 scores an exponential and a quotient each."""
    x, v = (torch.empty(4096, 16, n, dtype=torch.bfloat16, device="meta") for n in (dim, value_dim))
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    given = dict(causal=True, softcap=3.0 if softcap else None)
    report = in_tensor_memory(
        "sm_100a", lambda: attention.attention_varlen(x, x, v, starts, starts, **given), value_dim
    )
    exponentials, found = 96 + 256 * softcap, report.role("softmax1").counts
    assert exponentials < found["MUFU"] <= exponentials + 6
    assert (found["LDTM"], found["STTM"]) == (2, 4 if value_dim <= 64 else 5)


TMEM_BACKWARDS = [(d, d_v, causal) for d, d_v in ((64, 64), (128, 128), (192, 128)) for causal in (False, True)]


def backward_products(dim, value_dim):
    """Instructions, of 16 deep each, of S in the loop over blocks and before it; of dP, one more deep for dPsum, in the
    loop, and where dQ has columns of its own before it; of dV, dK and dQ in the loop. 192 columns take two."""
    queries, columns = (64, 2) if dim > 128 else (128, 1)
    dp = (value_dim // 16 + 1) * (2 if dim == 64 else 1)
    return 2 * dim // 16 + dp + queries // 16 * (1 + columns) + 128 // 16 * columns


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize("dim, value_dim, causal", some_slow(TMEM_BACKWARDS, [(128, 128, True), (192, 128, False)]))
def test_contract_of_the_attention_backward_in_tensor_memory(dim, value_dim, causal, arch):
    """Per element of P: one exponential at most. P and dS pass through no thread's memory. No loop spills; without a
    mask, nothing does up to dimension 128."""
    shapes = ((2, 16, 4096, n) for n in (dim, value_dim))
    x, v = (torch.empty(*n, dtype=torch.bfloat16, device="cpu", requires_grad=True) for n in shapes)
    gpu = replace(Device.of_gpu(GPUS["B200"]), capability=divmod(CHIPS[int(arch[3:6])].capability, 10))

    def backward():
        out = attention.attention(x, x, v, causal=causal)
        torch.autograd.grad(out, x, torch.empty_like(out))

    (launch,) = (launch for launch in recorded(backward, gpu) if launch.name == "attention_backward_tmem")
    compiled = launch.compile(arch)
    report = inspect(compiled)
    print(report.table())
    assert report.mma == {"UTCHMMA": backward_products(dim, value_dim)}
    assert report.reallocated and report.registers == 128
    assert report.tensor_columns == 512 and report.shared_bytes <= CHIPS[100].shared_per_block
    roles = {name: report.role(name).counts for name in ("reduce", "compute0", "compute1", "multiply")}
    for name in ("compute0", "compute1"):
        compute = roles[name]
        parts, width = (1 if dim > 128 else 2), (dim if name == "compute1" else value_dim)
        # of a role's scores of a row; others are polynomials
        assert compute["MUFU"] == parts * (32 if arch == "sm_103a" else 24)
        # parts of S and of dP; dV or dK at the end. Parts of P
        assert (compute["LDTM"], compute["STTM"]) == (2 * parts + width // 32, parts)
        # numbers of L; dS; dV or dK. Two loads of a task's values
        assert (compute["LDS"], compute["STS"]) == (8 * parts + 2, 4 * parts + width // 8)
    assert roles["reduce"]["UTMAREDG"] == {64: 2, 128: 8, 192: 2}[dim]
    assert not any(roles["multiply"].get(name) for name in THREAD_MEMORY if name != "LDS")
    assert report.spill_instructions <= (16 if causal else 6 if dim > 128 else 0)
    control = graph_of(compiled)
    opcodes = {loop: {i.base for block in loop.blocks for i in control.blocks[block]} for loop in control.loops}
    over_blocks = [loop for loop, found in opcodes.items() if {"LDTM", "UTCHMMA"} & found]  # others wait
    inner = [a for a in over_blocks if not any(b.blocks < a.blocks for b in over_blocks)]
    assert len(inner) == 4 and not any({"LDL", "STL"} & opcodes[loop] for loop in inner)


@pytest.mark.parametrize("dim, value_dim, causal", some_slow(TMEM_BACKWARDS, [(64, 64, True)]))
def test_contract_of_the_packed_attention_backward_in_tensor_memory(dim, value_dim, causal):
    """As without packing, but for more instructions that spill outside the loops."""
    shapes = ((4096, 16, n) for n in (dim, value_dim))
    x, v = (torch.empty(*n, dtype=torch.bfloat16, device="cpu", requires_grad=True) for n in shapes)
    starts = torch.empty(9, dtype=torch.int32, device="cpu")

    def backward():
        out = attention.attention_varlen(x, x, v, starts, starts, causal=causal)
        torch.autograd.grad(out, x, torch.empty_like(out))

    launches = recorded(backward, Device.of_gpu(GPUS["B200"]))
    (launch,) = (launch for launch in launches if launch.name == "attention_backward_tmem")
    report = inspect(launch.compile("sm_100a"))
    assert report.mma == {"UTCHMMA": backward_products(dim, value_dim)}
    assert report.tensor_columns == 512 and report.shared_bytes <= CHIPS[100].shared_per_block
    assert report.spill_instructions <= (23 if dim > 128 else 17 if causal else 0)


def test_what_is_streamed_leaves_l2_first():
    """B and the results carry a policy, A does not."""
    ptx = KERNELS["gemm_fp8_pingpong"]("sm_90a").asm["ptx"]
    copies = [line for line in ptx.splitlines() if "cp.async.bulk.tensor" in line]
    loads, stores = (
        [line for line in copies if kind in line]
        for kind in ("shared::cta.global.mbarrier", "global.shared::cta.bulk_group")
    )
    assert len(loads) + len(stores) == len(copies) and loads and stores
    assert sum("L2::cache_hint" in line for line in loads) == len(loads) // 2, (
        "of two tiles that arrive together, the one of B"
    )
    assert all("L2::cache_hint" in line for line in stores)
    assert "createpolicy.fractional.L2::evict_first" in ptx and "evict_last" not in ptx


def test_maxima_run_under_the_product_before_them():
    """Where ptxas waits for P·V decides how much of the softmax runs under it: in front of the maxima it cost the H200
    8 % at dimension 64."""
    control = graph("attention_d64_long_turns")
    assert control.main_loops
    for loop in control.main_loops:
        code = sorted((i for block in loop.blocks for i in control.blocks[block]), key=lambda i: i.address)
        waits = [n for n, i in enumerate(code) if i.opcode == "WARPGROUP.DEPBAR.LE"]
        assert len(waits) == 2, "one for the scores, one for the product"
        assert sum(i.base == "FMNMX" for i in code[slice(*waits)]) >= 36, (
            "the maxima of a row, and of some of the other"
        )


@pytest.mark.parametrize(
    ("name", "scores"),
    each_kind(
        [
            ("backward_d64_causal", 64),
            ("backward_d128_causal", 32),
            ("shifted_d64_causal", 32),
            ("varlen_d128_causal", 64),
            ("d64_long_causal", 64),
        ],
        "attention_",
    ),
)
def test_only_the_loop_of_the_edges_masks(name, scores):
    control = graph(f"attention_{name}")
    selections = sorted(
        sum(i.base == "FSEL" for block in loop.blocks for i in control.blocks[block]) for loop in control.main_loops
    )
    half, most = len(selections) // 2, 2 if name.startswith("backward") else 3
    assert half and max(selections[:half]) <= most and min(selections[half:]) >= scores, (
        "2: rows that have seen no key; 1: a limit of the forward"
    )


@pytest.mark.parametrize("dim", [slow(64), 128])
def test_the_single_pass_masks_in_blocks_of_their_own(dim):
    """Where all keys are seen: without `tk.scheduling_barrier` ptxas chooses by predicates, in 131 of 760 instructions
    at dimension 64."""
    control = graph(f"attention_backward_d{dim}_causal")
    for loop in control.main_loops:
        blocks = [[i.base for i in control.blocks[block]] for block in loop.blocks]
        assert not any("FSEL" in block and "HGMMA" in block for block in blocks)


LAZY = (
    "d64",
    "d64_causal",
    "d64_long_causal",
    "d128",
    "d128_causal",
    "shifted_d64_causal",
    "shifted_d128_causal",
    "varlen_d128_causal",
)
# the largest scores of every block
KNOWING = ("d64_short", *(f"fp8_d{dim}{'_causal' * causal}" for dim in (64, 128) for causal in (False, True)))
FORWARDS = (*LAZY, *KNOWING)


@pytest.mark.parametrize("name", each_kind([*FORWARDS, "dq_d64_causal"], "attention_"))
def test_what_the_loop_carries_is_packed_once(name):
    """With `tk.cast` ptxas packed weights the wrong way round and turned around all 32 registers again, in front of the
    product that waits for them; 8-bit ones it took apart and put together in 200 of 650 instructions."""
    control = graph(f"attention_{name}")
    assert control.main_loops
    for loop in control.main_loops:
        assert not any(i.base == "PRMT" for block in loop.blocks for i in control.blocks[block])


@pytest.mark.parametrize("name", each_kind(KNOWING, "attention_"))
def test_sums_are_scaled_under_the_exponentials(name):
    """Where the factor of what was summed before is needed last, ptxas scales the output behind the last exponential:
    64 multiplications an iteration, at dimension 128, that nothing hides. (Of bytes, half of them are still there.)"""
    control = graph(f"attention_{name}")
    assert control.main_loops
    for loop in control.main_loops:
        bases = [i.base for block in sorted(loop.blocks) for i in control.blocks[block]]
        last = len(bases) - 1 - bases[::-1].index("MUFU")
        scaled, most = bases.count("FMUL"), 0.5 if name.startswith("fp8") else 0
        assert scaled >= 32 and bases[last:].count("FMUL") <= most * scaled


def loops_of(name):
    """Of each main loop of a kernel, how often each of its blocks has an operation."""
    control = graph(f"attention_{name}")
    assert control.main_loops
    return [[Counter(i.base for i in control.blocks[block]) for block in loop.blocks] for loop in control.main_loops]


@pytest.mark.parametrize("name", each_kind(LAZY, "attention_"))
def test_outputs_are_scaled_in_a_branch(name):
    for blocks in loops_of(name):
        scaled = [block for block in blocks if block["FMUL"] >= 32]
        assert len(scaled) == 1 and not scaled[0].keys() & {"HGMMA", "QGMMA", "WARPGROUP", "MUFU", "FADD"}
        assert all(block["FMUL"] <= 4 for block in blocks if block not in scaled)


@pytest.mark.parametrize("name", each_kind(LAZY, "attention_"))
def test_largest_scores_are_looked_for_in_a_branch(name):
    """What every iteration does has no maxima, and exponentials that wait for none."""
    for blocks in loops_of(name):
        maxima, waits = ([block for block in blocks if block[base]] for base in ("FMNMX", "WARPGROUP"))
        assert len(maxima) == 1 and maxima[0]["FMNMX"] >= 32 and not maxima[0].keys() & {"HGMMA", "WARPGROUP", "BAR"}
        assert any(block["MUFU"] >= 32 for block in waits)


SPILLS_IN_LOOPS = [("d64", 0), ("d64_causal", 13), ("d128", 0), ("d128_causal", 0)]


@pytest.mark.parametrize("name, spills", each_kind(SPILLS_IN_LOOPS, "attention_backward_"))
def test_the_single_pass_has_descriptors_in_uniform_registers(name, spills):
    """What depends on the number of an iteration may be in vector registers: it was 57 moves to uniform ones an
    iteration at dimension 64, 60 at 128, and spills in the loop."""
    control = graph(f"attention_backward_{name}")
    assert control.main_loops
    for loop in control.main_loops:
        found = [i.base for block in loop.blocks for i in control.blocks[block]]
        assert found.count("R2UR") == 0 and found.count("LDL") <= spills


def test_scores_of_any_number_of_keys_are_one_wgmma():
    """Of 176, as FlashAttention-3 has them at head dimension 128."""
    x = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    wide = attention.forward(
        torch.bfloat16, 128, 128, False, False, False, False, False, attention.Config(tile_n=176, epilogue_n=64)
    )
    control = graph_of(wide.compile(x, x, x, x, scale=1.0, arch="sm_90a"))
    assert control.main_loops
    for loop in control.main_loops:
        found = [i.opcode for block in loop.blocks for i in control.blocks[block]]
        assert (
            sum(i.startswith("HGMMA.64x176x16") for i in found) == 8
            and sum(i.startswith("HGMMA.64x128x16") for i in found) == 11
        )


# consumers x keys of a block x CTAs an SM of the forwards that need most registers, among those that the model chooses
WIDEST_FORWARDS = [
    (96, 96, "1x64x3"),
    (128, 128, "3x64x1"),
    (128, 128, "1x64x2"),
    (160, 160, "1x48x2"),
    (160, 160, "2x128x1"),
    (192, 192, "2x96x1"),
    (192, 160, "1x48x2"),
    (256, 256, "2x64x1"),
    (256, 256, "1x64x1"),
]


@pytest.mark.parametrize("dim, value_dim, name", some_slow(WIDEST_FORWARDS, WIDEST_FORWARDS[:1]))
def test_forwards_that_the_model_may_choose_compile_without_spills(dim, value_dim, name):
    """With a soft-cap and a mask, where the model lists them for a mask: ptxas refuses a kernel whose registers do not
    suffice."""
    found = {}
    for length, causal, window in ((200, False, None), (4096, True, None), (4096, False, (100, 0))):
        shape = Shape(dim, value_dim, 2, length, length, 64, causal, window, softcap=True)
        found |= {f"{c.consumers}x{c.tile_n}x{c.blocks_per_sm}": (c, shape) for c in suited(shape, 132)}
    config, shape = found[name]
    forward = attention.forward(torch.bfloat16, dim, value_dim, *shape.features, shape.causal, True, config)
    q = torch.empty(4, 16, 4096, dim, dtype=torch.bfloat16, device="meta")
    v, lse = q.new_empty(4, 16, 4096, value_dim), q.new_empty(4, 16, 4096, dtype=torch.float32)
    window = {} if shape.window is None else dict(left=100, right=0)
    control = graph_of(forward.compile(q, q, v, v, lse, scale=1.0, squash=1.0, **window, arch="sm_90a"))
    assert control.main_loops
    for loop in control.main_loops:
        assert not any(i.base in ("LDL", "STL") for block in loop.blocks for i in control.blocks[block])


def unaligned_kernels(rows, transposed):
    """(tiles that are chosen, opcodes of every kernel of the product): of odd rows, against a matrix or its
    transpose."""
    a, b = torch.empty(rows, 4097, dtype=torch.bfloat16), torch.empty(4095, 4097, dtype=torch.bfloat16)
    b, out = b.T if transposed else b.view(4097, 4095), torch.empty(rows, 4095, dtype=torch.bfloat16)
    tiles = unaligned_tiles.chosen(rows, 4095, 4097, b.stride(), slots=132)
    plan = unaligned_plan(a, b, NO_OPERANDS, None, out.dtype, {}, out, tiles)
    found = plan.compile(a, b, NO_OPERANDS, out)
    return tiles, [[i.opcode for blocks in graph_of(kernel).blocks for i in blocks] for kernel in found]


def words_copied(tiles, found, of_step):
    """Asynchronous copies: all have 16 bytes, and a thread makes as many a step as it has of so many elements."""
    copies = [opcode for opcode in found if opcode.startswith("LDGSTS")]
    assert all(opcode.endswith(".128") for opcode in copies)
    return len(copies) == tiles.stages * of_step // 8 // (32 * tiles.warps) if tiles.stages > 1 else not copies


@pytest.mark.parametrize("transposed", [True, slow(False)])
def test_a_row_that_begins_anywhere_is_read_in_words(transposed):
    """By `gemm` without a copy: 16 bytes a thread and load, in front of the loop and in it; by asynchronous copies
    where words lie along K."""
    tiles, (found,) = unaligned_kernels(1, transposed)
    words = tiles.cols * tiles.depth // 8 // (32 * tiles.warps)  # of a thread and tile
    assert tiles.wide and words_copied(tiles, found, tiles.cols * tiles.depth)
    assert sum(opcode.startswith("LDG.E.128") for opcode in found) >= (2 * words if tiles.stages == 1 else 0)


@pytest.mark.parametrize(
    "rows, transposed", [(48, False), (100, True), slow(48, True), slow(16, True), slow(100, False)]
)
def test_packed_rows_pass_through_asynchronous_copies(rows, transposed):
    """As words of B do. wgmma waits once a step; the product of the ends comes after the loop."""
    tiles, (pack, product, *add) = unaligned_kernels(rows, transposed)
    assert words_copied(tiles, product, (tiles.rows + tiles.cols) * tiles.depth)
    assert any(opcode.startswith("STG.E.128") for opcode in pack)
    assert all(any(opcode.startswith("LDG.E.128") for opcode in kernel) for kernel in add)
    if tiles.rows >= 64:
        assert sum(opcode.startswith("HGMMA") for opcode in product) == tiles.depth // 16 + 1
        assert sum(opcode.startswith("WARPGROUP.ARRIVE") for opcode in product) == 2


def lines(cls, names):
    """Lines of methods and hooks, the decorator's included: a statement is one, however the formatter wraps it."""
    functions = [vars(cls)[n] for n in names if n in vars(cls)]
    return sum(logical_lines(python_inspect.getsource(getattr(f, "fn", f))) for f in functions)


SHORT = [
    pytest.param(gemm.Gemm, HOOKS, 40, id="gemm"),
    pytest.param(attention.AttentionForward, ("layout", *HOOKS), 80, id="attention"),
]


@pytest.mark.parametrize("cls, names, most", SHORT)
def test_kernels_stay_short(cls, names, most):
    """No longer than ThunderKittens': about 40 lines of hooks for its GEMM, about 80 with the layout for its
    attention."""
    assert 0 < lines(cls, names) <= most
