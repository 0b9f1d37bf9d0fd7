"""The launch path without a GPU: rules of tensor maps, keys and caches, and the very bytes that reach the driver."""

import ctypes
import gc
import struct
import threading
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.language import constexpr

from tests.fake_libcuda import FakeCuda, build, run_beside_triton
from tritonkittens.launch import (
    ArgType,
    GlobalArg,
    Launcher,
    TensorMapSpec,
    check_tensor_map,
    encode,
    hardware_box,
    native,
    tensormap,
)
from tritonkittens.launch.arguments import fingerprint
from tritonkittens.launch.clock_cache import ClockCache
from tritonkittens.launch.tensormap import addressable_strides, mapped

TILE = TensorMapSpec((64, 64), 128)
MODES = [pytest.param(True, id="native"), pytest.param(False, id="python")]


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "address", "spec", "message"),
    [
        (
            (8, 64),
            (65, 1),
            2,
            0,
            TILE,
            "Q: shape (8, 64), strides (65, 1), 2-byte elements: stride 65 of dimension 0 is 130 bytes; TMA needs",
        ),
        ((8, 64), (64, 1), 2, 0x1008, TILE, "address 0x1008 is not a multiple of 16 bytes"),
        ((8, 64), (1, 8), 2, 0, TILE, "the last dimension has stride 8; TMA needs it contiguous"),
        ((0, 64), (64, 1), 2, 0, TILE, "extent 0 of dimension 0"),
        ((8,) * 6, (1,) * 6, 2, 0, TILE, "6 dimensions; TMA addresses 1 to 5"),
        ((), (), 2, 0, TILE, "0 dimensions"),
        ((8, 64), (64, 1), 16, 0, TILE, "elements of 1, 2, 4 or 8 bytes"),
        ((8, 64), (1 << 40, 1), 2, 0, TILE, "stride < 2**40 bytes"),
        ((8, 64), (64, 1), 2, 0, TensorMapSpec((64,), 128), "the box has 1 dimensions, the tensor 2"),
        ((8, 64), (64, 1), 2, 0, TensorMapSpec((64, 24), 32), "a row of the box is 48 bytes; with a 32-byte swizzle"),
        (
            (8, 64),
            (64, 1),
            2,
            0,
            TensorMapSpec((64, 4), 0),
            "a row of the box is 8 bytes; TMA needs a multiple of 16 bytes",
        ),
        (
            (8, 64),
            (64, 1),
            2,
            0,
            TensorMapSpec((0, 64), 128),
            "extent 0 of dimension 0; a box has at least one element",
        ),
        ((8, 64), (64, 1), 2, 0, TensorMapSpec((64, 64), 96), "swizzle must be one of (0, 32, 64, 128)"),
        (
            (8, 64),
            (64, 1),
            2,
            0,
            TensorMapSpec((64, 64), 128, "-inf"),
            "fill '-inf'; a read outside the tensor gives 'zero' or 'nan'",
        ),
    ],
)
def test_a_broken_rule_is_named(shape, strides, itemsize, address, spec, message):
    with pytest.raises(ValueError) as error:
        check_tensor_map(shape, strides, itemsize, address, spec, "Q")
    assert message in str(error.value) and str(error.value).startswith("Q: ")


def test_a_wrong_type_is_named():
    with pytest.raises(TypeError, match="described by a TensorMapSpec, got tuple"):
        check_tensor_map((8, 64), (64, 1), 2, 0, ((64, 64), 128), "Q")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="extent 0 of the box is a float"):
        check_tensor_map((8, 64), (64, 1), 2, 0, TensorMapSpec((64.0, 64), 128), "Q")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fill 'nan' with torch.int32"):
        check_tensor_map((8, 64), (64, 1), 4, 0, TensorMapSpec((64, 32), 128, "nan"), "Q", torch.int32)


def test_meta_tensors_and_odd_but_legal_tensors_pass():
    meta = torch.empty(2, 300, 4, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    check_tensor_map(meta.shape, meta.stride(), 2, None, TensorMapSpec((1, 1, 128, 64), 128), "Q")
    # size 1: its stride addresses nothing
    check_tensor_map((1, 8, 64), (7, 64, 1), 2, 0, TensorMapSpec((1, 8, 64), 128), "Q")
    check_tensor_map((8, 1), (8, 5), 2, 0, TensorMapSpec((8, 8), 0), "Q")
    check_tensor_map((5, 8, 64), (0, 64, 1), 2, 0, TensorMapSpec((1, 8, 64), 128), "Q")  # expanded


def test_ragged_maps():
    """Two dimensions more, by which addresses come out right modulo 2⁶⁴ and rows end with their sequence."""
    x = torch.empty(100, 3, 64, dtype=torch.bfloat16).transpose(0, 1)
    spec = TensorMapSpec((1, 1, 1, 64, 64), 128, ragged=True)
    shape, strides = mapped(x, spec)
    assert shape == (0x7FFF0000, 0x7FFF0000, 3, 1 << 30, 64) and strides == ((1 << 34) - 192, 192, 64, 192, 1)
    for begin, rows, row, head in ((10, 70, 5, 2), (0, 100, 99, 1), (99, 1, 0, 0)):
        place = (1 << 30, begin + rows, head, (1 << 30) - rows + row, 7)
        offset = sum(c * s * x.itemsize for c, s in zip(place, strides, strict=True)) % (1 << 64)
        assert offset == x[head, begin + row, 7:].data_ptr() - x.data_ptr()
    check_tensor_map(x.shape, x.stride(), 2, x.data_ptr(), spec, "Q")
    single = torch.empty(1, 8, dtype=torch.bfloat16).as_strided((1, 8), (3, 1))  # a stride that addresses nothing
    assert mapped(single, spec._replace(box=(1, 1, 16, 8)))[1] == ((1 << 34) - 8, 8, 8, 1)
    for shape in ((64,), (2, 2, 8, 64), ((1 << 30) + 1, 64)):
        with pytest.raises(ValueError, match="a ragged map is of two or three dimensions and at most 2\\*\\*30 rows"):
            check_tensor_map(shape, (64,) * (len(shape) - 1) + (1,), 2, 0, spec, "Q")


def test_one_copy_is_at_most_256_elements_and_one_swizzle_wide():
    assert hardware_box(TensorMapSpec((512, 256), 128), 2) == (256, 64)
    assert hardware_box(TensorMapSpec((64, 128), 0), 2) == (64, 128)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
    st.randoms(use_true_random=False),
)
def test_strides_of_size_1_dimensions_become_legal_and_the_others_stay(shape, itemsize, random):
    strides = [random.choice([0, 1, 3, 16, 1 << 45]) if n == 1 else 16 * (i + 1) for i, n in enumerate(shape)]
    strides[-1] = strides[-1] if shape[-1] == 1 else 1
    legal = addressable_strides(shape, strides, itemsize)
    assert all(new == old for new, old, n in zip(legal, strides, shape) if n != 1)
    check_tensor_map(shape, strides, itemsize, 0, TensorMapSpec((1,) * (len(shape) - 1) + (16,), 0), "Q")


