"""Products of e4m3 blocks on sm_90, in Gluon; elsewhere, and for other formats, grouped_gemm_scaled runs.

    forward  out[r] = bf16(a[r] @ w[e].T)         dgrad  out[r] = bf16(dy[r] @ w[e])

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

The tensor cores multiply the e4m3 values as they are, a block of 32 at a time, which is one instruction deep, and every
FP32 product is multiplied by the scales of both blocks as it is added; 2^-127, as of zeros, counts as 0. So no value is
converted, and the bits of an output depend on its own row and column alone. A ring of stages is kept filled across
tiles: values by TMA, and of the scales the one atom (128 rows x 4 blocks) that goes with 128 values of the contraction.

FP8 tensor cores want the contraction to be contiguous. Where it is not, for the weights in dgrad, the warps that load
tiles also copy them into a second ring.

What is left to the FP32 units is a multiply-add for each output and block, and a multiplication for its scale. The
latter is one for 32 columns where the weights have square blocks. With few rows an expert the weights are the operand
of 128 rows and the result comes out transposed, so that a tile of 16 rows wastes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dist_moe.formats import MXFP8_E4M3
from dist_moe.quantized import check_scaled_rows
from dist_moe.shapes import next_power_of_2

from ._device import begin, delay, num_programs
from ._hopper import add, async_load, barrier, descriptor, load_box, put_rows
from ._launch import launched
from .grouped_gemm import GROUP_M, _tile_place

BLOCK = gl.constexpr(32)
STEP = gl.constexpr(128)  # values of the contraction in a stage: the four blocks of an atom of scales
TILE = gl.constexpr(128)  # columns of the result, or rows of weights, in a tile: the rows of an atom
SLOTS = gl.constexpr(3)  # of the ring of transposed tiles
PRODUCER_REGISTERS, TRANSPOSER_REGISTERS = gl.constexpr(56), gl.constexpr(72)


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile
    num_stages: int


DGRAD = Config(rows=128, num_stages=4)


@gluon.jit
def _row_tile_ends(num_rows_ptr, L, ROWS: gl.constexpr, BLOCK_L: gl.constexpr):
    """Cumulative number of row tiles by expert, as _scaled_operands.row_tile_ends."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offs_l = gl.arange(0, BLOCK_L, layout=LAYOUT)
    num_rows = gl.load(num_rows_ptr + offs_l, mask=offs_l < L, other=0)
    return gl.associative_scan((num_rows + ROWS - 1) // ROWS, 0, add)


@gluon.jit
def _tile(tile, ends_L, tables, width, ROWS: gl.constexpr, GROUP_M: gl.constexpr):
    """Expert, first row, end of the expert's real rows, and first column within the window of a tile."""
    row_start_ptr, num_rows_ptr = tables
    tile_m, tile_n = _tile_place(tile, gl.max(ends_L, 0), gl.cdiv(width, TILE), GROUP_M)
    expert = gl.sum((ends_L <= tile_m).to(gl.int32), 0)
    first_tile = gl.max(gl.where(ends_L <= tile_m, ends_L, 0), 0)
    row_start = gl.load(row_start_ptr + expert)
    row = row_start + (tile_m - first_tile) * ROWS
    return expert, row, row_start + gl.load(num_rows_ptr + expert), tile_n * TILE


@gluon.jit
def _copy_scales(to, atom_ptr, first_row, EVERY: gl.constexpr):
    """The words (four blocks) of rows first_row, first_row + EVERY, ... of an atom, asynchronously."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = first_row + gl.arange(0, to.shape[0], layout=LAYOUT) * EVERY
    async_load(to, atom_ptr + rows % 32 * 4 + rows // 32)


@gluon.jit
def _transpose(step, rings, transposed):
    """The weights of a stage, by words of four bytes, into the ring that the tensor cores read."""
    w_ring, full = rings[1], rings[4]
    t_ring, t_full, t_empty = transposed
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 16], [16, 2], [2, 2], [1, 0])
    stage = step % w_ring.shape[0]
    slot = step % SLOTS
    mbarrier.wait(full.index(stage), step // w_ring.shape[0] & 1)
    mbarrier.wait(t_empty.index(slot), (step // SLOTS & 1) ^ 1)
    t_ring.index(slot).store(gl.permute(w_ring.index(stage).reshape([STEP, TILE]).load(LAYOUT), (1, 0)))
    fence_async_shared()
    mbarrier.arrive(t_full.index(slot))


@gluon.jit
def _produce(
    sizes,
    tables,
    rings,
    transposed,
    a,
    w,
    ROWS: gl.constexpr,
    SQUARE: gl.constexpr,
    DGRAD: gl.constexpr,
    BLOCK_L: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Values and scales of every tile into the ring, a step a stage, as stages become empty.

    One warp; in dgrad four, which also transpose the weights, AHEAD steps behind.
    """
    L, all_columns, first_column, width, contraction = sizes
    a_ring, w_ring, a_scales, w_scales, full, empty = rings
    a_desc, a_start, a_scales_ptr = a
    w_desc, w_scales_ptr = w
    STAGES: gl.constexpr = a_ring.shape[0]
    AHEAD: gl.constexpr = STAGES - 1
    ends_L = _row_tile_ends(tables[1], L, ROWS, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    atoms_of_a_row = gl.cdiv(contraction, STEP)
    atoms_of_an_expert = gl.cdiv(all_columns, TILE) * atoms_of_a_row
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        expert, row, _, col = _tile(tile, ends_L, tables, width, ROWS, GROUP_M)
        col += first_column
        a_atom_ptr = a_scales_ptr + (row // 128 * atoms_of_a_row).to(gl.int64) * 128
        w_atom = expert.to(gl.int64) * atoms_of_an_expert + col // TILE * atoms_of_a_row
        w_atom_ptr = w_scales_ptr + w_atom * 128
        for k in range(0, contraction, STEP):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            _copy_scales(a_scales.index(stage), a_atom_ptr + k, row % 128, 1)
            _copy_scales(w_scales.index(stage), w_atom_ptr + k, 0, BLOCK if SQUARE else 1)
            async_copy.mbarrier_arrive(full.index(stage))
            if DGRAD:
                barrier()  # of the arrivals of all four warps, which count on the one that follows
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + w_desc.block_type.nbytes)
            load_box(a_desc, [a_start + row, k], full.index(stage), a_ring.index(stage))
            if DGRAD:
                load_box(w_desc, [expert, k, col], full.index(stage), w_ring.index(stage))
                if step >= AHEAD:
                    _transpose(step - AHEAD, rings, transposed)
            else:
                load_box(w_desc, [expert, col, k], full.index(stage), w_ring.index(stage))
            step += 1
    if DGRAD:
        for last in range(gl.maximum(step - AHEAD, 0), step):
            _transpose(last, rings, transposed)


@gluon.jit
def _power(words, j: gl.constexpr):
    """FP32 of E8M0 code j of words of four; code 0, which is 2^-127, as 0 and NaN as infinity."""
    bits = (words << (23 - 8 * j)) if j < 3 else (words >> 1)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _product(m_values, n_values, zeros, j: gl.constexpr):
    """The product of blocks j of a stage, asynchronously."""
    m_block = m_values.slice(j * BLOCK, BLOCK, 1)
    return warpgroup_mma(
        m_block, n_values.slice(j * BLOCK, BLOCK, 1).permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _multiply(
    sizes,
    tables,
    rings,
    transposed,
    out,
    ROWS: gl.constexpr,
    SQUARE: gl.constexpr,
    DGRAD: gl.constexpr,
    BLOCK_L: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Eight warps: the products of every tile, and its way out."""
    L, _all_columns, _first_column, width, contraction = sizes
    a_ring, w_ring, a_scales, w_scales, full, empty = rings
    t_ring, t_full, t_empty = transposed
    out_ptr, pitch = out
    STAGES: gl.constexpr = a_ring.shape[0]
    SWAP: gl.constexpr = ROWS < 128
    SLOTS: gl.constexpr = t_ring.shape[0]
    M: gl.constexpr = 128
    N: gl.constexpr = ROWS if SWAP else TILE
    GROUPS: gl.constexpr = N // BLOCK if SQUARE else N
    PIPELINED: gl.constexpr = SQUARE or N < 128  # else registers do not suffice for two products
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    ends_L = _row_tile_ends(tables[1], L, ROWS, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    zeros = gl.zeros([M, N], gl.float32, layout=ACC)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        _expert, row, row_end, col = _tile(tile, ends_L, tables, width, ROWS, GROUP_M)
        acc = gl.reshape(zeros, [M, GROUPS, N // GROUPS])
        SCALES: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
        for _k in range(0, contraction, STEP):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            slot = step % SLOTS
            if DGRAD:
                mbarrier.wait(t_full.index(slot), step // SLOTS & 1)
                w_values = t_ring.index(slot)
            else:
                w_values = w_ring.index(stage).reshape([TILE, STEP])
            if SWAP:
                m_values, n_values = w_values, a_ring.index(stage)
                m_words = w_scales.index(stage).load(gl.SliceLayout(1, SCALES))
                n_words = a_scales.index(stage).load(gl.SliceLayout(0, SCALES))
            else:
                m_values, n_values = a_ring.index(stage), w_values
                m_words = a_scales.index(stage).load(gl.SliceLayout(1, SCALES))
                n_words = w_scales.index(stage).load(gl.SliceLayout(0, SCALES))
            product = _product(m_values, n_values, zeros, 0)
            for j in gl.static_range(4):
                if PIPELINED and j < 3:
                    following = _product(m_values, n_values, zeros, j + 1)
                product = warpgroup_mma_wait(1 if PIPELINED and j < 3 else 0, deps=(product,))
                if j == 3:
                    mbarrier.arrive(empty.index(stage))
                    if DGRAD:
                        mbarrier.arrive(t_empty.index(slot))
                scale = gl.expand_dims(_power(m_words, j), 1) * gl.expand_dims(_power(n_words, j), 0)
                acc += gl.reshape(product, [M, GROUPS, N // GROUPS]) * gl.expand_dims(scale, 2)
                if j < 3:
                    product = following if PIPELINED else _product(m_values, n_values, zeros, j + 1)
            step += 1
        result = gl.reshape(acc, [M, N]).to(gl.bfloat16)
        if SWAP:
            result = gl.permute(result, (1, 0))
        put_rows(result, out_ptr, row, col, row_end, width, pitch)


@launched
@gluon.jit(
    do_not_specialize=["L", "first_column"],
    do_not_specialize_on_alignment=["a_start_ptr", "a_scales_start_ptr", "out_start_ptr", "stop_ptr"],
)
def _rows_times_weight_kernel(
    a_desc,  # [X, K] values
    a_start_ptr,  # [1] i64
    a_scales_ptr,  # i32, four codes a word
    a_scales_start_ptr,  # [1] i64
    w_desc,  # [L, N, K] values
    w_scales_ptr,  # i32, [L, whole atoms]
    out_ptr,  # [X, pitch] bf16
    out_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    stop_ptr,  # [1] i64
    L,
    all_columns,
    first_column,
    width,
    pitch,
    contraction,
    ROWS: gl.constexpr,
    SQUARE: gl.constexpr,
    DGRAD: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes output tiles p, p + programs, ...; example: grouped_gemm_scaled._rows_times_weight_kernel."""
    begin()
    if gl.load(stop_ptr) != 0:
        return
    VALUES: gl.constexpr = a_desc.dtype
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    W_WORDS: gl.constexpr = TILE // BLOCK if SQUARE else TILE
    a_ring = gl.allocate_shared_memory(VALUES, [STAGES, ROWS, STEP], a_desc.layout)
    w_ring = gl.allocate_shared_memory(VALUES, [STAGES, 1, TILE, STEP], w_desc.layout)
    a_scales = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], WORDS)
    w_scales = gl.allocate_shared_memory(gl.int32, [STAGES, W_WORDS], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    if DGRAD:
        t_ring = gl.allocate_shared_memory(VALUES, [SLOTS, TILE, STEP], a_desc.layout)
        t_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        t_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(t_full.index(slot), count=1)
            mbarrier.init(t_empty.index(slot), count=1)
        transposed = (t_ring, t_full, t_empty)
    else:
        transposed = (a_ring, full, empty)
    fence_async_shared()
    a_start = gl.load(a_start_ptr).to(gl.int32)
    a_scales_ptr += gl.load(a_scales_start_ptr) // 4
    out_ptr += gl.load(out_start_ptr) * pitch
    sizes = (L, all_columns, first_column, width, contraction)
    tables = (row_start_ptr, num_rows_ptr)
    rings = (a_ring, w_ring, a_scales, w_scales, full, empty)
    out = (out_ptr, pitch)
    a = (a_desc, a_start, a_scales_ptr)
    w = (w_desc, w_scales_ptr)
    gl.warp_specialize(
        [
            (_multiply, (sizes, tables, rings, transposed, out, ROWS, SQUARE, DGRAD, BLOCK_L, GROUP_M)),
            (_produce, (sizes, tables, rings, transposed, a, w, ROWS, SQUARE, DGRAD, BLOCK_L, GROUP_M)),
        ],
        [4 if DGRAD else 1],
        [TRANSPOSER_REGISTERS if DGRAD else PRODUCER_REGISTERS],
    )


def words(scales: Tensor) -> Tensor:
    """The codes of scales, flat, four a word."""
    return scales[: len(scales) // 4 * 4].view(torch.int32)


def pick_config(square: bool, rows_per_expert: int | None) -> Config:
    """Tile of 16 to 128 rows; 128 where a scale of weights holds for 32 columns, else its registers do not suffice."""
    if rows_per_expert is not None and rows_per_expert <= 32:
        rows = max(16, next_power_of_2(rows_per_expert))
    else:
        rows = 128 if square and (rows_per_expert is None or rows_per_expert > 64) else 64
    return Config(rows, num_stages=5 if rows == 128 else 8)


def grouped_gemm_scaled(
    a,
    w_values_LNK,
    w_scales,
    out_XN,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    w_outer_inv_L=None,
    columns=None,
    square=False,
    stop_1,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """As grouped_gemm_scaled.grouped_gemm_scaled, of e4m3 and windows that begin at a multiple of 128."""
    assert format is MXFP8_E4M3 and (columns is None or columns[0] % TILE.value == 0), (format, columns)
    windowed = {"w_outer_inv": w_outer_inv_L, "columns": columns}
    config = config or pick_config(square, rows_per_expert)
    square = square and config.rows == 128
    operands = (a, w_values_LNK, w_scales, out_XN, out_start_1, row_start_P, num_rows_L)
    options = {"stop_1": stop_1, "num_sms": num_sms, "config": config, "square": square}
    _rows_times_weight("grouped_gemm_scaled", *operands, **windowed, **options)


def grouped_gemm_scaled_dgrad(
    dy,
    w_values_LNK,
    w_transposed_scales,
    out_XK,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    stop_1,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """As grouped_gemm_scaled.grouped_gemm_scaled_dgrad, of e4m3."""
    assert format is MXFP8_E4M3, format
    operands = (dy, w_values_LNK, w_transposed_scales, out_XK, out_start_1, row_start_P, num_rows_L)
    options = {"w_outer_inv": None, "columns": None, "config": config or DGRAD, "square": True}
    _rows_times_weight("grouped_gemm_scaled_dgrad", *operands, **options, stop_1=stop_1, num_sms=num_sms)


def _rows_times_weight(
    op,
    a,
    w,
    w_scales,
    out,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    w_outer_inv,
    columns,
    square,
    stop_1,
    num_sms,
    config,
) -> None:
    dgrad = op == "grouped_gemm_scaled_dgrad"
    L, N, K, first, width = check_scaled_rows(
        op, a, w, w_scales, out, row_start_P, num_rows_L, format=MXFP8_E4M3, dgrad=dgrad, w_outer_inv=w_outer_inv,
        columns=columns,
    )  # fmt: skip
    contraction, all_columns = (N, K) if dgrad else (K, N)
    _rows_times_weight_kernel[(num_programs(out.device, num_sms),)](
        descriptor(a.values, config.rows, STEP.value),
        a.start_1,
        words(a.scales),
        a.scales_start_1,
        descriptor(w, 1, TILE.value, STEP.value),
        words(w_scales.view(-1)),
        out,
        out_start_1,
        row_start_P,
        num_rows_L,
        stop_1,
        L,
        all_columns,
        first,
        width,
        out.shape[1],
        contraction,
        ROWS=config.rows,
        SQUARE=square,
        DGRAD=dgrad,
        BLOCK_L=max(32, next_power_of_2(L)),
        STAGES=config.num_stages,
        GROUP_M=GROUP_M,
        num_warps=8,
    )
