"""Arithmetic and conversions of the emulator against their definitions in the PTX ISA."""

import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.sm100 import formats
from tests.sm100.small_kernels import lanes

U32 = np.random.default_rng(0).integers(0, 2**32, (3, 32), dtype=np.uint32)
U32[0, :8] = [0, 1, 2**31, 2**32 - 1, 2**31 - 1, 0x80000001, 0x00FF00FF, 7]
U32[1, :8] = [0, 2**32 - 1, 2**31, 3, 2**32 - 2, 1, 0x12345678, 2**31]
U64 = np.random.default_rng(1).integers(0, 2**64, (3, 32), dtype=np.uint64)


def signed(values, bits: int = 32) -> list[int]:
    return [value - 2**bits if value >= 2 ** (bits - 1) else value for value in map(int, values)]


def words(values, bits: int = 32) -> list[int]:
    return [int(value) & 2**bits - 1 for value in values]


# Integers and bits


def of_lanes(function, *inputs):
    return [function(*map(int, row)) for row in zip(*inputs, strict=True)]


INTEGER_CASES = {
    "add.s32 d, a, b;": lambda a, b, c: a + b,
    "sub.u32 d, a, b;": lambda a, b, c: a - b,
    "mul.lo.s32 d, a, b;": lambda a, b, c: a * b,
    "mul.hi.u32 d, a, b;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 d, a, b;": lambda a, b, c: signed([a])[0] * signed([b])[0] >> 32,
    "mad.lo.s32 d, a, b, c;": lambda a, b, c: a * b + c,
    "mad.hi.u32 d, a, b, c;": lambda a, b, c: (a * b >> 32) + c,
    "and.b32 d, a, b;": lambda a, b, c: a & b,
    "xor.b32 d, a, b;": lambda a, b, c: a ^ b,
    "not.b32 d, a;": lambda a, b, c: ~a,
    "neg.s32 d, a;": lambda a, b, c: -a,
    "shl.b32 d, a, 5;": lambda a, b, c: a << 5,
    "shl.b32 d, a, 32;": lambda a, b, c: 0,
    "shr.u32 d, a, 33;": lambda a, b, c: 0,
    "shr.s32 d, a, 4;": lambda a, b, c: signed([a])[0] >> 4,
    "shr.s32 d, a, 99;": lambda a, b, c: signed([a])[0] >> 31,
    "min.s32 d, a, b;": lambda a, b, c: min(signed([a, b])),
    "max.u32 d, a, b;": lambda a, b, c: max(a, b),
    "popc.b32 d, a;": lambda a, b, c: a.bit_count(),
    "clz.b32 d, a;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 d, a;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 d, a;": lambda a, b, c: a.bit_length() - 1,
    "bfind.s32 d, a;": lambda a, b, c: (a if a < 2**31 else ~a & 2**32 - 1).bit_length() - 1,
    "lop3.b32 d, a, b, c, 0xE8;": lambda a, b, c: a & b | a & c | b & c,
    "lop3.b32 d, a, b, c, 0x96;": lambda a, b, c: a ^ b ^ c,
    "shf.l.wrap.b32 d, a, b, c;": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.clamp.b32 d, a, b, c;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "bfe.u32 d, a, 5, 7;": lambda a, b, c: a >> 5 & 127,
    "bfe.s32 d, a, 28, 9;": lambda a, b, c: signed([a])[0] >> 28,
    "bfe.s32 d, a, 4, 8;": lambda a, b, c: signed([a >> 4 & 255], 8)[0],
    "bfe.u32 d, a, 3, 0;": lambda a, b, c: 0,
    "bfi.b32 d, a, b, 8, 12;": lambda a, b, c: b & ~(4095 << 8) | (a & 4095) << 8,
    "bfi.b32 d, a, b, 24, 12;": lambda a, b, c: b & 0xFFFFFF | a << 24,
    "prmt.b32 d, a, b, 0x7150;": lambda a, b, c: int.from_bytes(
        (p := struct.pack("<II", a, b))[:1] + p[5:6] + p[1:2] + p[7:], "little"
    ),
    "prmt.b32 d, a, b, 0x000B;": lambda a, b, c: (a & 255) * 0x01010100 + (255 if a >> 31 else 0),
    "{.reg .pred p; setp.lt.s32 p, a, b; selp.b32 d, a, b, p;}": lambda a, b, c: min(signed([a, b])),
    "{.reg .pred p, q; setp.hi.u32 p|q, a, b; selp.b32 d, 1, 2, q;}": lambda a, b, c: 1 if a <= b else 2,
    "{.reg .pred p, q; setp.eq.u32 q, c, c; setp.lt.and.u32 p, a, b, !q; selp.b32 d, 1, 2, p;}": lambda a, b, c: 2,
    "{.reg .b16 x, y; mov.b32 {x, y}, a; mov.b32 d, {y, x};}": lambda a, b, c: a >> 16 | a << 16,
    "{.reg .b16 x; cvt.u16.u32 x, a; cvt.s32.s16 d, x;}": lambda a, b, c: signed([a & 65535], 16)[0],
    "cvt.sat.u8.s32 d, a;": lambda a, b, c: min(max(signed([a])[0], 0), 255),
    "cvt.s32.s8 d, a;": lambda a, b, c: signed([a & 255], 8)[0],
}