# ---- the bytes that reach the driver ---------------------------------------------------------------------------------

Metadata = namedtuple(
    "Metadata",
    "name num_warps num_ctas shared launch_pdl launch_cooperative_grid global_scratch_size global_scratch_align "
    "profile_scratch_size profile_scratch_align tensordesc_meta instrumentation_mode",
    defaults=["k", 8, 1, 1000, False, False, 0, 1, 0, 1, [], ""],
)
ELEMENT = {"bf16": (10, 2), "fp32": (7, 4), "fp16": (6, 2), "u8": (0, 1)}


class Kernel:
    """What the launcher uses of a CompiledKernel."""

    def __init__(self, types, **options):
        signature, maps = [], []

        def visit(types):
            for item in types:
                if not isinstance(item, ArgType):
                    visit(item)
                    continue
                if item.kind != "descriptor":
                    signature.append(item.type)
                    continue
                for spec in item.specs:
                    code, size = ELEMENT[item.type]
                    signature.append(f"tensordesc<{item.type}[{', '.join(map(str, spec.box))}],layout>")
                    swizzle = [0, 32, 64, 128].index(spec.swizzle)
                    maps.append(
                        dict(
                            swizzle=swizzle,
                            elem_size=size,
                            elem_type=code,
                            block_size=list(hardware_box(spec, size)),
                            fp4_padded=False,
                        )
                    )

        visit(types)
        self.types, self.hooks = types, []
        self.metadata = Metadata(tensordesc_meta=maps, **options)
        self.src = SimpleNamespace(signature=dict(enumerate(signature)))
        self.function, self.loads = 0x77, 0

    def _init_handles(self):
        self.loads += 1

    def launch_metadata(self, grid, stream, *args):
        return SimpleNamespace(grid=grid, stream=stream, args=args)


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    return FakeCuda(build(tmp_path_factory.mktemp("fake"), "libfake.so"))


def launcher(fake, native, compiled=None, capacity=4096, **options):
    def compile(key, types, device):
        kernel = Kernel(types, **options)
        if compiled is not None:
            compiled.append((key, types, device, kernel))
        return kernel

    result = Launcher(
        compile, name="copy", arg_names=("Q", "out", "n"), driver=fake.driver, capacity=capacity, native=native
    )
    return result


def unpack(last, codes):
    return [struct.unpack("<" + code, data)[0] for code, data in zip(codes, last.parameters)]


def test_the_native_path_builds_here():
    assert native.load() is not None


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_laid_out_in_order(fake, mode):
    launch, compiled = launcher(fake, mode, compiled := []), compiled
    q, out = torch.empty(4, 96, 64, dtype=torch.bfloat16), torch.empty(33)
    specs = (TensorMapSpec((1, 64, 64), 128), TensorMapSpec((1, 16, 32), 64, "nan"))
    args = (GlobalArg(q, specs), (out, (7, None), constexpr(3)), 1 << 40, -1, 2.5, True, 1 << 63, out[1:])
    fake.expect([*[128, 4, 4, 4, 8, 8, 8] * 2, 8, 4, 8, 4, 4, 4, 8, 8, 8, 8])
    for _ in range(3):  # built, then found
        launch((2, 3), args, "key")
        last = fake.last
        assert last.grid == (2, 3, 1) and last.block == (256, 1, 1) and last.shared == 1000 and last.function == 0x77
        assert last.misaligned_maps == 0 and last.attributes == [] and last.context == 0x1000
        values = [struct.unpack("<" + c, data)[0] for c, data in zip("iiiqqq", last.parameters[1:7])]
        assert values == [4, 96, 64, 96 * 64, 64, 1]
        values = [struct.unpack("<" + c, data)[0] for c, data in zip("QiqifIQQQQ", last.parameters[14:])]
        assert values == [out.data_ptr(), 7, 1 << 40, -1, 2.5, 1, 1 << 63, out.data_ptr() + 4, 0, 0]
        for data, spec in zip((last.parameters[0], last.parameters[7]), specs):
            assert data == encode(q, spec, driver=fake.driver)
    assert len(compiled) == 1 and launch.is_native == mode
    key, types, device, kernel = compiled[0]
    assert (key, device, kernel.loads) == ("key", -1, 1)
    assert types[0] == ArgType("descriptor", "bf16", specs=specs)
    assert types[1] == (
        ArgType("pointer", "*fp32", True),
        (ArgType("scalar", "i32"), ArgType("constexpr", "constexpr")),
        types[1][2],
    )
    assert [t.type for t in types[2:]] == ["i64", "i32", "fp32", "u1", "u64", "*fp32"] and types[7].aligned is False


