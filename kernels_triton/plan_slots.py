"""The slot planner on the device: what a layer keeps in its activation slot, and where all rows of a call lie.

    slots, up:      of each layer x_RD and h1 (KEEPS_ROWS), x and h1 (KEEPS_H1) or x alone (KEEPS_X): the most that on
                    every rank leaves room for the layers still to come, see _choose_kept
    scratch, down:  what the slot does not hold of x_RD, h1, h2 (g2), h3 (dy), by the actual number of rows; each
                    starts at a multiple of its row pitch
Block-scaled, the columns of x stand for x_RD in a slot, and the scratch is that of planner.py's second table.

Grid: one program, scalars and one vector over the ranks. Reads rank_rows_W of route, so every rank decides alike; reads
and writes local memory only. Backward puts into the own header which forward it belongs to and what that kept; peers
verify it after PUBLISHED. The place record (words PLACE_*, all written) holds start and stop words of the ops that
follow.
"""

import triton
import triton.language as tl

from dist_moe import formats, shapes
from dist_moe.shapes import next_power_of_2

from ._device import begin, delay
from ._fault import set_fault
from ._launch import launched

KEEPS_X, KEEPS_H1, KEEPS_ROWS = (tl.constexpr(kept) for kept in (shapes.KEEPS_X, shapes.KEEPS_H1, shapes.KEEPS_ROWS))
KEPT, SLOT, LAYER, EPOCH, X, XR, H1, H2, H3, SKIP_X, SKIP_H1, SKIP_COLUMNS = (
    tl.constexpr(word)
    for word in (
        shapes.PLACE_KEPT,
        shapes.PLACE_SLOT,
        shapes.PLACE_LAYER,
        shapes.PLACE_EPOCH,
        shapes.PLACE_X,
        shapes.PLACE_XR,
        shapes.PLACE_H1,
        shapes.PLACE_H2,
        shapes.PLACE_H3,
        shapes.PLACE_SKIP_X,
        shapes.PLACE_SKIP_H1,
        shapes.PLACE_SKIP_COLUMNS,
    )
)
ROW_SCALES, OUTER, G1_ROWS, G2, X_COLUMNS, DY_COLUMNS, H2_COLUMNS, G1_COLUMNS, STAGE = (
    tl.constexpr(word)
    for word in (
        shapes.PLACE_ROW_SCALES,
        shapes.PLACE_OUTER,
        shapes.PLACE_G1_ROWS,
        shapes.PLACE_G2,
        shapes.PLACE_X_COLUMNS,
        shapes.PLACE_DY_COLUMNS,
        shapes.PLACE_H2_COLUMNS,
        shapes.PLACE_G1_COLUMNS,
        shapes.PLACE_STAGE,
    )
)
HEADER_KEPT, HEADER_SLOT, HEADER_LAYER, HEADER_FORWARD = (
    tl.constexpr(word) for word in (shapes.HEADER_KEPT, shapes.HEADER_SLOT, shapes.HEADER_LAYER, shapes.HEADER_FORWARD)
)
STATS_CALLS, STATS_ROWS, STATS_MOST_ROWS, STATS_KEPT, STATS_SCRATCH, STATS_SLOTS = (
    tl.constexpr(word)
    for word in (
        shapes.STATS_CALLS,
        shapes.STATS_ROWS,
        shapes.STATS_MOST_ROWS,
        shapes.STATS_KEPT,
        shapes.STATS_SCRATCH,
        shapes.STATS_SLOTS,
    )
)
PLACE_WORDS, SCALED_PLACE_WORDS = tl.constexpr(shapes.PLACE_WORDS), tl.constexpr(shapes.SCALED_PLACE_WORDS)
ALL_WORDS = tl.constexpr(next_power_of_2(shapes.SCALED_PLACE_WORDS))
NUM_STATS = tl.constexpr(next_power_of_2(shapes.STATS_SLOTS))
FAULT_SLOT = tl.constexpr(shapes.FAULT_SLOT)
FAULT_SLOT_ROOM = tl.constexpr(shapes.FAULT_SLOT_ROOM)
EPOCH_SHIFT = tl.constexpr(shapes.EPOCH_SHIFT)
ATOM_R = tl.constexpr(formats.SCALE_ATOM[0])
ATOM_C = tl.constexpr(formats.SCALE_ATOM[1])


