"""Block-scaled number formats as records, and how their values, scales and wire rows are laid out.

Everything that a plan, a quantiser and a product must agree on is written here once. A block is that many consecutive
values of the dimension a product sums over; its values share one scale. No constant of a format is repeated elsewhere.
"""

import itertools
import math
import struct
from dataclasses import dataclass

import torch

from .config import DIM_MULTIPLE, BlockScaledFormat
from .shapes import align

ROW_ALIGNMENT = 128  # rows; of an expert's first row in block-scaled modes, so that no block or atom holds two experts
SCALE_ATOM = (128, 4)  # rows and columns of scales that lie together in 512 bytes
PACKED_ROW_ALIGNMENT = 16  # bytes; of a wire row, so that peers pull it in whole 16-byte accesses
PADDING_SCALE = 0  # of scales that only fill an atom: a finite number in both kinds of scale

E8M0_BIAS, E8M0_NAN = 127, 0xFF  # code c is 2^(c - 127); there is neither zero nor sign
BLOCK_SCALE_FLOOR = 2.0**-9  # of an e4m3 block scale: the least positive number, so that nothing divides by zero
WEIGHT_EPS, ROW_EPS = 1e-12, 1e-8  # least amax behind an outer scale: of an expert's weight, of a row of activations


def _as_fp32(value: float) -> float:
    """value rounded to FP32."""
    return struct.unpack("f", struct.pack("f", value))[0]


@dataclass(frozen=True)
class Format:
    """Values and scales of one block-scaled format.

    Codes of values count magnitudes upwards from 0; the top bit is the sign.
    """

    name: str
    value_dtype: torch.dtype
    values_per_byte: int  # of 2, the value with the even index is in the low half
    mantissa_bits: int
    min_exponent: int  # of the least normal number
    largest: float
    nan_code: int  # what a NaN becomes; E2M1 has none and takes the largest, as the hardware does: its scale is NaN
    scale_dtype: torch.dtype
    block: int
    two_level: bool = False  # e4m3 scales under an FP32 outer scale (of a row or an expert); else E8M0, rounded up

    @property
    def largest_code(self) -> int:
        fraction, exponent = math.frexp(self.largest)  # largest = fraction * 2^exponent, 0.5 <= fraction < 1
        mantissa = int((2 * fraction - 1) * 2**self.mantissa_bits)
        return (exponent - self.min_exponent) << self.mantissa_bits | mantissa

    @property
    def reciprocal_of_largest(self) -> float:
        """1 / largest, rounded to FP32."""
        return _as_fp32(1 / self.largest)

    @property
    def outer_scale_bytes(self) -> int:
        return 4 if self.two_level else 0

    @property
    def expanded_dtype(self) -> torch.dtype:
        """16 bits that hold a value times its block scale: exactly, E8M0 scales from 2^-117 to 2^119 provided."""
        return torch.float16 if self.two_level else torch.bfloat16

    @property
    def expanded_group(self) -> int:
        """Columns of an expanded row that are in an order of their own, see expanded_order."""
        return EXPANDED_GROUP_BYTES * self.values_per_byte


EXPANDED_GROUP_BYTES = 128  # of codes, in a group of columns of an expanded row

_E2M1 = {"value_dtype": torch.float4_e2m1fn_x2, "values_per_byte": 2, "mantissa_bits": 1, "min_exponent": 0}
_E2M1 |= {"largest": 6.0, "nan_code": 0x7}
MXFP8_E4M3 = Format("mxfp8_e4m3", torch.float8_e4m3fn, 1, 3, -6, 448.0, 0x7F, torch.float8_e8m0fnu, 32)
MXFP8_E5M2 = Format("mxfp8_e5m2", torch.float8_e5m2, 1, 2, -14, 57344.0, 0x7F, torch.float8_e8m0fnu, 32)
MXFP4 = Format("mxfp4", **_E2M1, scale_dtype=torch.float8_e8m0fnu, block=32)
NVFP4 = Format("nvfp4", **_E2M1, scale_dtype=torch.float8_e4m3fn, block=16, two_level=True)
FORMATS = (MXFP8_E4M3, MXFP8_E5M2, MXFP4, NVFP4)

OUTER_RANGE = MXFP8_E4M3.largest * NVFP4.largest  # largest block scale times largest value: over amax, an outer scale


def by_name(format: BlockScaledFormat | str) -> Format:
    """The record of a format that a configuration can name. Raises ValueError for any other."""
    return {BlockScaledFormat.MXFP8_E4M3: MXFP8_E4M3, BlockScaledFormat.NVFP4: NVFP4}[BlockScaledFormat(format)]


# Layout


def padded_scales(rows: int, cols: int) -> tuple[int, int]:
    """Shape of a blocked scale matrix: whole atoms."""
    return align(rows, SCALE_ATOM[0]), align(cols, SCALE_ATOM[1])


def row_pitch(format: Format, width: int, expanded: bool = False) -> int:
    """Bytes from row to row of an operand of rows; expanded rows are padded to whole groups."""
    if expanded:
        return format.expanded_dtype.itemsize * align(width, format.expanded_group)
    return width // format.values_per_byte


def expanded_order(format: Format) -> list[int]:
    """For each position in a group of an expanded row, the column of the group that lies there.

    That of the bytes of codes in the registers of a product: one of four threads has every fourth pair of positions and
    32 consecutive bytes of codes.
    Example (e4m3): positions 0 to 9 hold columns 0, 2, 32, 34, 64, 66, 96, 98, 1, 3.
    """
    if format.values_per_byte == 1:  # position 32 b + 16 c + 8 d + 2 a + e
        places = itertools.product(range(4), range(2), range(2), range(4), range(2))
        return [4 * (8 * a + 2 * b + c) + d + 2 * e for b, c, d, a, e in places]
    places = itertools.product(range(2), range(2), range(2), range(4), range(4), range(2))
    return [8 * (8 * a + 4 * h + 2 * b + c) + d + 4 * e for h, b, c, d, a, e in places]  # 128 h + 64 b + 32 c + ...


def packed_row_width(format: Format, num_bytes: int) -> int | None:
    """How many values a wire row of so many bytes holds, a multiple of 32; None where no row is so long."""
    most = num_bytes * format.values_per_byte // DIM_MULTIPLE * DIM_MULTIPLE
    widths = range(most, 0, -DIM_MULTIPLE)
    return next((width for width in widths if packed_row_bytes(format, width) == num_bytes), None)


def packed_row_bytes(format: Format, width: int) -> int:
    """A row on the wire: values, scales in natural order, the inverse outer scale, padding."""
    return align(packed_row_parts(format, width)[-1], PACKED_ROW_ALIGNMENT)


def packed_row_parts(format: Format, width: int) -> tuple[int, int, int]:
    """Where values, scales and the inverse outer scale of a wire row end, in bytes; an outer scale starts at an even
    one, as widths are multiples of 32, not at a multiple of its four bytes."""
    values_end = width // format.values_per_byte
    scales_end = values_end + width // format.block
    return values_end, scales_end, scales_end + format.outer_scale_bytes
