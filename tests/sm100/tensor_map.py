"""The 128-byte tensor maps of TMA: decoding, encoding, and where the elements of a box lie.

The bit layout is not documented. It was found by encoding maps with one property changed at a time, and by running
public kernels with it; bits whose meaning was not found have to be as they were seen there, else decoding fails.

    words of 32 bits
    0, 1    address
    2       rank - 1 from bit 4 on, element type from 7, swizzle from 13
    3 to 6  strides of dimensions 1 to 4, in units of 16 bytes, low 32 bits
    7       the next 4 bits of each of them
    8 to 12 extents - 1
    13      from bit 24 on: box extent - 1 of dimension 0
    14      those of dimensions 1 to 4, 8 bits each
    16 on   not read: encoders leave whatever was there
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from tests.sm100.errors import EmulationError

TYPE_CODES = {"u8": 0, "u16": 1, "u32": 2, "f16": 6, "f32": 7, "bf16": 10, "16u4_align8b": 11}
TYPE_NAMES = {code: name for name, code in TYPE_CODES.items()}
TYPE_BITS = {"u8": 8, "u16": 16, "u32": 32, "f16": 16, "f32": 32, "bf16": 16, "16u4_align8b": 4}
SWIZZLES = (0, 32, 64, 128)  # bytes, by code


@dataclass(frozen=True)
class TensorMap:
    """A tensor of rank 1 to 5 in global memory and the box of it that one copy moves; dimension 0 is contiguous."""

    address: int
    element_type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of dimensions 1 and up
    box: tuple[int, ...]
    swizzle: int = 0  # bytes

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.box[0] * TYPE_BITS[self.element_type] // 8

    @property
    def box_bytes(self) -> int:
        return prod(self.box[1:]) * self.row_bytes

    def encode(self) -> bytes:
        words = [0] * 32
        words[0], words[1] = self.address & 0xFFFFFFFF, self.address >> 32
        words[2] = (
            _SEEN | (self.rank - 1) << 4 | TYPE_CODES[self.element_type] << 7 | SWIZZLES.index(self.swizzle) << 13
        )
        words[3 : 3 + len(self.strides)] = [stride // 16 & 0xFFFFFFFF for stride in self.strides]
        words[7] = sum((stride >> 36 & 15) << 4 * i for i, stride in enumerate(self.strides))
        words[8 : 8 + self.rank] = [extent - 1 for extent in self.shape]
        box = [extent - 1 for extent in self.box] + [0] * (5 - self.rank)
        words[13] = box[0] << 24
        words[14] = sum(extent << 8 * i for i, extent in enumerate(box[1:]))
        return struct.pack("<32I", *words)


# Of word 2: its known fields; the other bits as seen, but for bit 21, which was seen both ways on like tensors.
_FIELDS = 7 << 4 | 15 << 7 | 3 << 13
_SEEN, _VARIES = 0x00040002, 1 << 21


@lru_cache(maxsize=1024)
def decode(raw: bytes) -> TensorMap:
    words = struct.unpack("<16I", raw[:64])
    if words[2] & ~(_FIELDS | _VARIES) != _SEEN or words[13] & 0xFFFFFF or words[15]:
        raise EmulationError(f"tensor map: unknown bits: {raw[:64].hex()}")
    rank = (words[2] >> 4 & 7) + 1
    code = words[2] >> 7 & 15
    if rank > 5 or code not in TYPE_NAMES:
        raise EmulationError(f"tensor map: rank {rank} or element type {code} is unknown: {raw.hex()}")
    box = [words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(4))]
    tensor_map = TensorMap(
        address=words[0] | words[1] << 32,
        element_type=TYPE_NAMES[code],
        shape=tuple(extent + 1 for extent in words[8 : 8 + rank]),
        strides=tuple((words[3 + i] | (words[7] >> 4 * i & 15) << 32) * 16 for i in range(rank - 1)),
        box=tuple(extent + 1 for extent in box[:rank]),
        swizzle=SWIZZLES[words[2] >> 13 & 3],
    )
    if tensor_map.swizzle and tensor_map.row_bytes != tensor_map.swizzle:
        raise EmulationError(f"tensor map: box rows must be as wide as the swizzle: {tensor_map}")
    if tensor_map.row_bytes % 16:
        raise EmulationError(f"tensor map: box rows must be multiples of 16 bytes: {tensor_map}")
    return tensor_map


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Shared addresses with bits 4 and up XORed with those from bit 7 on: 1, 2 or 3 of them for 32, 64 or 128 bytes."""
    return addresses ^ ((addresses >> 7 & swizzle // 16 - 1 if swizzle else 0) << 4)


@lru_cache(maxsize=1024)
def chunks(start: int, num_bytes: int, swizzle: int) -> np.ndarray:
    """Numbers of the 16-byte chunks of shared memory that num_bytes from `start` on are laid out in."""
    return swizzled(np.arange(start, start + num_bytes, 16), swizzle) >> 4


def view_in_bounds(tensor_map: TensorMap, coordinates: tuple[int, ...], memory, writes: bool):
    """(bytes in global memory of the box's part within the tensor, its slices within the box), or None if all is out.

    Both go from the outermost dimension to the bytes of the innermost one.
    """
    bits = TYPE_BITS[tensor_map.element_type]
    offset, slices, shape, strides = tensor_map.address, [], [], []
    for at, extent, box, stride in zip(
        coordinates, tensor_map.shape, tensor_map.box, (0, *tensor_map.strides), strict=True
    ):
        low, high = max(at, 0), min(at + box, extent)
        if low >= high:
            return None
        if stride == 0 and not shape:  # the innermost dimension, in bytes
            offset += low * bits // 8
            low, high, at, stride = low * bits // 8, high * bits // 8, at * bits // 8, 1
        else:
            offset += low * stride
        slices.append(slice(low - at, high - at))
        shape.append(high - low)
        strides.append(stride)
    span = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
    data, start = memory.window(offset, span, writes)
    view = np.lib.stride_tricks.as_strided(data[start:], shape[::-1], strides[::-1], writeable=writes)
    return view, tuple(slices[::-1])
