"""The launch path on a GPU: a kernel that copies tiles with TMA, against torch, through every way a launch can
happen."""

import gc
import math
import threading

import numpy as np
import pytest
import torch
import triton
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language import constexpr

from tritonkittens.launch import GlobalArg, Launcher, TensorMapSpec, device_facts

pytestmark = pytest.mark.gpu

MODES = [pytest.param(True, id="native"), pytest.param(False, id="python")]
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@gluon.jit
def coordinates(index, tiles, box: gl.constexpr):
    """Element coordinates of the tile number ``index`` in a row-major grid of ``tiles``."""
    last: gl.constexpr = len(box) - 1
    if last == 0:
        return (index * box[0],)
    else:
        return coordinates(index // tiles[last], tiles, box[:-1]) + (index % tiles[last] * box[last],)


@gluon.jit
def copy_tile(src, dst, tiles):
    smem = gl.allocate_shared_memory(src.dtype, src.block_type.shape, src.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    coord = coordinates(gl.program_id(0), tiles, src.block_type.shape)
    mbarrier.expect(arrived, src.block_type.nbytes)
    tma.async_load(src, coord, arrived, smem)
    mbarrier.wait(arrived, 0)
    tma.async_store(dst, coord, smem)
    tma.store_wait(0)


@triton.jit
def affine(out, x, pair, shift, big, negate, skipped, SIZE: triton.language.constexpr):
    i = triton.language.program_id(0) * SIZE + triton.language.arange(0, SIZE)
    inside = i < pair[1]
    y = triton.language.load(x + i, inside) * pair[0] + shift + (big >> 40)
    triton.language.store(out + i, triton.language.where(negate, -y, y), inside)


def signature_of(types, position=()):
    """Triton signature and alignment attributes of a launcher's argument types; a GlobalArg becomes a tuple if it has
    several tiles."""
    out, attributes = [], {}
    for i, item in enumerate(types):
        path = (*position, i)
        if not hasattr(item, "kind"):
            nested, inner = signature_of(item, path)
            out.append(nested)
            attributes |= inner
        elif item.kind == "descriptor":
            bits = triton._utils.get_primitive_bitwidth(item.type)
            layouts = [
                gl.NVMMASharedLayout(swizzle_byte_width=s.swizzle, element_bitwidth=bits, rank=len(s.box))
                for s in item.specs
            ]
            kinds = [
                f"tensordesc<{item.type}[{', '.join(map(str, s.box))}],{layout!r}>"
                for s, layout in zip(item.specs, layouts)
            ]
            out.append(kinds[0] if len(kinds) == 1 else tuple(kinds))
        else:
            out.append(item.type)
            if item.aligned:
                attributes[path] = [["tt.divisibility", 16]]
    return tuple(out), attributes


def compile_copy(key, types, device, target=None):
    signature, attributes = signature_of(types)
    source = GluonASTSource(copy_tile, dict(zip(copy_tile.arg_names, signature)), {}, attributes)
    return triton.compile(source, target=target, options={"num_warps": 1, "enable_fp_fusion": True})


def compile_affine(key, types, device, target=None):
    signature, attributes = signature_of(types)
    signature = {**dict(zip(affine.arg_names, signature)), "SIZE": "constexpr"}
    size, options = key
    source = triton.compiler.ASTSource(affine, signature, {(6,): None, (7,): size}, attributes)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True, **dict(options)})