@triton.jit
def _round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


@triton.jit
def _column_scales(rows, width, BLOCK: tl.constexpr):
    """Bytes of the scales of a column bundle."""
    return rows // BLOCK * _round_up(width, ATOM_R)


@triton.jit
def _row_pitch(width, PER_BYTE: tl.constexpr, GROUP: tl.constexpr):
    """Bytes from row to row of a bundle of rows; expanded in groups of GROUP columns unless that is 0."""
    return width // PER_BYTE if GROUP == 0 else 2 * _round_up(width, GROUP)


@triton.jit
def _kept_bytes(kept, rows, D, F, x_bytes, BLOCK: tl.constexpr):
    """Bytes of a layer in a slot; a row more of x_RD and h1, because a start is rounded up to the row pitch.

    BLOCK: of the columns that stand for x_RD; 0: there are none, or they are expanded and as large. In blocks, h1's row
    more has 128 bytes to spare, behind scales that are aligned by themselves.
    Example (D = F = 32, 128 rows): 129 * 64 + 129 * 128 = 24768 -> 24832; in blocks of 32, 129 * 32 + 129 * 128 + 4 *
    128 = 21152 -> 21120.
    """
    h1 = (rows + 1) * (4 * F)
    if BLOCK == 0:
        full = _round_up((rows + 1) * (2 * D) + h1, 128)
    else:
        full = ((rows + 1) * D + h1 + _column_scales(rows, D, BLOCK)) // 128 * 128
    x_h1 = _round_up(x_bytes + tl.where(kept == KEEPS_X, 0, h1), 128)
    return tl.where(kept == KEEPS_ROWS, full, x_h1)


@triton.jit
def _choose_kept(used, rows, mask, still_to_come, D, F, slot_bytes, x_bytes, x_h1_bytes, BLOCK: tl.constexpr):
    """The most that a layer may keep: rows while the layers to come can keep x and h1 at balanced rows, or where rows
    take no more than x and h1 do; h1 while those can keep x.

    Example (D = F = 32, slot of 3072 bytes, x 256, x and h1 of balanced rows 896, one layer to come, nothing used): 9
    rows make 1920 bytes of rows, 1920 + 896 <= 3072: KEEPS_ROWS. 11 rows make 2304, and 1792 of x and h1, 1792 + 256 <=
    3072: KEEPS_H1. 20 rows make 2944 of x and h1: KEEPS_X.
    """
    full = _kept_bytes(KEEPS_ROWS, rows, D, F, x_bytes, BLOCK)
    x_h1 = _kept_bytes(KEEPS_H1, rows, D, F, x_bytes, BLOCK)
    full_end = tl.max(tl.where(mask, used + full, 0))
    x_h1_end = tl.max(tl.where(mask, used + x_h1, 0))
    rows_are_less = tl.max(tl.where(mask, full - x_h1, 0)) <= 0
    keeps_rows = (full_end + still_to_come * x_h1_bytes <= slot_bytes) | (
        rows_are_less & (full_end + still_to_come * x_bytes <= slot_bytes)
    )
    keeps_h1 = x_h1_end + still_to_come * x_bytes <= slot_bytes
    return tl.where(keeps_rows, KEEPS_ROWS, tl.where(keeps_h1, KEEPS_H1, KEEPS_X))


@triton.jit
def _begin_place(place_ptr, BLOCK: tl.constexpr):
    """Write a record that keeps nothing and skips everything, 0 in all other words."""
    NUM_WORDS: tl.constexpr = PLACE_WORDS if BLOCK == 0 else SCALED_PLACE_WORDS
    word = tl.arange(0, ALL_WORDS)
    skips = (word == SKIP_X) | (word == SKIP_H1) | ((word == SKIP_COLUMNS) & (BLOCK > 0))
    tl.store(place_ptr + word, skips.to(tl.int64), mask=word < NUM_WORDS)
    tl.debug_barrier()  # before another thread writes a word once more


@triton.jit
def _take(end, rows, pitch):
    """The region of this row pitch that ends at or below byte `end`: its first row."""
    return (end - rows * pitch) // pitch