@pytest.mark.parametrize("mode", MODES)
def test_a_ragged_map_brings_its_own_extents(fake, mode):
    launch = launcher(fake, mode)
    q, spec = (
        torch.empty(96, 4, 64, dtype=torch.bfloat16).transpose(0, 1),
        TensorMapSpec((1, 1, 1, 64, 64), 128, ragged=True),
    )
    fake.expect([128, *[4] * 5, *[8] * 5, 8, 8])
    for _ in range(3):
        launch((1,), (GlobalArg(q, (spec,)),))
        values = [struct.unpack("<" + c, data)[0] for c, data in zip("iiiiiqqqqq", fake.last.parameters[1:11])]
        assert values == [0x7FFF0000, 0x7FFF0000, 4, 1 << 30, 64, (1 << 34) - 256, 256, 64, 256, 1]
        assert fake.last.parameters[0] == encode(q, spec, driver=fake.driver)


@pytest.mark.parametrize("mode", MODES)
def test_scalars_are_values_not_keys(fake, mode):
    launch = launcher(fake, mode)
    out = torch.empty(4)
    fake.expect([8, 4, 4, 8, 8])
    for n in range(200):
        launch((1,), (out, n, n / 2))
        assert [struct.unpack("<if", b"".join(fake.last.parameters[1:3]))] == [(n, n / 2)]
    assert (launch.num_compiled, launch.num_bindings) == (1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_what_changes_the_code_recompiles(fake, mode):
    launch, compiled = launcher(fake, mode, compiled := []), compiled
    x, specs = torch.empty(64, 64), (TensorMapSpec((64, 32), 128),)
    fake.expect([])
    calls = [
        (x,),
        (x[0, 1:],),
        (x.half(),),
        (x.view(torch.int32),),
        (1, x),
        (1 << 40, x),
        (1.0, x),
        (True, x),
        (None, x),
        ((x,),),
    ]
    calls += [(GlobalArg(x, specs),), (GlobalArg(x, specs * 2),), (GlobalArg(x, (TensorMapSpec((32, 32), 128),)),)]
    for _ in range(2):
        for args in calls:
            launch((1,), args, 0)
    assert launch.num_compiled == len(compiled) == len(calls)
    launch((1,), (x,), 1)
    launch((1,), (torch.empty(2),), 0)
    # equal specs, other tuple, other shape
    launch((1,), (GlobalArg(torch.empty(128, 64), (TensorMapSpec((64, 32), 128),)),), 0)
    assert launch.num_compiled == len(compiled) == len(calls) + 1


@pytest.mark.parametrize("mode", MODES)
def test_an_address_that_returns_with_another_shape_gets_another_map(fake, mode):
    launch, base, specs = (
        launcher(fake, mode),
        torch.empty(64 * 64, dtype=torch.bfloat16),
        (TensorMapSpec((16, 32), 64),),
    )
    fake.expect([128, 4, 4, 8, 8, 8, 8])
    views = [
        base.view(64, 64),
        base.view(128, 32),
        base.view(128, 32)[:, :16],
        base.view(64, 64)[:32],
        base.view(torch.float16).view(64, 64),
    ]
    for view in views * 3:
        launch((1,), (GlobalArg(view, specs),))
        assert fake.last.parameters[0] == encode(view, specs[0], driver=fake.driver)
        assert struct.unpack("<16Q", fake.last.parameters[0])[2:4] == tuple(reversed(view.shape))
        assert struct.unpack("<iiqq", b"".join(fake.last.parameters[1:5])) == (*view.shape, *view.stride())
    assert launch.num_bindings == len(views) and launch.num_compiled == 2


def test_encoding_is_cached_and_small_tensors_are_corrected(fake):
    x = torch.empty(3, 40, 64, dtype=torch.bfloat16)[:, 8:]
    spec, before = TensorMapSpec((1, 512, 128), 64, "nan"), fake.num_encodes
    data = encode(x, spec, driver=fake.driver)
    assert encode(x, spec, driver=fake.driver) is data and fake.num_encodes == before + 1
    words = struct.unpack("<16Q", data)
    assert words[0] == x.data_ptr() and words[2:5] == (64, 32, 3) and words[7:9] == (128, 40 * 128)
    assert [w & 0xFFFFFFFF for w in words[11:14]] == [32, 256, 1] and [w >> 32 for w in words[11:14]] == [1, 1, 1]
    assert words[1] == 9 | 3 << 8 | 1 << 21 | 2 << 32 | 1 << 40 | 2 << 48
    other, large = torch.empty_like(x), torch.empty(3, 400, 64, dtype=torch.bfloat16)
    del fake.driver.version  # cached
    fake.integer("fake_version").value = 13010
    try:
        assert struct.unpack("<16Q", encode(other, spec, driver=fake.driver))[1] == words[1] & ~(1 << 21)
        assert struct.unpack("<16Q", encode(large, spec, driver=fake.driver))[1] == words[1]
    finally:
        fake.integer("fake_version").value = 13020
        del fake.driver.version
    with pytest.raises(TypeError, match="tensor: TMA does not move torch.complex64"):
        encode(torch.empty(8, 8, dtype=torch.complex64), TensorMapSpec((8, 8), 0), driver=fake.driver)


@pytest.mark.parametrize("fetched, code", [(128, 2), (256, 3)])
def test_what_a_copy_fetches_reaches_the_driver(fake, monkeypatch, fetched, code):
    monkeypatch.setattr(tensormap, "l2_promotion", lambda x: fetched)
    # maps are remembered by address and shape
    data = encode(torch.empty(fetched, 64, dtype=torch.bfloat16), TensorMapSpec((64, 64), 128), driver=fake.driver)
    assert struct.unpack("<16Q", data)[1] >> 48 == code


@pytest.mark.parametrize(
    "cols, rows, memory, fetched",
    [
        pytest.param(128, 200, 80, 256, id="an H100, what L2 cannot hold"),
        pytest.param(128, 199, 80, 128, id="what L2 holds"),
        pytest.param(120, 400, 80, 128, id="short rows"),
        pytest.param(128, 200, 141, 128, id="an H200"),
    ],
)
def test_what_l2_cannot_hold_is_fetched_by_256_bytes(monkeypatch, cols, rows, memory, fetched):
    facts = {"cuda:1": SimpleNamespace(memory_bytes=memory << 30, l2_bytes=199 * 256)}
    monkeypatch.setattr(tensormap, "device_facts", facts.__getitem__)
    x = SimpleNamespace(shape=(rows, cols), itemsize=2, nbytes=2 * rows * cols, is_cuda=True, device="cuda:1")
    assert tensormap.l2_promotion(x) == fetched


def test_without_a_device_copies_fetch_128_bytes():
    assert tensormap.l2_promotion(torch.empty(16 << 10, 4096, dtype=torch.bfloat16)) == 128


@pytest.mark.parametrize("mode", MODES)
def test_clusters_and_launch_attributes(fake, mode):
    fake.expect([8, 8, 8])
    before = fake.integer("fake_large_clusters").value
    launch = launcher(fake, mode, num_ctas=16, launch_pdl=True, launch_cooperative_grid=True, shared=229 * 1024)
    for _ in range(2):
        launch((3, 2), (torch.empty(1),))
        last = fake.last
        assert last.grid == (48, 2, 1) and last.shared == 229 * 1024
        assert [(kind, value[:3]) for kind, value in last.attributes] == [
            (18, [3, 0, 0]), (6, [1, 0, 0]), (2, [1, 0, 0]), (4, [16, 1, 1]), (5, [1, 0, 0])
        ]  # fmt: skip
    assert fake.integer("fake_large_clusters").value == before + 1
    with pytest.raises(ValueError, match="clusters of 16 blocks; a launch has at most 2147483647 blocks"):
        launch((1 << 28,), (torch.empty(1),))


@pytest.mark.parametrize("mode", MODES)
def test_scratch_is_allocated_for_each_launch(fake, mode):
    from triton.runtime import _allocation

    sizes = []

    def allocate(size, alignment, stream):
        sizes.append((size, alignment, stream))
        return torch.empty(size, dtype=torch.uint8)

    token = _allocation._allocator.set(allocate)
    try:
        launch = launcher(fake, mode, global_scratch_size=32, global_scratch_align=128, num_ctas=2)
        fake.expect([8, 8, 8])
        x = torch.empty(1)
        for _ in range(2):
            launch((3, 5), (x,))
            assert (
                unpack(fake.last, "QQQ")[0] == x.data_ptr()
                and unpack(fake.last, "QQQ")[1] != 0
                and unpack(fake.last, "QQQ")[2] == 0
            )
    finally:
        _allocation._allocator.reset(token)
    assert sizes == [(3 * 5 * 2 * 32, 128, 0)] * 2


TRITON_SCRIPT = """
import ctypes, sys, torch, triton
from pathlib import Path

from tests.fake_libcuda import FakeCuda
fake = FakeCuda(Path(sys.argv[1]))
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
driver = CudaDriver()
driver.get_current_device = lambda: 0
triton.runtime.driver.set_active(driver)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from tritonkittens.launch import GlobalArg, Launcher, TensorMapSpec

@gluon.jit
def kernel(src, dst, pair, x, n, flag, big):
    smem = gl.allocate_shared_memory(src.dtype, src.block_type.shape, src.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, src.block_type.nbytes)
    tma.async_load(src, [0, n, 0], bar, smem)
    mbarrier.wait(bar, 0)
    tma.async_store(dst, [0, 0, 0], smem)
    tma.store_wait(0)
    if flag:
        gl.store(pair[0], x + big + pair[1])

q = torch.empty(2, 300, 64, dtype=torch.bfloat16)[:, 3:]
o = torch.empty(300, 2, 64, dtype=torch.bfloat16).transpose(0, 1)
out = torch.empty(5)
layouts = [gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=3) for width in (128, 64)]
descriptor = lambda layout: f"tensordesc<bf16[1, 64, 64],{layout!r}>"
signature = dict(src=descriptor(layouts[0]), dst=descriptor(layouts[0]), pair=("*fp32", "i32"), x="fp32", n="i32", flag="u1", big="i64")
for options in (dict(num_warps=4), dict(num_warps=8, num_ctas=1, launch_pdl=True), dict(num_warps=4, launch_cooperative_grid=True)):
    options["enable_fp_fusion"] = True
    compiled = triton.compile(GluonASTSource(kernel, signature), target=GPUTarget("cuda", 90, 32), options=options)
    fake.expect([*[128, 4, 4, 4, 8, 8, 8] * 2, 8, 4, 4, 4, 1, 8, 8, 8])
    scalars = (1.5, 9, True, 1 << 50)
    descriptors = [TensorDescriptor.from_tensor(t, [1, 64, 64], layouts[0]) for t in (q, o)]
    compiled[(4, 3, 2)](*descriptors, (out, 6), *scalars, stream=0x55)
    triton_launch = vars(fake.last)
    spec = TensorMapSpec((1, 64, 64), 128)
    for native in (True, False):
        fake.driver.current_stream = lambda device: 0x55
        launch = Launcher(lambda key, types, device: compiled, driver=fake.driver, native=native)
        for _ in range(2):
            before = fake.num_launches
            launch((4, 3, 2), (GlobalArg(q, (spec,)), GlobalArg(o, (spec,)), (out, 6), *scalars))
            ours = vars(fake.last)
            assert fake.num_launches == before + 1 and launch.is_native == native
            assert {k: v for k, v in ours.items() if v != triton_launch[k]} == {}, (ours, triton_launch)
print("identical")
"""


def test_identical_to_tritons_own_launcher(tmp_path):
    """Triton's driver.c, built against the stand-in, and this launcher hand the driver the same bytes."""
    done = run_beside_triton(tmp_path, TRITON_SCRIPT)
    assert done.returncode == 0 and "identical" in done.stdout, done.stdout + done.stderr


# ---- keys, caches, threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nothing_keeps_a_tensor_alive(fake, mode):
    launch, x = launcher(fake, mode), torch.empty(64, 64, dtype=torch.bfloat16)
    fake.expect([])
    arg = GlobalArg(x, (TILE,))
    for _ in range(3):
        launch((1,), (arg, x, (x,)))
    ref = weakref.ref(x)
    del x, arg
    gc.collect(1)  # what the test made; the objects of all tests before take seconds
    assert ref() is None and launch.num_bindings == 1


@pytest.mark.parametrize("mode", MODES)
def test_bindings_are_bounded_and_recently_used_ones_stay(fake, mode):
    launch, specs = launcher(fake, mode, capacity=8), (TILE,)
    hot, *cold = [GlobalArg(torch.empty(64 + i, 64, dtype=torch.bfloat16), specs) for i in range(51)]
    fake.expect([128, 4, 4, 8, 8, 8, 8])
    launch((1,), (hot,))
    for x in cold:
        launch((1,), (x,))
        launch((1,), (hot,))
        assert fake.last.parameters[0] == encode(hot.tensor, TILE, driver=fake.driver)
    assert launch.num_bindings == 8 and launch.num_compiled == 1


@pytest.mark.parametrize("mode", MODES)
def test_other_addresses_need_nothing_built(fake, mode):
    """Natively: the launch of tensors of the same shapes gets these addresses, in pointers and in maps, and the driver
    encodes nothing."""
    launch, specs, of_last = launcher(fake, mode), (TILE, TensorMapSpec((16, 32), 64)), (TILE,)
    fake.expect([*[128, 4, 4, 8, 8] * 2, 8, 8, *[128, 4, 4, 8, 8], 8, 8])
    tensors = [torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(12)]

    def launch_with(x, y, z):
        launch((1,), (GlobalArg(x, specs), (y, x), GlobalArg(z, of_last)))
        parameters = fake.last.parameters
        assert [struct.unpack("<Q", p)[0] for p in (parameters[10], parameters[11])] == [y.data_ptr(), x.data_ptr()]
        maps = [(parameters[0], x, specs[0]), (parameters[5], x, specs[1]), (parameters[12], z, TILE)]
        return maps, fake.last.misaligned_maps

    launch_with(*tensors[:3])
    encoded, replaced = fake.num_encodes, fake.integer("fake_replacements").value
    found = [launch_with(*tensors[i : i + 3]) for i in (0, 3, 1, 6, 9, 0)]
    assert (fake.num_encodes == encoded, fake.integer("fake_replacements").value - replaced) == (
        (True, 12) if mode else (False, 0)
    )
    for maps, misaligned in found:
        assert misaligned == 0 and all(data == encode(x, spec, driver=fake.driver) for data, x, spec in maps)
    assert launch.num_compiled == 1 and launch.num_bindings == (1 if mode else 5)


@pytest.mark.parametrize("mode", MODES)
def test_other_alignment_is_other_code(fake, mode):
    """What a pointer's alignment lets the compiler do holds for that alignment; TMA takes no other."""
    launch, base, specs = launcher(fake, mode, compiled := []), torch.empty(65 * 64, dtype=torch.bfloat16), (TILE,)
    fake.expect([])
    even, odd = base[: 64 * 64].view(64, 64), base[1 : 1 + 64 * 64].view(64, 64)
    for x in (even, odd, even, odd):
        launch((1,), (x,))
    assert [kinds[0].aligned for _, kinds, _, _ in compiled] == [True, False]
    launch((1,), (GlobalArg(even, specs),))
    with pytest.raises(ValueError, match=f"Q: .*address {odd.data_ptr():#x} is not a multiple of 16 bytes"):
        launch((1,), (GlobalArg(odd, specs),))


def test_signatures_tell_apart_what_python_does():
    """Of plain tensors on the reader's device, or None for one that is left out; of others there is none."""
    read, base = native.signature_reader("cpu"), torch.zeros(4096, dtype=torch.float16)
    square, starts = base[:64].view(8, 8), range(9)
    views = [
        base,
        *(base[start : start + 4000] for start in starts),
        square,
        square.T,
        base[:64].view(8, 8, 1),
        base[:64].view(1, 64),
        base[:0],
        base[3],
        base.bfloat16(),
        square.float(),
        torch.nn.Parameter(square.clone()),
        base.as_strided((8, 8), (0, 1)),
    ]

    def in_python(*tensors):
        return tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)

    pairs = [(x, y) for x in views for y in views]
    for one, other in ((a, b) for a in pairs[:: len(views) - 1] for b in pairs):
        assert (read(*one) == read(*other)) == (in_python(*one) == in_python(*other))
    assert read(base) != read(base, base) and isinstance(read(base), bytes)
    left_out = [(base, None), (None, base), (base, None, base), (base, base, None), (base, None, None), (base,)]
    assert len({read(*tensors) for tensors in left_out}) == len(left_out)
    for odd in (1, torch.zeros(2, device="meta"), type("Tensor", (torch.Tensor,), {})()):
        assert read(base, odd) is None
    assert native.signature_reader("cuda")(base) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_launch(fake, mode, monkeypatch):
    """The bytes that reach the driver are those of a call with the same tensors; numbers and grid are those that were
    bound."""
    launch, specs = launcher(fake, mode), (TILE,)
    fake.expect([*[128, 4, 4, 8, 8], 8, 8, 8, 4])
    tensors = [torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(6)]

    def arguments(x, y, n):
        return (GlobalArg(x, specs), x), y, y, n

    def unbound(x, y):
        launch((3, 2), arguments(x, y, 7), "key")
        return fake.last

    fell_back = []
    bound = launch.bind(
        (3, 2), arguments(*tensors[:2], 7), "key", (0, 0, 1, 1), lambda x, y: fell_back.append(1) or unbound(x, y)
    )
    launches, encodes = fake.num_launches, fake.num_encodes
    assert launch.num_compiled == (1 if mode else 0), "bound ahead of the first launch"
    for x, y in zip(tensors[2:], tensors[3:], strict=False):
        bound(x, y)
        found, expected = fake.last, unbound(x, y)
        assert (
            found.parameters == expected.parameters and found.grid == expected.grid and found.stream == expected.stream
        )
    assert fake.num_launches == launches + 6 and (not mode or (fake.num_encodes == encodes and not fell_back))
    with pytest.raises(TypeError):
        bound(tensors[0])
    odd = torch.empty(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    bound(tensors[0], odd)
    assert fell_back, "a pointer that is aligned otherwise is another kernel's"
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", fell_back.append)
    bound(*tensors[:2])
    assert len(fell_back) >= 3 and fell_back[-1].args is not None, "a hook is called"


def varied():
    """bf16 tensors of three dimensions: small and large ones, permuted and narrowed views, one of which TMA addresses
    with other strides only, and one that is expanded."""
    long = torch.empty(8, 600, 64, dtype=torch.bfloat16)
    yield from (torch.empty(2, 16, 64, dtype=torch.bfloat16), long, long[:, 7:], long[1:5, :40])
    yield from (torch.empty(300, 4, 64, dtype=torch.bfloat16).transpose(0, 1), long[:, :, 24:], torch.empty_like(long))
    yield from (long[3:4].as_strided((1, 600, 64), (7, 64, 1)), long[:1].expand(3, -1, -1))


@pytest.mark.parametrize("version", [13010, 13020])
@pytest.mark.parametrize("mode", MODES)
def test_a_bound_launch_of_tensors_of_other_extents(fake, mode, version, monkeypatch):
    """The bytes that reach the driver are those of an unbound call. Nothing is compiled or bound again."""
    monkeypatch.setattr(fake.driver, "version", version)
    monkeypatch.setattr(tensormap, "_cache", ClockCache(100))
    launch, (same, other) = (
        launcher(fake, mode),
        ((TensorMapSpec((1, 64, 64), 128),), (TensorMapSpec((1, 16, 64), 64),)),
    )
    fake.expect([*[128, 4, 4, 4, 8, 8, 8] * 2, 8, *[128, 4, 4, 4, 8, 8, 8], 4])
    x, fixed = torch.empty(2, 200, 64, dtype=torch.bfloat16), torch.empty(1, 64, 64, dtype=torch.bfloat16)

    def arguments(x, y):
        return (GlobalArg(x, same + other), x), GlobalArg(y, same), 7

    def unbound(x, y):
        launch((3, 2), arguments(x, y), "key")
        return fake.last

    fell_back = []
    bound = launch.bind(
        (3, 2),
        arguments(x, fixed),
        "key",
        (0, 0, 1),
        lambda *given: fell_back.append(given) or unbound(*given),
        varying=(0,),
    )
    bindings, tensors = launch.num_bindings, list(varied())
    found = [(bound(tensor, fixed), fake.last)[1] for tensor in tensors]
    assert launch.num_compiled == 1
    assert not mode or (launch.num_bindings == bindings + 2 and len(fell_back) == 2), "two are not for the native path"
    for tensor, last in zip(tensors, found, strict=True):
        expected = unbound(tensor, fixed)
        assert last.grid == expected.grid and last.parameters == expected.parameters
    for wrong in (fixed[0], torch.empty(2, 16, 65, dtype=torch.bfloat16)[:, :, :64]):
        with pytest.raises((ValueError, RuntimeError)):
            bound(wrong, fixed)


def test_maps_that_cannot_vary_are_named(fake):
    launch, x = launcher(fake, True), torch.empty(100, 64, dtype=torch.bfloat16)
    fake.expect([])
    specs = (TensorMapSpec((1, 1, 64, 64), 128, ragged=True),)
    with pytest.raises(TypeError, match="only the map of a plain tile can be encoded for other extents"):
        launch.bind((1,), (GlobalArg(x, specs),), None, (0,), print, varying=(0,))


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_launch_keeps_no_tensor_and_outlives_its_entry(fake, mode):
    launch, specs = launcher(fake, mode, capacity=1), (TILE,)
    fake.expect([*[128, 4, 4, 8, 8]])
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    bound = launch.bind((1,), (GlobalArg(x, specs),), None, (0,), lambda y: launch((1,), (GlobalArg(y, specs),)))
    gone = weakref.ref(x)
    del x
    gc.collect(1)  # what the test made; the objects of all tests before take seconds
    assert gone() is None
    for rows in (8, 16, 24):  # evicts it
        launch((1,), (GlobalArg(torch.empty(rows, 64, dtype=torch.bfloat16), specs),))
    y = torch.empty(64, 64, dtype=torch.bfloat16)
    bound(y)
    assert fake.last.parameters[0] == encode(y, TILE, driver=fake.driver)


def test_a_driver_that_replaces_no_address_is_named(fake):
    launch, specs = launcher(fake, True), (TILE,)
    fake.expect([])
    tensors = [GlobalArg(torch.empty(64, 64, dtype=torch.bfloat16), specs) for _ in range(2)]
    launch((1,), (tensors[0],))
    fake.integer("fake_replace_result").value = 1
    try:
        with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress"):
            launch((1,), (tensors[1],))
    finally:
        fake.integer("fake_replace_result").value = 0
    launch((1,), (tensors[1],))


def test_clock_cache_gives_used_entries_a_second_chance():
    cache = ClockCache(3)
    entries = {name: SimpleNamespace(used=False) for name in "abcde"}
    for name in "abc":
        cache.insert(name, entries[name])
    entries["a"].used = True
    cache.insert("d", entries["d"])
    cache.insert("e", entries["e"])
    assert list(cache.table) == ["a", "d", "e"] and len(cache) == 3
    with pytest.raises(ValueError, match="at least one entry"):
        ClockCache(0)


@pytest.mark.parametrize("mode", MODES)
def test_specs_that_die_do_not_leave_their_address_in_a_key(fake, mode):
    """native.c knows a specs tuple by its address, so the launch that it finds must keep that tuple."""
    launch, x = launcher(fake, mode), torch.empty(64, 64, dtype=torch.bfloat16)
    fake.expect([128, 4, 4, 8, 8, 8, 8])
    for i in range(300):
        spec = TensorMapSpec((16 << i % 3, 64), 128)
        launch((1,), (GlobalArg(x, (spec,)),))
        assert fake.last.parameters[0] == encode(x, spec, driver=fake.driver)
    assert launch.num_compiled == launch.num_bindings == 3


@pytest.mark.parametrize("mode", MODES)
def test_threads(fake, mode):
    launch, compiled = launcher(fake, mode, compiled := [], capacity=16), compiled
    tensors, errors = [torch.empty(64, 64) for _ in range(40)], []
    fake.expect([])
    before, specs = fake.num_launches, (TensorMapSpec((64, 32), 128),)

    def work(seed):
        try:
            for i in range(300):
                launch((1,), (GlobalArg(tensors[(i * seed) % 40], specs), i), 0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(compiled) == 1
    assert 0 < fake.num_launches - before <= 1200  # the stand-in's own count is not atomic


@pytest.mark.parametrize("mode", MODES)
def test_a_thread_without_a_context_gets_one_and_another_context_is_restored(fake, mode):
    launch, x, seen = launcher(fake, mode), torch.empty(1), []
    fake.expect([8, 8, 8])

    def work():
        current = ctypes.c_void_p()
        fake.driver.context_get(ctypes.byref(current))
        seen.append(current.value)
        launch((1,), (x,))
        seen.append(fake.last.context)
        fake.driver.context_set(0x9999)
        launch((1,), (x,))
        fake.driver.context_get(ctypes.byref(current))
        seen.extend([fake.last.context, current.value])

    launch((1,), (x,))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, 0x1000, 0x1000, 0x9999]


@pytest.mark.parametrize("mode", MODES)
def test_the_stream_is_asked_for_at_every_launch(fake, mode, monkeypatch):
    streams = iter([5, 6, 7])
    monkeypatch.setattr(fake.driver, "current_stream", lambda device: next(streams))
    launch, x = launcher(fake, mode), torch.empty(1)
    fake.expect([])
    seen = []
    for _ in range(3):
        launch((1,), (x,))
        seen.append(fake.last.stream)
    assert seen == [5, 6, 7]


@pytest.mark.parametrize("mode", MODES)
def test_hooks_are_honoured(fake, mode, monkeypatch):
    launch, x, calls = launcher(fake, mode), torch.empty(1), []
    fake.expect([])
    launch((1,), (x,))
    launch((1,), (x,))

    def enter(metadata):
        calls.append(("enter", metadata.grid, fake.num_launches))

    knobs.runtime.launch_enter_hook.add(enter)
    before = fake.num_launches
    try:
        launch((2,), (x,))
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    assert calls == [("enter", (2, 1, 1), before)]
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: calls.append(("exit", fake.num_launches)))
    launch((2,), (x,))
    assert calls[1:] == [("exit", before + 2)]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_grids(fake, mode):
    launch, x = launcher(fake, mode), torch.empty(1)
    fake.expect([])
    launch(lambda t, n: (n, 1, t.numel()), (x, 9))
    assert fake.last.grid == (9, 1, 1)
    for _ in range(2):
        before = fake.num_launches
        launch((4, 0), (x,))
        assert fake.num_launches == before
        for grid, error, message in [
            ((-1,), ValueError, r"copy: grid \(-1,\); its extent along x must lie in 0 to 2147483647"),
            ((1, 65536), ValueError, "its extent along y must lie in 0 to 65535"),
            ((1, 1, 1, 1), TypeError, "a tuple of one to three ints"),
            (4, TypeError, "grid 4; a grid is a tuple"),
            ((1.5,), TypeError, "its extent along x is a float, not an int"),
        ]:
            with pytest.raises(error, match=message):
                launch(grid, (x,))
        launch((1,), (x,))


