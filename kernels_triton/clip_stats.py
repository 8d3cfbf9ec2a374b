"""count_clips: how many gates and ups of h1 = [gate | up] lie beyond a limit, over the rows that this rank received.

    counts += [#(gate > limit), #(|up| > limit), #elements of the gate]

Grid: persistent, one program an SM, over blocks of rows by columns; each adds its three sums once, as integers, so that
the order of the programs changes nothing. Reads and writes local memory only; no barrier before or after it. It reads
h1 after W13, before anything overwrites it, and not at all in calls that do not ask.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ._device import begin, delay, num_programs
from ._launch import launched


@dataclass(frozen=True)
class Config:
    block_r: int = 16  # rows of a block
    block_f: int = 256  # columns of a block, per half of h1: 16 bytes a lane of one warp
    num_warps: int = 16


CONFIG = Config()  # one for all shapes: it reads h1 and nothing else


@launched
@triton.jit(do_not_specialize_on_alignment=["h1_start_ptr", "row_to_slot_ptr", "num_rows_ptr", "stop_ptr"])
def _count_clips(
    h1_ptr,  # [X, 2F] bf16
    h1_start_ptr,  # [1] i64
    row_to_slot_ptr,  # [R] i32, -1 for padding
    num_rows_ptr,  # [1] i32
    counts_ptr,  # [3] i64
    stop_ptr,  # [1] i64
    F,
    limit,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program p takes blocks p, p + programs, ...; a block is BLOCK_R rows by BLOCK_F columns of both halves.

    Example (F = 2, limit 1): rows [3, 1 | -2, 1] and [0, 2 | 1, 5] have gates 3 and 2 above it, ups -2 and 5 beyond it:
    [2, 2, 4].
    """
    begin()
    if tl.load(stop_ptr) != 0:
        return
    h1_ptr += tl.load(h1_start_ptr) * 2 * F
    num_rows = tl.load(num_rows_ptr)
    num_chunks = tl.cdiv(F, BLOCK_F)
    gates = tl.zeros((), tl.int64)
    ups = tl.zeros((), tl.int64)
    elements = tl.zeros((), tl.int64)
    for block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R) * num_chunks, tl.num_programs(0)):
        delay(block)
        rows = block // num_chunks * BLOCK_R + tl.arange(0, BLOCK_R)
        cols = block % num_chunks * BLOCK_F + tl.arange(0, BLOCK_F)
        real = tl.load(row_to_slot_ptr + rows, mask=rows < num_rows, other=-1) >= 0
        mask = real[:, None] & (cols < F)[None, :]
        gate_ptrs = h1_ptr + rows[:, None].to(tl.int64) * 2 * F + cols[None, :]
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + F, mask=mask, other=0.0).to(tl.float32)
        gates += tl.sum(tl.sum((mask & (gate > limit)).to(tl.int32), axis=1), axis=0)
        ups += tl.sum(tl.sum((mask & (tl.abs(up) > limit)).to(tl.int32), axis=1), axis=0)
        elements += tl.sum(tl.sum(mask.to(tl.int32), axis=1), axis=0)
    tl.atomic_add(counts_ptr, gates, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, ups, sem="relaxed")
    tl.atomic_add(counts_ptr + 2, elements, sem="relaxed")


def count_clips(h1_X2F, h1_start_1, row_start_P, row_to_slot_R, counts_3, *, limit, stop_1, num_sms=None) -> None:
    """Add the counts of this rank's rows to counts_3; see the file.

    Args:    h1_X2F: bf16, contiguous; the rows begin at h1_start_1 (int64, device).  row_start_P: int32 [L + 1], the
             last word counts the rows with padding.  row_to_slot_R: int32, -1 marks rows of padding, which are not
             read.  counts_3: int64.  limit: compared in FP32.  stop_1: nothing is touched when it is not 0.
    Source:  reference.count_clips, to the bit.
    """
    assert h1_X2F.is_contiguous() and counts_3.dtype.itemsize == 8, (h1_X2F.stride(), counts_3.dtype)
    _count_clips[(num_programs(h1_X2F.device, num_sms),)](
        h1_X2F,
        h1_start_1,
        row_to_slot_R,
        row_start_P[-1:],
        counts_3,
        stop_1,
        h1_X2F.shape[1] // 2,
        limit,
        BLOCK_R=CONFIG.block_r,
        BLOCK_F=CONFIG.block_f,
        num_warps=CONFIG.num_warps,
    )
