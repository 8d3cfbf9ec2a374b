"""The slot planner on the device: what a layer keeps in its activation slot, and where all rows of a call lie.

    slots, up:      x_RD and h1 of a layer that is kept, x of one that is not; a layer is kept if on every rank both fit
                    in the slot and leave room for the x of the layers still to come
    scratch, down:  x_RD, h1, h2 (g2), h3 (dy) by the actual number of rows; each starts at a multiple of its row pitch

Grid: one program, scalars and one vector over the ranks. Reads rank_rows_W of route, so every rank decides alike; reads
and writes local memory only. Backward puts into the own header which forward it belongs to and what that kept; peers
verify it after PUBLISHED. The place record (words PLACE_*) holds start and stop words of the ops that follow.
"""

import triton
import triton.language as tl

from dist_moe import shapes
from dist_moe.shapes import next_power_of_2

from ._fault import set_fault
from ._launch import launched

KEPT, SLOT, LAYER, EPOCH, X, XR, H1, H2, H3, SKIP = (
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
        shapes.PLACE_SKIP,
    )
)
HEADER_KEPT, HEADER_SLOT, HEADER_LAYER, HEADER_FORWARD = (
    tl.constexpr(word) for word in (shapes.HEADER_KEPT, shapes.HEADER_SLOT, shapes.HEADER_LAYER, shapes.HEADER_FORWARD)
)
FAULT_SLOT = tl.constexpr(shapes.FAULT_SLOT)
EPOCH_SHIFT = tl.constexpr(shapes.EPOCH_SHIFT)


@triton.jit
def _full_bytes(rows, D, F):
    """Bytes of x_RD and h1 in a slot; a row more of each, because a start is rounded up to the row pitch."""
    return ((rows + 1) * (2 * D + 4 * F) + 127) // 128 * 128


@triton.jit
def _take(end, rows, pitch):
    """The region of this row pitch that ends at or below byte `end`: its first row."""
    return (end - rows * pitch) // pitch


@triton.jit
def _place_scratch(place_ptr, rows, kept, total_bytes, D, F, TRAINING: tl.constexpr):
    """Write the scratch words; XR and H1 only if they are not kept, though they are walked in any case.

    Example: D = F = 32 (pitches 64, 128, 64, 64), 1024 bytes, 2 rows: XR = 14 (byte 896), H1 = 5 (640), H2 = 8 (512),
    H3 = 6 (384).
    """
    xr = _take(total_bytes, rows, 2 * D)
    h1 = _take(xr * (2 * D), rows, 4 * F)
    h2 = _take(h1 * (4 * F), rows, 2 * F)
    if TRAINING:
        h3 = _take(h2 * (2 * F), rows, 2 * D)
    else:
        h3 = xr
    if kept == 0:
        tl.store(place_ptr + XR, xr)
        tl.store(place_ptr + H1, h1)
    tl.store(place_ptr + H2, h2)
    tl.store(place_ptr + H3, h3)


