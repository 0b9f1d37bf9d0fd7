"""Linear attention with and without decays, the gated delta rule, Based, and Mamba-2's scan: beside fla and mamba_ssm,
and a copy of as many bytes as a call must read and write.

Operands are in fla's layout, (batch, length, heads, dim). Errors are those of a few heads, against float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.gemm import DEVICE, OURS, randn
from bench.harness import Case, Suite, Trial, both_ways, call_of, deferred
from bench.quantize import beside_copy

CHECKED = 2  # heads
CHUNK = 256  # rows of the reference
BOUND = 1e-2  # states and weights of a chunk are rounded to bf16


class Shape(NamedTuple):
    """Operands, and whether the past fades, in each step in another way with `gates`, which have gradients, too."""

    batch: int
    length: int
    heads: int
    dim: int
    decayed: bool
    gates: bool = False

    def __str__(self) -> str:
        kind = "gates" if self.gates else "decays" if self.decayed else "plain"
        return f"{kind} B {self.batch} T {self.length} H {self.heads} D {self.dim}"

    def moved(self, backward: bool) -> float:
        """Bytes that a call reads and writes."""
        return 2.0 * self.batch * self.length * self.heads * self.dim * (7 if backward else 4)


# heads of all batches from 16 to 1,024, lengths from 512 to 65,536; fla tunes its kernels again for other heads
EXTENTS = (
    (1, 16384, 16, 128), (1, 65536, 16, 128), (16, 4096, 16, 128), (64, 512, 16, 128), (4, 2048, 16, 128),
    (32, 1024, 16, 64), (1, 16384, 16, 64), (32, 4096, 16, 64),
)  # fmt: skip


def rates(heads: int) -> torch.Tensor:
    """Decays of heads as of lightning attention."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float32, device=DEVICE) / heads)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The result in the dtype of the operands, chunk by chunk. g: logarithms of what is kept (batch, length, heads)."""
    state: Any = 0.0
    found: list[torch.Tensor] = []
    chunks = (x.transpose(1, 2).split(CHUNK, 2) for x in (q, k, v, g.to(q.dtype)[..., None]))
    for q_i, k_i, v_i, g_i in zip(*chunks, strict=True):
        sums = g_i.cumsum(2)
        weights = torch.exp((sums - sums.mT).tril()).tril()
        found.append((q_i @ k_i.mT * weights) @ v_i + sums.exp() * (q_i @ state if len(found) else 0.0))
        state = sums[:, :, -1:].exp() * state + (k_i * torch.exp(sums[:, :, -1:] - sums)).mT @ v_i
    return torch.cat(found, 2).transpose(1, 2)


def ours(decay: torch.Tensor | None) -> Callable[..., Any]:
    from tritonkittens.kernels.linear_attention import linear_attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None) -> Any:
        return linear_attention(q, k, v, None if g is not None else decay, g=g, scale=1.0)

    return run


def fla(decay: torch.Tensor | None) -> Callable[..., Any]:
    if decay is None:
        from fla.ops.linear_attn import chunk_linear_attn

        return lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda q, k, v, g=None: chunk_simple_gla(q, k, v, g=g, g_gamma=-decay if g is None else None, scale=1.0)[0]


@deferred
def error(shape: Shape, given: list[torch.Tensor], decay: Any, grad: torch.Tensor | None) -> Callable[[Any], float]:
    exact = [x[:, :, :CHECKED].double().requires_grad_(grad is not None) for x in given]
    q, k, v, *g = exact
    rates_of = q.new_zeros(q.shape[2]) if decay is None else decay[:CHECKED].double()
    expected = [reference(q, k, v, g[0] if g else (-rates_of).expand(q.shape[:3]))]
    if grad is not None:
        expected = list(torch.autograd.grad(expected[0], exact, grad[:, :, :CHECKED].double()))

    def of(found: Any) -> float:
        parts = [found] if isinstance(found, torch.Tensor) else found
        pairs = zip(parts, expected, strict=True)
        return max(float((a[:, :, :CHECKED].double() - b).norm() / b.norm()) for a, b in pairs)

    return of


