"""Cases of models on two devices. Each runs in two processes: simulated with gloo, or on two GPUs with NCCL."""

import contextlib
import datetime
import fcntl
import itertools
import json
import pathlib
import traceback
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.util import refused, relative_error
from tritonkittens import sim
from tritonkittens.kernels.attention import attention, attention_decode
from tritonkittens.kernels.gemm import gemm
from tritonkittens.nn import Linear, replace_linears
from tritonkittens.ops import scaled_dot_product_attention, use_attention

WORLD, BF16 = 2, torch.bfloat16
BATCH, LENGTH, WIDTH, HEADS, KV_HEADS = 2, 16, 64, 4, 2
LAYERS = ("0", "1")


@dataclass
class Process:
    """One of the two processes."""

    rank: int
    mesh: DeviceMesh

    @property
    def device(self):
        return torch.device(self.mesh.device_type, self.rank if self.mesh.device_type == "cuda" else None)

    def randn(self, *shape, seed=0, dtype=BF16):
        """The same numbers in both processes."""
        generator = torch.Generator().manual_seed(seed * 1000 + sum(shape))
        return torch.randn(*shape, generator=generator).to(self.device, dtype)

    def sharded(self, x, placement=Replicate()):  # noqa: B008
        """A DTensor, which requires a gradient unless it is of integers."""
        return distribute_tensor(x, self.mesh, [placement]).requires_grad_(x.is_floating_point())

    def of_both(self, x):
        """Rows of this process before or after those of the other one."""
        return DTensor.from_local(x, self.mesh, [Shard(0)]).full_tensor()


# ---- a model


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before and a sum behind."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # without a bias: softmax makes its gradient zero
        self.k = nn.Linear(WIDTH, WIDTH * KV_HEADS // HEADS, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH * KV_HEADS // HEADS)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def make_model(process, dtype=BF16):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in LAYERS)).to(process.device, dtype)


def make_input(process, dtype=BF16):
    return process.randn(BATCH, LENGTH, WIDTH, dtype=dtype)


def loss_of(y):
    return y.double().square().mean()


_references = {}


def reference(process, dtype):
    """(y, dx, gradients of parameters) of one process in float64."""
    if dtype not in _references:
        model, x = make_model(process, dtype).double(), make_input(process, dtype).double().requires_grad_()
        y = model(x)
        loss_of(y).backward()
        _references[dtype] = y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}
    return _references[dtype]


@contextlib.contextmanager
def only_our_kernels():
    """Run attention on the shipped kernels, and fail where PyTorch's own linear or attention would run."""

    def refuse(*args, **kwargs):
        raise AssertionError("PyTorch's own linear ran")

    with (
        mock.patch("torch.nn.functional.linear", refuse),
        mock.patch(
            "tritonkittens.ops.attention.scaled_dot_product_attention",
            lambda *args, fallback, **kwargs: scaled_dot_product_attention(*args, **kwargs),
        ),
        use_attention(),
    ):
        yield


