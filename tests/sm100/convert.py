"""cvt: between integers, float32 and the narrow formats."""

import numpy as np

from tests.sm100 import formats
from tests.sm100.arithmetic import flush
from tests.sm100.decode import BITS, DTYPES, instruction, put

_INTEGERS = tuple(f"{letter}{bits}" for letter in "us" for bits in (8, 16, 32, 64))
_ROUND = ("rni", "rzi", "rmi", "rpi")

# Two float32 to one packed pair; .satfinite is required, as in PTX.
_TO_PAIR = {
    "e4m3x2": formats.encode_e4m3,
    "e5m2x2": formats.encode_e5m2,
    "e2m1x2": formats.encode_e2m1,
}
_FROM_PAIR = {"e4m3x2": formats.E4M3, "e5m2x2": formats.E5M2, "e2m1x2": formats.E2M1, "ue8m0x2": formats.E8M0}


@instruction("cvt")
def _convert(builder, ins, mods):
    source = mods.rest.pop()
    target = mods.rest.pop()
    if target in _INTEGERS and source in _INTEGERS:
        return _integer(builder, ins, mods, target, source)
    if target in _INTEGERS and source == "f32":
        return _float_to_integer(builder, ins, mods, target)
    if target == "f32" and source in _INTEGERS:
        return _integer_to_float(builder, ins, mods, source)
    if target in ("bf16x2", "f16x2") and source == "f32":
        return _half_pair(builder, ins, mods, target)
    if target in ("bf16", "f16") and source == "f32":
        return _half(builder, ins, mods, target)
    if target == "f32" and source in ("bf16", "f16"):
        mods.take("ftz")
        mods.done()
        decode = formats.decode_bf16 if source == "bf16" else formats.decode_f16
        return _one(builder, ins, "f32", "u16", decode)
    if target == "f32" and source == "f32":
        function = mods.need(*_ROUND)
        mods.take("ftz")
        mods.done()
        return _one(builder, ins, "f32", "f32", lambda a: formats.round_bits(a, function))
    if target in _TO_PAIR and source == "f32":
        return _narrow_pair(builder, ins, mods, target)
    if target == "ue8m0x2" and source == "f32":
        return _scale_pair(builder, ins, mods)
    if source in _FROM_PAIR and target in ("f16x2", "bf16x2"):
        return _widen_pair(builder, ins, mods, target, source)
    raise ins.unsupported("conversion")


def _one(builder, ins, to_kind: str, from_kind: str, function):
    a = builder.read(ins.operands[1], from_kind, ins)
    d = builder.write(ins.operands[0], to_kind, ins)

    def run(warp, mask):
        rows = warp.rows
        put(rows[d], function(np.ascontiguousarray(rows[a])), mask)

    return run


def _pair(builder, ins, to_kind: str, encode, width: int):
    """d = encode(a) in the upper half, encode(b) in the lower one."""
    a, b = (builder.read(operand, "f32", ins) for operand in ins.operands[1:3])
    d, dtype = builder.write(ins.operands[0], to_kind, ins), DTYPES[to_kind]

    def run(warp, mask):
        rows = warp.rows
        codes = encode(np.concatenate([rows[a], rows[b]])).astype(dtype)
        put(rows[d], codes[:32] << dtype.type(width) | codes[32:], mask)

    return run


def _integer(builder, ins, mods, target: str, source: str):
    saturates = mods.take("sat") is not None
    mods.done()
    if not saturates:
        return _one(builder, ins, target, source, lambda a: a)
    limits = np.iinfo(DTYPES[target])

    def clamp(a):
        return np.array([min(max(int(x), limits.min), limits.max) for x in a], DTYPES[target])

    return _one(builder, ins, target, source, clamp)


def _float_to_integer(builder, ins, mods, target: str):
    """Out-of-range values go to the nearest end, NaN to zero (to the top bit alone in 64 bits)."""
    rounding = mods.need(*_ROUND)
    ftz = mods.take("ftz")
    mods.take("sat")  # these conversions always saturate
    mods.done()
    limits, dtype = np.iinfo(DTYPES[target]), DTYPES[target]
    of_nan = 2**63 if BITS[target] == 64 else 0

    def convert(a):
        values = formats.round_bits((flush(a) if ftz else a).astype(np.float64), rounding)
        exact = [of_nan if v != v else int(np.clip(v, -(2.0**65), 2.0**65)) for v in values.tolist()]
        clamped = [v if v == of_nan else min(max(v, limits.min), limits.max) for v in exact]
        return np.array([v & 2 ** BITS[target] - 1 for v in clamped], f"u{BITS[target] // 8}").view(dtype)

    return _one(builder, ins, target, "f32", convert)


def _integer_to_float(builder, ins, mods, source: str):
    mods.need("rn")
    mods.done()
    return _one(builder, ins, "f32", source, lambda a: a.astype(np.float32))


def _encode_half(ins, mods, target: str):
    rounding, relu, saturates = mods.need("rn", "rz"), mods.take("relu"), mods.take("satfinite")
    mods.done()
    if saturates or (target.startswith("f16") and rounding != "rn"):
        raise ins.unsupported("rounding")

    def encode(values):
        if relu:
            values = np.where(values > 0, values, np.where(np.isnan(values), values, np.float32(0)))
        return formats.encode_bf16(values, rounding) if target.startswith("bf16") else formats.encode_f16(values)

    return encode


def _half(builder, ins, mods, target: str):
    return _one(builder, ins, "u16", "f32", _encode_half(ins, mods, target))


def _half_pair(builder, ins, mods, target: str):
    return _pair(builder, ins, "u32", _encode_half(ins, mods, target), 16)


def _narrow_pair(builder, ins, mods, target: str):
    mods.need("rn")
    mods.need("satfinite")
    relu = mods.take("relu") is not None
    mods.done()

    def encode(values):
        values = values.astype(np.float64)
        return _TO_PAIR[target](np.where(values < 0, 0.0, values) if relu else values)

    return _pair(builder, ins, "u8" if target == "e2m1x2" else "u16", encode, 4 if target == "e2m1x2" else 8)


def _scale_pair(builder, ins, mods):
    rounding = mods.need("rp", "rz")
    mods.need("satfinite")
    mods.done()
    return _pair(builder, ins, "u16", lambda a: formats.encode_e8m0(a.astype(np.float64), rounding), 8)


def _widen_pair(builder, ins, mods, target: str, source: str):
    """Both codes of a packed pair to two halves; exact, as every value of these formats is one."""
    mods.need("rn")
    mods.done()
    if (target == "bf16x2") != (source == "ue8m0x2"):
        raise ins.unsupported("conversion")
    table, width = _FROM_PAIR[source], 4 if source == "e2m1x2" else 8
    encode = formats.encode_bf16 if target == "bf16x2" else formats.encode_f16

    def widen(codes):
        low, high = (encode(table[codes >> shift & 2**width - 1].astype(np.float32)) for shift in (0, width))
        return high.astype(np.uint32) << np.uint32(16) | low

    return _one(builder, ins, "u32", "u8" if width == 4 else "u16", widen)
