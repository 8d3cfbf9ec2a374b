"""Values and scales of the block-scaled formats on the device: what every kernel that quantises shares.

Magnitudes are compared as the integers of their bits, so that a NaN is the largest of all. E8M0 scales are made by
integer arithmetic, e4m3 ones rounded by an addition; e4m3 and e5m2 values by the conversion of sm_89 and later, which
rounds to nearest even, codes of e2m1 by integers too, and its values by an addition. reference_formats has the exact
formulas. Launch with enable_fp_fusion=False: every product is rounded.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_moe import formats
from dist_moe.formats import Format

E8M0_NAN = tl.constexpr(formats.E8M0_NAN)
E4M3_LARGEST = tl.constexpr(formats.MXFP8_E4M3.largest)
BLOCK_SCALE_FLOOR = tl.constexpr(formats.BLOCK_SCALE_FLOOR)
OUTER_RANGE = tl.constexpr(formats.OUTER_RANGE)
ATOM_R = tl.constexpr(formats.SCALE_ATOM[0])
ATOM_C = tl.constexpr(formats.SCALE_ATOM[1])
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)

ELEMENTS = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float4_e2m1fn_x2: "e2m1",
}


@functools.cache
def format_options(format: Format) -> dict:
    """Constexprs that every kernel of a format takes; not to be changed."""
    return {
        "ELEMENT": ELEMENTS[format.value_dtype],
        "BLOCK": format.block,
        "RECIPROCAL": format.reciprocal_of_largest,
    }


def words_of(codes: Tensor) -> Tensor:
    """Codes of values or of scales, [..., a multiple of 4 bytes], as words of 32 bits."""
    return codes.view(torch.uint8).view(torch.int32)


@triton.jit
def bits_of(v):
    return v.to(tl.int32, bitcast=True)


@triton.jit
def fp32_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_codes(v):
    """Codes of FP32 values: 0 0.5 1 1.5 2 3 4 6 and, from 8 on, their negatives; ties to even, NaN -> 7.

    Example: 0.25 -> 0, 0.75 -> 2 (1.0), 2.5 -> 4 (2.0), 3.5 -> 6 (4.0), 5.0 -> 6, -7 -> 15 (-6).
    """
    bits = bits_of(v)
    magnitude = tl.minimum(bits & MAGNITUDE, 0x40C00000)  # 6
    below_1 = bits_of(fp32_of(magnitude) + 4194304.0) & 3  # 2^22, whose unit is 0.5: rounded by the addition
    from_1 = (magnitude + 0x1FFFFF + ((magnitude >> 22) & 1) - 0x3F000000) >> 22  # to one bit of mantissa
    code = tl.where(magnitude < 0x3F800000, below_1, from_1)
    sign = tl.where((bits & MAGNITUDE) > INFINITY, 0, (bits >> 28) & 8)
    return (code | sign).to(tl.uint8)


@triton.jit
def value_codes(v, ELEMENT: tl.constexpr):
    """Codes (uint8) of FP32 values that are at most the largest of the format, or NaN."""
    if ELEMENT == "e4m3":
        codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif ELEMENT == "e5m2":
        codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        tl.static_assert(ELEMENT == "e2m1")
        codes = e2m1_codes(v)
    return codes


@triton.jit
def rounded_to_e4m3(v):
    """FP32 values of 2^-9 to 448 as the nearest of e4m3, ties to even: 9.4 -> 9, 9.5 -> 10, 11 -> 11.

    By an addition as in rounded_to_e2m1: before a conversion to fp8 Triton changes to a layout in which a thread has
    the scales of many blocks, and back behind it.
    """
    rounds = fp32_of(tl.maximum(bits_of(v) & INFINITY, 0x3C800000) + 0x0A000000)  # 2^20 times the power of two below
    return (v + rounds) - rounds


@triton.jit
def block_scales(amax, outer, RECIPROCAL: tl.constexpr, TWO_LEVEL: tl.constexpr):
    """Scales of blocks whose amax has these bits: codes (uint8), FP32, and what their values are multiplied by.

    Example: amax 960 in e4m3: m = 2.14 is rounded up to 4, code 129, values are multiplied by 0.25.
    """
    if TWO_LEVEL:
        m = fp32_of(amax) * outer * RECIPROCAL  # a NaN stays one in all that follows
        m = tl.where(m < BLOCK_SCALE_FLOOR, BLOCK_SCALE_FLOOR, m)
        scales = rounded_to_e4m3(tl.where(m > E4M3_LARGEST, E4M3_LARGEST, m))
        codes = scales.to(tl.float8e4nv).to(tl.uint8, bitcast=True) & 0x7F  # a NaN may have a sign
        factor = tl.div_rn(outer, scales)
    else:
        m = bits_of(fp32_of(amax) * RECIPROCAL)
        codes = tl.where(m <= 0x400000, 0, (m + 0x7FFFFF) >> 23)  # up to 2^-127, subnormal, is code 0
        codes = tl.where(amax >= INFINITY, E8M0_NAN, codes)
        factor = fp32_of(tl.where(amax >= INFINITY, NAN, (254 - codes) << 23))
        scales = powers(codes)
    return codes.to(tl.uint8), scales, factor


@triton.jit
def quantise(
    blocks, outer, AXIS: tl.constexpr, ELEMENT: tl.constexpr, RECIPROCAL: tl.constexpr, TWO_LEVEL: tl.constexpr
):
    """Codes (uint8) of FP32 values in blocks along AXIS, and of the blocks' scales.

    A block with a NaN or an infinity is multiplied by NaN, so that all its values become the one NaN of the format.
    """
    amax = tl.max(bits_of(blocks) & MAGNITUDE, axis=AXIS)
    codes, _, factor = block_scales(amax, outer, RECIPROCAL, TWO_LEVEL)
    return value_codes(blocks * tl.expand_dims(factor, AXIS), ELEMENT), codes


@triton.jit
def rounded_to_e2m1(v):
    """FP32 of e2m1_codes; of a NaN 6 or -6, whose scale is NaN.

    Example: 2.5 lies between 2 and 4, whose values are 1 apart; 2^23, whose unit is 1, rounds it to 2 as it is added.
    """
    bits = bits_of(v)
    magnitude = tl.minimum(bits & MAGNITUDE, 0x40C00000)  # 6
    rounds = fp32_of(tl.maximum(magnitude & INFINITY, 0x3F800000) + 0x0B000000)  # 2^22 times the power of two below
    rounded = (fp32_of(magnitude) + rounds) - rounds
    return fp32_of(bits_of(rounded) | (bits & ~MAGNITUDE))


@triton.jit
def quantise_and_expand(
    blocks, outer, AXIS: tl.constexpr, ELEMENT: tl.constexpr, RECIPROCAL: tl.constexpr, TWO_LEVEL: tl.constexpr
):
    """What expanded makes of quantise, in the order of the blocks.

    Example: 957 and 960 in an e4m3 block have codes of 240 and the scale 4: 960 both.
    """
    amax = tl.max(bits_of(blocks) & MAGNITUDE, axis=AXIS)
    _, scales, factor = block_scales(amax, outer, RECIPROCAL, TWO_LEVEL)
    v = blocks * tl.expand_dims(factor, AXIS)
    DTYPE: tl.constexpr = tl.float16 if ELEMENT == "e2m1" else tl.bfloat16
    if ELEMENT == "e4m3":
        v = v.to(tl.float8e4nv).to(tl.float32)
    elif ELEMENT == "e5m2":
        v = v.to(tl.float8e5).to(tl.float32)
    else:
        tl.static_assert(ELEMENT == "e2m1" and TWO_LEVEL)
        v = rounded_to_e2m1(v)
    return (v * tl.expand_dims(scales, AXIS)).to(DTYPE)


@triton.jit
def expanded(codes, scales, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Codes [R, C] times the scales [R, C / BLOCK] of their blocks, exact in 16 bits, in the order of
    formats.expanded_order. An outer scale stays apart."""
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    if ELEMENT == "e2m1":
        bits = ((codes & 7).to(tl.int16) << 9) | ((codes & 8).to(tl.int16) << 12)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)  # 2^-14 of what they are
        factors = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 16384.0
        DTYPE: tl.constexpr = tl.float16
    else:
        tl.static_assert(ELEMENT == "e4m3")
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        factors = powers(scales)
        DTYPE: tl.constexpr = tl.bfloat16
    values = tl.reshape(values, (R, C // BLOCK, BLOCK)) * factors[:, :, None]
    return in_expanded_order(values.to(DTYPE), ELEMENT)


@triton.jit
def in_expanded_order(blocks, ELEMENT: tl.constexpr):
    """Blocks [R, S, BLOCK] of whole groups of formats.expanded_order -> [R, S * BLOCK].

    In a group code d + D e of word 8 a + r goes to place 8 D r + 8 d + 2 a + e, where a word has 2 D codes.
    """
    R: tl.constexpr = blocks.shape[0]
    C: tl.constexpr = blocks.shape[1] * blocks.shape[2]
    D: tl.constexpr = 4 if ELEMENT == "e2m1" else 2
    words = tl.reshape(blocks, (R, C // (64 * D), 4, 8, 2, D))
    return tl.reshape(tl.permute(words, (0, 1, 3, 5, 2, 4)), (R, C))


@triton.jit
def powers(codes):
    """FP32 of E8M0 codes, exact: 0 is 2^-127, a subnormal number."""
    codes = codes.to(tl.int32)
    bits = tl.where(codes == 0, 0x400000, codes << 23)
    return fp32_of(tl.where(codes == E8M0_NAN, NAN, bits))


@triton.jit
def outer_scale(amax, EPS: tl.constexpr):
    """The FP32 scale over a row or an expert whose largest magnitude has bits amax; NaN stays, as the one NaN."""
    value = fp32_of(amax)
    value = tl.where(value < EPS, EPS, value)
    return one_nan(tl.div_rn(1.0, value) * OUTER_RANGE)


@triton.jit
def one_nan(v):
    """Any NaN as the same bits: which ones an operation makes depends on the machine."""
    return fp32_of(tl.where((bits_of(v) & MAGNITUDE) > INFINITY, NAN, bits_of(v)))


@triton.jit
def pack_pairs(codes, R: tl.constexpr, C: tl.constexpr):
    """[R, C] codes of four bits -> [R, C / 2] bytes, the even index in the low half."""
    low, high = tl.split(tl.reshape(codes, (R, C // 2, 2)))
    return low | (high << 4)


@triton.jit
def blocked_offset(row, col, num_cols):
    """Byte of scale (row, col) in blocked order, of a matrix with num_cols columns, padding included.

    Example: (33, 2) -> 22; (128, 4) with 8 columns -> 1536.
    """
    atom = tl.cast(row >> 7, tl.int64) * (num_cols // ATOM_C) + (col >> 2)
    return atom * (ATOM_R * ATOM_C) + (row & 31) * 16 + (row >> 5 & 3) * 4 + (col & 3)
