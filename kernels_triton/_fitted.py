"""Tiles that fit the rows of an expert, and how their operands come into shared memory; in Gluon, for sm_90.

An expert has whole tiles of MAIN rows and a last one of what is left, up to TAIL rows more than a whole one. Rows come
in boxes: one of MAIN rows or several of BOX rows, and a tail.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._device import delay
from ._hopper import add, load_box
from .grouped_gemm import _tile_place

TILE = gl.constexpr(128)  # columns of the result, rows of the first operand, in a tile
SIDE_ROWS = gl.constexpr(64)  # of these, what four warps multiply
STEP = gl.constexpr(64)  # of the contraction in a stage
MAIN = gl.constexpr(256)  # rows of a whole tile: four boxes
BOX = gl.constexpr(64)  # rows of what TMA brings where a tile is not whole


@gluon.jit
def _tiles_of(num_rows, TAIL: gl.constexpr):
    """How many tiles an expert's rows are: 0 -> 0, 1 and 288 -> 1, 289 -> 2 with a tail of 32."""
    return gl.maximum(gl.cdiv(num_rows - TAIL, MAIN), (num_rows > 0).to(gl.int32))


@gluon.jit
def row_tile_ends(row_start_ptr, L, TAIL: gl.constexpr, BLOCK_L: gl.constexpr):
    """Cumulative number of row tiles by expert, int32 [BLOCK_L]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offs_l = gl.arange(0, BLOCK_L, layout=LAYOUT)
    start = gl.load(row_start_ptr + offs_l, mask=offs_l < L, other=0)
    end = gl.load(row_start_ptr + offs_l + 1, mask=offs_l < L, other=0)
    return gl.associative_scan(_tiles_of(end - start, TAIL), 0, add)


@gluon.jit
def tile_of(tile, ends_L, row_start_ptr, num_tiles_n, TAIL: gl.constexpr, GROUP_M: gl.constexpr):
    """Expert, first row, end of the rows and first column of a tile; how many boxes of rows it takes, and whether there
    is a tail behind them. Behind three boxes there is none: its rows are a fourth box."""
    tile_m, tile_n = _tile_place(tile, gl.max(ends_L, 0), num_tiles_n, GROUP_M)
    expert = gl.sum((ends_L <= tile_m).to(gl.int32), 0)
    first_tile = gl.max(gl.where(ends_L <= tile_m, ends_L, 0), 0)
    start = gl.load(row_start_ptr + expert)
    end = gl.load(row_start_ptr + expert + 1)
    row = start + (tile_m - first_tile) * MAIN
    row_end = gl.where(tile_m - first_tile + 1 == _tiles_of(end - start, TAIL), end, row + MAIN)
    boxes = gl.minimum(gl.maximum(gl.cdiv(row_end - row - TAIL, BOX), 1), MAIN // BOX)
    boxes += ((boxes == 3) & (row + 3 * BOX < row_end)).to(gl.int32)
    return expert, row, row_end, tile_n * TILE, boxes, row + boxes * BOX < row_end


@gluon.jit
def _fill(step, place, contraction, rings, a, w_desc, DGRAD: gl.constexpr, WHOLE: gl.constexpr, has_tail):
    """Rows and weights of a tile into the ring, a step a stage, as stages become empty."""
    expert, row, col, boxes = place
    a_ring, tail_ring, w_ring, full, empty = rings
    main_desc, box_desc, tail_desc = a
    STAGES: gl.constexpr = w_ring.shape[0]
    BOXES: gl.constexpr = MAIN // BOX
    W_BYTES: gl.constexpr = w_desc.block_type.nbytes
    BOX_BYTES: gl.constexpr = box_desc.block_type.nbytes
    for k in range(0, contraction, STEP):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        for i in gl.static_range(BOXES - 1 if WHOLE else 0, BOXES if WHOLE else BOXES - 1):
            if WHOLE or boxes == i + 1:
                if i != 2 and has_tail:
                    mbarrier.expect(bar, W_BYTES + (i + 1) * BOX_BYTES + tail_desc.block_type.nbytes)
                else:
                    mbarrier.expect(bar, W_BYTES + (i + 1) * BOX_BYTES)
        if len(w_desc.block_type.shape) == 5:
            at = [expert, col // 16, 0, 0, k]
        elif DGRAD:
            at = [expert, k, col]
        else:
            at = [expert, col, k]
        load_box(w_desc, at, bar, w_ring.index(stage))
        if WHOLE:
            load_box(main_desc, [row, k], bar, a_ring.index(stage))
        else:
            for i in gl.static_range(BOXES - 1):
                if i < boxes:
                    load_box(box_desc, [row + i * BOX, k], bar, a_ring.index(stage).slice(i * BOX, BOX, 0))
        if has_tail:
            load_box(tail_desc, [row + boxes * BOX, k], bar, tail_ring.index(stage))
        step += 1
    return step


@gluon.jit
def produce(
    sizes,
    row_start_ptr,
    rings,
    a,
    a_start,
    w_desc,
    TAIL: gl.constexpr,
    DGRAD: gl.constexpr,
    BLOCK_L: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """One warp: the operands of every tile."""
    L, width, contraction = sizes
    ends_L = row_tile_ends(row_start_ptr, L, TAIL, BLOCK_L)
    num_tiles_n = gl.cdiv(width, TILE)
    step = 0
    for tile in range(gl.program_id(0), gl.max(ends_L, 0) * num_tiles_n, gl.num_programs(0)):
        delay(tile)
        expert, row, _, col, boxes, has_tail = tile_of(tile, ends_L, row_start_ptr, num_tiles_n, TAIL, GROUP_M)
        place = (expert, a_start + row, col, boxes)
        if boxes < MAIN // BOX:
            step = _fill(step, place, contraction, rings, a, w_desc, DGRAD, False, has_tail)
        elif has_tail:
            step = _fill(step, place, contraction, rings, a, w_desc, DGRAD, True, True)
        else:
            step = _fill(step, place, contraction, rings, a, w_desc, DGRAD, True, False)