@pytest.mark.parametrize("text", INTEGER_CASES)
def test_integers(text):
    expected = words(of_lanes(INTEGER_CASES[text], *U32))
    assert lanes(text, np.uint32, *U32).tolist() == expected


def test_wide_integers():
    a, b, c = U64
    assert lanes("mul.hi.u64 d, a, b;", np.uint64, a, b).tolist() == of_lanes(lambda a, b: a * b >> 64, a, b)
    expected = words(of_lanes(lambda a, b, c: a * b + c, a, b, c), 64)
    assert lanes("mad.lo.s64 d, a, b, c;", np.uint64, a, b, c).tolist() == expected
    expected = words((x * y for x, y in zip(signed(U32[0]), signed(U32[1]), strict=True)), 64)
    assert lanes("mul.wide.s32 d, a, b;", np.uint64, U32[0], U32[1]).tolist() == expected
    expected = of_lanes(lambda a, b, c: (a * b + c) & 2**64 - 1, U32[0], U32[1], c)
    assert lanes("mad.wide.u32 d, a, b, c;", np.uint64, U32[0], U32[1], c).tolist() == expected
    assert lanes("shr.u64 d, a, 40;", np.uint64, a).tolist() == of_lanes(lambda a: a >> 40, a)
    assert lanes("clz.b64 d, a;", np.uint32, a >> np.uint64(20)).tolist() == of_lanes(
        lambda a: 64 - (a >> 20).bit_length(), a
    )
    assert lanes("{.reg .b32 x; mov.b64 {_, x}, a; mov.b64 d, {x, 5};}", np.uint64, a).tolist() == of_lanes(
        lambda a: 5 << 32 | a >> 32, a
    )


def test_division_truncates():
    a, b = np.array([7, -7, 7, -7] * 8, np.int32), np.array([2, 2, -2, -2] * 8, np.int32)
    assert lanes("div.s32 d, a, b;", np.int32, a, b)[:4].tolist() == [3, -3, -3, 3]
    assert lanes("rem.s32 d, a, b;", np.int32, a, b)[:4].tolist() == [1, -1, 1, -1]
    assert lanes("div.u32 d, a, b;", np.uint32, U32[0], U32[2]).tolist() == of_lanes(
        lambda a, b: a // b, U32[0], U32[2]
    )


# Floating point

SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-40], np.float32)
F32 = np.concatenate([SPECIAL, np.random.default_rng(2).normal(size=24).astype(np.float32)])
G32 = np.concatenate([np.roll(SPECIAL, 3), np.random.default_rng(3).normal(size=24).astype(np.float32)])


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; NaN whatever its payload."""
    nan = np.isnan(expected)
    assert (np.isnan(got) == nan).all()
    assert got[~nan].view(np.uint32).tolist() == np.asarray(expected, np.float32)[~nan].view(np.uint32).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "text, function",
    (
        ("add.rn.f32 d, a, b;", np.add),
        ("sub.f32 d, a, b;", np.subtract),
        ("mul.rn.f32 d, a, b;", np.multiply),
        ("div.rn.f32 d, a, b;", np.divide),
        ("rcp.rn.f32 d, a;", lambda a, b: np.float32(1) / a),
        ("neg.f32 d, a;", lambda a, b: -a),
        ("abs.f32 d, a;", lambda a, b: np.abs(a)),
        ("copysign.f32 d, a, b;", lambda a, b: np.copysign(b, a)),
        ("min.f32 d, a, b;", np.fmin),
        ("max.NaN.f32 d, a, b;", np.maximum),
        ("cvt.rni.f32.f32 d, a;", lambda a, b: np.rint(a)),
        ("add.sat.f32 d, a, b;", lambda a, b: np.nan_to_num(np.clip(a + b, 0, 1))),
    ),
)
def test_floats(text, function):
    assert_same(lanes(text, np.float32, F32, G32), function(F32, G32))


def test_min_and_max_order_zeros_and_pass_over_nan():
    a = np.array([0.0, -0.0, np.nan, 2.0, np.nan, 0, 0, 0] * 4, np.float32)
    b = np.array([-0.0, 0.0, 1.0, np.nan, np.nan, 0, 0, 0] * 4, np.float32)
    bits = lanes("min.f32 d, a, b;", np.uint32, a, b)[:5]
    assert bits.tolist() == [0x80000000, 0x80000000, 0x3F800000, 0x40000000, 0x7FFFFFFF]
    bits = lanes("max.f32 d, a, b;", np.uint32, a, b)[:5]
    assert bits.tolist() == [0, 0, 0x3F800000, 0x40000000, 0x7FFFFFFF]
    assert lanes("max.NaN.f32 d, a, b;", np.uint32, a, b)[2:5].tolist() == [0x7FFFFFFF] * 3


def nearest_float32(value: Fraction) -> np.float32:
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


def test_fma_rounds_once():
    """Among others sums that float64 rounds onto a tie between two float32, from above and from below."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 32)).astype(np.float32)
    c = (-a * b * np.float32(1 + 2**-20)).astype(np.float32)
    tie = np.float32(1 + 2**-12)  # its square is 1 + 2^-11 + 2^-24: a tie
    a[:4], b[:4], c[:4] = tie, tie, np.float32([2**-80, -(2**-80), 0, 2**-149])
    expected = [
        nearest_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert_same(lanes("fma.rn.f32 d, a, b, c;", np.float32, a, b, c), np.array(expected))


def test_pairs_of_floats():
    a, b = (np.random.default_rng(i).normal(size=64).astype(np.float32) for i in (5, 6))
    for text, function in (("add.rn.f32x2 d, a, b;", np.add), ("mul.f32x2 d, a, b;", np.multiply)):
        got = lanes(text, np.uint64, a.view(np.uint64), b.view(np.uint64)).view(np.float32)
        assert got.tolist() == function(a, b).tolist()


def test_flush_to_zero():
    tiny = np.full(32, 1e-40, np.float32)
    assert lanes("add.ftz.f32 d, a, a;", np.float32, -tiny).view(np.uint32)[0] == 0x80000000
    assert lanes("ex2.approx.ftz.f32 d, a;", np.float32, np.float32(-140) + 0 * tiny)[0] == 0
    assert lanes("ex2.approx.f32 d, a;", np.float32, np.float32(-140) + 0 * tiny)[0] == np.float32(2.0**-140)


@pytest.mark.parametrize("name, compare", (("lt", np.less), ("ge", np.greater_equal), ("eq", np.equal)))
def test_comparisons_with_nan(name, compare):
    either_nan = np.isnan(F32) | np.isnan(G32)
    template = "{{.reg .pred p; setp.{}.f32 p, a, b; selp.b32 d, 1, 0, p;}}"
    ordered = lanes(template.format(name), np.uint32, F32, G32)
    assert ordered.tolist() == compare(F32, G32).astype(int).tolist()
    unordered = lanes(template.format(name + "u"), np.uint32, F32, G32)
    assert unordered.tolist() == (compare(F32, G32) | either_nan).astype(int).tolist()
    assert lanes(template.format("nan"), np.uint32, F32, G32).tolist() == either_nan.astype(int).tolist()


# Conversions


def near(table: np.ndarray) -> np.ndarray:
    """Finite values of a format, what lies halfway between them and just beside that, past the ends, and non-finite."""
    finite = np.unique(table[np.isfinite(table)])
    middles = (finite[1:] + finite[:-1]) / 2
    values = np.concatenate([finite, middles, finite[-1:] * 1.01, finite[-1:] * 8]).astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])
    return np.concatenate([values, -values, np.float32([np.inf, -np.inf, 3e38, 1e-45])])


