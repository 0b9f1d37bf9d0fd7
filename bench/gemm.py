"""The GEMM against cuBLAS: squares and short K (Figure 7 of the paper), ragged and model shapes, fp8, epilogues, host
time."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.harness import Case, Contender, Factory, Suite, Trial, deferred, frobenius_error, ratio, with_knobs
from bench.peers import CHECKED_ROWS, SCALE_BLOCK, Product, peers

OURS, BARE = "tritonkittens", "tritonkittens, bare"
DEVICE = "cuda"
BF16_BOUND, EPILOGUE_BOUND = 4e-3, 1e-2  # rounding to bf16 is 1.7e-3; torch's epilogues round after every step
FAST_FP8_BOUND = 2e-2  # Hopper's tensor core keeps 14 bits of an fp8 sum
BLOCK_FP8_BOUND = 4e-3

SQUARES = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384))
SHORT_K = tuple((4096, 4096, k) for k in (64, 128, 256, 512, 1024, 2048))
SUSTAINED = (4096, 8192, 16384)
SCALINGS = ("tensor", "row", "block")  # of e4m3
LAYOUTS = ("NN", "NT", "TN")  # of A and B: T is stored transposed

TOKENS = (1, 16, 64, 512, 4096, 16384)
# Weights as stored, (N, K). DeepSeek-V3: 128 heads, query 128 + 64, key 128 + value 128, latent 1536 (queries) and 512
# + 64 (keys and values)
WEIGHTS = {
    "Llama-3 8B": {"q, o": (4096, 4096), "k, v": (1024, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)},
    "Llama-3 70B": {"q, o": (8192, 8192), "k, v": (1024, 8192), "gate, up": (28672, 8192), "down": (8192, 28672)},
    "DeepSeek-V3": {
        "q_a": (1536, 7168),
        "q_b": (128 * 192, 1536),
        "kv_a": (512 + 64, 7168),
        "kv_b": (128 * 256, 512),
        "o": (7168, 128 * 128),
        "gate, up": (18432, 7168),
        "down": (7168, 18432),
        "expert gate, up": (2048, 7168),
        "expert down": (7168, 2048),
    },
}
TRAINED, TRAINED_TOKENS = {model: WEIGHTS[model] for model in ("Llama-3 8B", "Llama-3 70B")}, (4096, 16384)
HEADS = {"GPT-2": {"head": (50257, 768)}}  # rows of logits begin at no multiple of 16 bytes
RAGGED = (
    (4095, 4097, 4103),
    (1000, 1000, 1000),
    (127, 129, 255),
    (3000, 5000, 2000),
    (4104, 4104, 4104),
    (8200, 1000, 3000),
    (1, 4095, 4097),
    (100, 50000, 512),
    (16, 4095, 4097),
    (64, 4095, 4097),
    (255, 257, 1023),
    (511, 513, 1023),
    (1000, 1001, 1003),
)

SIDE = 4096
EPILOGUE_ROUNDS = 8  # times the usual
MANY = 64  # products that differ in their tensors only
EPILOGUES: dict[str, Mapping[str, Any]] = {
    "bare": {},
    "bias": {"bias": True},
    "bias, gelu": {"bias": True, "activation": "gelu"},
    "bias, gelu_tanh": {"bias": True, "activation": "gelu_tanh"},
    "bias, silu": {"bias": True, "activation": "silu"},
    "residual + gate · (a·b + bias)": {"bias": True, "gate": True, "residual": True},
}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random data: zeros or ones draw less power and run faster than any real tensor."""
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    return x.to(dtype)


def ours(p: Product, new_result: bool = False, **config: Any) -> Callable[[], torch.Tensor]:
    """Our GEMM, with the configuration that it chooses or with these fields of it."""
    from tritonkittens.kernels.gemm import Config, gemm

    settings: dict[str, Any] = {"config": Config(**config)} if config else {}
    return functools.partial(gemm, p.a, p.b, **p.options(), **settings, **({} if new_result else {"out": p.out()}))


def trial(
    p: Product,
    contenders: Mapping[str, Factory],
    operation: str = "gemm",
    bound: float = BF16_BOUND,
    slow: bool = False,
    note: str = "",
) -> Trial:
    """Ours and the operation's peers on a product."""
    return Trial(contenders, peers(operation, p, slow), p.error(), bound, note)


