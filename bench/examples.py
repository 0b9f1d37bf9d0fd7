"""The programs of `examples/`, beside the shipped kernel of the same operation and PyTorch; beside fla and quack where
these are installed."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench import gemm as bench_gemm
from bench import peers as registered
from bench.attention import flop
from bench.gemm import OURS, randn
from bench.harness import UNITS, Case, Factory, Suite, Trial, deferred, frobenius_error
from examples import (
    attention,
    attention_pipeline,
    gemm,
    grouped_gemm,
    linear_attention,
    pipelined_gemm,
    rmsnorm,
    rotary,
    row_sums,
    stream_rows,
    tile_math,
    tma_copy,
)

EXAMPLE = "example"
BOUND = 5e-3  # operands and results are rounded to bf16
SIDES = (4096, 8192)
HEADS = (4, 16, 4096, 128)  # batch, heads, sequence and dimension of attention
MATRIX = (16384, 4096)
ROTARY = (64, 16384, 128)  # heads of all sequences, positions, dimension
LINEAR = ((256, 4096, 64), (128, 4096, 128))
CHECKED_HEADS = 4  # of linear attention, whose reference has all scores
GROUPED = {  # rows of each expert, N, K
    "8 experts": ((4096, 0, 9000, 1700, 8192, 3000, 5000, 1780), 4096, 4096),
    "64 experts": ((256, 128, 64, 576) * 16, 2048, 7168),
}

Peers = Mapping[str, Callable[..., Callable[[], Any]]]  # by name: what makes a call of the operands


def calling(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """A peer that is a function of the operands."""
    return functools.partial(functools.partial, function)


def compiled(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """A peer that torch.compile makes of a function of the operands."""

    def make(*operands: Any) -> Callable[[], Any]:
        torch.compiler.reset()
        return functools.partial(torch.compile(function, dynamic=False), *operands)

    return make


def error_to(reference: Callable[..., torch.Tensor]) -> Callable[..., Callable[[Any], float]]:
    """What makes an error function of the operands. A result may be a tuple of tensors instead of their stack."""

    @deferred
    def error(*operands: Any) -> Callable[[Any], float]:
        expected = reference(*operands)
        compare = frobenius_error(expected.reshape(-1, expected.shape[-1]))
        return lambda found: compare(torch.stack(found) if isinstance(found, tuple) else found)

    return error


def case(
    name: str,
    example: Callable[..., Any],
    operands: Callable[[], Sequence[Any]],
    error: Callable[..., Any],
    peers: Peers,
    shipped: Callable[..., Any] | None = None,
    **work: float,
) -> Case:
    """A case of `example(*operands())`; `work` is `flop` or `nbytes` of a call."""
    ((kind, amount),) = work.items()

    def prepare() -> Trial:
        given = operands()
        ours: dict[str, Factory] = {EXAMPLE: lambda: functools.partial(example, *given)}
        if shipped is not None:
            ours[OURS] = lambda: functools.partial(shipped, *given)
        theirs = {peer: functools.partial(make, *given) for peer, make in peers.items()}
        return Trial(ours, theirs, error(*given), BOUND)

    return Case(name, amount, {"work": amount, "rate": "TFLOP/s" if kind == "flop" else "TB/s"}, prepare)


def add_rate(row: dict[str, Any]) -> None:
    """TFLOP/s or TB/s of each contender."""
    rate, work = row["facts"]["rate"], row["facts"]["work"]
    for cell in row["contenders"].values():
        if "ms" in cell:
            cell["extra"] = {rate: round(UNITS[rate](work, cell["value"] * 1e-3), 2)}


def registered_as(operation: str, name: str, kind: type, **fields: Any) -> Peers:
    """A peer of `bench.peers`, whose operands are a record of this kind."""
    return {name: lambda *operands: registered.peers(operation, kind(*operands, **fields))[name]()}


def operands(shape: tuple[int, ...], number: int) -> list[torch.Tensor]:
    """So many random tensors of a shape."""
    return [randn(*shape) for _ in range(number)]


def matrix_cases() -> list[Case]:
    """The rungs without a product, at shapes that are bound by memory."""
    rows, cols = MATRIX
    size, x = 2 * rows * cols, functools.partial(operands, MATRIX, 1)
    name = f"{rows}x{cols}"
    return [
        case(
            f"tile_math silu {name}",
            tile_math.silu,
            x,
            error_to(tile_math.silu_torch),
            {"torch": calling(torch.nn.functional.silu)},
            nbytes=2 * size,
        ),
        case(
            f"tile_math softmax {name}",
            tile_math.softmax,
            x,
            error_to(tile_math.softmax_torch),
            {"torch": calling(torch_softmax), "torch.compile": compiled(torch_softmax), "quack": quack_softmax},
            nbytes=2 * size,
        ),
        case(
            f"tma_copy {name}",
            tma_copy.copy,
            x,
            error_to(tma_copy.copy_torch),
            {"torch": calling(torch.clone)},
            nbytes=2 * size,
        ),
        case(
            f"row_sums {name}",
            row_sums.row_sums,
            x,
            error_to(row_sums.row_sums_torch),
            {"torch": calling(torch_sums)},
            nbytes=size,
        ),
        case(
            f"stream_rows {name}",
            stream_rows.scaled_silu,
            lambda: [*x(), 0.5],
            error_to(stream_rows.scaled_silu_torch),
            {"torch.compile": compiled(lambda x, scale: torch.nn.functional.silu(x * scale))},
            nbytes=2 * size,
        ),
        case(
            f"rmsnorm {name}",
            rmsnorm.rmsnorm,
            lambda: [*x(), *x(), randn(cols)],
            error_to(rmsnorm.rmsnorm_torch),
            {"torch.compile": compiled(eager_rmsnorm), "quack": quack_rmsnorm},
            nbytes=4 * size,
        ),
    ]


def rotary_cases() -> list[Case]:
    return [
        case(
            f"rotary {ROTARY}",
            rotary.rotary,
            rotary_operands,
            error_to(rotary.rotary_torch),
            {"torch.compile": compiled(eager_rotary)},
            nbytes=4 * ROTARY[0] * ROTARY[1] * ROTARY[2],
        )
    ]


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1)


def torch_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1, dtype=torch.float32)


def rotary_operands() -> list[torch.Tensor]:
    heads, positions, dim = ROTARY
    angles = randn(positions, dim // 2).float()
    return [randn(heads, positions, dim), angles.cos(), angles.sin()]


def eager_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def eager_rmsnorm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + r
    return h, torch.nn.functional.rms_norm(h, w.shape, w, 1e-6)


def quack_softmax(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    import quack

    return functools.partial(quack.softmax, x)


def quack_rmsnorm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Callable[[], Any]:
    import quack

    return lambda: quack.rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True)[::-1]


def product_cases() -> list[Case]:
    def shipped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        from tritonkittens.kernels.gemm import gemm as shipped_gemm

        return shipped_gemm(a, b)

    def error(a: torch.Tensor, b: torch.Tensor) -> Callable[[torch.Tensor], float]:
        return registered.Product(a, b).error()

    cublas = registered_as("gemm", "cublas", registered.Product)
    return [
        case(
            f"{program.__name__.split('.')[-1]} {n}x{n}x{n}",
            program.gemm,
            functools.partial(operands, (n, n), 2),
            error,
            cublas,
            shipped,
            flop=2 * n**3,
        )
        for program in (pipelined_gemm, gemm)
        for n in SIDES
    ]


def attention_cases() -> list[Case]:
    batch, heads, length, dim = HEADS
    found = []
    for program, causal in ((attention_pipeline, False), (attention, False), (attention, True)):
        masked = {"causal": True} if causal else {}

        def shipped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal) -> Any:
            from tritonkittens.kernels.attention import attention as shipped_attention

            return shipped_attention(q, k, v, causal=causal)

        def error(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal
        ) -> Callable[[torch.Tensor], float]:
            return registered.Attention(q, k, v, causal=causal).error()

        name = f"{program.__name__.split('.')[-1]} {'causal ' * causal}D {dim} S {length} B {batch} H {heads}"
        cudnn = registered_as("attention", "cudnn", registered.Attention, causal=causal)
        found.append(
            case(
                name,
                functools.partial(program.attention, **masked),
                functools.partial(operands, HEADS, 3),
                error,
                cudnn,
                shipped,
                flop=flop(batch, heads, length, dim, causal, False),
            )
        )
    return found


def grouped_cases() -> list[Case]:
    def operands(counts: Sequence[int], n: int, k: int) -> list[torch.Tensor]:
        offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=bench_gemm.DEVICE)
        return [randn(sum(counts), k), randn(len(counts), n, k), offsets]

    torchs = {
        "torch grouped_mm": calling(lambda x, w, offsets: torch.nn.functional.grouped_mm(x, w.mT, offs=offsets[1:]))
    }
    return [
        case(f"grouped_gemm {name} N {n} K {k}", grouped_gemm.grouped_gemm, functools.partial(operands, counts, n, k),
             error_to(grouped_gemm.grouped_gemm_torch), torchs, flop=2 * sum(counts) * n * k)
        for name, (counts, n, k) in GROUPED.items()
    ]  # fmt: skip


@deferred
def linear_error(*qkv: torch.Tensor) -> Callable[[torch.Tensor], float]:
    compare = frobenius_error(linear_attention.linear_attention_torch(*(x[:CHECKED_HEADS] for x in qkv)).flatten(0, 1))
    return lambda found: compare(found[:CHECKED_HEADS])


def fla_linear(*qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
    """fla's heads lie beside each other in a position: (1, positions, heads, dim)."""
    from fla.ops.linear_attn import chunk_linear_attn

    of_fla = [x.transpose(0, 1).contiguous()[None] for x in qkv]
    return lambda: chunk_linear_attn(*of_fla, scale=1.0, normalize=False)[0][0].transpose(0, 1)


def linear_cases() -> list[Case]:
    return [
        case(
            f"linear_attention heads {shape[0]} S {shape[1]} D {shape[2]}",
            linear_attention.linear_attention,
            functools.partial(operands, shape, 3),
            linear_error,
            {"fla": fla_linear},
            nbytes=8 * shape[0] * shape[1] * shape[2],
        )
        for shape in LINEAR
    ]


def cases(options: argparse.Namespace) -> list[Case]:
    return [*matrix_cases(), *rotary_cases(), *product_cases(), *attention_cases(), *grouped_cases(), *linear_cases()]


SUITES = (
    Suite(
        "examples", "the programs of examples/, microseconds", cases, unit="µs", plot={"y": "ratio"}, extend=add_rate
    ),
)
