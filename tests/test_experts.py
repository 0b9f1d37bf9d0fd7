"""Mixtures of experts as torch sees them, their modules, their machine code, and what they refuse."""

import contextlib
import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.cases_experts import BF16, FP32, choices_of, operands
from tests.util import assert_wide_offsets, explored, refused, relative_error, slow
from tritonkittens import sim
from tritonkittens.inspect import _sass, _tools
from tritonkittens.kernels.experts import (
    backward_operator,
    combine_operator,
    combine_tokens,
    experts,
    experts_torch,
    gather_operator,
    gather_tokens,
    interface,
    route,
)
from tritonkittens.kernels.experts.inspection import inspectable
from tritonkittens.nn import Experts, GroupedLinear, MixtureOfExperts


@pytest.fixture(autouse=True)
def inputs_of_the_simulator(monkeypatch):
    """These tests simulate, also where there is a GPU."""
    monkeypatch.setattr("tests.cases_experts.DEVICE", "cpu")


@explored(1, 20)
def test_interleavings_of_programs(schedules):
    x, routing = torch.randn(9, 40), route(choices_of(9, 2, 3, elsewhere=1), 3)
    leaves = [x.requires_grad_(), torch.rand(9, 2).requires_grad_()]

    def run():
        y = combine_tokens(gather_tokens(leaves[0], routing), leaves[1], routing)
        torch.autograd.grad(y.sum(), leaves)

    sim.explore(run, schedules=schedules)


# ---------------------------------------------------------------- as torch sees them


def test_torch_compile_sees_operators():
    x, index, *rest = operands(9, 2, 3, 32, 16, BF16)
    with sim.device():
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        results = [function(x, index, *rest) for function in (experts, compiled)]
        gradients = [torch.autograd.grad(y.float().square().sum(), [x, *rest]) for y in results]
    for a, b in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        assert torch.equal(a, b)


def test_opcheck():
    x, weights = torch.randn(9, 40, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    routing, y = route(choices_of(9, 2, 3), 3), torch.randn(18, 40, requires_grad=True)
    with sim.device():
        for operator, args in (
            (gather_operator, (x, *routing)),
            (combine_operator, (y, weights, *routing)),
            (combine_operator, (y, None, *routing)),
            (backward_operator, (x.detach(), y.detach(), weights.detach(), *routing[:2])),
        ):
            torch.library.opcheck(
                operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
            )


def test_transforms_of_functions():
    routing, y, weights = route(choices_of(9, 2, 3), 3), torch.randn(2, 18, 40), torch.rand(9, 2)
    with sim.device():
        found = torch.vmap(lambda t: combine_tokens(t, weights, routing))(y)
        each = torch.stack([combine_tokens(t, weights, routing) for t in y])
    assert torch.equal(found, each)


def test_second_derivatives():
    """Moves of rows are linear, and have derivatives of any order; the weighted sum has the first."""
    routing = route(choices_of(9, 2, 3), 3)
    x, y = (torch.randn(n, 40, requires_grad=True) for n in (9, 18))
    weights = torch.rand(9, 2, requires_grad=True)
    with sim.device():
        (dx,) = torch.autograd.grad(gather_tokens(x, routing).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
        torch.testing.assert_close(second, 12 * x)  # of two copies
        (dy,) = torch.autograd.grad(combine_tokens(y, weights, routing).square().sum(), y, create_graph=True)
        with refused(
            "combine_tokens_backward has no second derivative; weigh and add the rows in torch", NotImplementedError
        ):
            dy.sum().backward()


# ---------------------------------------------------------------- without gradients


def test_without_gradients_the_first_product_gates():
    """Choices of experts elsewhere and empty experts; the same as with gradients within rounding."""
    x, index, *rest = operands(21, 2, 5, 64, 48, BF16, index=choices_of(21, 2, 3, elsewhere=4))
    with sim.device() as device, torch.no_grad():
        y = experts(x, index, *rest)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, index, *rest)
    assert len(device.launches) == 2 * 4 and torch.equal(compiled, y)
    assert relative_error(y, experts_torch(x, index, *rest).detach()) < 1.2e-2


# ---------------------------------------------------------------- modules


def test_modules_agree_with_themselves_on_the_cpu():
    """Without kernels a module computes expert by expert in torch."""
    block = MixtureOfExperts(64, 48, 6, top_k=2, dtype=BF16)
    again, x = copy.deepcopy(block), torch.randn(3, 10, 64, dtype=BF16)
    results = []
    for module, device in ((block, sim.device()), (again, contextlib.nullcontext())):
        with device as found:
            y = module(x)
            y.float().square().sum().backward()
        assert found is None or len(found.launches) > 9, "kernels of both directions"
        results.append([y, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b.double()) < 2e-2


def test_blocks_of_other_shapes():
    """One token without a leading dimension; no choices, and no experts, of which a sum is 0."""
    block, x = MixtureOfExperts(64, 48, 3, top_k=2, dtype=BF16), torch.randn(2, 64).to(BF16)
    with sim.device():
        assert torch.equal(block(x[0]), block(x)[0])
        assert not block.experts(x, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0)).any()
        assert not Experts(64, 48, 0, dtype=BF16)(x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)).any()
        linear = GroupedLinear(0, 64, 48, bias=True, dtype=BF16)
        assert linear(x, torch.zeros(0, dtype=torch.int32)).shape == (2, 48)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traces_with_symbols_and_by_jit():
    block, x = MixtureOfExperts(64, 48, 3, top_k=2, dtype=BF16).requires_grad_(False), torch.randn(5, 64).to(BF16)
    params = dict(block.named_parameters())
    with sim.device():
        symbolic = make_fx(lambda x, p: torch.func.functional_call(block, p, (x,)), tracing_mode="symbolic")(x, params)
        traced = torch.jit.trace(block, (x[:2],))
        assert torch.equal(symbolic(x, params), block(x)) and torch.equal(traced(x), block(x))


