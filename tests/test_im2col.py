"""im2col tiles without a GPU: what the kernels compile to, what is refused, and the tensor maps that reach the
driver."""

import re
import struct
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritonkittens.lang as tk
from tests.cases_im2col import all_taps, convolution_input, expected_taps, expected_tile, one_tile
from tests.fake_libcuda import FakeCuda, build
from tests.util import meta
from tritonkittens.launch import GlobalArg, Im2colSpec, Launcher, TensorMapSpec, check_tensor_map, encode

TILE = tk.st(tk.bf16, 64, 64)
SPEC = Im2colSpec((64, 64), 128, "zero", (-1, -2), (1, -3), (2, 1))
INSTRUCTION = (
    r"cp\.async\.bulk\.tensor\.(\d)d\.\S*im2col\.mbarrier::complete_tx::bytes \[%r\d+\], \[%rd\d+, "
    r"\{([^}]*)\}\], \[%r\d+\], \{([^}]*)\}"
)


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    return FakeCuda(build(tmp_path_factory.mktemp("fake"), "libfake.so"))


# ---- compiled code
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_filter_compiles_to_im2col_copies(arch):
    compiled = all_taps.compile(
        convolution_input(meta(2, 13, 11, 72), TILE, (3, 3), 2, 1),
        tk.gl(meta(9, 84, 72)),
        TILE,
        3,
        3,
        2,
        1,
        1,
        7,
        6,
        arch=arch,
    )
    (found,) = re.findall(INSTRUCTION, compiled.asm["ptx"])
    assert found[0] == "4" and found[1].count("%r") == 4 and found[2].count("%rs") == 2
    (descriptor,) = compiled.metadata.tensordesc_meta
    assert descriptor["is_im2col"] and descriptor["block_size"] == [64, 64]


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_one_offset_for_each_spatial_dimension(spatial):
    x, corner = meta(2, *[8] * spatial, 64), (0,) * spatial
    offset = {1: 65535, 2: 255, 3: 31}[spatial]
    compiled = one_tile.compile(
        tk.im2col(x, TILE, corner, corner), tk.gl(meta(64, 64)), TILE, (0, *corner, 0), (offset,) * spatial
    )
    ((rank, coordinates, offsets),) = re.findall(INSTRUCTION, compiled.asm["ptx"])
    assert int(rank) == spatial + 2 and coordinates.count("%r") == spatial + 2 and offsets.count("%rs") == spatial
    assert re.search(rf"mov\.b16 \s*%rs\d+, {offset if offset < 1 << 15 else offset - (1 << 16)};", compiled.asm["ptx"])


@triton.jit
def _producer(X, tile, arrived):
    tk.load_im2col_async(tile, X, (0, tk.block_index(0), 0, 0), (0, 2), arrived[0])


@triton.jit
def _consumer(tile, arrived):
    tk.wait(arrived[0], 0)


@tk.kernel
@triton.jit
def in_a_role(X, TILE: tl.constexpr):
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    tk.expect(arrived[0], tile)
    tk.specialize(((_consumer, (tile, arrived)), (_producer, (X, tile, arrived))), warps=(4, 1))


def test_a_role_can_load():
    compiled = in_a_role.compile(tk.im2col(meta(2, 8, 8, 64), TILE, (0, 0), (0, 0)), TILE)
    assert len(re.findall(INSTRUCTION, compiled.asm["ptx"])) == 1


