"""Attention against cuDNN, FlashAttention-2 (both through torch), -3 and -4, forward and backward, causal or not, 16 K
tokens, also sustained; of e4m3; packed sequences; errors where operands have outliers; memory; host time. Decoding:
`bench.decode`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch

from bench.gemm import OURS, randn
from bench.harness import Case, Suite, Trial, with_knobs
from bench.peers import Attention, Packed, peers

TOKENS, WIDTH = 16384, 2048
LENGTHS, DIMS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128)
BOUND, GRADIENT_BOUND = 5e-3, 1e-2  # probabilities and results are rounded to bf16; in gradients dS as well
FP8_BOUND = 4e-2  # probabilities have 3 bits behind the leading one


def ours(p: Attention, **given: Any) -> Callable[[], Any]:
    from tritonkittens.kernels.attention import attention

    given |= {} if p.grad is not None else dict(out=torch.full_like(p.q, float("nan")))
    given |= {} if p.window is None else dict(window=(p.window, 0))
    return p.timed(functools.partial(attention, causal=p.causal, **given))


def ours_new(p: Attention) -> Callable[[], torch.Tensor]:
    """With the log-sum-exp, and new memory for both, as a forward that is to be differentiated."""
    from tritonkittens.kernels.attention import attention

    return lambda: attention(p.q, p.k, p.v, causal=p.causal, return_lse=True)[0]


def ours_with(p: Attention, knobs: dict[str, Any]) -> Callable[[], Any]:
    """Ours with some knobs of the kernel (`Config` forward, `AttentionBackward` backward) not as they are chosen."""
    from tritonkittens.kernels.attention import backward_plan, call_plan, checks
    from tritonkittens.kernels.attention.config import choose_fused, suited
    from tritonkittens.launch import multiprocessor_count

    if p.grad is None:
        scores = call_plan.scores_of(p.q, None, None, *checks.check_window(p.causal, None))
        chosen = suited(call_plan.shape_of(p.q, p.k, p.v.shape[3], scores), multiprocessor_count(p.q.get_device()))[0]
        kernel, _ = call_plan.kernel_of(call_plan.forward, p.q.dtype, p.q, p.k, p.v.shape[3], False, scores)
        # a configuration that says nothing of them gets as many as fit, under the results
        slots = {"stages": kernel.placement(90).stages}
        return ours(p, config=dataclasses.replace(chosen, **slots | knobs))
    replaced: dict[str, Any] = dict(choose_fused=lambda *kind, **given: choose_fused(*kind, **given | knobs), _plans={})
    timed = ours(p)

    def call() -> Any:
        with unittest.mock.patch.multiple(backward_plan, **replaced):
            return timed()

    return call


def peers_of(p: Attention, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    return peers("attention" if p.grad is None else "attention backward", p, options.slow)


def flop(batch: int, heads: int, length: int, dim: int, causal: bool, backward: bool) -> int:
    """Of a call with as many keys as queries; a causal score counts half."""
    return (5 if backward else 2) * (1 if causal else 2) * batch * heads * length * length * dim


def ours_fp8(p: Attention) -> Callable[[], torch.Tensor]:
    from tritonkittens.kernels.attention import attention_fp8

    q, k, v = (x.to(torch.float8_e4m3fn) for x in (p.q, p.k, p.v))
    return functools.partial(attention_fp8, q, k, v, causal=p.causal, out=torch.full_like(p.q, float("nan")))


def cases(options: argparse.Namespace, backward: bool = False, fp8: bool = False) -> list[Case]:
    """`fp8`: operands of e4m3, which peers get in bf16: torch has no attention of bytes. Else each of `options.knobs`
    is one more of ours."""

    def variants(p: Attention) -> dict[str, Callable[..., Any]]:
        return with_knobs(OURS, options.knobs, lambda knobs: functools.partial(ours_with, p, knobs))

    def prepare(batch: int, heads: int, length: int, dim: int, causal: bool) -> Trial:
        q, k, v, grad = (randn(batch, heads, length, dim) for _ in range(4))
        if backward:
            p = Attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), causal, grad)
            both = {
                OURS: functools.partial(ours, p),
                f"{OURS}, deterministic": functools.partial(ours, p, deterministic=True),
            }
            return Trial(both | variants(p), peers_of(p, options), p.gradient_error(), GRADIENT_BOUND)
        if fp8:
            q, k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k, v))
            p = Attention(q, k, v, causal)
            both = {OURS: functools.partial(ours_fp8, p), f"{OURS}, bf16": functools.partial(ours, p)}
            return Trial(both, peers_of(p, options), p.error(), FP8_BOUND)
        p = Attention(q, k, v, causal)
        return Trial({OURS: functools.partial(ours, p)} | variants(p), peers_of(p, options), p.error(), BOUND)

    out = []
    for dim in DIMS:
        for causal in (False, True):
            for s in LENGTHS:
                b, h = max(1, TOKENS // s), WIDTH // dim
                name = f"{'e4m3' if fp8 else 'bf16'} {'causal ' * causal}D {dim} S {s} B {b} H {h}"
                facts = {"B": b, "H": h, "S": s, "D": dim, "causal": causal, "panel": f"D {dim}{', causal' * causal}"}
                out.append(
                    Case(
                        name,
                        flop(b, h, s, dim, causal, backward),
                        facts,
                        functools.partial(prepare, b, h, s, dim, causal),
                    )
                )
    return out


SUSTAINED = (4096, 16384)  # lengths whose calls the host keeps up with


def sustained_cases(options: argparse.Namespace) -> list[Case]:
    """Forward and backward as training runs them, at the card's power limit."""

    def sustained(case: Case, what: str) -> Case:
        return dataclasses.replace(
            case,
            name=f"{what} {case.name}",
            kind="sustained",
            facts={**case.facts, "panel": f"{what}, {case.facts['panel']}"},
        )

    both = {"forward": cases(options), "backward": cases(options, backward=True)}
    return [sustained(case, what) for what, found in both.items() for case in found if case.facts["S"] in SUSTAINED]