def bf16(m: int, n: int, k: int, layout: str = "NN") -> Product:
    a = randn(k, m).T if layout[0] == "T" else randn(m, k)
    b = randn(n, k).T if layout[1] == "T" else randn(k, n)
    return Product(a, b)


def case(
    name: str,
    shape: tuple[int, int, int],
    prepare: Callable[[], Trial],
    kind: str = "device",
    rounds: int = 1,
    **facts: Any,
) -> Case:
    """A case of a product of this shape (M, N, K)."""
    m, n, k = shape
    return Case(name, 2 * m * n * k, {"M": m, "N": n, "K": k, **facts}, prepare, kind, rounds)


def sweep() -> Iterator[tuple[str, tuple[int, int, int], int]]:
    """The shapes of Figure 7 and the short ones: (what varies, shape, its value)."""
    for shape in SQUARES:
        yield "M = N = K", shape, shape[0]
    for shape in SHORT_K:
        yield "M = N = 4096, K", shape, shape[2]


def contenders(p: Product, options: argparse.Namespace) -> dict[str, Factory]:
    """Ours, and once more for each of `options.knobs`, fields of a configuration."""
    return {OURS: functools.partial(ours, p)} | with_knobs(
        OURS, options.knobs, lambda knobs: functools.partial(ours, p, **knobs)
    )


def bf16_trial(options: argparse.Namespace, shape: tuple[int, int, int], layout: str) -> Trial:
    p = bf16(*shape, layout)
    return trial(p, contenders(p, options), slow=options.slow)


def sweep_cases(options: argparse.Namespace) -> list[Case]:
    return [
        case(
            f"bf16 {m}x{n}x{k} {layout}",
            (m, n, k),
            functools.partial(bf16_trial, options, (m, n, k), layout),
            layout=layout,
            panel=f"{layout}, {what}",
            extent=extent,
        )
        for layout in LAYOUTS
        for what, (m, n, k), extent in sweep()
    ]


def model_cases(options: argparse.Namespace) -> list[Case]:
    shapes = [
        (model, weight, (m, n, k), "NT")
        for model, weights in WEIGHTS.items()
        for weight, (n, k) in weights.items()
        for m in TOKENS
    ]
    shapes += [("ragged", f"{m}x{n}x{k}", (m, n, k), layout) for layout in LAYOUTS for m, n, k in RAGGED]
    return [
        case(
            f"{model} {weight}: {m}x{n}x{k} {layout}",
            (m, n, k),
            functools.partial(bf16_trial, options, (m, n, k), layout),
            model=model,
            weight=weight,
            layout=layout,
        )
        for model, weight, (m, n, k), layout in shapes
    ]


