"""Number formats against torch's casts: every encoding, and random numbers with those near ties of rounding."""

import numpy as np
import pytest
import torch

from tritonkittens.sim.numbers import decode, encode, from_bytes, round_to, to_bytes

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f8E4M3FN": torch.float8_e4m3fn, "f8E5M2": torch.float8_e5m2}
WORD = {
    "bf16": (np.uint16, torch.uint16),
    "f16": (np.uint16, torch.uint16),
    "f8E4M3FN": (np.uint8, torch.uint8),
    "f8E5M2": (np.uint8, torch.uint8),
}
LARGEST = {"bf16": 3.3895313892515355e38, "f16": 65504.0, "f8E4M3FN": 448.0, "f8E5M2": 57344.0, "e2m1": 6.0}
pytestmark = pytest.mark.filterwarnings("error:::tritonkittens")
rng = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def seeded(request):
    """The module's generator goes on as the fixture's would: from the session's seed and the test's name."""
    rng.bit_generator.state = request.getfixturevalue("rng").bit_generator.state


def every(name):
    word = WORD[name][0]
    return np.arange(1 << (8 * np.dtype(word).itemsize), dtype=np.uint32).astype(word)


def with_torch(name, bits):
    return torch.from_numpy(bits.copy()).view(TORCH[name]).to(torch.float64).numpy()


def near_ties(name):
    """All midpoints between neighbours of a format, one float32 below and above each, infinities, NaN and random
    numbers of every magnitude."""
    finite = np.unique(with_torch(name, every(name))[np.isfinite(with_torch(name, every(name)))])
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    factors = np.float32(
        [4, 4.04, 4.12, 4.142857, 4.1428576, 4.16, 4.285714, 4.2857146, 4.4] if name[0] == "f" else [4]
    )
    beyond = np.float32(LARGEST[name] * 0.25) * factors
    numbers = np.concatenate(
        [
            middle,
            np.nextafter(middle, np.float32(-np.inf)),
            np.nextafter(middle, np.float32(np.inf)),
            finite.astype(np.float32),
            beyond,
        ]
    )
    anything = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([numbers, -numbers, anything, np.float32([0, -0.0, np.inf, -np.inf, np.nan])])


def same(a, b):
    with np.errstate(invalid="ignore"):  # signalling NaN
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(
        np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)])
    )


@pytest.mark.parametrize("name", TORCH)
def test_every_encoding_and_rounding_to_nearest(name):
    bits = every(name)
    values = decode(name, bits)
    assert values.dtype == np.float32 and same(values, with_torch(name, bits))
    there = ~np.isnan(values)
    assert (
        np.array_equal(encode(name, values)[there], bits[there])
        and np.isnan(decode(name, encode(name, values))[~there]).all()
    )
    x = near_ties(name)
    expected = torch.from_numpy(x).to(TORCH[name]).to(torch.float32).numpy()
    if name == "f8E4M3FN":  # this torch saturates on the CPU; without saturation the format's overflow is NaN (OFP8)
        expected[np.abs(x) > 464] = np.nan
    assert same(round_to(name, x), expected)
    assert same(round_to(name, np.array(x[7])), expected[7]) and round_to(name, x[:6].reshape(2, 3)).shape == (2, 3)


