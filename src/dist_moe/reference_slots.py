"""The oracle of the device-side slot planner: what a layer keeps, and where all rows of a call lie."""

import torch
from torch import Tensor

from . import shapes
from .formats import SCALE_ATOM, row_pitch
from .reference_memory import set_fault
from .shapes import Geometry, align, cdiv


def _kept_bytes(rows: Tensor, g: Geometry, kept: int) -> Tensor:
    """Bytes that a layer with this many rows takes in a slot; a row more of x_RD and h1, as their starts round up.

    Block-scaled, KEEPS_ROWS has the columns of x instead of x_RD, and their scales, so that h1's row more has 128 bytes
    to spare; or they are expanded and as large as x_RD.
    """
    D, h1 = g.hidden_dim, (rows + 1) * 4 * g.intermediate_dim
    if kept == shapes.KEEPS_ROWS and g.format is not None and not g.expanded:
        return (h1 + (rows + 1) * D + _column_scale_bytes(g, rows, D)) // 128 * 128
    raw = {
        shapes.KEEPS_X: torch.full_like(rows, g.x_bytes),
        shapes.KEEPS_H1: g.x_bytes + h1,
        shapes.KEEPS_ROWS: (rows + 1) * 2 * D + h1,
    }[kept]
    return (raw + 127) // 128 * 128


def _column_scale_bytes(g: Geometry, rows, width: int):
    return rows // g.format.block * align(width, SCALE_ATOM[0])


def _choose_kept(used_W: Tensor, rank_rows_W: Tensor, g: Geometry, still_to_come: int) -> int:
    """The most that a layer may keep: rows while the layers to come can keep x and h1 at balanced rows, or where rows
    take no more than x and h1 do; h1 while those can keep x."""
    x_h1, rows = (_kept_bytes(rank_rows_W, g, kept) for kept in (shapes.KEEPS_H1, shapes.KEEPS_ROWS))

    def fits(size_W: Tensor, later_bytes: int) -> bool:
        return int((used_W + size_W).max()) + still_to_come * later_bytes <= g.slot_bytes

    if fits(rows, g.x_h1_bytes) or (fits(rows, g.x_bytes) and bool((rows <= x_h1).all())):
        return shapes.KEEPS_ROWS
    return shapes.KEEPS_H1 if fits(x_h1, g.x_bytes) else shapes.KEEPS_X


def _begin_place(place: Tensor, g: Geometry) -> None:
    """A record that keeps nothing and skips everything, 0 in all other words."""
    place.zero_()
    place[shapes.PLACE_SKIP_X] = place[shapes.PLACE_SKIP_H1] = 1
    if g.format is not None:
        place[shapes.PLACE_SKIP_COLUMNS] = 1


def _place_scratch(place: Tensor, g: Geometry, rows: int, kept: int) -> int:
    """What is not in the slot, down from the end of the buffer, each at a multiple of its pitch; the bytes it takes."""
    if g.format is not None:
        return _place_scaled_scratch(place, g, rows, kept)
    pitches = {}
    if kept != shapes.KEEPS_ROWS:
        pitches[shapes.PLACE_XR] = 2 * g.hidden_dim
    if kept == shapes.KEEPS_X:
        pitches[shapes.PLACE_H1] = 4 * g.intermediate_dim
    pitches[shapes.PLACE_H2] = 2 * g.intermediate_dim
    if g.training:
        pitches[shapes.PLACE_H3] = 2 * g.hidden_dim
    end = g.total_bytes
    for word, pitch in pitches.items():
        place[word] = (end - rows * pitch) // pitch
        end = int(place[word]) * pitch
    if not g.training:
        place[shapes.PLACE_H3] = place[shapes.PLACE_XR]
    return g.total_bytes - end