def fp8(m: int, n: int, k: int, scaling: str) -> Product:
    """e4m3 operands; B is (N, K) stored, as the tensor core and `torch._scaled_mm` want it. Scales as
    `torch._scaled_mm` wants their memory."""
    a, b = randn(m, k, dtype=torch.float8_e4m3fn), randn(n, k, dtype=torch.float8_e4m3fn).T
    if scaling == "tensor":
        shapes: tuple[Any, ...] = ((), ())
    elif scaling == "row":
        shapes = ((m, 1), (1, n))
    else:
        blocks = k // SCALE_BLOCK
        scale_a = torch.rand(blocks, m, dtype=torch.float32, device=DEVICE).T + 0.5  # consecutive along M
        padded = torch.rand(-(-n // SCALE_BLOCK), -(-blocks // 4) * 4, dtype=torch.float32, device=DEVICE) + 0.5
        return Product(a, b, scale_a=scale_a, scale_b=padded[:, :blocks].T, out_dtype=torch.bfloat16)
    scale_a, scale_b = (torch.rand(shape, dtype=torch.float32, device=DEVICE) + 0.5 for shape in shapes)
    return Product(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def fp8_trial(options: argparse.Namespace, shape: tuple[int, int, int], scaling: str) -> Trial:
    p = fp8(*shape, scaling)
    operation, bound = ("gemm fp8 blocks", BLOCK_FP8_BOUND) if scaling == "block" else ("gemm fp8", FAST_FP8_BOUND)
    return trial(p, contenders(p, options), operation, bound)


def fp8_cases(options: argparse.Namespace) -> list[Case]:
    return [
        case(
            f"e4m3 {m}x{n}x{k} scale per {scaling}",
            (m, n, k),
            functools.partial(fp8_trial, options, (m, n, k), scaling),
            scaling=scaling,
            panel=f"scale per {scaling}, {what}",
            extent=extent,
        )
        for scaling in SCALINGS
        for what, (m, n, k), extent in sweep()
        if scaling != "block" or k % SCALE_BLOCK == 0
    ]


def sustained_cases(options: argparse.Namespace) -> list[Case]:
    """Large products as training runs them, at the card's power limit."""
    kinds = {"bf16": functools.partial(bf16_trial, options, layout="NN")}
    kinds |= {
        f"e4m3 scale per {scaling}": functools.partial(fp8_trial, options, scaling=scaling) for scaling in SCALINGS
    }
    return [
        case(
            f"{kind} {side}x{side}x{side}",
            (side, side, side),
            functools.partial(prepare, shape=(side, side, side)),
            "sustained",
            panel=kind,
        )
        for kind, prepare in kinds.items()
        for side in SUSTAINED
    ]


def epilogue_cases(options: argparse.Namespace) -> list[Case]:
    """What is fused costs 1 to 3 %, and at the power limit a burst varies by 2: the medians of 20 rounds gave gelu_tanh
    2.1 and 3.1 % over the bare product."""

    def prepare(epilogue: Mapping[str, Any]) -> Trial:
        bare = bf16(SIDE, SIDE, SIDE)
        shapes = {"bias": (SIDE,), "gate": (SIDE,), "residual": (SIDE, SIDE)}
        p = Product(
            bare.a,
            bare.b,
            **{name: value if name == "activation" else randn(*shapes[name]) for name, value in epilogue.items()},
        )
        against = peers("gemm with epilogue" if epilogue else "gemm", p)
        baselines = {BARE: Contender(functools.partial(ours, bare), bare.error())} if epilogue else {}
        return Trial({OURS: functools.partial(ours, p)}, against, p.error(), EPILOGUE_BOUND, baselines=baselines)

    return [
        case(
            f"bf16 {SIDE}³ {name}",
            (SIDE, SIDE, SIDE),
            functools.partial(prepare, epilogue),
            rounds=EPILOGUE_ROUNDS,
            epilogue=name,
        )
        for name, epilogue in EPILOGUES.items()
    ]


def over_bare(row: dict[str, Any]) -> None:
    """What the epilogue costs: time over that of our bare product in the same rounds."""
    mine, bare = row["contenders"][OURS], row["contenders"].get(BARE, {})
    if "ms" in mine and "ms" in bare:
        percent = 100 * (ratio(bare["ms"], mine["ms"]) - 1)
        mine["extra"] = {"% over bare": round(percent, 2)}


def linear_trial(
    theirs: torch.nn.Linear,
    timed: Callable[[torch.nn.Module], Callable[[], torch.Tensor]],
    error: Callable[[torch.Tensor], float],
) -> Trial:
    """A torch.nn.Linear and ours with the same parameters; `timed` makes of a module the call that is timed."""
    from tritonkittens.nn import Linear

    return Trial({OURS: lambda: timed(Linear.from_torch(theirs))}, {"torch": lambda: timed(theirs)}, error, BF16_BOUND)


def trial_in_turn(side: int) -> Trial:
    """Each call has other tensors than the one before, as the layers of a model have."""
    products = [bf16(side, side, side) for _ in range(MANY)]

    def in_turn(make: Callable[[Product], Callable[[], Any]]) -> Callable[[], Any]:
        calls = itertools.cycle([make(p) for p in products])
        return lambda: next(calls)()

    def peer(name: str, p: Product) -> Callable[[], Any]:
        return peers("gemm", p)[name]()

    against = {name: functools.partial(in_turn, functools.partial(peer, name)) for name in peers("gemm", products[0])}
    return Trial({OURS: functools.partial(in_turn, ours)}, against, products[0].error(), BF16_BOUND)


def linear_host_trial(side: int, backward: bool) -> Trial:
    """A call of one Linear layer, or of it and its backward."""
    theirs = torch.nn.Linear(side, side, device=DEVICE, dtype=torch.bfloat16)
    x, grad = randn(side, side).requires_grad_(backward), randn(side, side)
    weight, bias = theirs.weight, theirs.bias

    def timed(module: torch.nn.Module) -> Callable[[], torch.Tensor]:
        """One result to compare: y, or of the gradients that of the weight."""
        if backward:
            return lambda: torch.autograd.grad(module(x), (x, weight, bias), grad)[1]
        return torch.no_grad()(functools.partial(module, x))

    exact = (grad.double().T @ x.double() if backward else x.double() @ weight.double().T + bias.double()).detach()
    return linear_trial(theirs, timed, frobenius_error(exact))


def host_cases(options: argparse.Namespace) -> list[Case]:
    def prepare(side: int, new_result: bool) -> Trial:
        p = bf16(side, side, side)
        return trial(p, {OURS: functools.partial(ours, p, new_result)}, "gemm new result" if new_result else "gemm")

    cases = (("host", 256, False), ("host", 256, True), ("eager", 512, False), ("graph", 512, False))
    found = [
        case(
            f"bf16 {side}³ {'new result' if new else 'out='}, {kind} time",
            (side, side, side),
            functools.partial(prepare, side, new),
            kind,
            new_result=new,
        )
        for kind, side, new in cases
    ]
    in_turn = f"bf16 256³ out=, {MANY} products in turn, host time"
    found.append(case(in_turn, (256, 256, 256), functools.partial(trial_in_turn, 256), "host", new_result=False))
    return [
        *found,
        *(
            case(
                f"bf16 256³ nn.Linear forward{' and backward' * backward}, host time",
                (256, 256, 256),
                functools.partial(linear_host_trial, 256, backward),
                "host",
                backward=backward,
            )
            for backward in (False, True)
        ),
    ]


def training_cases(trained: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[Case]:
    """A step of Linear layers, each: three products, and gradients that are kept."""

    def prepare(m: int, n: int, k: int) -> Trial:
        theirs = torch.nn.Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16)
        x, grad = randn(m, k).requires_grad_(), randn(m, n)
        rows = torch.randperm(n, device=DEVICE)[:CHECKED_ROWS]

        def step(module: torch.nn.Module) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                x.grad = module.weight.grad = None
                module(x).backward(grad)
                return module.weight.grad

            return run

        return linear_trial(
            theirs, step, deferred(lambda: frobenius_error(grad[:, rows].double().T @ x.detach().double(), rows))()
        )

    return [
        case(
            f"{model} {weight}: {m}x{n}x{k} forward and backward",
            (m, n, 3 * k),
            functools.partial(prepare, m, n, k),
            model=model,
            weight=weight,
        )
        for model, weights in trained.items()
        for weight, (n, k) in weights.items()
        for m in TRAINED_TOKENS
    ]


OF_WEIGHTS = {"x": "M", "y": "ratio", "panel": "model", "series": "weight"}
SUITES = (
    Suite("gemm", "GEMM sweep against cuBLAS (Figure 7)", sweep_cases, plot={"x": "extent", "panel": "panel"}),
    Suite("gemm_models", "GEMM at model shapes (weights stored (N, K)) and ragged ones", model_cases, plot=OF_WEIGHTS),
    Suite("gemm_fp8", "e4m3 GEMM against torch._scaled_mm", fp8_cases, plot={"x": "extent", "panel": "panel"}),
    Suite(
        "gemm_sustained",
        "GEMM calls behind one another, each contender at the clock that its own draw leaves it",
        sustained_cases,
        plot={"x": "M", "panel": "panel"},
    ),
    Suite("gemm_epilogues", "fused epilogues against torch eager and torch.compile", epilogue_cases, extend=over_bare),
    Suite(
        "gemm_training",
        "forward and backward of a Linear layer against torch.nn.Linear",
        lambda options: training_cases(TRAINED),
        plot=OF_WEIGHTS,
    ),
    Suite(
        "gemm_head",
        "forward and backward of a Linear layer whose results TMA cannot address, against torch.nn.Linear",
        lambda options: training_cases(HEADS),
        plot=OF_WEIGHTS,
    ),
    Suite("gemm_host", "time of a small GEMM with the host", host_cases, unit="µs"),
)