def exact_reference(name, x, toward_zero):
    """Rounding by search among all finite numbers of the format, in float64."""
    numbers = {"e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])}.get(name)
    finite = (
        np.unique(np.abs(with_torch(name, every(name))[np.isfinite(with_torch(name, every(name)))]))
        if numbers is None
        else numbers
    )
    at = np.searchsorted(finite, np.abs(x), side="right") - 1
    low, high = finite[at], finite[np.minimum(at + 1, len(finite) - 1)]
    middle = (low + high) / 2
    up = (np.abs(x) > middle) | ((np.abs(x) == middle) & (at % 2 == 1))
    return np.copysign(low if toward_zero else np.where(up, high, low), x)


@pytest.mark.parametrize("name", [*TORCH, "e2m1"])
@pytest.mark.parametrize("toward_zero", [False, True])
def test_float64_is_rounded_once(name, toward_zero):
    """Numbers a float64 step off a tie: a float32 in between would put them on the tie."""
    x = rng.uniform(0, 1, 20_000) * np.exp2(rng.integers(-10, 3, 20_000))
    close = exact_reference(name, x, False)
    tie = (close + exact_reference(name, np.nextafter(close * 1.0001 + 1e-9, 9), False)) / 2
    x = np.concatenate([x, -x, tie, np.nextafter(tie, 9), np.nextafter(tie, 0), -np.nextafter(tie, 9)])
    x = x[np.abs(x) < min(LARGEST[name], 1e4)]
    assert np.array_equal(round_to(name, x, toward_zero), exact_reference(name, x, toward_zero))
    single = x.astype(np.float32)
    assert np.array_equal(
        round_to(name, single, toward_zero), exact_reference(name, single.astype(np.float64), toward_zero)
    )


def test_overflow_and_saturation():
    x = np.float32([448, 464, 465, 1e9, np.inf, -np.inf, -465, np.nan])
    assert same(decode("f8E4M3FN", encode("f8E4M3FN", x)), np.float32([448, 448] + [np.nan] * 6))
    assert same(
        decode("f8E4M3FN", encode("f8E4M3FN", x, saturate=True)),
        np.float32([448, 448, 448, 448, 448, -448, -448, np.nan]),
    )
    x = np.float32([61439, 61440, 1e30, np.inf, -1e30, np.nan])
    assert same(decode("f8E5M2", encode("f8E5M2", x)), np.float32([57344, np.inf, np.inf, np.inf, -np.inf, np.nan]))
    assert same(decode("f8E5M2", encode("f8E5M2", x, saturate=True)), np.float32([57344] * 4 + [-57344, np.nan]))
    assert same(round_to("f8E5M2", x, toward_zero=True), np.float32([57344, 57344, 57344, np.inf, -57344, np.nan]))
    assert same(
        round_to("e2m1", np.float32([5, 7, np.inf, -9, np.nan, 0.25, 0.2500001])), np.float32([4, 6, 6, -6, 6, 0, 0.5])
    )
    assert same(
        round_to("f32", np.array([1e300, 1 + 2.0**-25]), toward_zero=True), np.float32([np.finfo(np.float32).max, 1])
    )
    assert same(round_to("f16", np.array([1e9, 65519.0, -70000]), toward_zero=True), np.float32([65504, 65504, -65504]))


def test_scales_tf32_and_integers():
    assert np.array_equal(
        decode("ue8m0", np.arange(255, dtype=np.uint8)), np.exp2(np.arange(255) - 127.0).astype(np.float32)
    )
    assert np.isnan(decode("f8E8M0FNU", np.array(255, np.uint8))) and encode(
        "ue8m0", np.float32([1, 3.9, 2.0**-127])
    ).tolist() == [127, 128, 0]
    x = np.float32([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20, np.inf, np.nan, 1e-40])
    assert same(
        round_to("tf32", x),
        np.float32(
            [
                1,
                1 + 2.0**-9,
                1 + 2.0**-10,
                np.inf,
                np.nan,
                np.float32(8192 * round(1e-40 / 2.0**-149 / 8192)) * 2.0**-149,
            ]
        ),
    )
    assert round_to("tf32", np.array(1 + 2.0**-11 + 2.0**-40)) == 1 + 2.0**-10
    for name, dtype in [("i8", np.int8), ("i16", np.int16), ("i32", np.int32), ("i64", np.int64), ("index", np.int64)]:
        limits = np.iinfo(dtype)
        x = rng.integers(limits.min, limits.max, (4, 5), dtype=dtype, endpoint=True)
        back = from_bytes(name, to_bytes(name, x))
        assert back.dtype == dtype and np.array_equal(back, x) and to_bytes(name, x).tobytes() == x.tobytes()
    assert np.array_equal(from_bytes("i1", to_bytes("i1", np.array([True, False]))), [True, False])
    for name in ("f16", "bf16", "f32", "f64", "f8E4M3FN", "f8E5M2"):
        x = round_to(name, rng.normal(size=(3, 2)))
        assert np.array_equal(from_bytes(name, to_bytes(name, x)), x)
    assert to_bytes("bf16", np.float32([1.0])).tolist() == [[0x80, 0x3F]]
    with pytest.raises(NotImplementedError, match="f128"):
        encode("f128", np.float32(1))