def _place_scaled_scratch(place: Tensor, g: Geometry, rows: int, kept: int) -> int:
    """The regions of planner.py's second table, scales first; the bytes they take."""
    D, F, end = g.hidden_dim, g.intermediate_dim, g.total_bytes

    def take(num_bytes: int) -> int:
        nonlocal end
        end -= num_bytes
        return end

    def take_rows(word: int, pitch: int) -> None:
        nonlocal end
        place[word] = (end - rows * pitch) // pitch
        end = int(place[word]) * pitch

    if not g.expands_rows:
        place[shapes.PLACE_ROW_SCALES] = take(rows * align(g.widest_rows // g.format.block, SCALE_ATOM[1]))
    if g.format.two_level:
        place[shapes.PLACE_OUTER] = take(rows * 4) // 4
    if g.training and not g.expanded:
        if kept != shapes.KEEPS_ROWS:
            place[shapes.PLACE_X_COLUMNS + 1] = take(_column_scale_bytes(g, rows, D))
        for word, width in (
            (shapes.PLACE_DY_COLUMNS, D),
            (shapes.PLACE_H2_COLUMNS, F),
            (shapes.PLACE_G1_COLUMNS, 2 * F),
        ):
            place[word + 1] = take(_column_scale_bytes(g, rows, width))
    h1_end = end
    if kept == shapes.KEEPS_X:
        take_rows(shapes.PLACE_H1, 4 * F)
    if not g.training:
        pitch = 2 * g.output_columns
        place[shapes.PLACE_H3] = (h1_end - rows * pitch) // pitch
        end = min(end, int(place[shapes.PLACE_H3]) * pitch)

    for word, width in ((shapes.PLACE_XR, D), (shapes.PLACE_H2, F), (shapes.PLACE_G1_ROWS, 2 * F)):
        if word != shapes.PLACE_G1_ROWS or g.training:
            pitch = row_pitch(g.format, width, g.expands_rows)
            place[word] = (end - rows * pitch) // pitch
    take((rows + 1) * row_pitch(g.format, g.widest_rows, g.expands_rows))

    stage_end = end
    if g.expands_columns:
        take_rows(shapes.PLACE_H3, 2 * D)
        place[shapes.PLACE_DY_COLUMNS] = place[shapes.PLACE_H3]
        if kept != shapes.KEEPS_ROWS:
            take_rows(shapes.PLACE_X_COLUMNS, 2 * D)
        stage_end = end
        take_rows(shapes.PLACE_G1_COLUMNS, 4 * F)
        take_rows(shapes.PLACE_H2_COLUMNS, 2 * F)
        place[shapes.PLACE_G2] = place[shapes.PLACE_H2_COLUMNS]
    elif g.training:
        take_rows(shapes.PLACE_H3, 2 * D)
        first_row = 2 * int(place[shapes.PLACE_H3])
        if kept != shapes.KEEPS_ROWS:
            place[shapes.PLACE_X_COLUMNS] = first_row
        place[shapes.PLACE_DY_COLUMNS] = first_row + rows
        stage_end = end
        take_rows(shapes.PLACE_G1_COLUMNS, 2 * F)
        place[shapes.PLACE_G2] = place[shapes.PLACE_G1_COLUMNS]
        if F > g.format.block:
            take_rows(shapes.PLACE_G2, 2 * F)
        take_rows(shapes.PLACE_H2_COLUMNS, F)
    if g.stage_columns:
        pitch = 2 * g.stage_columns
        place[shapes.PLACE_STAGE] = (stage_end - rows * pitch) // pitch
        end = min(end, int(place[shapes.PLACE_STAGE]) * pitch)
    return g.total_bytes - end


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
    """Decide what a forward keeps in its activation slot and where its rows lie; the same decision on every rank.

    Counts the forward in stats_S; of one in a negative slot, which a checkpoint will run again, the scratch alone.

    A layer keeps what on no rank pushes the slot's remaining layers out of it: see _choose_kept.
    """
    g, rows, kept = geometry, int(rank_rows_W[rank]), shapes.KEEPS_X
    _begin_place(place, g)
    if int(fault_F[0]):
        return
    if save:
        layer = int(slot_layers_N[slot])
        if layer >= depth:
            set_fault(fault_F, shapes.FAULT_SLOT, rank, slot, layer, depth)
            return
        if int(slot_used_NW[slot].max()) + (depth - layer) * g.x_bytes > g.slot_bytes:
            set_fault(fault_F, shapes.FAULT_SLOT_ROOM, rank, slot, layer, depth)
            return
        start = slot * g.slot_bytes + int(slot_used_NW[slot, rank])
        kept = _choose_kept(slot_used_NW[slot], rank_rows_W, g, depth - 1 - layer)
        slot_used_NW[slot] += _kept_bytes(rank_rows_W, g, kept)
        if kept == shapes.KEEPS_ROWS and g.format is not None and not g.expanded:
            place[shapes.PLACE_X_COLUMNS + 1] = start
            start += _column_scale_bytes(g, rows, g.hidden_dim)
            h1_end = (cdiv(start, 4 * g.intermediate_dim) + rows) * 4 * g.intermediate_dim
            place[shapes.PLACE_X_COLUMNS] = cdiv(h1_end, g.hidden_dim)
        elif kept == shapes.KEEPS_ROWS:
            word = shapes.PLACE_XR if g.format is None else shapes.PLACE_X_COLUMNS
            place[word] = cdiv(start, 2 * g.hidden_dim)
            start = (int(place[word]) + rows) * 2 * g.hidden_dim
        else:
            place[shapes.PLACE_X] = start // 2
            start += g.x_bytes
        if kept != shapes.KEEPS_X:
            place[shapes.PLACE_H1] = cdiv(start, 4 * g.intermediate_dim)
        slot_layers_N[slot] += 1
        place[shapes.PLACE_KEPT] = kept
        place[shapes.PLACE_SKIP_X], place[shapes.PLACE_SKIP_H1] = kept == shapes.KEEPS_ROWS, kept != shapes.KEEPS_X
        if g.format is not None:
            place[shapes.PLACE_SKIP_COLUMNS] = kept != shapes.KEEPS_ROWS
        place[shapes.PLACE_SLOT], place[shapes.PLACE_LAYER] = slot, layer
        place[shapes.PLACE_EPOCH] = int(call_1[0]) >> shapes.EPOCH_SHIFT
        slot_calls_NM[slot, layer] = call_1[0]
        peak = stats_S[shapes.STATS_SLOTS + slot]
        peak.copy_(torch.maximum(peak, slot_used_NW[slot, rank]))
        stats_S[shapes.STATS_KEPT + kept] += 1
    if slot >= 0:
        stats_S[shapes.STATS_CALLS] += 1
        stats_S[shapes.STATS_ROWS] += rows
        stats_S[shapes.STATS_MOST_ROWS] = max(rows, int(stats_S[shapes.STATS_MOST_ROWS]))
        stats_S[shapes.STATS_SLOTS + len(slot_layers_N) :] += num_rows_L
    scratch = _place_scratch(place, g, rows, kept)
    stats_S[shapes.STATS_SCRATCH] = max(scratch, int(stats_S[shapes.STATS_SCRATCH]))


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
    """Give a layer's room in its slot back, say where backward finds and makes its rows, and put into the header which
    forward it belongs to."""
    g, rows = geometry, int(rank_rows_W[rank])
    _begin_place(place, g)
    if int(fault_F[0]):
        return
    kept, slot, layer, epoch = saved_place[: shapes.PLACE_EPOCH + 1].tolist()
    newest = int(slot_layers_N[slot]) - 1
    if layer != newest or epoch != int(call_1[0]) >> shapes.EPOCH_SHIFT:
        set_fault(fault_F, shapes.FAULT_SLOT, rank, slot, layer, newest)
        return
    told = torch.tensor([kept, slot, layer, int(slot_calls_NM[slot, layer])])
    header.own[shapes.HEADER_KEPT : shapes.HEADER_FORWARD + 1] = told
    slot_layers_N[slot] -= 1
    slot_used_NW[slot] -= _kept_bytes(rank_rows_W, g, kept)
    place[: shapes.PLACE_H1 + 1] = saved_place[: shapes.PLACE_H1 + 1]
    if g.format is not None:
        x_columns = slice(shapes.PLACE_X_COLUMNS, shapes.PLACE_X_COLUMNS + 2)
        place[x_columns] = saved_place[x_columns]
    place[shapes.PLACE_SKIP_X], place[shapes.PLACE_SKIP_H1] = kept == shapes.KEEPS_ROWS, kept != shapes.KEEPS_X
    _place_scratch(place, g, rows, kept)