@pytest.mark.parametrize("mode", MODES)
def test_arguments_that_cannot_be_launched(fake, mode):
    launch, x = launcher(fake, mode), torch.empty(8, 8)
    fake.expect([])
    for _ in range(2):
        for args, error, message in [
            (
                (torch.empty(3, device="meta"),),
                ValueError,
                r"Q: a tensor on meta \(shape \(3,\), torch.float32\); kernels take tensors on cpu",
            ),
            ((x, "text"), TypeError, "out: str 'text'; a kernel takes torch tensors"),
            ((x, (1, [2])), TypeError, r"out\[1\]: list \[2\]"),
            ((x, 1, 1 << 64), ValueError, "n: 18446744073709551616 does not fit in 64 bits"),
            ((x.to(torch.complex64),), TypeError, "Q: torch.complex64 has no Triton type"),
            ((GlobalArg(3, (TILE,)),), TypeError, r"Q: GlobalArg\(int, ...\)"),
            ((GlobalArg(x, ()),), TypeError, "specs is a tuple of at least one TensorMapSpec"),
            (
                (GlobalArg(x, (TensorMapSpec([64, 64], 128),)),),
                TypeError,
                r"Q: TensorMapSpec\(box=\[64, 64\], .*; the box is a tuple",
            ),
            ((x, GlobalArg(x, [TILE])), TypeError, "out: GlobalArg.*specs is a tuple"),
            ((GlobalArg(x.t(), (TILE,)),), ValueError, "Q: shape"),
            ([x], TypeError, "args is a list"),
        ]:
            with pytest.raises(error, match=message):
                launch((1,), args)
        launch((1,), (x,))


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_compiled_for_other_arguments_is_refused(fake, mode):
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    other = Kernel((ArgType("descriptor", "bf16", specs=(TensorMapSpec((64, 32), 64),)),))
    for args, message in [
        ((x,), r"copy was compiled for parameters \(nvTmaDesc, i32, i32, i64, i64\), but its arguments are \(\*bf16\)"),
        ((GlobalArg(x, (TILE,)),), r"Q: TensorMapSpec\(.*\), but k copies boxes of \(64, 32\) with a 64-byte swizzle"),
        (
            (GlobalArg(x, (TILE._replace(swizzle=64), TILE)),),
            "Q: descriptor 1, but k was compiled with 1 tensor descriptors",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            Launcher(lambda key, types, device: other, name="copy", arg_names=("Q",), driver=fake.driver, native=mode)(
                (1,), args
            )


def test_one_compiled_kernel_does_not_serve_two_devices(fake):
    kernel, x = Kernel((ArgType("pointer", "*fp32"),)), torch.empty(1)
    launch = Launcher(lambda key, types, device: kernel, name="copy", driver=fake.driver)
    launch((1,), (x,))
    with pytest.raises(RuntimeError, match="copy: one CompiledKernel for devices -1 and 3"):
        launch._code((x,), None, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_driver_error_is_raised(fake, mode):
    launch, x = launcher(fake, mode), torch.empty(1)
    fake.expect([])
    launch((1,), (x,))
    fake.integer("fake_result").value = 719
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"CUDA_ERROR_FAKE \(719\): a fake error"):
                launch((1,), (x,))
    finally:
        fake.integer("fake_result").value = 0
    launch((1,), (x,))


def test_cpu_tensors_without_a_driver_are_refused_by_name():
    with pytest.raises(ValueError, match="Q: a tensor on cpu"):
        Launcher(lambda *_: None, arg_names=("Q",))((1,), (torch.empty(1),))


def test_a_fingerprint_holds_no_tensor():
    x, scalars = torch.empty(8, 8), []
    key = fingerprint((x, GlobalArg(x, (TILE,)), (3, 2.0)), scalars)
    assert scalars == [3, 2.0] and hash(key) == hash(fingerprint((x, GlobalArg(x, (TILE,)), (4, 1.0)), []))
    assert key != fingerprint((x, GlobalArg(x.view(4, 16), (TILE,)), (3, 2.0)), [])
    assert "tensor(" not in repr(key)
