"""What ours is compared with: for every operation, functions from its operands to a call that is timed.

A peer imports what it needs when it is asked for, so that one that is not installed, or refuses the operands, is shown
as missing with the reason.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import Factory, deferred, frobenius_error

SCALE_BLOCK = 128  # rows or columns that share a scale
# multiply-adds up to which every row is compared with float64; of larger products CHECKED_ROWS random rows are
CHECKED_WHOLE = 2**36
CHECKED_ROWS = 256

Peer = Callable[[Any], Callable[[], torch.Tensor]]
_PEERS: dict[str, dict[str, tuple[Peer, bool]]] = {}

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def peer(operation: str, name: str, slow: bool = False) -> Callable[[Peer], Peer]:
    """Register a peer of an operation; a slow one runs under --slow only."""

    def register(make: Peer) -> Peer:
        _PEERS.setdefault(operation, {})[name] = make, slow
        return make

    return register


def peers(operation: str, operands: Any, slow: bool = False) -> dict[str, Factory]:
    """The peers of an operation on these operands. Raises KeyError for an operation without any."""
    return {
        name: functools.partial(make, operands)
        for name, (make, is_slow) in _PEERS[operation].items()
        if slow or not is_slow
    }


@dataclass(frozen=True)
class Product:
    """y = act(a·b·scales + bias), or residual + gate · y. a: (M, K), b: (K, N), any strides; bias and gate: (N,);
    residual: (M, N); scales: fp32, one number, (M, 1) and (1, N), or (M, K/128) and (K/128, N/128)."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    activation: str | None = None
    gate: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def work(self) -> int:
        return 2 * self.a.shape[0] * self.a.shape[1] * self.b.shape[1]

    def options(self) -> dict[str, Any]:
        """The keywords that are given."""
        names = ("bias", "activation", "gate", "residual", "scale_a", "scale_b", "out_dtype")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def out(self) -> torch.Tensor:
        """Memory for a result, filled with NaN: what a contender leaves unwritten is found."""
        shape = self.a.shape[0], self.b.shape[1]
        return torch.full(shape, float("nan"), dtype=self.out_dtype or self.a.dtype, device=self.a.device)

    @deferred
    def error(self) -> Callable[[torch.Tensor], float]:
        """Relative error against float64, of all rows or of a random sample."""
        count = self.a.shape[0]
        rows = None
        if self.work // 2 > CHECKED_WHOLE and count > CHECKED_ROWS:
            rows = torch.randperm(count, device=self.a.device)[:CHECKED_ROWS]
        everywhere = torch.arange(count, device=self.a.device) if rows is None else rows
        a, b = scaled(self.a, self.scale_a, everywhere), scaled(self.b, self.scale_b)
        bias, gate, residual = (None if x is None else x.double() for x in (self.bias, self.gate, self.residual))
        return frobenius_error(
            epilogue(a @ b, bias, self.activation, gate, None if residual is None else residual[everywhere]), rows
        )


def epilogue(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """What follows a·b, in torch."""
    y = ACTIVATIONS[activation](product if bias is None else product + bias)
    y = y if gate is None else gate * y
    return y if residual is None else residual + y


def scaled(x: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor | None = None) -> torch.Tensor:
    """x times its scales, in float64; of these rows."""
    y = x.double()
    if scale is not None:
        scale = scale.double()
        for dim in range(scale.ndim):
            if scale.shape[dim] not in (1, x.shape[dim]):
                scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, x.shape[dim])
        y = y * scale
    return y if rows is None else y[rows]


@peer("gemm", "cublas")
def torch_mm(p: Product) -> Callable[[], torch.Tensor]:
    return functools.partial(torch.mm, p.a, p.b, out=p.out())


@peer("gemm", "torch.compile max-autotune", slow=True)
def compiled_mm(p: Product) -> Callable[[], torch.Tensor]:
    torch.compiler.reset()
    return functools.partial(torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False), p.a, p.b)


@peer("gemm new result", "cublas")
def torch_mm_new(p: Product) -> Callable[[], torch.Tensor]:
    return functools.partial(torch.mm, p.a, p.b)


def _expression(activation: str | None) -> Callable[..., torch.Tensor]:
    """A product with its epilogue as one writes it in torch; cuBLAS adds the bias."""

    def expression(a: torch.Tensor, b: torch.Tensor, bias: Any, gate: Any, residual: Any) -> torch.Tensor:
        return epilogue(torch.mm(a, b) if bias is None else torch.addmm(bias, a, b), None, activation, gate, residual)

    return expression


@peer("gemm with epilogue", "torch eager")
def eager_epilogue(p: Product) -> Callable[[], torch.Tensor]:
    return functools.partial(_expression(p.activation), p.a, p.b, p.bias, p.gate, p.residual)


