"""Narrow number formats, from their definitions: decoding tables and correctly rounded encodings.

Encodings take float64 arrays (every float32 is one exactly) and round once. Non-finite inputs follow the PTX ISA's
text on cvt: with .satfinite, NaN becomes the format's canonical NaN, or the largest value where the format has none.
"""

import numpy as np


def _floats(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Every code's value, as if none stood for infinity or NaN."""
    codes = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    mantissa = codes % 2**mantissa_bits / 2**mantissa_bits
    exponent = codes >> mantissa_bits & 2**exponent_bits - 1
    magnitude = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(codes >> exponent_bits + mantissa_bits, -magnitude, magnitude)


E4M3 = _floats(4, 3, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _floats(5, 2, 15)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
E2M1 = _floats(2, 1, 1)
E8M0 = 2.0 ** (np.arange(256) - 127.0)
E8M0[0xFF] = np.nan
UE4M3 = np.where(np.arange(256) < 128, E4M3, E4M3[np.arange(256) & 0x7F])  # scales have no sign: its bit is ignored


def encode_float(values: np.ndarray, table: np.ndarray, max_code: int, nan_code: int) -> np.ndarray:
    """Codes nearest to the values, ties to even, larger magnitudes to the largest (.rn.satfinite)."""
    finite = table[: max_code + 1]
    magnitude = np.minimum(np.abs(values), finite[-1])
    with np.errstate(invalid="ignore"):
        above = np.clip(np.searchsorted(finite, magnitude), 1, max_code)  # NaN goes last; it is replaced below
        to_below, to_above = magnitude - finite[above - 1], finite[above] - magnitude
    codes = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, above - 1)
    codes = np.where(np.signbit(values), codes + len(table) // 2, codes)
    return np.where(np.isnan(values), nan_code, codes).astype(np.uint8)


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    return encode_float(values, E4M3, 0x7E, 0x7F)


def encode_e5m2(values: np.ndarray) -> np.ndarray:
    return encode_float(values, E5M2, 0x7B, 0x7F)


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    return encode_float(values, E2M1, 0x7, 0x7)


def encode_e8m0(values: np.ndarray, rounding: str) -> np.ndarray:
    """Powers of two at or above ("rp") or at or below ("rz") the magnitude, within 2^-127 to 2^127; NaN is 0xFF."""
    with np.errstate(invalid="ignore", divide="ignore"):
        fraction, exponent = np.frexp(np.abs(values))  # 2^(e-1) has fraction 0.5
        exponent = np.where(values == 0, -127, np.where(np.isinf(values), 128, exponent - 1))
        if rounding == "rp":
            exponent = exponent + ((fraction > 0.5) & (values != 0) & np.isfinite(values))
        codes = np.clip(exponent, -127, 127) + 127
    return np.where(np.isnan(values), 0xFF, codes).astype(np.uint8)


def encode_bf16(values: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """float32 to the bits of bf16; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if rounding == "rn":
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16  # wraps for NaN only
    elif rounding == "rz":
        rounded = bits >> 16
    else:
        raise ValueError(f"encode_bf16: rounding must be rn or rz, got {rounding}")
    nan = np.isnan(values)
    return (np.where(nan, np.uint32(0x7FFF), rounded) if nan.any() else rounded).astype(np.uint16)


def encode_f16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of f16, to nearest even; NaN is 0x7FFF."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), 0x7FFF, bits).astype(np.uint16)


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def decode_f16(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits, np.uint16).view(np.float16).astype(np.float32)


def round_bits(values: np.ndarray, rounding: str) -> np.ndarray:
    """float64 to the nearest integral float64: to even, to zero, down or up."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](values)


def unpack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes a byte, the low one first, along the last axis."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