def prepare(shape: Shape, backward: bool) -> Trial:
    batch, length, heads, dim, decayed, gates = shape
    given = [randn(batch, length, heads, dim) for _ in range(3)]
    if gates:
        keys = torch.randn(batch, length, heads, dtype=torch.float32, device=DEVICE) + 4
        given.append(torch.nn.functional.logsigmoid(keys))
    grad, decay = randn(batch, length, heads, dim) if backward else None, rates(heads) if decayed else None

    def timed(make: Callable[..., Any]) -> Callable[[], Callable[[], Any]]:
        return lambda: call_of(make(decay), given, grad)

    baselines = beside_copy(shape.moved(backward))
    return Trial({OURS: timed(ours)}, {"fla": timed(fla)}, error(shape, given, decay, grad), BOUND, baselines=baselines)


def cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    kinds = [(True, False), (False, False), (True, True)]
    shapes = [Shape(*extents, *kind) for kind in kinds for extents in EXTENTS]
    return both_ways(shapes, prepare, backward)


class Delta(NamedTuple):
    """Operands of the gated delta rule: as many heads of values as of keys."""

    batch: int
    length: int
    heads: int
    dim: int

    def __str__(self) -> str:
        return f"B {self.batch} T {self.length} H {self.heads} D {self.dim}"

    def moved(self, backward: bool) -> float:
        """Bytes that a call reads and writes, without gates."""
        return 2.0 * self.batch * self.length * self.heads * self.dim * (7 if backward else 4)


DELTAS = ((1, 16384, 16, 128), (1, 65536, 16, 128), (16, 4096, 16, 128), (4, 2048, 16, 128), (64, 512, 16, 128))