@tk.kernel
@triton.jit
def wrong(X, Y, TILE: tl.constexpr, WHAT: tl.constexpr):
    tile = tk.allocate(TILE)
    arrived = tk.semaphores(1)
    if WHAT == "destination":
        tk.load_im2col_async(X, X, (0, 0, 0, 0), (0, 0), arrived[0])
    elif WHAT == "ring":
        tk.load_im2col_async(tk.allocate(TILE, stages=2), X, (0, 0, 0, 0), (0, 0), arrived[0])
    elif WHAT == "tiled source":
        tk.load_im2col_async(tile, Y, (0, 0), (0, 0), arrived[0])
    elif WHAT == "no source":
        tk.load_im2col_async(tile, 3, (0, 0), (0, 0), arrived[0])
    elif WHAT == "semaphore":
        tk.load_im2col_async(tile, X, (0, 0, 0, 0), (0, 0), 5)
    elif WHAT == "shape":
        tk.load_im2col_async(tk.allocate(tk.st(tk.bf16, 64, 32)), X, (0, 0, 0, 0), (0, 0), arrived[0])
    elif WHAT == "pieces":
        tk.load_im2col_async(tk.allocate(tk.st(tk.bf16, 96, 64)), X, (0, 0, 0, 0), (0, 0), arrived[0])
    elif WHAT == "coordinates":
        tk.load_im2col_async(tile, X, (0, 0, 0), (0, 0), arrived[0])
    elif WHAT == "offsets":
        tk.load_im2col_async(tile, X, (0, 0, 0, 0), (0,), arrived[0])
    elif WHAT == "offset":
        tk.load_im2col_async(tile, X, (0, 0, 0, 0), (0, 256), arrived[0])
    elif WHAT == "negative":
        tk.load_im2col_async(tile, X, (0, 0, 0, 0), (-1, 0), arrived[0])
    elif WHAT == "float":
        tk.load_im2col_async(tile, X, (0, 0, 0, 0), (0.5, 0), arrived[0])
    elif WHAT == "tiled copy":
        tk.load_async(tile, X, (0, 0, 0, 0), arrived[0])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("destination", "load_im2col_async: the destination must be a shared tile, got"),
        ("ring", "load_im2col_async to a ring of st(bf16, 64, 64): take a slot first, ring[slot]"),
        (
            "tiled source",
            "load_im2col_async to st(bf16, 64, 64): the source is a tk.gl; pass tk.im2col(tensor, tile, lower, upper)",
        ),
        ("no source", "is no global layout"),
        ("semaphore", "load_im2col_async(arrived=5): needs a semaphore"),
        ("shape", "load_im2col_async to st(bf16, 64, 32): the im2col was made for tiles of 64×64 bf16 (swizzle 128)"),
        ("pieces", "load_im2col_async to st(bf16, 96, 64): the im2col was made for tiles of 64×64 bf16 (swizzle 128)"),
        (
            "coordinates",
            "load_im2col_async: 3 coordinates for a tensor of 4 dimensions; give one per dimension, in elements",
        ),
        (
            "offsets",
            "load_im2col_async: 1 offsets for a tensor of 4 dimensions; give one for each of the 2 spatial ones",
        ),
        ("offset", "load_im2col_async(offsets=(0, 256)): 256 must lie in 0 to 255 with 2 spatial dimensions"),
        ("negative", "load_im2col_async(offsets=(-1, 0)): -1 must lie in 0 to 255"),
        ("float", "load_im2col_async(offsets=…): 0.5 must be an integer, a constant or a run-time scalar"),
        ("tiled copy", "the global layout has no descriptor for its 1×1×64×64 piece"),
    ],
)
def test_wrong_use_in_a_kernel_is_named(what, message):
    with pytest.raises(tk.TileError) as error:
        wrong.compile(tk.im2col(meta(2, 8, 8, 64), TILE, (0, 0), (0, 0)), tk.gl(meta(64, 64), TILE), TILE, what)
    assert message in str(error.value)


@tk.kernel
@triton.jit
def only_the_load(X, TILE: tl.constexpr):
    tk.load_im2col_async(tk.allocate(TILE), X, (0, 0, 0), (0,), None)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
def test_other_architectures_refuse_it(arch):
    with pytest.raises(
        tk.ArchitectureError,
        match=rf"load_im2col_async \(TMA\) needs .*; this kernel is compiled for {arch.rstrip('a')}",
    ):
        only_the_load.compile(tk.im2col(meta(2, 8, 64), TILE, (0,), (0,)), TILE, arch=arch)