@peer("gemm with epilogue", "torch.compile")
def compiled_epilogue(p: Product) -> Callable[[], torch.Tensor]:
    torch.compiler.reset()
    compiled = torch.compile(
        _expression(p.activation), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )
    return functools.partial(compiled, p.a, p.b, p.bias, p.gate, p.residual)


@peer("gemm with epilogue", "cublasLt epilogue")
def cublaslt_epilogue(p: Product) -> Callable[[], torch.Tensor]:
    if p.bias is None or p.activation != "gelu_tanh" or p.gate is not None or p.residual is not None:
        raise ValueError("cublasLt fuses bias and gelu_tanh, and only these, through torch._addmm_activation")
    return functools.partial(torch._addmm_activation, p.bias, p.a, p.b, use_gelu=True, out=p.out())


@peer("gemm fp8", "torch._scaled_mm fast")
def scaled_mm_fast(p: Product) -> Callable[[], torch.Tensor]:
    return functools.partial(
        torch._scaled_mm, p.a, p.b, p.scale_a, p.scale_b, out_dtype=p.out_dtype, use_fast_accum=True, out=p.out()
    )


@peer("gemm fp8 blocks", "torch._scaled_mm")
def scaled_mm_blocks(p: Product) -> Callable[[], torch.Tensor]:
    return functools.partial(torch._scaled_mm, p.a, p.b, p.scale_a, p.scale_b, out_dtype=p.out_dtype, out=p.out())


@peer("gemm fp8 blocks", "torch scaled_mm")
def functional_scaled_mm(p: Product) -> Callable[[], torch.Tensor]:
    from torch.nn.functional import ScalingType, scaled_mm

    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(
        p.a, p.b, p.scale_a, recipes[0], _whole_rows(p.scale_b), recipes[1], output_dtype=p.out_dtype
    )


def _whole_rows(scale: torch.Tensor) -> torch.Tensor:
    """Scales (K/128, N/128) with the rows that pad their memory: cuBLAS wants every column to start at a multiple of
    4."""
    rows = scale.stride(1)
    return scale if rows == scale.shape[0] else torch.as_strided(scale, (rows, scale.shape[1]), scale.stride())


