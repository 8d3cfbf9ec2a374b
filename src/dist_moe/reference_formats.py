"""The oracle of the block-scaled formats: quantisers, their inverses, layouts and products in plain PyTorch.

Rounding is integer arithmetic on the bits of FP32, as casts to narrow types differ between libraries, above the largest
value and for NaN. A source is converted to FP32 first. In FP32, with every operation rounded to nearest:

    E8M0 scales       m = amax * fl(1 / largest);  scale = the least power of two >= m, as a code;  q = v / scale
                      a block with NaN or Inf: code 0xFF, every value NaN.  amax 0: code 0, which is 2^-127
    two-level scales  outer = fl(2688 * fl(1 / max(amax of the row or expert, eps)));  outer_inv = fl(1 / outer)
                      block scale = e4m3 of fl(fl(amax * outer) * fl(1/6)), at least 2^-9 and at most 448
                      q = v * fl(outer / block scale)
                      NaN anywhere: the row or expert is NaN. Inf: outer is 0 and its inverse Inf, so the same

and q is rounded to nearest, ties to even, to a value of the format, the largest at most. Quantising reads a source once
per orientation: blocks of columns are not made from blocks of rows.
"""

import functools

import torch
from torch import Tensor

from .formats import (
    BLOCK_SCALE_FLOOR,
    E8M0_BIAS,
    E8M0_NAN,
    MXFP8_E4M3,
    OUTER_RANGE,
    PADDING_SCALE,
    ROW_ALIGNMENT,
    ROW_EPS,
    SCALE_ATOM,
    WEIGHT_EPS,
    Format,
    expanded_order,
    packed_row_parts,
    padded_scales,
)
from .quantized import (
    Quantized,
    QuantizedWeights,
    columns_out,
    packed_out,
    rows_out,
    weights_out,
)

_INFINITY = 0x7F800000  # FP32 bits
_MAGNITUDE = 0x7FFFFFFF


# ---- values --------------------------------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    """The bits of FP32 as int32, which is negative where the sign is set."""
    return x.contiguous().view(torch.int32)


def encode(v: Tensor, format: Format) -> Tensor:
    """Codes (uint8, one a value) of FP32 values: nearest, ties to even, the largest beyond it, NaN to nan_code.

    A number that is normal in the format is cut at the format's last bit; a carry out of the mantissa is the next
    exponent by itself. Smaller ones are rounded by adding an FP32 number whose last bit is the format's least number.
    Example (E2M1: 0 0.5 1 1.5 2 3 4 6): 0.25 -> 0, 0.75 -> 2 (1.0), 2.5 -> 4 (2.0), -7 -> 15 (-6).
    """
    bits = _bits(v)
    magnitude = bits & _MAGNITUDE
    dropped, least_exponent = 23 - format.mantissa_bits, format.min_exponent + 127
    half = (1 << dropped - 1) - 1 + (magnitude >> dropped & 1)  # one less than half, but of a tie with an odd number
    normal = (magnitude + half >> dropped) - (least_exponent - 1 << format.mantissa_bits)
    ruler = torch.tensor(2.0 ** (format.min_exponent + dropped), dtype=torch.float32)
    small = _bits(v.abs() + ruler) - _bits(ruler)
    codes = torch.where(magnitude < least_exponent << 23, small, normal)
    codes = codes.clamp(max=format.largest_code) | bits >> 31 & 1 << _sign_bit(format)
    return torch.where(magnitude > _INFINITY, format.nan_code, codes).to(torch.uint8)


def _sign_bit(format: Format) -> int:
    return 8 // format.values_per_byte - 1


@functools.cache
def _decode_table(format: Format) -> Tensor:
    """FP32 value of every code of the format."""
    M, sign_bit = format.mantissa_bits, _sign_bit(format)
    values = []
    for code in range(2 ** (sign_bit + 1)):
        exponent, mantissa = (code & 2**sign_bit - 1) >> M, code & 2**M - 1
        normal = exponent > 0
        value = (normal * 2**M + mantissa) * 2.0 ** (max(exponent, 1) - 1 + format.min_exponent - M)
        if value > format.largest:  # E5M2 counts on to Inf, then NaN; the code after E4M3's largest is NaN
            has_infinity = format.largest_code + 1 < format.nan_code and code & 2**M - 1 == 0
            value = float("inf") if has_infinity else float("nan")
        values.append(-value if code >> sign_bit else value)
    return torch.tensor(values, dtype=torch.float32)


def decode(codes: Tensor, format: Format) -> Tensor:
    """FP32 values of codes (uint8, one a value)."""
    return _decode_table(format).to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _pack(codes: Tensor, format: Format) -> Tensor:
    """Codes as the bytes that are stored."""
    return codes if format.values_per_byte == 1 else codes[..., ::2] | codes[..., 1::2] << 4