@triton.jit
def _place_scratch(place_ptr, rows, kept, total_bytes, D, F, TRAINING: tl.constexpr):
    """Write the scratch words of what is not in the slot; return how many bytes they take. What is used comes last in
    the buffer, so that scratch which lies on the host in part reaches there as little as it can.

    Example: D = F = 32 (pitches 64, 128, 64, 64), 1024 bytes, 2 rows: XR = 14 (byte 896), H1 = 5 (640), H2 = 8 (512),
    H3 = 6 (384), 640 bytes. With x_RD and h1 in the slot: H2 = 14 and H3 = 12, 256 bytes.
    """
    end = total_bytes.to(tl.int64)
    xr = _take(end, rows, 2 * D)
    if kept != KEEPS_ROWS:
        tl.store(place_ptr + XR, xr)
        end = xr * (2 * D)
    if kept == KEEPS_X:
        h1 = _take(end, rows, 4 * F)
        tl.store(place_ptr + H1, h1)
        end = h1 * (4 * F)
    h2 = _take(end, rows, 2 * F)
    tl.store(place_ptr + H2, h2)
    end = h2 * (2 * F)
    h3 = xr
    if TRAINING:
        h3 = _take(end, rows, 2 * D)
        end = h3 * (2 * D)
    tl.store(place_ptr + H3, h3)
    return total_bytes - end