@pytest.fixture(params=MODES)
def copy(request):
    launcher = Launcher(compile_copy, name="copy_tile", arg_names=copy_tile.arg_names, native=request.param)

    def launch(dst, src, box, swizzle, fill="zero"):
        spec = TensorMapSpec(box, swizzle, fill)
        tiles = tuple(-(-n // b) for n, b in zip(dst.shape, box))
        launcher((math.prod(tiles),), (GlobalArg(src, (spec,)), GlobalArg(dst, (spec._replace(fill="zero"),)), tiles))
        assert launcher.is_native == request.param

    launch.launcher = launcher
    return launch


def filled(shape, dtype):
    data = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
    return data.view(dtype) if dtype.itemsize == 1 else data.to(dtype)


def random_view(rng, rank, dtype):
    """A tensor that TMA can address, not necessarily contiguous: padded, permuted, sliced."""
    quantum = 16 // dtype.itemsize
    shape = [int(rng.integers(1, 9)) for _ in range(rank - 1)] + [int(rng.integers(1, 5)) * quantum]
    if rank > 1:
        shape[-2] = int(rng.integers(1, 200))
    base = filled(
        [n + int(rng.integers(0, 3)) for n in shape[:-1]] + [shape[-1] + quantum * int(rng.integers(0, 3))], dtype
    )
    order = [*rng.permutation(rank - 1).tolist(), rank - 1]
    view = base.permute(order)
    offset = quantum * int(rng.integers(0, 1 + (view.shape[-1] - shape[-1]) // quantum))
    last = shape[-1] if rank > 1 and rng.integers(2) else shape[-1] - int(rng.integers(0, quantum))  # ragged rows too
    return view[..., offset : offset + max(last, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_copy_of_any_tensor(copy, rng, rank, dtype):
    torch.manual_seed(int(rng.integers(1 << 31)))
    swizzle = 0 if rank == 1 else int(rng.choice([32, 64, 128]))
    box = (1,) * (rank - 2) + (int(rng.choice([8, 64])),) * (rank > 1) + ((swizzle or 64) // dtype.itemsize,)
    for _ in range(4):
        src = random_view(rng, rank, dtype)
        dst = (
            filled(src.shape, dtype)
            if (src.shape[-1] * dtype.itemsize) % 16 == 0
            else torch.zeros_like(padded(src))[..., : src.shape[-1]]
        )
        copy(dst, src, box, swizzle)
        assert torch.equal(
            dst.view(torch.uint8) if dtype.itemsize == 1 else dst, src.view(torch.uint8) if dtype.itemsize == 1 else src
        )


def padded(tensor):
    """A contiguous tensor with rows rounded up to 16 bytes."""
    quantum = 16 // tensor.itemsize
    return torch.empty(
        *tensor.shape[:-1], -(-tensor.shape[-1] // quantum) * quantum, dtype=tensor.dtype, device=tensor.device
    )


@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_reads_outside_the_tensor(copy, fill):
    src, dst = filled((70, 40), torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16, device="cuda")
    copy(dst, src, (64, 64), 128, fill)
    assert torch.equal(dst[:70, :40], src)
    outside = torch.cat([dst[70:].flatten(), dst[:70, 40:].flatten()])
    assert (outside.isnan() if fill == "nan" else outside == 0).all()


def test_a_tile_wider_than_one_copy(copy):
    src = torch.randn(300, 400, device="cuda", dtype=torch.float16)
    dst = torch.zeros_like(src)
    copy(dst, src, (128, 256), 128)
    assert torch.equal(dst, src)


def test_expanded_tensors_are_read(copy):
    src = torch.randn(1, 32, 64, device="cuda", dtype=torch.bfloat16).expand(5, 32, 64)
    dst = torch.zeros(5, 32, 64, device="cuda", dtype=torch.bfloat16)
    copy(dst, src, (1, 32, 64), 128)
    assert torch.equal(dst, src)


def test_graph_capture_and_replay(copy):
    src = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    dst = torch.zeros_like(src)
    copy(dst, src, (64, 64), 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy(dst, src, (64, 64), 128)  # a launch that exists
        inner = dst * 2
        out = torch.empty_like(inner)
        copy(out, inner, (64, 64), 128)  # one that is built during capture, in the graph's own memory
    for _ in range(3):
        src.normal_()
        dst.zero_()
        out.zero_()
        graph.replay()
        assert torch.equal(dst, src) and torch.equal(out, src * 2)


def test_streams(copy):
    streams = [torch.cuda.Stream() for _ in range(2)]
    sources = [torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16) for _ in streams]
    chains = [[torch.zeros_like(s) for _ in range(6)] for s in sources]
    torch.cuda.synchronize()
    for step in range(6):
        for stream, source, chain in zip(streams, sources, chains):
            with torch.cuda.stream(stream):
                copy(chain[step], chain[step - 1] if step else source, (64, 64), 128)
    for stream, source, chain in zip(streams, sources, chains):
        stream.synchronize()
        assert torch.equal(chain[-1], source)


def test_threads(copy):
    """Each thread's first CUDA call is the launch itself: it has no context yet."""
    sources = [torch.randn(256, 64 * (1 + i % 3), device="cuda", dtype=torch.bfloat16) for i in range(12)]
    targets = [torch.zeros_like(s) for s in sources]
    errors = []

    def work(seed):
        try:
            for step in range(60):
                i = (seed + 5 * step) % 12
                copy(targets[i], sources[i], (64, 64), 128)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == [] and all(torch.equal(t, s) for t, s in zip(targets, sources))
    assert copy.launcher.num_compiled == 1


def test_freed_addresses_that_come_back(copy, rng):
    seen = {}
    dst = torch.zeros(1 << 16, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        rows, columns = int(rng.integers(1, 512)), 64 * int(rng.integers(1, 3))
        src = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        seen.setdefault(src.data_ptr(), set()).add(tuple(src.shape))
        out = dst[: rows * columns].view(rows, columns)
        out.zero_()
        copy(out, src, (64, 64), 128)
        assert torch.equal(out, src)
        del src
        gc.collect()
    assert max(len(shapes) for shapes in seen.values()) > 1, (
        "the allocator never reused an address; the test has no point then"
    )


@pytest.mark.parametrize("native", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}], ids=str
)
def test_pointers_scalars_and_launch_options(native, options):
    launcher = Launcher(compile_affine, name="affine", arg_names=affine.arg_names, native=native)
    for n, scale, shift, big, negate in [
        (1000, 2.5, 7, 5 << 40, True),
        (1000, -1.0, -3, 9 << 40, False),
        (77, 0.5, 1 << 20, 1 << 40, True),
    ]:
        x = torch.randn(n + 1, device="cuda")[1:]  # not 16-byte aligned
        out = torch.zeros(n, device="cuda")
        for _ in range(2):
            out.zero_()
            args = (out, x, (scale, n), shift, big, negate, constexpr(None))
            launcher(lambda *args: (triton.cdiv(args[2][1], 256),), args, (256, tuple(options.items())))
            expect = (x.double() * scale + shift + (big >> 40)) * (-1 if negate else 1)
            torch.testing.assert_close(out.double(), expect, rtol=1e-6, atol=1e-5)
    assert launcher.num_compiled == 1


def test_hooks(copy):
    src = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    dst, names = torch.zeros_like(src), []

    def enter(metadata):
        names.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        copy(dst, src, (64, 64), 128)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    copy(dst, src, (64, 64), 128)
    assert names == ["copy_tile"] and torch.equal(dst, src)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_another_device(copy):
    for index in (1, 0, 1):
        src = torch.randn(128, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        dst = torch.zeros_like(src)
        copy(dst, src, (64, 64), 128)
        assert torch.equal(dst, src) and torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="dst is on cuda:0, src on cuda:1; one kernel's tensors lie on one device"):
        copy(dst.to("cuda:0"), src, (64, 64), 128)


def test_cpu_tensors_are_refused(copy):
    with pytest.raises(ValueError, match="src: a tensor on cpu"):
        copy(torch.zeros(64, 64, device="cuda"), torch.zeros(64, 64), (64, 32), 128)


def test_device_facts():
    facts, properties = device_facts(), torch.cuda.get_device_properties()
    assert device_facts(torch.device("cuda", facts.index)) is facts
    assert (facts.name, facts.capability) == (properties.name, torch.cuda.get_device_capability())
    assert facts.multiprocessors == properties.multi_processor_count and facts.shared_memory_per_block == 227 * 1024
    assert facts.l2_bytes > 1 << 20 and np.isclose(facts.memory_bytes, torch.cuda.mem_get_info()[1], rtol=0.05)