def test_a_block_is_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    theirs, ours = Qwen3MoeSparseMoeBlock(config), MixtureOfExperts(64, 48, 6, top_k=2)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 64)
    y = theirs(x)
    torch.testing.assert_close(ours(x), y[0] if isinstance(y, tuple) else y)
    ours, x = ours.to(BF16), x.to(BF16)
    with sim.device():
        half = ours(x)
    assert relative_error(half, ours(x)) < 2e-2  # of the same choices: rounded scores may choose other experts
    assert repr(ours).startswith("MixtureOfExperts(\n  top_k=2, norm_topk_prob=True\n")


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_100a")])
@pytest.mark.parametrize("name", ["gather_tokens", "combine_tokens", "combine_tokens_backward"])
def test_rows_move_16_bytes_at_once(name, arch):
    kernel = inspectable[name](arch)
    assert_wide_offsets(kernel)
    instructions, _ = _sass.parse(*_tools.disassemble(kernel.asm["cubin"]))
    assert not {"LDL", "STL"} & {i.base for i in instructions}, "nothing spills"
    ptx = kernel.asm["ptx"]
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx and "global.b16" not in ptx


# ---------------------------------------------------------------- wrong use


def test_errors():
    index = choices_of(9, 2, 3)
    with refused("route: index has dtype torch.float32; it must be torch.int64 or torch.int32", TypeError):
        route(index.float(), 3)
    with refused("route: index has shape (18,); it must be (tokens, choices), 1 to 32 of a token", ValueError):
        route(index.flatten(), 3)
    with refused("route: experts=0; it must be an integer from 1 to 32767", ValueError):
        route(index, 0)
    routing = route(index, 3)
    with sim.device():
        with refused("gather_tokens: x has shape (8, 40); it must be (9, columns), a row for each token", ValueError):
            gather_tokens(torch.randn(8, 40), routing)
        with refused(
            "combine_tokens: y has shape (9, 40); it must be (18, columns), a row for each choice", ValueError
        ):
            combine_tokens(torch.randn(9, 40), None, routing)
        with refused("combine_tokens: weights has shape (9,); it must be (9, 2), a number for each choice", ValueError):
            combine_tokens(torch.randn(18, 40), torch.rand(9), routing)
        x, _, weights, gate_up, down = operands(9, 2, 3, 64, 48, BF16)
        with refused("experts: activation='relu'; it must be 'silu' or 'gelu_tanh'", ValueError):
            experts(x, index, weights, gate_up, down, activation="relu")
    with refused("gather_tokens: x is on cpu; it must be on a CUDA device, or on the CPU within", ValueError):
        gather_tokens(torch.randn(9, 40, dtype=FP32), routing)
    with refused("MixtureOfExperts: top_k=7; it must be from 1 to num_experts=6", ValueError):
        MixtureOfExperts(64, 48, 6, top_k=7)
    with refused("Experts: activation='relu'; it must be 'silu' or 'gelu_tanh'", ValueError):
        Experts(64, 48, 6, "relu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(x=torch.zeros(9, 64)), "experts: x has dtype torch.float32; it must be torch.bfloat16 or torch.float16"),
        (dict(x=torch.zeros(3, 3, 64, dtype=BF16)), "experts: x has shape (3, 3, 64); it must be (tokens, hidden)"),
        (dict(gate_up=torch.zeros(3, 95, 64, dtype=BF16)), "it must be (experts, 2 · intermediate, 64)"),
        (dict(gate_up=torch.zeros(3, 96, 64)), "experts: gate_up has dtype torch.float32, x torch.bfloat16; they must"),
        (dict(down=torch.zeros(3, 48, 64, dtype=BF16)), "experts: down has shape (3, 48, 64); it must be (3, 64, 48)"),
        (dict(index=torch.zeros(8, 2).long()), "experts: index has shape (8, 2); it must be (9, choices)"),
        (dict(weights=torch.zeros(9, 1)), "experts: weights has shape (9, 1); it must be (9, 2), as index"),
    ],
    ids=str,
)
def test_what_experts_refuse(changed, message):
    names = ("x", "index", "weights", "gate_up", "down")
    given = dict(zip(names, operands(9, 2, 3, 64, 48, BF16), strict=True)) | changed
    with sim.device(), refused(message, (TypeError, ValueError)):
        experts(**given)


def test_what_is_no_routing_is_refused():
    with refused("gather_tokens: routing is Tensor; it must be a Routing, of route(index, experts)", TypeError):
        gather_tokens(torch.zeros(9, 40), choices_of(9, 2, 3))


def test_nan_of_choices_elsewhere_counts_nothing():
    routing, y = route(torch.full((9, 2), -1, device="cpu"), 3), torch.randn(18, 40, requires_grad=True)
    weights = torch.full((9, 2), float("nan"))
    with sim.device():
        found = combine_tokens(y, weights, routing)
        (dy,) = torch.autograd.grad(found.sum(), y)
    assert not found.any() and not dy.any()


def test_shards_are_refused(monkeypatch):
    monkeypatch.setattr(interface, "is_distributed", lambda kind: True)
    x, index, *rest = operands(9, 2, 3, 64, 48, BF16)
    with refused("experts: x is a DTensor; give its shard, x.to_local()", TypeError):
        experts(x, index, *rest)
    with refused("gather_tokens: x is a DTensor; give its shard, x.to_local()", TypeError):
        gather_tokens(x, route(index, 3))
    with refused("combine_tokens: y is a DTensor; give its shard, y.to_local()", TypeError):
        combine_tokens(x, None, route(index, 3))