# ---- rules of the host
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((8, 64), TILE, (), ()), "im2col of shape (8, 64): needs 3 (NWC), 4 (NHWC) or 5 (NDHWC) dimensions"),
        (((2, 8, 64), "tile", (0,), (0,)), "im2col(…, 'tile'): give the shared tile type (st)"),
        (
            ((2, 8, 64), tk.st(tk.fp16, 64, 64), (0,), (0,)),
            "im2col of bf16 with st(fp16, 64, 64): the tile's element type",
        ),
        (
            ((2, 8, 64), tk.st(tk.bf16, 96, 64), (0,), (0,)),
            "im2col of st(bf16, 96, 64): pixels (rows) and channels (columns) must be powers",
        ),
        (
            ((2, 8, 64), tk.st(tk.bf16, 2048, 64), (0,), (0,)),
            "im2col of st(bf16, 2048, 64): box (2048, 64) has 2048 pixels; an im2col copy has",
        ),
        (((2, 8, 8, 64), TILE, (0,), (0, 0)), "lower (0,) has 1 values; one for each of the 2 spatial dimensions"),
        (((2, 8, 8, 64), TILE, (0, 0), (0, 0, 0)), "upper (0, 0, 0) has 3 values"),
        (((2, 8, 8, 64), TILE, (0, 0), (0, 0), (1, 9)), "element_strides (1, 9): 9 must lie in 1 to 8"),
        (((2, 8, 8, 64), TILE, (0, 0), (0, 0), (0, 1)), "element_strides (0, 1): 0 must lie in 1 to 8"),
        (
            ((2, 8, 8, 64), TILE, (0, 0.5), (0, 0)),
            "im2col(lower=(0, 0.5)): must be a tuple of ints, one for each spatial dimension",
        ),
        (
            ((2, 8, 64), TILE, (-32769,), (0,)),
            "lower (-32769,): -32769 must lie in -32768 to 32767 for a tensor of 3 dimensions",
        ),
        (
            ((2, 8, 8, 64), TILE, (0, 0), (128, 0)),
            "upper (128, 0): 128 must lie in -128 to 127 for a tensor of 4 dimensions",
        ),
        (
            ((2, 8, 8, 8, 64), TILE, (0, -17, 0), (0, 0, 0)),
            "lower (0, -17, 0): -17 must lie in -16 to 15 for a tensor of 5 dimensions",
        ),
        (((2, 8, 64), TILE, (0,), (0,), None, "one"), "(fill='one'): TMA fills with 'zero' or 'nan'"),
    ],
)
def test_a_broken_rule_of_the_host_is_named(arguments, message):
    shape, *rest = arguments
    with pytest.raises(tk.TileError) as error:
        tk.im2col(meta(*shape), *rest)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tensor", "upper", "message"),
    [
        (
            meta(2, 8, 8, 68)[..., :64].transpose(1, 3),
            (0, 0),
            "X: shape (2, 64, 8, 8), strides (4352, 1, 68, 544), 2-byte elements: the last",
        ),
        (
            meta(2, 8, 8, 68)[..., :64],
            (0, 0),
            "stride 68 of dimension 2 is 136 bytes; TMA needs a multiple of 16 bytes",
        ),
        (
            meta(2, 8, 3, 64),
            (0, -3),
            "X: shape (2, 8, 3, 64), lower (0, 0), upper (0, -3): the pixel box runs from 0 to -1; it must hold",
        ),
    ],
)
def test_a_tensor_that_tma_cannot_address_is_refused(tensor, upper, message):
    with pytest.raises(ValueError) as error:
        one_tile.compile(tk.im2col(tensor, TILE, (0, 0), upper), tk.gl(meta(64, 64)), TILE, (0, 0, 0, 0), (0, 0))
    assert message in str(error.value)


def test_rules_of_a_spec():
    shape, strides = (2, 8, 8, 512), (8 * 8 * 512, 8 * 512, 512, 1)
    check_tensor_map(shape, strides, 2, 0, SPEC, "X")
    check_tensor_map(shape, strides, 2, 0, SPEC._replace(box=(1024, 256), swizzle=0), "X")
    with pytest.raises(
        ValueError,
        match=re.escape("X: box (64, 512) has 512 channels; an im2col copy without a swizzle has at most 256"),
    ):
        check_tensor_map(shape, strides, 2, 0, SPEC._replace(box=(64, 512), swizzle=0), "X")
    with pytest.raises(ValueError, match=re.escape("X: box (1, 64, 64); an im2col tile has two extents")):
        check_tensor_map(shape, strides, 2, 0, SPEC._replace(box=(1, 64, 64)), "X")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a row of the box is 32 bytes; with a 128-byte swizzle"):
        check_tensor_map(shape, strides, 2, 0, SPEC._replace(box=(64, 16)), "X")
    with pytest.raises(TypeError, match=re.escape("X: lower (0, 0.0) holds a float")):
        check_tensor_map(shape, strides, 2, 0, SPEC._replace(lower=(0, 0.0)), "X")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="X: 2 dimensions; im2col takes 3"):
        check_tensor_map(shape[:2], strides[2:], 2, 0, SPEC, "X")


# ---- what reaches the driver
# -------------------------------------------------------------------------------------------