def delta_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
    """The result in the dtype of the operands, chunk by chunk."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[-1], v.shape[-1])
    found: list[torch.Tensor] = []
    for q_i, k_i, v_i, g, beta in zip(*(x.transpose(1, 2).split(CHUNK, 2) for x in (q, k, v, *gates)), strict=True):
        sums, beta = g.cumsum(2)[..., None], beta[..., None]
        fading = (sums - sums.mT).tril().exp().tril()
        missing = beta * (v_i - sums.exp() * (k_i @ state))
        products = beta * (k_i @ k_i.mT) * fading
        corrected = torch.linalg.solve_triangular(products, missing, upper=False, unitriangular=True)
        found.append(sums.exp() * (q_i @ state) + (q_i @ k_i.mT * fading) @ corrected)
        last = sums[..., -1:, :]
        state = last.exp() * state + (k_i * (last - sums).exp()).mT @ corrected
    return torch.cat(found, 2).transpose(1, 2) * q.shape[-1] ** -0.5


@deferred
def delta_error(given: list[torch.Tensor], grad: torch.Tensor | None) -> Callable[[Any], float]:
    """The largest error of the result, or of the gradients, of a few heads."""
    exact = [x[:, :, :CHECKED].double().requires_grad_(grad is not None) for x in given]
    expected = [delta_reference(*exact)]
    if grad is not None:
        expected = list(torch.autograd.grad(expected[0], exact, grad[:, :, :CHECKED].double()))

    def of(found: Any) -> float:
        pairs = zip([found] if isinstance(found, torch.Tensor) else found, expected, strict=True)
        return max(float((a[:, :, :CHECKED].double() - b).norm() / b.norm()) for a, b in pairs)

    return of


def prepare_delta(shape: Delta, backward: bool) -> Trial:
    q, k, v = (randn(*shape) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    g = torch.nn.functional.logsigmoid(torch.randn(shape[:3], dtype=torch.float32, device=DEVICE) + 4)
    beta = torch.rand(shape[:3], dtype=torch.float32, device=DEVICE).to(q.dtype)
    given, grad = [q, k, v, g, beta], randn(*shape) if backward else None

    def ours() -> Callable[..., Any]:
        from tritonkittens.kernels.gated_delta_net import gated_delta_rule

        return gated_delta_rule

    def fla() -> Callable[..., Any]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda *given: chunk_gated_delta_rule(*given)[0]

    def timed(function: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[[], Any]]:
        return lambda: call_of(function(), given, grad)

    checked, baselines = delta_error(given, grad), beside_copy(shape.moved(backward))
    return Trial({OURS: timed(ours)}, {"fla": timed(fla)}, checked, BOUND, baselines=baselines)


def delta_cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    return both_ways((Delta(*extents) for extents in DELTAS), prepare_delta, backward)


class Taylor(NamedTuple):
    """Operands of Based, and whether results are divided by the sums of weights."""

    batch: int
    length: int
    heads: int
    values: int
    normalized: bool

    def __str__(self) -> str:
        return f"{'normalized ' * self.normalized}B {self.batch} T {self.length} H {self.heads} V {self.values}"

    def moved(self, backward: bool = False) -> float:
        """Bytes that a call reads and writes: backwards, q, k and v, their gradients, and that of results."""
        columns = 4 * 16 + 3 * self.values if backward else 2 * (16 + self.values)
        return 2.0 * self.batch * self.length * self.heads * columns


TAYLORS = ((1, 16384, 16, 64), (1, 65536, 16, 64), (8, 4096, 32, 64), (4, 2048, 16, 64), (32, 1024, 16, 64),
           (8, 4096, 32, 128))  # fmt: skip
FIRST_ROWS = 2048  # that are checked


@deferred
def taylor_error(given: list[torch.Tensor], grad: torch.Tensor | None, normalized: bool) -> Callable[[Any], float]:
    """The error of the first rows of a few heads; of gradients, where those are all rows that have one."""
    from tritonkittens.kernels.based import based_attention_torch

    at = slice(1), slice(FIRST_ROWS), slice(CHECKED)
    exact = [x[at].double().requires_grad_(grad is not None) for x in given]
    q, k, v = exact
    expected = [based_attention_torch(q, k, v, normalize=normalized)[0]]
    if grad is not None:
        expected = list(torch.autograd.grad(expected[0], exact, grad[at].double()))

    def of(found: Any) -> float:
        parts = [found] if isinstance(found, torch.Tensor) else found
        return max(float((a[at].double() - b).norm() / b.norm()) for a, b in zip(parts, expected, strict=True))

    return of


def prepare_taylor(shape: Taylor, backward: bool = False) -> Trial:
    normalized = shape.normalized
    given = [randn(*shape[:3], n) for n in (16, 16, shape.values)]
    grad = randn(*shape[:3], shape.values) if backward else None
    if grad is not None:
        grad[:, FIRST_ROWS:] = 0  # gradients of later rows have no part in those that are checked

    def ours() -> Callable[[], Any]:
        from tritonkittens.kernels.based import based_attention

        return call_of(functools.partial(based_attention, normalize=normalized), given, grad)

    def fla(name: str) -> Callable[[], Callable[[], Any]]:
        def run() -> Callable[[], Any]:
            from fla.ops import based

            return call_of(functools.partial(getattr(based, name), use_norm=normalized), given, grad)

        return run

    peers = {f"fla {name}": fla(name) for name in ("parallel_based", "fused_chunk_based")}
    error = taylor_error(given, grad, normalized)
    return Trial({OURS: ours}, peers, error, BOUND, baselines=beside_copy(shape.moved(backward)))


def taylor_cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    return both_ways(
        (Taylor(*extents, normalized) for normalized in (False, True) for extents in TAYLORS), prepare_taylor, backward
    )


class Scan(NamedTuple):
    """Operands of Mamba-2's scan: x (batch, length, heads, dim), B and C (batch, length, groups, states)."""

    batch: int
    length: int
    heads: int
    dim: int
    groups: int
    states: int
    gated: bool = False  # with z

    def __str__(self) -> str:
        batch, length, heads, dim, groups, states, gated = self
        return f"B {batch} L {length} H {heads} P {dim} G {groups} N {states}{', z' * gated}"

    def moved(self, backward: bool = False) -> float:
        """Bytes that a call reads and writes, without dt."""
        of_x = (2 + self.gated + backward * (1 + self.gated)) * self.heads * self.dim
        return 2.0 * self.batch * self.length * (of_x + (4 if backward else 2) * self.groups * self.states)


# of 16,384 tokens as ThunderKittens' Mamba-2 was measured, of Mamba-2 with 2.7 B parameters, of Nemotron-H, and of as
# many states as Falcon-H1 has
SCANS = (
    (16, 1024, 32, 64, 1, 64), (4, 4096, 32, 64, 1, 64), (1, 16384, 32, 64, 1, 64), (16, 1024, 32, 64, 1, 128),
    (4, 4096, 32, 64, 1, 128), (1, 65536, 32, 64, 1, 128), (8, 4096, 80, 64, 1, 128), (8, 4096, 80, 64, 1, 128, True),
    (2, 8192, 128, 64, 8, 128), (4, 4096, 32, 64, 1, 256), (1, 65536, 32, 64, 1, 256),
)  # fmt: skip