# Shares of the tokens that the sequences of a batch have
MIXES = {
    "16 alike": (1,) * 16,
    "16 of 1 to 16 parts": tuple(range(1, 17)),
    "1 of half, 32": (32, *(1,) * 32),
    "128 of 1 to 8 parts": (*range(1, 9),) * 16,
}


def ours_packed(p: Packed) -> Callable[[], torch.Tensor]:
    from tritonkittens.kernels.attention import attention_varlen

    starts, longest = p.starts(), max(p.lengths)
    return functools.partial(
        attention_varlen,
        p.q,
        p.k,
        p.v,
        starts,
        starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=p.causal,
        out=torch.full_like(p.q, float("nan")),
    )


def packed_cases(options: argparse.Namespace) -> list[Case]:
    def prepare(lengths: tuple[int, ...], heads: int, dim: int, causal: bool) -> Trial:
        q, k, v = (randn(sum(lengths), heads, dim) for _ in range(3))
        p = Packed(q, k, v, lengths, causal)
        return Trial(
            {OURS: functools.partial(ours_packed, p)},
            peers("attention of packed sequences", p, options.slow),
            p.error(),
            BOUND,
        )

    out = []
    for dim in DIMS:
        for causal in (False, True):
            for mix, shares in MIXES.items():
                lengths, heads = tuple(max(1, TOKENS * share // sum(shares)) for share in shares), WIDTH // dim
                facts = {
                    "mix": mix,
                    "D": dim,
                    "causal": causal,
                    "lengths": lengths,
                    "panel": f"D {dim}{', causal' * causal}",
                }
                work = 4 * heads * dim * sum(n * n for n in lengths) / (2 if causal else 1)
                out.append(
                    Case(
                        f"bf16 {'causal ' * causal}D {dim} {mix}",
                        work,
                        facts,
                        functools.partial(prepare, lengths, heads, dim, causal),
                    )
                )
    return out


def with_outliers(*shape: int) -> torch.Tensor:
    """Normal numbers, of which one in a thousand has 100 times the variance more (as in section 4.3 of
    FlashAttention-3, Shah et al., 2024)."""
    x = randn(*shape)
    return x + 10 * randn(*shape) * (torch.rand(shape, dtype=torch.float32, device=x.device) < 1e-3)


OUTLIER_LENGTHS = (512, 4096)
# of a gradient: where the softmax has one probability near 1, what is left of P ∘ (dP − Δ) are differences
OUTLIER_BOUND = 5e-2


def outlier_cases(options: argparse.Namespace) -> list[Case]:
    def prepare(batch: int, heads: int, length: int, dim: int, causal: bool, backward: bool) -> Trial:
        q, k, v = (with_outliers(batch, heads, length, dim).requires_grad_(backward) for _ in range(3))
        p = Attention(q, k, v, causal, with_outliers(batch, heads, length, dim) if backward else None)
        # of few heads a single row may be most of it
        error = p.gradient_error(heads=16) if backward else p.error(heads=16, rows=256)
        return Trial({OURS: functools.partial(ours, p)}, peers_of(p, options), error, OUTLIER_BOUND)

    out = []
    for backward, causal, dim, s in itertools.product((False, True), (False, True), DIMS, OUTLIER_LENGTHS):
        b, h = max(1, TOKENS // s), WIDTH // dim
        facts = {"B": b, "H": h, "S": s, "D": dim, "causal": causal, "backward": backward}
        name = f"bf16 {'backward ' * backward}{'causal ' * causal}D {dim} S {s} with outliers"
        out.append(
            Case(
                name,
                flop(b, h, s, dim, causal, backward),
                facts,
                functools.partial(prepare, b, h, s, dim, causal, backward),
            )
        )
    return out


def add_error_ratio(row: dict[str, Any]) -> None:
    """The error of each of ours to the least of cuDNN's and, where it is installed, FlashAttention-3's: their weights
    are never above one."""
    cells = row["contenders"]
    least = min(
        (cells[name]["error"] for name in ("cudnn", "flash-attention 3") if cells.get(name, {}).get("error")),
        default=None,
    )
    for cell in cells.values():
        if cell["ours"] and least and cell.get("error"):
            cell["extra"] = {"error to the least of theirs": round(cell["error"] / least, 4)}


# Sequences, heads, heads of keys, tokens, D, causal
MEMORY = (
    (32, 32, 32, 512, 64, False),
    (4, 32, 32, 4096, 64, True),
    (8, 16, 16, 2048, 128, False),
    (4, 16, 16, 4096, 128, True),
    (1, 16, 16, 16384, 128, True),
    (4, 32, 8, 4096, 128, True),
    (1, 32, 8, 4096, 128, True),
    (4, 32, 4, 4096, 128, True),
    (1, 64, 8, 4096, 128, True),
    (2, 28, 4, 4096, 128, True),
)


def memory_cases(options: argparse.Namespace) -> list[Case]:
    def prepare(batch: int, heads: int, kv_heads: int, length: int, dim: int, causal: bool, backward: bool) -> Trial:
        q, k, v = (randn(batch, n, length, dim).requires_grad_(backward) for n in (heads, kv_heads, kv_heads))
        p = Attention(q, k, v, causal, randn(batch, heads, length, dim) if backward else None)
        error = p.gradient_error(heads=1) if backward else p.error()
        return Trial(
            {OURS: functools.partial(ours if backward else ours_new, p)}, peers_of(p, options), error, GRADIENT_BOUND
        )

    return [
        Case(
            f"bf16 {'backward ' * backward}{'causal ' * causal}D {dim} S {s} B {b} H {h} of keys {kv}",
            flop(b, h, s, dim, causal, backward),
            {"B": b, "H": h, "H_kv": kv, "S": s, "D": dim, "causal": causal, "backward": backward},
            functools.partial(prepare, b, h, kv, s, dim, causal, backward),
            kind="memory",
        )
        for backward in (False, True)
        for b, h, kv, s, dim, causal in MEMORY
    ]


HOST_HEADS, HOST_LENGTH, HOST_DIM = 16, 256, 128  # so few tokens that the host is the slower one


def host_cases(options: argparse.Namespace) -> list[Case]:
    """By the operator and by the function with the signature of PyTorch's, which is the peer and chooses a kernel
    itself."""

    def prepare(kv_heads: int, backward: bool) -> Trial:
        from tritonkittens.kernels.attention import attention
        from tritonkittens.ops import scaled_dot_product_attention

        q, k, v = (
            randn(1, heads, HOST_LENGTH, HOST_DIM).requires_grad_(backward)
            for heads in (HOST_HEADS, kv_heads, kv_heads)
        )
        grad = torch.randn_like(q)
        p = Attention(q, k, v, True, grad if backward else None)
        like_torch = dict(is_causal=True, enable_gqa=kv_heads != HOST_HEADS)

        def timed(function: Callable[..., torch.Tensor], **given: Any) -> Callable[[], Any]:
            run = functools.partial(function, q, k, v, **given)
            return (lambda: torch.autograd.grad(run(), (q, k, v), grad)) if backward else run

        both = {
            OURS: lambda: timed(attention, causal=True),
            f"{OURS}, as torch's": lambda: timed(scaled_dot_product_attention, **like_torch),
        }
        torchs = {"torch": lambda: timed(torch.nn.functional.scaled_dot_product_attention, **like_torch)}
        return Trial(both, torchs, p.gradient_error() if backward else p.error(), GRADIENT_BOUND if backward else BOUND)

    return [
        Case(
            f"bf16 causal D {HOST_DIM} S {HOST_LENGTH} H {HOST_HEADS} of keys {kv}, "
            f"forward{' and backward' * backward}, host time",
            flop(1, HOST_HEADS, HOST_LENGTH, HOST_DIM, True, False),
            {"S": HOST_LENGTH, "H": HOST_HEADS, "H_kv": kv, "D": HOST_DIM, "backward": backward},
            functools.partial(prepare, kv, backward),
            "host",
        )
        for backward in (False, True)
        for kv in (HOST_HEADS, HOST_HEADS // 4)
    ]


PLOT = {"x": "S", "panel": "panel"}
SUITES = (
    Suite("attention", "attention forward, 16 K tokens (a causal score counts half)", cases, plot=PLOT),
    Suite(
        "attention_backward",
        "attention backward, 16 K tokens (a causal score counts half)",
        functools.partial(cases, backward=True),
        plot=PLOT,
    ),
    Suite(
        "attention_sustained",
        "attention calls behind one another, each contender at the clock that its own draw leaves it, 16 K tokens",
        sustained_cases,
        plot=PLOT,
    ),
    Suite(
        "attention_fp8",
        "attention forward of e4m3, peers in bf16, 16 K tokens (a causal score counts half)",
        functools.partial(cases, fp8=True),
        plot=PLOT,
    ),
    Suite(
        "attention_varlen",
        "attention forward of packed sequences, 16 K tokens (a causal score counts half)",
        packed_cases,
    ),
    Suite(
        "attention_outliers",
        "attention whose operands have outliers, 16 K tokens (a causal score counts half)",
        outlier_cases,
        extend=add_error_ratio,
    ),
    Suite("attention_host", "host time of attention of few tokens", host_cases, unit="µs"),
    Suite("attention_memory", "memory that attention allocates, its results among them", memory_cases, unit="MiB"),
)