@launched
@triton.jit(do_not_specialize=["rank", "slot", "depth"])
def _plan_forward(
    rank_rows_ptr,  # [W] int64
    call_ptr,
    slot_used_ptr,  # [N, W] int64
    slot_layers_ptr,  # [N] int64
    slot_calls_ptr,  # [N, deepest] int64
    place_ptr,
    fault_ptr,
    rank,
    slot,
    depth,
    deepest,
    W,
    D,
    F,
    slot_bytes,
    x_bytes,
    total_bytes,
    SAVE: tl.constexpr,
    TRAINING: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program.

    Example (D = F = 32, slot of 3072 bytes, x 256, depth 2, W = 2): rows (4, 3) make full 1024 and 768 bytes of an
    empty slot: 1024 + 256 <= 3072, kept, used = (1024, 768). Rank 0: XR = 0, H1 = 2 (byte 256, where x_RD ends).
    Then rows (2, 11) make 640 and 2304: 768 + 2304 <= 3072, kept too. With (2, 12), 2560 bytes, it were not: x alone at
    element 512 of rank 0 (byte 1024), used = (1280, 1024).
    """
    tl.store(place_ptr + KEPT, 0)
    tl.store(place_ptr + SKIP, 1)
    if tl.load(fault_ptr) != 0:
        return
    rows = tl.load(rank_rows_ptr + rank)
    kept = 0
    if SAVE:
        layer = tl.load(slot_layers_ptr + slot)
        if layer >= depth:
            set_fault(fault_ptr, FAULT_SLOT, rank, slot, layer, depth)
            return
        w = tl.arange(0, BLOCK_W)
        full = _full_bytes(tl.load(rank_rows_ptr + w, mask=w < W, other=0), D, F)
        used = tl.load(slot_used_ptr + slot * W + w, mask=w < W, other=0)
        start = slot.to(tl.int64) * slot_bytes + tl.sum(tl.where(w == rank, used, 0))
        reach = tl.max(tl.where(w < W, used + full, 0)) + (depth - 1 - layer) * x_bytes
        kept = (reach <= slot_bytes).to(tl.int32)
        if kept != 0:
            xr = (start + 2 * D - 1) // (2 * D)
            tl.store(place_ptr + XR, xr)
            tl.store(place_ptr + H1, ((xr + rows) * (2 * D) + 4 * F - 1) // (4 * F))
        else:
            tl.store(place_ptr + X, start // 2)
        tl.store(slot_used_ptr + slot * W + w, used + tl.where(kept != 0, full, x_bytes), mask=w < W)
        tl.store(slot_layers_ptr + slot, layer + 1)
        tl.store(place_ptr + KEPT, kept)
        tl.store(place_ptr + SKIP, kept)
        tl.store(place_ptr + SLOT, slot)
        tl.store(place_ptr + LAYER, layer)
        call = tl.load(call_ptr)
        tl.store(place_ptr + EPOCH, call >> EPOCH_SHIFT)
        tl.store(slot_calls_ptr + slot.to(tl.int64) * deepest + layer, call)
    _place_scratch(place_ptr, rows, kept, total_bytes, D, F, TRAINING)


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
    TRAINING: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program. A layer that is not the newest of its slot, or of another epoch, is a fault.

    Example: after the second forward of _plan_forward (used = (1280, 1024), 2 layers), its place with LAYER = 1 gives
    used = (1024, 768), 1 layer, SKIP = 0 (x_RD and h1 must be made again); given once more it is a fault.
    """
    tl.store(place_ptr + KEPT, 0)
    tl.store(place_ptr + SKIP, 1)
    if tl.load(fault_ptr) != 0:
        return
    slot, layer = tl.load(saved_place_ptr + SLOT), tl.load(saved_place_ptr + LAYER)
    # A record that its forward never wrote, because of a fault before a reset, holds any slot; its epoch differs.
    newest = tl.load(slot_layers_ptr + slot, mask=(slot >= 0) & (slot < num_slots), other=0) - 1
    if (layer != newest) | (tl.load(saved_place_ptr + EPOCH) != tl.load(call_ptr) >> EPOCH_SHIFT):
        set_fault(fault_ptr, FAULT_SLOT, rank, slot, layer, newest)
        return
    kept = tl.load(saved_place_ptr + KEPT)
    w = tl.arange(0, BLOCK_W)
    full = _full_bytes(tl.load(rank_rows_ptr + w, mask=w < W, other=0), D, F)
    used = tl.load(slot_used_ptr + slot * W + w, mask=w < W, other=0)
    tl.store(slot_used_ptr + slot * W + w, used - tl.where(kept != 0, full, x_bytes), mask=w < W)
    tl.store(slot_layers_ptr + slot, newest)
    tl.store(place_ptr + KEPT, kept)
    tl.store(place_ptr + SKIP, kept)
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
    _place_scratch(place_ptr, tl.load(rank_rows_ptr + rank), kept, total_bytes, D, F, TRAINING)


def plan_forward(
    rank_rows_W,
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
    place,
    fault_F,
):
    """Decide what a forward keeps and where its rows lie; see reference.plan_forward. Local, no host read.

    Args:  save: whether a backward will follow; without it the slots are not touched.
    """
    g, W = geometry, rank_rows_W.numel()
    assert not save or 0 <= slot < slot_layers_N.numel(), (slot, slot_layers_N.numel())
    _plan_forward[(1,)](
        rank_rows_W,
        call_1,
        slot_used_NW,
        slot_layers_N,
        slot_calls_NM,
        place,
        fault_F,
        rank,
        slot,
        depth,
        slot_calls_NM.shape[1],
        W,
        g.hidden_dim,
        g.intermediate_dim,
        g.slot_bytes,
        g.x_bytes,
        g.total_bytes,
        SAVE=save,
        TRAINING=g.training,
        BLOCK_W=next_power_of_2(W),
        num_warps=1,
    )


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
        TRAINING=g.training,
        BLOCK_W=next_power_of_2(W),
        num_warps=1,
    )