class Scanned(NamedTuple):
    """The result of a scan without D and z, or in a backward its gradients, which are not checked."""

    y: Any


@deferred
def scan_error(given: dict[str, torch.Tensor], grad: torch.Tensor | None) -> Callable[[Any], float]:
    """The error of a few heads, and of their gradients; those of B and C are sums over all heads, and not checked."""
    of_heads = {n: t[..., :CHECKED, :] if n in "xz" else t[..., :CHECKED] for n, t in given.items() if n not in "BC"}
    exact = {n: t.double().requires_grad_(grad is not None) for n, t in of_heads.items()}
    B, C = (given[n][:, :, :1].double().expand(-1, -1, CHECKED, -1) for n in "BC")
    x, dt = exact["x"], torch.nn.functional.softplus(exact["dt"] + exact["dt_bias"])
    bare = reference(C, B, x * dt[..., None], exact["A"] * dt)
    y = bare + exact["D"][:, None] * x
    y = y * torch.nn.functional.silu(exact["z"]) if "z" in exact else y
    expected = [y]
    if grad is not None:
        expected = list(torch.autograd.grad(y, list(exact.values()), grad[:, :, :CHECKED].double()))

    def of(found: Any) -> float:
        if isinstance(found, Scanned):
            return 0.0 if grad is not None else float((found.y[:, :, :CHECKED].double() - bare).norm() / bare.norm())
        parts = {"x": found} if isinstance(found, torch.Tensor) else dict(zip(given, found, strict=True))
        few = [t[..., :CHECKED, :] if n in "xz" else t[..., :CHECKED] for n, t in parts.items() if n not in "BC"]
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(few, expected, strict=True))

    return of