@dataclass(frozen=True)
class Attention:
    """softmax(q kᵀ / √D) v; q: (batch, heads, sequence, D), k, v: (batch, kv_heads, keys, D), lengths equal where
    `causal`. With `grad`, like q, the operands require gradients and it is their computation that is timed. `window`:
    how many keys before its own a query of a causal attention sees; None for all."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    grad: torch.Tensor | None = None
    window: int | None = None

    def hidden(self, queries: torch.Tensor) -> torch.Tensor:
        """(queries, keys): may the query at each of these places not see a key?"""
        keys = torch.arange(self.k.shape[-2], device=queries.device)
        hidden = (keys > queries[:, None]) & self.causal
        return hidden if self.window is None else hidden | (keys < queries[:, None] - self.window)

    @deferred
    def error(self, heads: int = 4, rows: int = 64) -> Callable[[torch.Tensor], float]:
        """Relative error against float64 of some rows of some heads."""
        length, group = self.q.shape[-2], self.q.shape[1] // self.k.shape[1]
        q, k, v = (x.detach().flatten(0, 1) for x in (self.q, self.k, self.v))
        places = torch.randperm(length, device=q.device)[:rows]
        which = torch.randperm(q.shape[0], device=q.device)[:heads]
        hidden = self.hidden(places)
        expected = []
        for head in which.tolist():  # a head at a time: caches are long
            scores = q[head, places].double() @ k[head // group].double().mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(hidden, float("-inf"))
            expected.append(torch.softmax(scores, -1) @ v[head // group].double())
        return frobenius_error(torch.cat(expected), (which[:, None] * length + places).flatten())

    @deferred
    def gradient_error(self, heads: int = 2) -> Callable[[tuple[torch.Tensor, ...]], float]:
        """The largest relative error of dq, dk and dv against float64, of some heads of k."""
        which = torch.randperm(self.k.shape[0] * self.k.shape[1], device=self.k.device)[:heads]

        def of_key_heads(x: torch.Tensor) -> torch.Tensor:
            """(heads of all k, of q for each, rows, D)."""
            return x.detach().reshape(self.k.shape[0] * self.k.shape[1], -1, *x.shape[2:])

        expected = []
        for head in which.tolist():
            q, k, v = (of_key_heads(x)[head].double().requires_grad_() for x in (self.q, self.k, self.v))
            scores = q @ k.mT / q.shape[-1] ** 0.5
            hidden = self.hidden(torch.arange(scores.shape[-2], device=q.device))
            scores = scores.masked_fill(hidden, float("-inf"))
            expected.append(
                torch.autograd.grad(torch.softmax(scores, -1) @ v, (q, k, v), of_key_heads(self.grad)[head].double())
            )
        wanted = [torch.stack(parts) for parts in zip(*expected, strict=True)]

        def error(found: tuple[torch.Tensor, ...]) -> float:
            parts = zip(found, wanted, strict=True)
            return max(((of_key_heads(x)[which].double() - ref).norm() / ref.norm()).item() for x, ref in parts)

        return error

    def timed(self, attention: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        """A call of `attention(q, k, v)`, or of its gradients, whose forward ran before."""
        if self.grad is None:
            return functools.partial(attention, self.q, self.k, self.v)
        operands = (self.q, self.k, self.v)
        out = attention(*operands)
        return lambda: torch.autograd.grad(out, operands, self.grad, retain_graph=True)


def _of_torch(backend: str) -> Peer:
    def make(p: Attention) -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if p.window is not None:
            raise ValueError("scaled_dot_product_attention has windows only as masks")

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=p.causal, enable_gqa=q.shape[1] != k.shape[1]
                )

        return p.timed(call)

    return make


def _of_package(module: str) -> Peer:
    """`flash_attn_func` of a FlashAttention package, where it is installed. Its tensors are (B, S, H, D), and its
    result may come with more. The third is the module that the folder `hopper` of its repository makes; the fourth is
    on PyPI (flash-attn-4)."""

    def make(p: Attention) -> Callable[[], Any]:
        function = importlib.import_module(module).flash_attn_func
        given = {} if p.window is None else {"window_size": (p.window, 0)}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=p.causal, **given)
            return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

        return p.timed(call)

    return make


for _operation in ("attention", "attention backward"):
    peer(_operation, "cudnn")(_of_torch("CUDNN_ATTENTION"))
    peer(_operation, "flash-attention 2 (torch)")(_of_torch("FLASH_ATTENTION"))
    peer(_operation, "flash-attention 3")(_of_package("flash_attn_interface"))
    peer(_operation, "flash-attention 4")(_of_package("flash_attn.cute"))


@dataclass(frozen=True)
class Packed:
    """Attention of sequences of these lengths, end to end: q, k and v are (total, H, D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: tuple[int, ...]
    causal: bool

    def starts(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths], device=self.q.device).cumsum(0).to(torch.int32)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, longest, D), zeros behind each sequence."""
        return torch.nn.utils.rnn.pad_sequence(x.split(list(self.lengths)), batch_first=True).transpose(1, 2)

    @deferred
    def error(self) -> Callable[[torch.Tensor], float]:
        """Relative error against float64 of one head of the shortest and of the longest sequence, of results packed or
        padded."""
        head = int(torch.randint(self.q.shape[1], (), device="cpu"))
        which = {n: self.lengths.index(n) for n in (min(self.lengths), max(self.lengths))}
        starts, expected = self.starts().tolist(), []
        for n, b in which.items():
            q, k, v = (x[starts[b] : starts[b] + n, head].double() for x in (self.q, self.k, self.v))
            scores = q @ k.T / q.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
            expected.append(torch.softmax(scores, -1) @ v)
        compare = frobenius_error(torch.cat(expected))

        def error(result: torch.Tensor) -> float:
            found = [
                result[b, head, :n] if result.ndim == 4 else result[starts[b] : starts[b] + n, head]
                for n, b in which.items()
            ]
            return compare(torch.cat(found))

        return error


@peer("attention of packed sequences", "flash-attention 2 (torch varlen_attn)")
def torch_varlen(p: Packed) -> Callable[[], torch.Tensor]:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    # newer versions of torch; a flag in older ones
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    given = {"window_size": (-1, 0 if p.causal else -1)} if by_window else {"is_causal": p.causal}
    starts, longest = p.starts(), max(p.lengths)
    return functools.partial(varlen_attn, p.q, p.k, p.v, starts, starts, longest, longest, **given)


@peer("attention of packed sequences", "nested tensors (torch)")
def torch_nested(p: Packed) -> Callable[[], torch.Tensor]:
    bounds = dict(min_seqlen=min(p.lengths), max_seqlen=max(p.lengths))
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, p.starts().long(), **bounds).transpose(1, 2) for x in (p.q, p.k, p.v)
    )
    return lambda: (
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.causal).transpose(1, 2).values()
    )


@peer("attention of packed sequences", "cudnn")
def padded_cudnn(p: Packed) -> Callable[[], torch.Tensor]:
    """On sequences that are padded to the longest one beforehand. Behind a causal mask no query of a sequence sees the
    padding."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (p.padded(x) for x in (p.q, p.k, p.v))
    mask = None
    if not p.causal:
        mask = (torch.arange(k.shape[2], device=k.device) < torch.tensor(p.lengths, device=k.device)[:, None])[
            :, None, None
        ]

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=p.causal)

    return call
