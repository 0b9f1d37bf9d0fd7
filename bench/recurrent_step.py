"""Steps of decoding of linear attention, the gated delta rule and Mamba-2: beside fla's and mamba_ssm's, torch.compile,
our kernels of chunks, and a copy of as many bytes.

`work` is the bytes of the states that a call must read and write. Calls take turns over so many operands that no state
is in L2 when it is read.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import DEVICE, OURS, randn
from bench.harness import Case, Contender, Suite, Trial, deferred
from bench.quantize import beside_copy, copies, in_turn

BATCHES = (1, 16, 256)
TOKENS = (1, 4, 8)
CHECKED = 2  # batches
BOUND = 1e-2  # of results in bf16; the kernels of chunks round states to multiply them
Step = Callable[[dict[str, Any]], Any]  # a function of operands by name: the result, and the state after


class Shape(NamedTuple):
    """Of linear attention, the gated delta rule of Qwen3-Next, or Mamba-2 with 2.7 B parameters."""

    kind: str
    batch: int
    tokens: int
    key_heads: int
    heads: int
    keys: int
    values: int

    def __str__(self) -> str:
        return f"{self.kind} B {self.batch} T {self.tokens}"

    @property
    def moved(self) -> float:
        """Bytes of states that a call reads and writes."""
        return 8.0 * self.batch * self.heads * self.keys * self.values


MODELS = (
    ("linear attention", (32, 32, 128, 128)),
    ("gated delta rule", (16, 32, 128, 128)),
    ("mamba2", (1, 80, 128, 64)),
)


def operands(shape: Shape) -> dict[str, Any]:
    """Of the functions by name, the state (batch, heads, values, keys), as our kernels return it."""
    kind, batch, tokens, key_heads, heads, keys, values = shape

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=DEVICE)

    q, k = (randn(batch, tokens, key_heads, keys) for _ in range(2))
    v, state = randn(batch, tokens, heads, values), randn(batch, heads, values, keys).float()
    if kind == "mamba2":
        given = dict(x=v, dt=randn(batch, tokens, heads), A=-1 - 15 * numbers(heads), B=k, C=q)
        return given | dict(D=numbers(heads), dt_bias=numbers(heads) - 4, state=state)
    if kind == "linear attention":
        return dict(q=q, k=k, v=v, decay=numbers(heads), state=state)
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(q.dtype)
    return dict(q=q, k=k, v=v, g=-0.1 * numbers(batch, tokens, heads), beta=numbers(batch, tokens, heads), state=state)


def eager(kind: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in torch, in the dtype of the state."""
    state, found = given["state"], []
    wide = {name: x.to(state.dtype) for name, x in given.items()}
    q, k, v = (wide[name] for name in ("CBx" if kind == "mamba2" else "qkv"))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    for t in range(q.shape[1]):
        q_t, k_t, u = q[:, t], k[:, t], v[:, t]
        if kind == "mamba2":
            step = torch.nn.functional.softplus(wide["dt"][:, t] + wide["dt_bias"])
            state = (wide["A"] * step).exp()[..., None, None] * state
            u = step[..., None] * u
        elif kind == "linear attention":
            state = torch.exp(-wide["decay"])[:, None, None] * state
        else:
            state = wide["g"][:, t].exp()[..., None, None] * state
            u = wide["beta"][:, t, :, None] * (u - (state * k_t[..., None, :]).sum(-1))
        state = state + u[..., None] * k_t[..., None, :]
        o = (state * q_t[..., None, :]).sum(-1)
        o = o + wide["D"][:, None] * v[:, t] if kind == "mamba2" else o
        found.append(o if kind != "gated delta rule" else o * q.shape[-1] ** -0.5)
    return torch.stack(found, 1).to(given["x" if kind == "mamba2" else "v"].dtype), state


def ours(kind: str) -> Step:
    from tritonkittens.kernels.gated_delta_net import gated_delta_rule
    from tritonkittens.kernels.linear_attention import linear_attention
    from tritonkittens.kernels.mamba2 import mamba_chunk_scan

    def run(given: dict[str, Any]) -> Any:
        named = {name: x for name, x in given.items() if name != "state"}
        if kind == "mamba2":
            named |= dict(initial_states=given["state"], return_final_states=True, dt_softplus=True)
            return mamba_chunk_scan(**named)
        named |= dict(initial_state=given["state"].mT, output_final_state=True)
        o, state = linear_attention(**named, scale=1.0) if "decay" in given else gated_delta_rule(**named)
        return o, state.mT

    return run