def prepare_scan(shape: Scan, backward: bool = False) -> Trial:
    """fla has no dt, D and z: dt is applied before it is timed."""
    batch, length, heads, dim, groups, states, gated = shape
    x, B, C = randn(batch, length, heads, dim), *(randn(batch, length, groups, states) for _ in range(2))
    dt, bias, D = (torch.randn(n, dtype=torch.float32, device=DEVICE) for n in ((batch, length, heads), heads, heads))
    A = -1 - 15 * torch.rand(heads, dtype=torch.float32, device=DEVICE)
    given = dict(
        x=x, dt=dt.to(x.dtype), A=A, B=B, C=C, D=D, dt_bias=bias - 4, **(dict(z=randn(*x.shape)) if gated else {})
    )
    grad = randn(*x.shape) if backward else None

    def timed(function: Callable[..., Any], given: dict[str, torch.Tensor]) -> Callable[[], Any]:
        return call_of(lambda *values: function(**dict(zip(given, values, strict=True))), [*given.values()], grad)

    def ours() -> Callable[[], Any]:
        from tritonkittens.kernels.mamba2 import mamba_chunk_scan

        return timed(functools.partial(mamba_chunk_scan, dt_softplus=True), given)

    def mamba_ssm() -> Callable[[], Any]:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return timed(functools.partial(mamba_chunk_scan_combined, chunk_size=CHUNK, dt_softplus=True), given)

    def fla() -> Callable[[], Any]:
        from fla.ops.simple_gla import chunk_simple_gla

        steps = torch.nn.functional.softplus(given["dt"].float() + given["dt_bias"])
        q, k = (t.repeat_interleave(heads // groups, 2) for t in (C, B))
        rows = dict(q=q, k=k, v=(x * steps[..., None]).to(x.dtype), g=steps * A)
        run = timed(lambda **rows: chunk_simple_gla(**rows, scale=1.0)[0], rows)
        return lambda: Scanned(run())

    peers: dict[str, Callable[[], Any]] = {"mamba_ssm": mamba_ssm}
    if heads == SCANS[0][2]:  # it tunes its kernels again for other heads
        peers["fla without dt, D and z"] = fla
    return Trial({OURS: ours}, peers, scan_error(given, grad), BOUND, baselines=beside_copy(shape.moved(backward)))


def scan_cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    return both_ways((Scan(*extents) for extents in SCANS), prepare_scan, backward)


class Conv(NamedTuple):
    """Operands of a causal convolution with 4 taps: x (batch, length, channels)."""

    batch: int
    length: int
    channels: int

    def __str__(self) -> str:
        return f"B {self.batch} L {self.length} C {self.channels}"

    def moved(self, backward: bool = False) -> float:
        """Bytes that a call reads and writes."""
        return (6.0 if backward else 4.0) * self.batch * self.length * self.channels


CONVS = ((8, 4096, 5376), (1, 16384, 4352), (32, 512, 5376), (4, 2048, 4352))


def short_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A causal convolution as models of transformers write it."""
    taps, channels = weight.shape[1], weight.shape[0]
    y = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=channels)
    return torch.nn.functional.silu(y[..., : x.shape[2]])


def prepare_conv(shape: Conv, backward: bool = False) -> Trial:
    given = [randn(*shape).mT, randn(shape.channels, 4), randn(shape.channels)]
    grad = randn(*shape).mT if backward else None

    def ours() -> Callable[[], Any]:
        from tritonkittens.kernels.causal_conv import causal_conv1d

        return call_of(functools.partial(causal_conv1d, activation="silu"), given, grad)

    def package() -> Callable[[], Any]:
        from causal_conv1d import causal_conv1d_fn

        return call_of(functools.partial(causal_conv1d_fn, activation="silu"), given, grad)

    def compiled() -> Callable[[], Any]:
        torch.compiler.reset()
        return call_of(torch.compile(short_convolution, dynamic=False), given, grad)

    def error(found: Any) -> float:
        """The error of the first rows, or of the gradient of those whose sums lie among them."""
        from tritonkittens.kernels.causal_conv import causal_conv1d_torch

        x = given[0][:1, :, :CHUNK].double().requires_grad_(backward)
        expected = causal_conv1d_torch(x, *given[1:], activation="silu")
        if grad is not None:
            (expected,) = torch.autograd.grad(expected, x, grad[:1, :, :CHUNK].double())
            found = found[0]
        first, expected = (t[:1, :, : min(CHUNK, shape.length) - 3].double() for t in (found, expected))
        return float((first - expected).norm() / expected.norm())

    peers = {"causal-conv1d": package, "torch.compile": compiled}
    return Trial({OURS: ours}, peers, error, BOUND, baselines=beside_copy(shape.moved(backward)))


def conv_cases(options: argparse.Namespace, backward: bool = False) -> list[Case]:
    return both_ways((Conv(*extents) for extents in CONVS), prepare_conv, backward)


MEASURED = ("B 4 T 2048 H 16", "B 4 L 4096 H 32 P 64 G 1 N 128")  # parts of names of cases whose memory is counted


def memory_cases(options: argparse.Namespace) -> list[Case]:
    """What a call allocates. That of a backward does not have what the forward keeps for it."""

    def without_copy(prepare: Callable[[], Trial]) -> Trial:
        return dataclasses.replace(prepare(), baselines={})

    makers = {"linear attention": cases, "delta rule": delta_cases, "Based": taylor_cases, "Mamba-2": scan_cases}
    return [
        dataclasses.replace(
            case, name=f"{name}, {case.name}", kind="memory", prepare=functools.partial(without_copy, case.prepare)
        )
        for name, make in makers.items()
        for backward in (False, True)
        for case in make(options, backward)
        if any(part in case.name for part in MEASURED)
    ]


SUITES = (
    Suite("sequence_memory", "memory that sequence models allocate, results included", memory_cases, unit="MiB"),
    Suite("causal_conv1d", "causal convolutions", conv_cases, unit="TB/s"),
    Suite(
        "causal_conv1d_backward",
        "backwards of causal convolutions",
        functools.partial(conv_cases, backward=True),
        unit="TB/s",
    ),
    Suite("mamba_chunk_scan", "Mamba-2's scan", scan_cases, unit="TB/s"),
    Suite(
        "mamba_chunk_scan_backward",
        "backwards of Mamba-2's scan",
        functools.partial(scan_cases, backward=True),
        unit="TB/s",
    ),
    Suite("based", "the attention of Based", taylor_cases, unit="TB/s"),
    Suite("based_backward", "backwards of Based", functools.partial(taylor_cases, backward=True), unit="TB/s"),
    Suite("gated_delta_rule", "the gated delta rule", delta_cases, unit="TB/s"),
    Suite(
        "gated_delta_rule_backward",
        "backwards of the gated delta rule",
        functools.partial(delta_cases, backward=True),
        unit="TB/s",
    ),
    Suite("linear_attention", "linear attention", cases, unit="TB/s"),
    Suite(
        "linear_attention_backward",
        "backwards of linear attention",
        functools.partial(cases, backward=True),
        unit="TB/s",
    ),
)
