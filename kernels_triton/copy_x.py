"""copy_x: dst[dst_offset + i] = src[src_offset + i] for i < num_rows * width, offsets read on the device.

Saves x into an activation slot and restores it. Grid: persistent programs over blocks of BLOCK elements. Local memory
only; ordered by the stream.
"""

import triton
import triton.language as tl

from ._device import begin, delay
from ._launch import launched
from ._rows import RowTile, row_grid

_TILE = RowTile(rows=1, block_d=8192)


@launched
@triton.jit
def _copy(
    src_ptr,  # bf16
    src_offset_ptr,  # int64, a multiple of 64
    dst_ptr,  # bf16
    dst_offset_ptr,  # int64, a multiple of 64
    stop_ptr,  # int64
    num_elements,
    BLOCK: tl.constexpr,
):
    """Example: src = 0, 1, 2, ..., offsets 64 and 128, 96 elements: dst[128:224] = 64, ..., 159."""
    begin()
    if tl.load(stop_ptr) != 0:
        return
    src_ptrs = tl.multiple_of(src_ptr + tl.load(src_offset_ptr), 16)
    dst_ptrs = tl.multiple_of(dst_ptr + tl.load(dst_offset_ptr), 16)
    for block in range(tl.program_id(0), tl.cdiv(num_elements, BLOCK), tl.num_programs(0)):
        delay(block)
        i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst_ptrs + i, tl.load(src_ptrs + i, mask=i < num_elements), mask=i < num_elements)


def copy_x(src, src_offset_1, dst, dst_offset_1, num_rows, width, *, stop_1, num_sms=None):
    """Copy num_rows * width elements between two contiguous bf16 tensors, from and to device offsets in elements.

    Args:    width: a multiple of 32.  src_offset_1, dst_offset_1: int64 [1], multiples of 64; the two places are apart.
    Source:  reference.copy_x.
    """
    assert width % 32 == 0 and src.is_contiguous() and dst.is_contiguous()
    if num_rows == 0:
        return
    grid = row_grid(dst.device, _TILE, num_sms)
    _copy[grid](
        src, src_offset_1, dst, dst_offset_1, stop_1, num_rows * width, BLOCK=_TILE.block_d, num_warps=_TILE.num_warps
    )