def test_the_tensor_map(fake):
    x = torch.empty(3, 10, 12, 80, dtype=torch.bfloat16)[..., 8:72]
    before = fake.num_encodes
    data = encode(x, SPEC._replace(fill="nan"), driver=fake.driver)
    assert encode(x, SPEC._replace(fill="nan"), driver=fake.driver) is data and fake.num_encodes == before + 1
    words = struct.unpack("<16Q", data)
    assert words[0] == x.data_ptr() and words[2:6] == (64, 12, 10, 3) and words[7:10] == (160, 12 * 160, 10 * 12 * 160)
    assert words[1] == 9 | 4 << 8 | 1 << 21 | 3 << 32 | 1 << 40 | 2 << 48
    assert struct.unpack("<4i", data[88:104]) == (-2, -3, -1, 1), "w before h: lower and upper"
    assert struct.unpack("<2I", data[112:120]) == (64, 64) and data[120:124] == bytes([1, 1, 2, 1])
    tall = struct.unpack("<16Q", encode(x, SPEC._replace(box=(1024, 64), swizzle=32), driver=fake.driver))
    assert tall[14] == 16 | 1024 << 32, "one copy: as many channels as the swizzle spans, up to 1024 pixels"
    del fake.driver.version  # cached
    fake.integer("fake_version").value = 13010
    try:
        small = encode(torch.empty_like(x), SPEC, driver=fake.driver)
        large = encode(torch.empty(30, 10, 12, 80, dtype=torch.bfloat16), SPEC, driver=fake.driver)
        assert [struct.unpack("<16Q", m)[1] >> 21 & 1 for m in (small, large)] == [0, 1]
    finally:
        fake.integer("fake_version").value = 13020
        del fake.driver.version


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_launch_hands_over_map_shape_and_strides(fake, native, monkeypatch):
    sizes = {"nvTmaDesc": 128, "i32": 4, "i64": 8, "*bf16": 8}

    def compile(key, types, device):
        compiled = one_tile._compile(key, types, 90)
        return SimpleNamespace(
            metadata=compiled.metadata,
            src=compiled.src,
            function=0x77,
            _init_handles=lambda: None,
            launch_metadata=lambda *_: None,
        )

    launcher = Launcher(compile, name="one_tile", arg_names=["X", "Y"], driver=fake.driver, native=native)
    monkeypatch.setattr(one_tile, "launcher", launcher)
    base, out = torch.empty(2 * 16 * 16 * 64, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.bfloat16)
    fake.expect([128, *[4] * 4, *[8] * 4, 8, 8])
    for shape in ((2, 16, 16, 64), (2, 8, 32, 64), (2, 16, 16, 64), (2, 8, 32, 64)):
        for upper in ((0, 0), (-1, 2)):
            x = tk.im2col(base.view(shape), TILE, (0, 0), upper)
            one_tile[(3,)](x, tk.gl(out), TILE, (0, 0, 0, 0), (0, 0))
            parameters = fake.last.parameters
            assert (
                struct.unpack("<2i", parameters[0][88:96])[1] == upper[1]
                and struct.unpack("<2i", parameters[0][96:104])[1] == upper[0]
            )
            assert parameters[0] == encode(x.tensor, x.specs[0], driver=fake.driver) and fake.last.misaligned_maps == 0
            assert struct.unpack("<4i4qQQ", b"".join(parameters[1:])) == (
                *shape,
                *x.tensor.stride(),
                base.data_ptr(),
                out.data_ptr(),
            )
    assert launcher.is_native == native and launcher.num_bindings == 4 and launcher.num_compiled == 2
    code = next(iter(launcher._codes.values()))
    assert [sizes[kind] for kind in code.types[:10]] == [128, *[4] * 4, *[8] * 4, 8]
    with pytest.raises(RuntimeError, match=r"X: TensorMapSpec.*, but one_tile was compiled with an im2col descriptor"):
        code.encode_map(base.view(64, -1), TensorMapSpec((64, 64), 128), "X", 0)


def test_a_tiled_kernel_refuses_an_im2col_spec(fake):
    kernel = SimpleNamespace(
        metadata=SimpleNamespace(
            name="k",
            num_ctas=1,
            num_warps=4,
            shared=0,
            launch_pdl=False,
            launch_cooperative_grid=False,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            tensordesc_meta=[dict(swizzle=3, elem_size=2, elem_type=10, block_size=[64, 64], fp4_padded=False)],
        ),
        src=SimpleNamespace(signature={0: "tensordesc<bf16[64, 64],layout>"}),
        function=1,
        _init_handles=lambda: None,
    )
    launcher = Launcher(lambda *_: kernel, name="k", driver=fake.driver, native=False)
    with pytest.raises(RuntimeError, match=r"argument 0: Im2colSpec.*, but k was compiled with a tiled descriptor"):
        launcher((1,), (GlobalArg(torch.empty(2, 8, 8, 64, dtype=torch.bfloat16), (SPEC,)),))


def test_the_two_references_agree_with_unfold(rng):
    x = torch.from_numpy(rng.standard_normal((2, 6, 7, 8)))
    for stride, dilation in ((1, 1), (2, 1), (1, 2), (2, 2)):
        taps, height, width = expected_taps(x, (3, 3), stride, 1, dilation)
        unfolded = torch.nn.functional.unfold(x.permute(0, 3, 1, 2), 3, dilation=dilation, padding=1, stride=stride)
        assert (
            torch.equal(taps, unfolded.unflatten(1, (8, 9)).permute(2, 0, 3, 1).flatten(1, 2))
            and height * width * 2 == taps.shape[1]
        )
        upper = (1 - 2 * dilation,) * 2
        for tap in range(9):
            offsets = tap // 3 * dilation, tap % 3 * dilation
            tile = expected_tile(x, taps.shape[1] + 3, 16, (-1, -1), upper, (stride,) * 2, (0, -1, -1, 0), offsets)
            assert torch.equal(tile[:-3, :8], taps[tap]) and not tile[-3:].any() and not tile[:, 8:].any()