def of_chunks(kind: str) -> Step:
    """Ours, as if rows were many."""
    from tritonkittens.kernels.recurrent_step import config

    step, most = ours(kind), config.MOST_ROWS

    def run(given: dict[str, Any]) -> Any:
        config.MOST_ROWS = 0
        try:
            return step(given)
        finally:
            config.MOST_ROWS = most

    return run


def compiled(kind: str) -> Step:
    torch.compiler.reset()
    return torch.compile(functools.partial(eager, kind), dynamic=False)


def fla(kind: str) -> Step:
    """States are (batch, heads, keys, values) in memory, as fla's kernels return them."""
    if kind == "mamba2":
        raise ValueError("fla has no such function")

    def run(given: dict[str, Any]) -> Any:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        if "theirs" not in given:  # at the first call, which is not timed
            theirs = {name: x for name, x in given.items() if name not in ("state", "decay")}
            theirs |= dict(initial_state=given["state"].mT.contiguous(), output_final_state=True)
            given["theirs"] = theirs | (dict(g_gamma=-given["decay"], scale=1.0) if "decay" in given else {})
        function = fused_recurrent_simple_gla if "decay" in given else fused_recurrent_gated_delta_rule
        o, state = function(**given["theirs"])
        return o, state.mT

    return run


def mamba_ssm(kind: str) -> Step:
    """It writes the state in place: a result is right at the first call."""
    if kind != "mamba2":
        raise ValueError("mamba_ssm has no such function")
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def run(given: dict[str, Any]) -> Any:
        if given["x"].shape[1] > 1:
            raise ValueError("mamba_ssm's step has one token")
        state, x, (heads, values) = given["state"], given["x"][:, 0], given["x"].shape[2:]
        dt, A, D, bias = (
            t[..., None].expand(*t.shape, values) for t in (given["dt"][:, 0], given["A"], given["D"], given["dt_bias"])
        )
        A = A[..., None].expand(heads, values, state.shape[-1])
        B, C = given["B"][:, 0], given["C"][:, 0]
        return selective_state_update(state, x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True)[:, None]

    return run


PEERS: dict[str, Callable[[str], Step]] = {"fla": fla, "mamba_ssm": mamba_ssm, "torch.compile": compiled}


def timed(make: Callable[[str], Step], shape: Shape, given: dict[str, Any]) -> Callable[[], Any]:
    """Calls with copies of the operands in turn."""
    step, turns = make(shape.kind), [{n: x.clone() for n, x in given.items()} for _ in range(copies(shape.moved))]
    return in_turn(lambda i: step(turns[i]), len(turns))


@deferred
def error(kind: str, given: dict[str, Any]) -> Callable[[Any], float]:
    """The larger error of the result and the state, of a few sequences."""
    few = {n: x[:CHECKED] if x.ndim > 1 else x for n, x in given.items()}
    expected = eager(kind, {n: x.double() for n, x in few.items()})

    def of(found: Any) -> float:
        parts = [found] if isinstance(found, torch.Tensor) else found
        return max(float((a[:CHECKED].double() - b).norm() / b.norm()) for a, b in zip(parts, expected, strict=False))

    return of


def prepare(shape: Shape) -> Trial:
    given = operands(shape)
    checked = error(shape.kind, given)
    peers = {name: functools.partial(timed, make, shape, given) for name, make in PEERS.items()}
    baselines = {"kernels of chunks": Contender(functools.partial(timed, of_chunks, shape, given), checked)}
    return Trial(
        {OURS: functools.partial(timed, ours, shape, given)}, peers, checked, BOUND,
        baselines=baselines | beside_copy(shape.moved),
    )  # fmt: skip


def cases(options: argparse.Namespace) -> list[Case]:
    shapes = [Shape(kind, batch, tokens, *sizes) for kind, sizes in MODELS for tokens in TOKENS for batch in BATCHES]
    return [
        Case(str(shape), shape.moved, shape._asdict(), functools.partial(prepare, shape), kind="graph")
        for shape in shapes
    ]


TITLE = "steps of decoding with states of constant size, beside a copy of as many bytes"
SUITES = (Suite("recurrent_step", TITLE, cases, unit="TB/s", plot={"panel": "kind"}),)