def unpack_codes(values: Tensor, format: Format) -> Tensor:
    values = values.view(torch.uint8)
    return values if format.values_per_byte == 1 else torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)


# ---- scales --------------------------------------------------------------------------------------------------------


def _amax(v: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest magnitude; NaN if there is one."""
    return v.abs().amax(dim=dim, keepdim=True)


def encode_e8m0(m: Tensor) -> Tensor:
    """Codes (uint8) of FP32 numbers >= 0 rounded up to a power of two; 0xFF for Inf and NaN, 0 for 0.

    Example: 1.0 -> 127, the next number after it -> 128; 2^-127, subnormal in FP32, -> 0.
    """
    bits = _bits(m) & _MAGNITUDE
    codes = (bits + 0x7FFFFF) >> 23
    codes = torch.where(bits <= 0x400000, 0, codes)  # up to 2^-127
    return torch.where(bits >= _INFINITY, E8M0_NAN, codes).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """FP32 powers of two of codes."""
    codes = codes.to(torch.int32)
    bits = torch.where(codes == 0, 0x400000, codes << 23)
    return torch.where(codes == E8M0_NAN, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _outer(amax: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The FP32 scale over a row or an expert, and its inverse."""
    eps = torch.tensor(eps, dtype=torch.float32, device=amax.device)
    outer = _one_nan(torch.where(amax < eps, eps, amax).reciprocal() * OUTER_RANGE)
    return outer, _one_nan(outer.reciprocal())


def _one_nan(v: Tensor) -> Tensor:
    """Any NaN as the same bits: which ones an operation makes depends on the machine."""
    return torch.where(v.isnan(), float("nan"), v)


def _quantize_blocks(v: Tensor, dim: int | tuple[int, ...], format: Format, outer: Tensor | None):
    """Codes of the values of blocks, and of the scales; a block is what lies along `dim` of v."""
    amax = _amax(v, dim)
    if not format.two_level:
        scale_codes = encode_e8m0(amax * format.reciprocal_of_largest)
        scale_codes = torch.where(torch.isfinite(amax), scale_codes, E8M0_NAN)
        down = ((2 * E8M0_BIAS - scale_codes.to(torch.int32)) << 23).view(torch.float32)
        codes = encode(v * down, format)
        return torch.where(torch.isfinite(amax), codes, format.nan_code), scale_codes
    scales = amax * outer * format.reciprocal_of_largest
    scales = torch.where(scales < BLOCK_SCALE_FLOOR, BLOCK_SCALE_FLOOR, scales)
    scale_codes = encode(scales, MXFP8_E4M3)  # at most 448 by its rounding
    return encode(v * (outer / decode(scale_codes, MXFP8_E4M3)), format), scale_codes


def scale_values(scales: Tensor, format: Format) -> Tensor:
    scales = scales.view(torch.uint8)
    return decode(scales, MXFP8_E4M3) if format.two_level else decode_e8m0(scales)


# ---- layouts -------------------------------------------------------------------------------------------------------


def to_blocked(scales_GRS: Tensor) -> Tensor:
    """Bytes [G, rows, cols] in natural order -> [G * align(rows, 128), align(cols, 4)] in blocked order.

    Atoms of 128 x 4 one after another, by rows of atoms; byte (r, c) of an atom is its byte
    r % 32 * 16 + r // 32 * 4 + c. Padding is PADDING_SCALE.
    Example: byte (33, 2) of an atom is its byte 1 * 16 + 1 * 4 + 2 = 22.
    """
    G, rows, cols = scales_GRS.shape
    padded_rows, padded_cols = padded_scales(rows, cols)
    padded = scales_GRS.new_full((G, padded_rows, padded_cols), PADDING_SCALE)
    padded[:, :rows, :cols] = scales_GRS
    atoms = padded.view(G, padded_rows // SCALE_ATOM[0], 4, 32, padded_cols // SCALE_ATOM[1], SCALE_ATOM[1])
    return atoms.permute(0, 1, 4, 3, 2, 5).reshape(G * padded_rows, padded_cols)


def from_blocked(blocked: Tensor, rows: int, cols: int, num_groups: int = 1) -> Tensor:
    """The inverse of to_blocked: bytes [num_groups, rows, cols] in natural order, without the padding."""
    padded_rows, padded_cols = padded_scales(rows, cols)
    atoms = blocked.reshape(num_groups, padded_rows // SCALE_ATOM[0], padded_cols // SCALE_ATOM[1], 32, 4, 4)
    return atoms.permute(0, 1, 4, 3, 2, 5).reshape(num_groups, padded_rows, padded_cols)[:, :rows, :cols]


def _put(out: Tensor, found: Tensor) -> None:
    out.view(torch.uint8).copy_(found)


def _put_rows(out: Tensor, found: Tensor, num_rows: int) -> None:
    """The first rows of an output; num_rows may be all of them."""
    _put(out[:num_rows], found[:num_rows])


def _real_rows(x_RC: Tensor, row_start_P: Tensor | None, num_rows_L: Tensor | None) -> tuple[Tensor, int]:
    """The rows as FP32, padding rows of experts as zeros, and where the last expert's padding ends."""
    if row_start_P is None:
        return x_RC.float(), x_RC.shape[0]
    starts, counts = row_start_P.tolist(), num_rows_L.tolist()
    v = torch.zeros_like(x_RC, dtype=torch.float32, memory_format=torch.contiguous_format)
    for start, count in zip(starts, counts, strict=False):
        assert start % ROW_ALIGNMENT == 0, f"an expert starts at row {start}"
        v[start : start + count] = x_RC[start : start + count].float()
    return v, starts[-1]


# ---- ops -----------------------------------------------------------------------------------------------------------


def quantize_rows(x_RC, *, format, blocked=False, row_start_P=None, num_rows_L=None, out=None) -> Quantized:
    """Blocks of consecutive columns of a row.

    Args:    x_RC: bf16 or fp32, any strides, C a multiple of 32.  blocked: order of the scales.
             row_start_P, num_rows_L: int32; expert l has num_rows_L[l] rows from row_start_P[l], a multiple of 128.
             Its rows up to the next start are padding, whatever x holds there; rows from row_start_P[-1] on, their
             scales too, are left alone. None: every row counts.
             out: where to write, else new tensors.
    Returns: values, scales, the inverse outer scales; see Quantized.
    """
    out = rows_out("quantize_rows", x_RC, format, blocked, row_start_P, num_rows_L, out)
    v, end = _real_rows(x_RC, row_start_P, num_rows_L)
    R, C = v.shape
    if R == 0:
        return out
    outer = None
    if format.two_level:
        outer, outer_inv = _outer(_amax(v, 1), ROW_EPS)
        out.outer_inv_R[:end] = outer_inv[:end, 0]
        outer = outer[:, :, None]
    codes, scales = _quantize_blocks(v.view(R, C // format.block, format.block), 2, format, outer)
    _put_rows(out.values, _pack(codes.view(R, C), format), end)
    scales = scales.view(R, C // format.block)
    if blocked:
        num_rows = padded_scales(end, 1)[0]
        _put_rows(out.scales, to_blocked(scales[None, :end]), num_rows)
    else:
        _put_rows(out.scales, scales, end)
    return out


def quantize_columns(x_RC, *, format, blocked=False, row_start_P, num_rows_L, out=None) -> Quantized:
    """Blocks of 32 consecutive rows of a column, for products that sum over rows.

    Args:    as in quantize_rows; a block never holds rows of two experts, as experts start at multiples of 128.
             blocked: the scales of operand [C, row_start_P[-1]], so that a column's scales are a row, packed at the
             start of out.scales.
    Returns: values, row-major as x, and scales; see Quantized.
    Raises:  ValueError for formats with two values in a byte.
    """
    out = columns_out("quantize_columns", x_RC, format, blocked, row_start_P, num_rows_L, out)
    v, end = _real_rows(x_RC, row_start_P, num_rows_L)
    R, C = v.shape
    if R == 0:
        return out
    codes, scales = _quantize_blocks(v.view(R // format.block, format.block, C), 1, format, None)
    _put_rows(out.values, codes.view(R, C), end)
    scales = scales.view(R // format.block, C)
    end //= format.block
    if blocked:
        found = to_blocked(scales[:end].T[None]).flatten()
        _put_rows(out.scales.view(-1), found, len(found))
    else:
        _put_rows(out.scales, scales, end)
    return out


def quantize_weights(w_GNK, *, format, square=False, out=None) -> QuantizedWeights:
    """Weights of G experts: blocks along K, or square ones of block x block.

    Square blocks make one tensor of values that is an operand of the forward, which sums over K, and of the gradient of
    x, which sums over N; both scale tensors hold the same scales.

    Args:    w_GNK: bf16 or fp32, any strides, N and K multiples of 32.  out: where to write, else new tensors.
    Raises:  ValueError for square blocks of formats with two values in a byte.
    """
    out = weights_out("quantize_weights", w_GNK, format, square, out)
    G, N, K = w_GNK.shape
    if w_GNK.numel() == 0:
        return out
    v, B = w_GNK.float(), format.block
    if square:
        codes, scales = _quantize_blocks(v.reshape(G, N // B, B, K // B, B), (2, 4), format, None)
        scales = scales.view(G, N // B, K // B)
        _put(out.transposed_scales, to_blocked(scales.mT.repeat_interleave(B, dim=1)))
        scales = scales.repeat_interleave(B, dim=1)
    else:
        outer = None
        if format.two_level:
            outer, outer_inv = _outer(_amax(v, (1, 2)), WEIGHT_EPS)
            out.outer_G.copy_(outer[:, 0, 0])
            out.outer_inv_G.copy_(outer_inv[:, 0, 0])
            outer = outer[..., None]
        codes, scales = _quantize_blocks(v.reshape(G, N, K // B, B), 3, format, outer)
        scales = scales.view(G, N, K // B)
    _put(out.values, _pack(codes.view(G, N, K), format))
    _put(out.scales, to_blocked(scales))
    return out


def pack_rows(x_TD, *, format, out_TB=None, num_sms=None) -> Tensor:
    """Rows as they go on the wire, uint8: values, scales in natural order, the inverse outer scale, padding of zeros.

    Args:    x_TD: as in quantize_rows.  out_TB: contiguous [T, packed_row_bytes], else new memory.
    Example: D = 96 in NVFP4 is 48 + 6 + 4 bytes, padded to 64.
    """
    out_TB = packed_out("pack_rows", x_TD, format, out_TB)
    if x_TD.shape[0] == 0:
        return out_TB
    found = quantize_rows(x_TD, format=format)
    parts = [found.values, found.scales]
    if format.two_level:
        parts.append(found.outer_inv_R[:, None])
    content = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    out_TB.zero_()
    out_TB[:, : content.shape[1]] = content
    return out_TB


def unpack_rows(packed_TB: Tensor, format: Format, width: int) -> Quantized:
    """The values, scales and inverse outer scales of rows on the wire, as new tensors."""
    ends = packed_row_parts(format, width)
    values, scales, outer = (
        packed_TB[:, start:end].clone(memory_format=torch.contiguous_format)
        for start, end in zip((0, *ends), ends, strict=False)
    )
    outer_inv_T = outer.view(torch.float32)[:, 0] if format.two_level else None
    return Quantized(values.view(format.value_dtype), scales.view(format.scale_dtype), outer_inv_T)


# ---- back to FP32 --------------------------------------------------------------------------------------------------


def dequantize_rows(rows: Quantized, *, format: Format, blocked: bool = False) -> Tensor:
    """FP32 [R, C] of what quantize_rows made: value * scale (exact), then * the inverse outer scale (rounded)."""
    v = decode(unpack_codes(rows.values, format), format)
    R, C = v.shape
    scales = rows.scales.view(torch.uint8)
    scales = from_blocked(scales, R, C // format.block)[0] if blocked else scales
    v = v * scale_values(scales, format).repeat_interleave(format.block, dim=1)
    return v if rows.outer_inv_R is None else v * rows.outer_inv_R[:, None]


def expand_rows(rows: Quantized, format: Format) -> Tensor:
    """[R, align(C, group)] in 16 bits of rows with scales in natural order, as quantized.Bundle has them."""
    v = dequantize_rows(rows._replace(outer_inv_R=None), format=format)
    group = format.expanded_group
    v = torch.nn.functional.pad(v, (0, -v.shape[1] % group)).unflatten(1, (-1, group))
    return v[:, :, expanded_order(format)].flatten(1).to(format.expanded_dtype)


def gather_rows(values_RC: Tensor, width: int, format: Format) -> Tensor:
    """The `width` columns of expanded rows in their natural order."""
    group = format.expanded_group
    places = torch.tensor(expanded_order(format)).argsort().to(values_RC.device)
    return values_RC.unflatten(1, (-1, group))[:, :, places].flatten(1)[:, :width]


def dequantize_columns(
    columns: Quantized, *, format: Format, blocked: bool = False, rows_end: int | None = None
) -> Tensor:
    """FP32 [rows_end, C] of what quantize_columns made; rows_end is the last of row_start_P, by default all rows."""
    rows_end = len(columns.values) if rows_end is None else rows_end
    v = decode(unpack_codes(columns.values[:rows_end], format), format)
    C, S = v.shape[1], rows_end // format.block
    scales = columns.scales.view(torch.uint8)
    if blocked:
        scales = from_blocked(scales.flatten()[: padded_scales(C, S)[0] * S], C, S)[0].T
    scales = scales[:S]
    return v * scale_values(scales, format).repeat_interleave(format.block, dim=0)


def dequantize_weights(weights: QuantizedWeights, *, format: Format) -> Tensor:
    """FP32 [G, N, K] of what quantize_weights made."""
    v = decode(unpack_codes(weights.values, format), format)
    G, N, K = v.shape
    scales = from_blocked(weights.scales.view(torch.uint8), N, K // format.block, num_groups=G)
    v = v * scale_values(scales, format).repeat_interleave(format.block, dim=2)
    return v if weights.outer_inv_G is None else v * weights.outer_inv_G[:, None, None]