@pytest.mark.parametrize(
    "name, dtype, table, bits, nan_code",
    (
        ("e4m3x2", ml_dtypes.float8_e4m3fn, formats.E4M3, 8, 0x7F),
        ("e5m2x2", ml_dtypes.float8_e5m2, formats.E5M2, 8, 0x7F),
        ("e2m1x2", ml_dtypes.float4_e2m1fn, formats.E2M1, 4, 0x7),
    ),
)
def test_conversions_to_narrow_pairs(name, dtype, table, bits, nan_code):
    assert_same(table.astype(np.float32), np.arange(2**bits).astype(np.uint8).view(dtype).astype(np.float32))
    largest = np.nanmax(table[np.isfinite(table)])
    values = near(table)
    values = np.resize(values, -(-len(values) // 32) * 32)
    expected = np.clip(values, -largest, largest).astype(dtype).view(np.uint8) & 2**bits - 1
    if bits == 8:
        convert = f"{{.reg .b16 x; cvt.rn.satfinite.{name}.f32 x, b, a; cvt.u32.u16 d, x;}}"
    else:
        convert = f"{{.reg .b8 x; cvt.rn.satfinite.{name}.f32 x, b, a; cvt.u32.u8 d, x;}}"
    for at in range(0, len(values), 32):
        low, high = values[at : at + 32], np.roll(values[at : at + 32], 1)
        codes = expected[at : at + 32].astype(np.uint32)
        assert lanes(convert, np.uint32, low, high).tolist() == (codes | np.roll(codes, 1) << bits).tolist()
    assert lanes(convert, np.uint32, np.float32(np.nan), np.float32(0))[0] == nan_code


def test_conversions_to_powers_of_two():
    """ue8m0 rounds up to the next power of two or down, and ends at 2^-127 and 2^127."""
    values = np.float32([1, 1.0001, 2, 3, 0.75, 2.0**-126, 2.0**-127, 2.0**-128, 0, 3e38, np.inf, np.nan, 1e-45, 448])
    up = [127, 128, 128, 129, 127, 1, 0, 0, 0, 254, 254, 255, 0, 136]
    down = [127, 127, 128, 128, 126, 1, 0, 0, 0, 254, 254, 255, 0, 135]
    for rounding, expected in (("rp", up), ("rz", down)):
        text = f"{{.reg .b16 x; cvt.{rounding}.satfinite.ue8m0x2.f32 x, b, a; cvt.u32.u16 d, x;}}"
        got = lanes(text, np.uint32, np.resize(values, 32), np.float32(4))[: len(values)]
        assert got.tolist() == [129 << 8 | code for code in expected]
    finite = np.arange(255).astype(np.uint8)
    assert_same(formats.E8M0[:255].astype(np.float32), finite.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@pytest.mark.filterwarnings("ignore:overflow")
def test_conversions_to_halves():
    values = near(formats.E5M2)
    values = np.concatenate([values, np.float32([65504, 65519, 65520, 3.3895e38, 3.4e38])])[-32:]
    bf16 = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    f16 = values.astype(np.float16).view(np.uint16)
    assert lanes("cvt.rn.bf16.f32 d, a;", np.uint16, values).tolist() == bf16.tolist()
    assert lanes("cvt.rn.f16.f32 d, a;", np.uint16, values).tolist() == f16.tolist()
    pairs = lanes("cvt.rn.bf16x2.f32 d, a, b;", np.uint32, values, values[::-1].copy())
    assert pairs.tolist() == (bf16.astype(np.uint32) << 16 | bf16[::-1]).tolist()
    assert_same(lanes("cvt.f32.bf16 d, a;", np.float32, bf16), bf16.view(ml_dtypes.bfloat16).astype(np.float32))
    assert_same(lanes("cvt.f32.f16 d, a;", np.float32, f16), f16.view(np.float16).astype(np.float32))
    assert lanes("cvt.rn.bf16.f32 d, a;", np.uint16, np.float32(np.nan))[0] == 0x7FFF


def test_conversions_from_narrow_pairs():
    codes = np.arange(32, dtype=np.uint16) | 0x5100
    expected = np.stack([formats.E4M3[np.arange(32)], np.full(32, formats.E4M3[0x51])], 1).astype(np.float16)
    assert lanes("cvt.rn.f16x2.e4m3x2 d, a;", np.uint32, codes).tolist() == expected.view(np.uint32)[:, 0].tolist()
    expected = np.stack([formats.E8M0[np.arange(32)], np.full(32, formats.E8M0[0x51])], 1).astype(ml_dtypes.bfloat16)
    assert lanes("cvt.rn.bf16x2.ue8m0x2 d, a;", np.uint32, codes).tolist() == expected.view(np.uint32)[:, 0].tolist()


def test_conversions_between_floats_and_integers():
    values = np.resize(np.float32([0.5, 1.5, 2.5, -0.5, -1.7, 3e9, -3e9, np.nan, np.inf, 7]), 32)
    got = lanes("cvt.rni.s32.f32 d, a;", np.int32, values)[:10]
    assert got.tolist() == [0, 2, 2, 0, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, 7]
    assert lanes("cvt.rzi.u32.f32 d, a;", np.uint32, values)[3:7].tolist() == [0, 0, 3000000000, 0]
    assert lanes("cvt.rmi.s32.f32 d, a;", np.int32, values)[3:5].tolist() == [-1, -2]
    assert_same(lanes("cvt.rn.f32.u32 d, a;", np.float32, U32[0]), U32[0].astype(np.float32))
    assert_same(lanes("cvt.rn.f32.s32 d, a;", np.float32, U32[0]), U32[0].view(np.int32).astype(np.float32))