def check_training(process, model, x, dtype=BF16):
    """Compare a forward and a backward with those of one process. Of data-parallel models `x` has the rows of this
    process."""
    y_one, dx_one, gradients = reference(process, dtype)
    with only_our_kernels():
        y = model(x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        loss_of(y).backward()
    if x.shape == y_one.shape:
        assert relative_error(x.grad, dx_one) < 1e-2
    else:
        y = process.of_both(y)
    assert relative_error(y, y_one) < 8e-3
    errors = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        errors[name] = relative_error(grad, gradients[name.removeprefix("module.")])
    assert max(errors.values()) < 2e-2, errors


def plan_of_tensors():
    """Columns, attention of DTensors, rows."""
    columns = dict.fromkeys("qkv", ColwiseParallel(use_local_output=False))
    of_layer = columns | dict(o=RowwiseParallel(), up=ColwiseParallel(), down=RowwiseParallel())
    return {f"{layer}.{name}": style for layer in LAYERS for name, style in of_layer.items()}


def plan_of_sequences():
    """Norms and sums of parts of a sequence, attention of local heads."""
    rows = Shard(1)
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=rows))
    of_layer = columns | dict.fromkeys(("o", "down"), RowwiseParallel(output_layouts=rows, use_local_output=False))
    of_layer |= dict.fromkeys(("norm1", "norm2"), SequenceParallel())
    plan = {f"{layer}.{name}": style for layer in LAYERS for name, style in of_layer.items()}
    return plan | {"0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(rows,))}


def tensor_parallel(process):
    """Linears are replaced before they are sharded."""
    model = make_model(process)
    assert replace_linears(model) == 12
    parallelize_module(model, process.mesh, plan_of_tensors())
    check_training(process, model, make_input(process).requires_grad_())


def sequence_parallel(process):
    """Linears are replaced after they were sharded."""
    model = parallelize_module(make_model(process), process.mesh, plan_of_sequences())
    assert replace_linears(model) == 12
    check_training(process, model, make_input(process).requires_grad_())


def shard_fully(model, mesh, **options):
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def own_rows(process, dtype=BF16):
    return make_input(process, dtype).chunk(WORLD)[process.rank].contiguous()


def fully_sharded_in_fp32(process):
    model = make_model(process, torch.float32)
    replace_linears(model)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    shard_fully(model, process.mesh, mp_policy=policy)
    check_training(process, model, own_rows(process, torch.float32), torch.float32)


def fully_sharded_tensor_parallel(process):
    """Two dimensions: parameters are DTensors while they are gathered, too."""
    mesh = init_device_mesh(process.mesh.device_type, (WORLD, 1), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(make_model(process), mesh["tensor"], plan_of_tensors())
    replace_linears(model)
    shard_fully(model, mesh["data"])
    check_training(process, model, own_rows(process))


def data_parallel(process):
    model = make_model(process)
    replace_linears(model)
    check_training(process, DistributedDataParallel(model), own_rows(process))


# ---- calls


def products(process):
    """All pairs of shardings of two matrices; a vector and a sharded matrix are added once."""
    a, b = process.randn(32, 64), process.randn(64, 48)
    bias, residual = process.randn(48), process.randn(32, 48)
    exact = [x.double().requires_grad_() for x in (a, b, bias, residual)]
    y = exact[0] @ exact[1] + exact[2] + exact[3]
    loss_of(y).backward()
    for first, second in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        tensors = [process.sharded(x, p) for x, p in ((a, first), (b, second), (bias, Replicate()), (residual, first))]
        out = gemm(tensors[0], tensors[1], bias=tensors[2], residual=tensors[3])
        loss_of(out.full_tensor()).backward()
        assert relative_error(out.full_tensor(), y) < 8e-3, (first, second)
        for found, expected in zip(tensors, exact, strict=True):
            assert relative_error(found.grad.full_tensor(), expected.grad) < 1.5e-2, (first, second)


def sums_over_shards(process):
    """K may be sharded where the epilogue is linear. What PyTorch remembers of a call is for calls that differ in
    nothing."""
    a, b = process.sharded(process.randn(32, 64), Shard(1)), process.sharded(process.randn(64, 48), Shard(0))
    vector = process.sharded(process.randn(48))
    total, exact = (a.full_tensor().double() @ b.full_tensor().double()), vector.full_tensor().double()
    for options, expected, placement in (
        (dict(bias=vector), total + exact, Partial()),
        (dict(bias=vector, activation="gelu"), functional.gelu(total + exact), Replicate()),
        (dict(gate=vector), total * exact, Partial()),
        (dict(out_dtype=torch.float32), total, Partial()),
        (dict(out_dtype=torch.float8_e5m2), total, Replicate()),
    ):
        out = gemm(a, b, **options)
        assert out.placements == (placement,) and out.dtype == options.get("out_dtype", BF16), options
        assert relative_error(out.full_tensor(), expected) < (0.1 if out.dtype.itemsize == 1 else 8e-3), options
    out = process.sharded(torch.full_like(total, float("nan"), dtype=BF16), Shard(0)).detach()
    assert gemm(a.detach(), b.detach(), out=out) is out
    assert relative_error(out.full_tensor(), total) < 8e-3


def linears(process):
    """Columns and rows with an activation, and inference."""
    layer = Linear(64, 48, device=process.device, dtype=BF16, activation="silu")
    layer.load_state_dict(dict(weight=process.randn(48, 64), bias=process.randn(48)))
    x = process.randn(2, 6, 64)
    expected = functional.silu(x.double() @ layer.weight.double().T + layer.bias.double())
    for style, kind in ((ColwiseParallel, Shard), (RowwiseParallel, Replicate)):
        parallel = parallelize_module(Linear.from_torch(layer, "silu"), process.mesh, style(use_local_output=False))
        given = x if kind is Shard else x.chunk(WORLD, -1)[process.rank]
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with only_our_kernels(), mode():
                y = parallel(given)
            assert isinstance(y.placements[0], kind)
            assert relative_error(y.full_tensor(), expected) < 8e-3


def attentions(process):
    """Batches, groups of heads, and heads that share one head of keys are sharded; sequences are gathered."""
    for kv_heads, placements in ((2, (Shard(0), Shard(1), Shard(2))), (1, (Shard(1),))):
        q, k, v = (process.randn(2, heads, 16, 16, seed=i) for i, heads in enumerate((4, kv_heads, kv_heads)))
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        y = functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
        loss_of(y).backward()
        for placement in placements:
            of_keys = placement if kv_heads > 1 else Replicate()
            tensors = [process.sharded(x, p) for x, p in ((q, placement), (k, of_keys), (v, of_keys))]
            out, lse = attention(*tensors, causal=True, return_lse=True)
            kept = Replicate() if placement == Shard(2) else placement
            assert out.placements == lse.placements == (kept,)
            loss_of(out.full_tensor()).backward()
            assert relative_error(out.full_tensor(), y) < 8e-3
            for found, expected in zip(tensors, exact, strict=True):
                assert relative_error(found.grad.full_tensor(), expected.grad) < 1e-2


def caches(process):
    """Attention of a token, by batches and by groups of heads."""
    tensors = [
        process.randn(2, heads, length, 16, seed=i) for i, (heads, length) in enumerate(((4, 1), (2, 40), (2, 40)))
    ]
    lengths = torch.tensor([7, 40], dtype=torch.int32, device=process.device)
    with torch.no_grad():
        expected = attention_decode(*tensors, lengths=lengths)
        for placement, of_lengths in ((Shard(0), Shard(0)), (Shard(1), Replicate())):
            sharded = [process.sharded(x, placement) for x in tensors]
            out = attention_decode(*sharded, lengths=process.sharded(lengths, of_lengths))
            assert out.placements == (placement,)
            assert relative_error(out.full_tensor(), expected) < 8e-3


def mistakes(process):
    """Errors name shapes of whole tensors."""
    a, b = process.sharded(process.randn(32, 64), Shard(0)), process.sharded(process.randn(64, 48), Shard(1))
    with refused("gemm: a is (32, 64), b is (48, 64); they must be (…, M, K) and (…, K, N)", ValueError):
        gemm(a, b.T.contiguous())
    with refused("gemm: bias is (47,); it must be one number or (48,), (1, 48)", ValueError):
        gemm(a, b, bias=process.sharded(process.randn(47)))
    with refused("tritonkittens.gemm.default got mixed torch.Tensor and DTensor", RuntimeError):
        gemm(a, process.randn(64, 48))
    q, k = (process.sharded(process.randn(2, heads, 16, 16), Shard(0)) for heads in (4, 3))
    with refused("attention: 4 query heads and 3 key heads; the first must be a multiple of the second", ValueError):
        attention(q, k, k)
    with refused("tritonkittens.attention.default got mixed torch.Tensor and DTensor", RuntimeError):
        attention(q, process.randn(2, 4, 16, 16), process.randn(2, 4, 16, 16))


def traced(process):
    """torch.compile sees DTensors as eager calls do."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(process.device, BF16)
    replace_linears(model)
    parallelize_module(model, process.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    q = [process.sharded(process.randn(2, 4, 16, 16, seed=i), Shard(1)) for i in range(3)]

    def attend(*operands):
        with use_attention():
            return functional.scaled_dot_product_attention(*operands, is_causal=True)

    for function, operands in ((model, [process.randn(16, 64).requires_grad_()]), (attend, q)):
        found = []
        for run in (function, torch.compile(function, backend="aot_eager")):
            with only_our_kernels():
                y = run(*operands)
                y.float().square().sum().backward()
            found.append((y, operands[0].grad))
            operands[0].grad = None
        for eager, compiled in zip(*found, strict=True):
            assert relative_error(*(x.full_tensor() if isinstance(x, DTensor) else x for x in (compiled, eager))) < 4e-3


CASES = (
    tensor_parallel,
    sequence_parallel,
    fully_sharded_in_fp32,
    fully_sharded_tensor_parallel,
    data_parallel,
    products,
    sums_over_shards,
    linears,
    attentions,
    caches,
    mistakes,
    traced,
)


@contextlib.contextmanager
def one_compiles(folder):
    """Of two processes that need the same kernel, the second finds what the first has compiled."""
    compile_here = triton.compile

    def compile_alone(*args, **kwargs):
        with (folder / "compiling").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_here(*args, **kwargs)

    with mock.patch("triton.compile", compile_alone):
        yield


def run_cases(rank, folder, backend):
    """Run the cases in one of two processes, which writes what went wrong, by case, into `folder`."""
    torch.set_num_threads(1)
    kind = "cuda" if backend == "nccl" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    folder, timeout = pathlib.Path(folder), datetime.timedelta(seconds=600)
    dist.init_process_group(backend, f"file://{folder}/rendezvous", timeout, WORLD, rank)
    process, outcomes = Process(rank, init_device_mesh(kind, (WORLD,))), {}
    with sim.device("sm_90a") if kind == "cpu" else contextlib.nullcontext(), one_compiles(folder):
        for case in CASES:
            try:
                case(process)
                outcomes[case.__name__] = ""
            except Exception:
                outcomes[case.__name__] = traceback.format_exc()
                break  # the other process may wait for this one
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def outcomes_of(folder, backend):
    """What went wrong in each process, by case: "" where nothing did. Cases that were not reached are missing."""
    stopped = {}
    try:
        torch.multiprocessing.spawn(run_cases, (str(folder), backend), WORLD)
    except Exception as error:
        stopped["a process stopped"] = str(error)
    files = [folder / f"{rank}.json" for rank in range(WORLD)]
    return [(json.loads(file.read_text()) if file.exists() else {}) | stopped for file in files]