@triton.jit
def _place_scaled_scratch(
    place_ptr, rows, kept, total_bytes, D, F, stage, output_columns,
    BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, OUTER_SCALES: tl.constexpr, GROUP: tl.constexpr,
    TRAINING: tl.constexpr,
):  # fmt: skip
    """As _place_scratch, the regions of planner.py's second table, scales first.

    Example: D = F = 32, training in blocks of 32 one-byte values, 80000 bytes, 128 rows, no stage. Five regions of
    scales take 512 bytes each: ROW_SCALES = 79488, of the columns of x, dy, h2, g1 78976, 78464, 77952, 77440. H1 = 477
    (byte 61056), below it the rows XR = 1780, H2 = 1780, G1_ROWS = 826; H3 = 697 (byte 44608) with the columns of x and
    dy, 1394 and 1522; those of g1 569, over G2 = 569, of h2 1010 (byte 32320): 47680 bytes.
    With expanded columns H1 = 493 (byte 63104), XR = H2 = 1844, G1_ROWS = 858; H3 = 729 with the columns of dy, those
    of x 601, of g1 172, of h2 216 (byte 13824), over G2 = 216: 66176 bytes.
    """
    end = total_bytes.to(tl.int64)
    ROW_GROUP: tl.constexpr = 0 if TRAINING else GROUP
    widest = tl.maximum(D, 2 * F if TRAINING else F)
    if ROW_GROUP == 0:
        end -= rows * _round_up(widest // BLOCK, ATOM_C)
        tl.store(place_ptr + ROW_SCALES, end)
    if OUTER_SCALES:
        end -= rows * 4
        tl.store(place_ptr + OUTER, end // 4)
    if TRAINING and GROUP == 0:
        if kept != KEEPS_ROWS:
            end -= _column_scales(rows, D, BLOCK)
            tl.store(place_ptr + X_COLUMNS + 1, end)
        end -= _column_scales(rows, D, BLOCK)
        tl.store(place_ptr + DY_COLUMNS + 1, end)
        end -= _column_scales(rows, F, BLOCK)
        tl.store(place_ptr + H2_COLUMNS + 1, end)
        end -= _column_scales(rows, 2 * F, BLOCK)
        tl.store(place_ptr + G1_COLUMNS + 1, end)
    h1_end = end
    if kept == KEEPS_X:
        h1 = _take(end, rows, 4 * F)
        tl.store(place_ptr + H1, h1)
        end = h1 * (4 * F)
    if not TRAINING:
        h3 = _take(h1_end, rows, 2 * output_columns)
        tl.store(place_ptr + H3, h3)
        end = tl.minimum(end, h3 * (2 * output_columns))

    tl.store(place_ptr + XR, _take(end, rows, _row_pitch(D, PER_BYTE, ROW_GROUP)))
    tl.store(place_ptr + H2, _take(end, rows, _row_pitch(F, PER_BYTE, ROW_GROUP)))
    if TRAINING:
        tl.store(place_ptr + G1_ROWS, _take(end, rows, 2 * F))
    end -= (rows + 1) * _row_pitch(widest, PER_BYTE, ROW_GROUP)

    stage_end = end
    if TRAINING and GROUP > 0:
        dy = _take(end, rows, 2 * D)
        tl.store(place_ptr + H3, dy)
        tl.store(place_ptr + DY_COLUMNS, dy)
        stage_end = dy * (2 * D)
        if kept != KEEPS_ROWS:
            tl.store(place_ptr + X_COLUMNS, dy - rows)
            stage_end -= rows * (2 * D)
        g1 = _take(stage_end, rows, 4 * F)
        h2 = _take(g1 * (4 * F), rows, 2 * F)
        tl.store(place_ptr + G1_COLUMNS, g1)
        tl.store(place_ptr + G2, h2)
        tl.store(place_ptr + H2_COLUMNS, h2)
        end = h2 * (2 * F)
    elif TRAINING:
        h3 = _take(end, rows, 2 * D)
        tl.store(place_ptr + H3, h3)
        if kept != KEEPS_ROWS:
            tl.store(place_ptr + X_COLUMNS, 2 * h3)
        tl.store(place_ptr + DY_COLUMNS, 2 * h3 + rows)
        stage_end = h3 * (2 * D)
        g1 = _take(stage_end, rows, 2 * F)
        g2 = tl.where(F > BLOCK, g1 - rows, g1)
        h2 = 2 * g2 - rows
        tl.store(place_ptr + G1_COLUMNS, g1)
        tl.store(place_ptr + G2, g2)
        tl.store(place_ptr + H2_COLUMNS, h2)
        end = h2 * F
    if TRAINING and stage > 0:
        first = _take(stage_end, rows, 2 * stage)
        tl.store(place_ptr + STAGE, first)
        end = tl.minimum(end, first * (2 * stage))
    return total_bytes - end


@triton.jit
def _raise_to(ptr, value):
    tl.store(ptr, tl.maximum(tl.load(ptr), value))


@triton.jit
def _counted(stats, word, rows, kept, scratch, is_counted, SAVE: tl.constexpr):
    """The statistics after a forward, of what they were before it: words of one number a rank.

    Example: 7 words of 0, rows 5, kept KEEPS_H1, scratch 1600: 1 5 5 0 1 0 1600; not counted, 0 0 0 0 1 0 1600.
    """
    counts = tl.where(word == STATS_CALLS, 1, tl.where(word == STATS_ROWS, rows, 0))
    most = tl.where(word == STATS_MOST_ROWS, rows, 0)
    stats = tl.where(is_counted, tl.maximum(stats + counts, most), stats)
    if SAVE:
        stats += (word == STATS_KEPT + kept).to(tl.int64)
    return tl.maximum(stats, tl.where(word == STATS_SCRATCH, scratch, 0))


@triton.jit
def plan_one_forward(
    rank_rows_ptr,  # [W] int64
    num_rows_ptr,  # [L] int32
    call_ptr,
    slot_used_ptr,  # [N, W] int64
    slot_layers_ptr,  # [N] int64
    slot_calls_ptr,  # [N, deepest] int64
    stats_ptr,  # [STATS_SLOTS + N + L] int64
    place_ptr,
    fault_ptr,
    rank,
    slot,
    depth,
    num_slots,
    deepest,
    W,
    L,
    D,
    F,
    slot_bytes,
    x_bytes,
    x_h1_bytes,
    total_bytes,
    stage,
    output_columns,
    SAVE: tl.constexpr,
    TRAINING: tl.constexpr,
    BLOCK: tl.constexpr,  # values of a scale; 0: bf16
    PER_BYTE: tl.constexpr,
    OUTER_SCALES: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a group of expanded rows; 0: operands are codes
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Of one program of any number of warps: what it reads and then changes is read by all before a barrier. A slot of
    -1 is that of a forward which a checkpoint will run again: only its scratch is counted.

    Example (D = F = 32, slot of 3072 bytes, x 256, x and h1 of balanced rows 896, depth 2, W = 2): rows (4, 3) make
    1024 and 768 bytes of rows in an empty slot: 1024 + 896 <= 3072, KEEPS_ROWS, used = (1024, 768). Rank 0: XR = 0 and
    H1 = 2 (byte 256, where x_RD ends). Then rows (2, 11) make 640 and 2304: 768 + 2304 <= 3072, KEEPS_ROWS too. With
    (2, 12) rows make 2560 and x and h1 1920: KEEPS_H1, x at element 512 of rank 0 (byte 1024), H1 = 10 (byte 1280),
    used = (1664, 2688).
    """
    X_BLOCK: tl.constexpr = BLOCK if GROUP == 0 else 0  # of the columns of x
    fits = tl.load(fault_ptr) == 0
    rows = tl.load(rank_rows_ptr + rank)
    word = tl.arange(0, NUM_STATS)
    stats = tl.load(stats_ptr + word, mask=word < STATS_SLOTS, other=0)
    kept = tl.full([], KEEPS_X, tl.int32)
    if SAVE:
        layer = tl.load(slot_layers_ptr + slot)
        w = tl.arange(0, BLOCK_W)
        rows_W = tl.load(rank_rows_ptr + w, mask=w < W, other=0)
        used = tl.load(slot_used_ptr + slot * W + w, mask=w < W, other=0)
    _begin_place(place_ptr, BLOCK)
    if SAVE:
        has_room = tl.max(used) + (depth - layer) * x_bytes <= slot_bytes
        if fits & (layer >= depth):
            set_fault(fault_ptr, FAULT_SLOT, rank, slot, layer, depth)
        elif fits & ~has_room:
            set_fault(fault_ptr, FAULT_SLOT_ROOM, rank, slot, layer, depth)
        fits = fits & (layer < depth) & has_room
        if fits:
            kept = _choose_kept(used, rows_W, w < W, depth - 1 - layer, D, F, slot_bytes, x_bytes, x_h1_bytes, X_BLOCK)
            start = slot.to(tl.int64) * slot_bytes + tl.sum(tl.where(w == rank, used, 0))
            if kept == KEEPS_ROWS:
                if X_BLOCK == 0:
                    xr = (start + 2 * D - 1) // (2 * D)
                    tl.store(place_ptr + (XR if BLOCK == 0 else X_COLUMNS), xr)
                    start = (xr + rows) * (2 * D)
                else:
                    tl.store(place_ptr + X_COLUMNS + 1, start)
                    start += _column_scales(rows, D, BLOCK)
                    h1_end = _round_up(start, 4 * F) + rows * (4 * F)
                    tl.store(place_ptr + X_COLUMNS, (h1_end + D - 1) // D)
            else:
                tl.store(place_ptr + X, start // 2)
                start += x_bytes
            if kept != KEEPS_X:
                tl.store(place_ptr + H1, (start + 4 * F - 1) // (4 * F))
            used += _kept_bytes(kept, rows_W, D, F, x_bytes, X_BLOCK)
            tl.store(slot_used_ptr + slot * W + w, used, mask=w < W)
            _raise_to(stats_ptr + STATS_SLOTS + slot, tl.sum(tl.where(w == rank, used, 0)))
            tl.store(slot_layers_ptr + slot, layer + 1)
            tl.store(place_ptr + KEPT, kept)
            tl.store(place_ptr + SKIP_X, (kept == KEEPS_ROWS).to(tl.int64))
            tl.store(place_ptr + SKIP_H1, (kept != KEEPS_X).to(tl.int64))
            if BLOCK > 0:
                tl.store(place_ptr + SKIP_COLUMNS, (kept != KEEPS_ROWS).to(tl.int64))
            tl.store(place_ptr + SLOT, slot)
            tl.store(place_ptr + LAYER, layer)
            call = tl.load(call_ptr)
            tl.store(place_ptr + EPOCH, call >> EPOCH_SHIFT)
            tl.store(slot_calls_ptr + slot.to(tl.int64) * deepest + layer, call)
    if fits:
        if slot >= 0:
            e = tl.arange(0, BLOCK_L)
            count = tl.load(num_rows_ptr + e, mask=e < L, other=0)
            expert_ptr = stats_ptr + STATS_SLOTS + num_slots + e
            tl.store(expert_ptr, tl.load(expert_ptr, mask=e < L, other=0) + count, mask=e < L)
        if BLOCK == 0:
            scratch = _place_scratch(place_ptr, rows, kept, total_bytes, D, F, TRAINING)
        else:
            scratch = _place_scaled_scratch(
                place_ptr, rows, kept, total_bytes, D, F, stage, output_columns,
                BLOCK, PER_BYTE, OUTER_SCALES, GROUP, TRAINING,
            )  # fmt: skip
        stats = _counted(stats, word, rows, kept, scratch, slot >= 0, SAVE)
        tl.store(stats_ptr + word, stats, mask=word < STATS_SLOTS)


@launched
@triton.jit(do_not_specialize=["rank", "slot", "depth"])
def _plan_forward(
    rank_rows_ptr,
    num_rows_ptr,
    call_ptr,
    slot_used_ptr,
    slot_layers_ptr,
    slot_calls_ptr,
    stats_ptr,
    place_ptr,
    fault_ptr,
    rank,
    slot,
    depth,
    num_slots,
    deepest,
    W,
    L,
    D,
    F,
    slot_bytes,
    x_bytes,
    x_h1_bytes,
    total_bytes,
    stage,
    output_columns,
    SAVE: tl.constexpr,
    TRAINING: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OUTER_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One program."""
    begin()
    plan_one_forward(
        rank_rows_ptr, num_rows_ptr, call_ptr, slot_used_ptr, slot_layers_ptr, slot_calls_ptr, stats_ptr, place_ptr,
        fault_ptr, rank, slot, depth, num_slots, deepest, W, L, D, F, slot_bytes, x_bytes, x_h1_bytes, total_bytes,
        stage, output_columns, SAVE, TRAINING, BLOCK, PER_BYTE, OUTER_SCALES, GROUP, BLOCK_W, BLOCK_L,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["rank"])
def _plan_backward(
    saved_place_ptr,
    rank_rows_ptr,
    call_ptr,
    header_ptr,  # own
    slot_used_ptr,
    slot_layers_ptr,
    slot_calls_ptr,
    place_ptr,
    fault_ptr,
    rank,
    num_slots,
    deepest,
    W,
    D,
    F,
    x_bytes,
    total_bytes,
    stage,
    output_columns,
    TRAINING: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OUTER_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program. A layer that is not the newest of its slot, or of another epoch, is a fault.

    Example: after the last forward of _plan_forward (used = (1664, 2688), 2 layers), its place with LAYER = 1 gives
    used = (1024, 768), 1 layer, SKIP_X = 0 and SKIP_H1 = 1 (x_RD must be made again); once more it is a fault.
    """
    begin()
    _begin_place(place_ptr, BLOCK)
    if tl.load(fault_ptr) != 0:
        return
    slot, layer = tl.load(saved_place_ptr + SLOT), tl.load(saved_place_ptr + LAYER)
    # A record that its forward never came to write holds any slot; its epoch differs.
    newest = tl.load(slot_layers_ptr + slot, mask=(slot >= 0) & (slot < num_slots), other=0) - 1
    if (layer != newest) | (tl.load(saved_place_ptr + EPOCH) != tl.load(call_ptr) >> EPOCH_SHIFT):
        set_fault(fault_ptr, FAULT_SLOT, rank, slot, layer, newest)
        return
    X_BLOCK: tl.constexpr = BLOCK if GROUP == 0 else 0
    delay(layer)  # before the header is written, which peers verify
    kept = tl.load(saved_place_ptr + KEPT)
    w = tl.arange(0, BLOCK_W)
    rows_W = tl.load(rank_rows_ptr + w, mask=w < W, other=0)
    used = tl.load(slot_used_ptr + slot * W + w, mask=w < W, other=0)
    tl.store(slot_used_ptr + slot * W + w, used - _kept_bytes(kept, rows_W, D, F, x_bytes, X_BLOCK), mask=w < W)
    tl.store(slot_layers_ptr + slot, newest)
    tl.store(place_ptr + KEPT, kept)
    tl.store(place_ptr + SKIP_X, (kept == KEEPS_ROWS).to(tl.int64))
    tl.store(place_ptr + SKIP_H1, (kept != KEEPS_X).to(tl.int64))
    tl.store(place_ptr + SLOT, slot)
    tl.store(place_ptr + LAYER, layer)
    tl.store(place_ptr + EPOCH, tl.load(saved_place_ptr + EPOCH))
    tl.store(header_ptr + HEADER_KEPT, kept)
    tl.store(header_ptr + HEADER_SLOT, slot)
    tl.store(header_ptr + HEADER_LAYER, layer)
    tl.store(header_ptr + HEADER_FORWARD, tl.load(slot_calls_ptr + slot * deepest + layer))
    tl.store(place_ptr + X, tl.load(saved_place_ptr + X))
    tl.store(place_ptr + XR, tl.load(saved_place_ptr + XR))
    tl.store(place_ptr + H1, tl.load(saved_place_ptr + H1))
    rows = tl.load(rank_rows_ptr + rank)
    if BLOCK == 0:
        _place_scratch(place_ptr, rows, kept, total_bytes, D, F, TRAINING)
    else:
        tl.store(place_ptr + X_COLUMNS, tl.load(saved_place_ptr + X_COLUMNS))
        tl.store(place_ptr + X_COLUMNS + 1, tl.load(saved_place_ptr + X_COLUMNS + 1))
        _place_scaled_scratch(
            place_ptr, rows, kept, total_bytes, D, F, stage, output_columns,
            BLOCK, PER_BYTE, OUTER_SCALES, GROUP, TRAINING,
        )  # fmt: skip


def _format_options(geometry: shapes.Geometry) -> dict:
    format = geometry.format
    if format is None:
        return {"BLOCK": 0, "PER_BYTE": 1, "OUTER_SCALES": False, "GROUP": 0}
    group = format.expanded_group if geometry.expanded else 0
    values = {"BLOCK": format.block, "PER_BYTE": format.values_per_byte}
    return values | {"OUTER_SCALES": format.two_level, "GROUP": group}


def forward_arguments(geometry: shapes.Geometry, rank, slot, depth, save, W, L, slot_calls_NM) -> tuple[tuple, dict]:
    """What plan_one_forward takes from `rank` on: numbers, and constexprs."""
    g, (num_slots, deepest) = geometry, slot_calls_NM.shape
    assert not save or 0 <= slot < num_slots, (slot, num_slots)
    widths, slots = (g.hidden_dim, g.intermediate_dim), (g.slot_bytes, g.x_bytes, g.x_h1_bytes, g.total_bytes)
    options = {"SAVE": save, "TRAINING": g.training, **_format_options(g)}
    options |= {"BLOCK_W": next_power_of_2(W), "BLOCK_L": next_power_of_2(L)}
    return (rank, slot, depth, num_slots, deepest, W, L, *widths, *slots, g.stage_columns, g.output_columns), options


def plan_forward(
    rank_rows_W,
    num_rows_L,
    *,
    rank,
    slot,
    depth,
    save,
    geometry,
    call_1,
    slot_used_NW,
    slot_layers_N,
    slot_calls_NM,
    stats_S,
    place,
    fault_F,
):
    """Decide what a forward keeps and where its rows lie; see reference.plan_forward. Local, no host read.

    Args:  save: whether a backward will follow; without it the slots are not touched.
    """
    sizes, options = forward_arguments(
        geometry, rank, slot, depth, save, len(rank_rows_W), len(num_rows_L), slot_calls_NM
    )
    words = (call_1, slot_used_NW, slot_layers_N, slot_calls_NM, stats_S, place)
    _plan_forward[(1,)](rank_rows_W, num_rows_L, *words, fault_F, *sizes, **options, num_warps=1)


def plan_backward(
    saved_place,
    rank_rows_W,
    *,
    rank,
    geometry,
    call_1,
    header,
    slot_used_NW,
    slot_layers_N,
    slot_calls_NM,
    place,
    fault_F,
):
    """Give a layer's room back, say where backward finds its rows; see reference.plan_backward. Local, no host read."""
    g, W = geometry, rank_rows_W.numel()
    _plan_backward[(1,)](
        saved_place,
        rank_rows_W,
        call_1,
        header.own,
        slot_used_NW,
        slot_layers_N,
        slot_calls_NM,
        place,
        fault_F,
        rank,
        slot_layers_N.numel(),
        slot_calls_NM.shape[1],
        W,
        g.hidden_dim,
        g.intermediate_dim,
        g.x_bytes,
        g.total_bytes,
        g.stage_columns,
        g.output_columns,
        TRAINING=g.training,
        **_format_options(g),
        BLOCK_W=next_power_of_2(W),
        num_warps=1,
    )
