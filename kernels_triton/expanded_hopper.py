"""Forward product of block-scaled weights and expanded rows on sm_90, in Gluon.

    out[r] = bf16((a[r] @ w[e].T * a_outer_inv[r]) * w_outer_inv[e])          outer scales of NVFP4 alone

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

Rows are read by every tile of columns, so their producer has multiplied them by their scales already: "expanded", 16
bits a value, exact, in the order of formats.expanded_order. Weights are read once or a few times: they stay codes in
memory and become 16-bit values in registers (_expanded.py), from where the tensor cores take them as the operand of 128
rows; the result comes out transposed. That costs some two instructions a value, for all rows of a tile together.

The bits of an output depend on its own row and column alone.
"""

import math
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dist_moe.formats import MXFP8_E4M3, NVFP4, Format
from dist_moe.quantized import check_scaled_rows
from dist_moe.shapes import next_power_of_2

from ._device import begin, delay, num_programs
from ._expanded import PART, SIDE_ROWS, TILE, WORDS, halves_of, parts_of, scales_of, take
from ._hopper import descriptor, load_box, put_rows
from ._launch import launched
from ._scaled import words_of
from .grouped_gemm import GROUP_M
from .scaled_hopper import _row_tile_ends, _tile

# Of a thread. With fewer for the producer, ptxas finds too few for the others and waits for every product.
MULTIPLIER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(200), gl.constexpr(112)
UNSCALED = gl.constexpr(2.0**14)


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile
    num_stages: int
    tail: int = 0  # rows more, loaded and multiplied where there are any


CONFIGS = {
    MXFP8_E4M3: {
        16: Config(16, num_stages=10),
        32: Config(32, num_stages=8),
        64: Config(64, num_stages=6),
        80: Config(64, num_stages=5, tail=16),
        96: Config(64, num_stages=5, tail=32),
        128: Config(128, num_stages=4),
    },
    NVFP4: {
        16: Config(16, num_stages=7),
        32: Config(32, num_stages=6),
        48: Config(32, num_stages=5, tail=16),
        64: Config(64, num_stages=4),
        80: Config(64, num_stages=3, tail=16),
        96: Config(64, num_stages=3, tail=32),
        128: Config(128, num_stages=2),
    },
}


@gluon.jit
def _produce(
    sizes,
    tables,
    rings,
    a,
    w,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    FP4: gl.constexpr,
    BLOCK_L: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """One warp: rows and weights of every tile, with the scales of the weights, into the ring, a step a stage."""
    L, all_columns, first_column, width, contraction = sizes
    a_ring, tail_ring, w_ring, w_scales, full, empty = rings
    a_desc, tail_desc, a_start = a
    w_desc, w_scales_desc = w
    STAGES: gl.constexpr = a_ring.shape[0]
    STEP: gl.constexpr = a_ring.shape[2]
    ATOM: gl.constexpr = 64 if FP4 else 128  # values of the contraction whose scales are in one atom
    NBYTES: gl.constexpr = a_desc.block_type.nbytes + w_desc.block_type.nbytes + w_scales_desc.block_type.nbytes
    ends_L = _row_tile_ends(tables[1], L, ROWS + TAIL, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        expert, row, row_end, col = _tile(tile, ends_L, tables, width, ROWS + TAIL, GROUP_M)
        col += first_column
        rows_of_atoms = expert * gl.cdiv(all_columns, TILE) + col // TILE
        for k in range(0, contraction, STEP):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            if TAIL and row + ROWS < row_end:
                mbarrier.expect(full.index(stage), NBYTES + tail_desc.block_type.nbytes)
                load_box(tail_desc, [a_start + row + ROWS, k], full.index(stage), tail_ring.index(stage))
            else:
                mbarrier.expect(full.index(stage), NBYTES)
            load_box(w_desc, [expert, col, k // (STEP // WORDS)], full.index(stage), w_ring.index(stage))
            load_box(w_scales_desc, [rows_of_atoms, k // ATOM * 4, 0], full.index(stage), w_scales.index(stage))
            load_box(a_desc, [a_start + row, k], full.index(stage), a_ring.index(stage))
            step += 1


@gluon.jit
def _contract(
    first_step,
    num_steps,
    contraction,
    words,
    scale_words,
    rings,
    SIDE: gl.constexpr,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
    FP4: gl.constexpr,
):
    """Sums of a tile, those of its tail, or zeros, and what was taken for the step behind it.

    The tensor cores read one part of a step from registers while the warps convert the next part into others. Before
    registers are written again, in the next step, all but the newest product have ended: a step has at least two
    parts, and conversions, which are not declared pure, stay behind the wait that they follow.
    """
    a_ring, tail_ring, w_ring, w_scales, full, empty = rings
    STAGES: gl.constexpr = w_ring.shape[0]
    STEP: gl.constexpr = a_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    TAIL_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TAIL_OPERAND: gl.constexpr = gl.DotOperandLayout(0, TAIL_ACC, 2)
    # The next step's codes are taken before the last part where registers suffice for both, and for zeros of no tail.
    TAKE: gl.constexpr = STEP // PART - (1 if FP4 and TAIL > 16 else 2)
    acc = gl.zeros([SIDE_ROWS, ROWS], gl.float32, layout=ACC)
    tail = gl.zeros([SIDE_ROWS, TAIL], gl.float32, layout=TAIL_ACC)
    step = first_step
    for k in range(0, contraction, STEP):
        stage = step % STAGES
        parts = parts_of(words, FP4)
        WORDS_LAYOUT: gl.constexpr = parts[0].type.layout
        scales = scales_of(scale_words, SIDE, FP4, WORDS_LAYOUT)
        for part in gl.static_range(STEP // PART):
            values = halves_of(parts[part], scales[part], FP4)
            a_rows = a_ring.index(stage).slice(part * PART, PART, 1).permute((1, 0))
            acc = warpgroup_mma(gl.convert_layout(values, OPERAND), a_rows, acc, is_async=True)
            if HAS_TAIL:
                tail_rows = tail_ring.index(stage).slice(part * PART, PART, 1).permute((1, 0))
                tail = warpgroup_mma(gl.convert_layout(values, TAIL_OPERAND), tail_rows, tail, is_async=True)
                acc, tail = warpgroup_mma_wait(2, deps=(acc, tail))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            if part == 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            if part == TAKE:
                words, scale_words = take(step + 1, num_steps, w_ring, w_scales, full, SIDE, FP4)
        step += 1
    if HAS_TAIL:
        acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, tail, words, scale_words


@gluon.jit
def _multiply(
    sizes,
    tables,
    rings,
    outer,
    out,
    SIDE: gl.constexpr,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    FP4: gl.constexpr,
    BLOCK_L: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Four warps: half of the weights of every tile into registers and 16 bits, their products, and the way out."""
    L, _all_columns, _first_column, width, contraction = sizes
    a_ring, _tail_ring, w_ring, w_scales, full, _empty = rings
    a_outer_ptr, w_outer_ptr = outer
    STEP: gl.constexpr = a_ring.shape[2]
    ends_L = _row_tile_ends(tables[1], L, ROWS + TAIL, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    programs = gl.num_programs(0)
    tile_steps = gl.cdiv(contraction, STEP)
    num_steps = gl.cdiv(gl.maximum(num_tiles - gl.program_id(0), 0), programs) * tile_steps
    words, scale_words = take(0, num_steps, w_ring, w_scales, full, SIDE, FP4)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, programs):
        delay(tile)
        expert, row, row_end, col = _tile(tile, ends_L, tables, width, ROWS + TAIL, GROUP_M)
        col += SIDE * SIDE_ROWS
        at = (step, num_steps, contraction, words, scale_words, rings)
        has_tail = row + ROWS < row_end
        if TAIL and has_tail:
            acc, tail, words, scale_words = _contract(*at, SIDE, ROWS, TAIL, True, FP4)
        else:
            acc, tail, words, scale_words = _contract(*at, SIDE, ROWS, TAIL if TAIL else 16, False, FP4)
        w_outer = gl.load(w_outer_ptr + expert).to(gl.float32) if FP4 else 1.0
        _put(acc, a_outer_ptr, w_outer, out, row, row_end, col, width, FP4)
        if TAIL and has_tail:
            _put(tail, a_outer_ptr, w_outer, out, row + ROWS, row_end, col, width, FP4)
        step += tile_steps


@gluon.jit
def _put(acc, a_outer_ptr, w_outer, out, row, row_end, col, width, FP4: gl.constexpr):
    """Transposed sums of rows from row on, with their outer scales, to their place."""
    out_ptr, pitch = out
    if FP4:
        rows = row + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        a_outer = gl.load(a_outer_ptr + rows, mask=rows < row_end, other=0.0)
        acc = acc * UNSCALED * gl.expand_dims(a_outer, 0) * w_outer
    put_rows(gl.permute(acc.to(gl.bfloat16), (1, 0)), out_ptr, row, col, row_end, width, pitch)


@launched
@gluon.jit(
    do_not_specialize=["L", "first_column"],
    do_not_specialize_on_alignment=["a_start_ptr", "out_start_ptr", "a_outer_start_ptr", "stop_ptr"],
)
def _rows_times_weight_kernel(
    a_desc,  # [X, K up to a multiple of 32 words of codes] fp16 or bf16
    tail_desc,  # the same in boxes of TAIL rows, or None
    a_start_ptr,  # [1] i64
    w_desc,  # [L, N, K / codes of a word] i32
    w_scales_desc,  # i32 [L * atoms along N, 4 * atoms along K, 32]
    out_ptr,  # [X, pitch] bf16
    out_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    a_outer_inv_ptr,  # fp32, or None
    a_outer_start_ptr,  # [1] i64, or None
    w_outer_inv_ptr,  # [L] fp32, or None
    stop_ptr,  # [1] i64
    L,
    all_columns,
    first_column,
    width,
    pitch,
    contraction,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    FP4: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes output tiles p, p + programs, ...; example: grouped_gemm_scaled._rows_times_weight_kernel."""
    begin()
    if gl.load(stop_ptr) != 0:
        return
    STEP: gl.constexpr = a_desc.block_type.shape[1]
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, STEP], a_desc.layout)
    if TAIL:
        tail_ring = gl.allocate_shared_memory(tail_desc.dtype, [STAGES, TAIL, STEP], tail_desc.layout)
        a = (a_desc, tail_desc, gl.load(a_start_ptr).to(gl.int32))
    else:
        tail_ring = a_ring
        a = (a_desc, a_desc, gl.load(a_start_ptr).to(gl.int32))
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1, TILE, WORDS], w_desc.layout)
    w_scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 16 if FP4 else 4, 32], w_scales_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    out_ptr += gl.load(out_start_ptr) * pitch
    sizes = (L, all_columns, first_column, width, contraction)
    tables = (row_start_ptr, num_rows_ptr)
    rings = (a_ring, tail_ring, w_ring, w_scales, full, empty)
    if FP4:
        outer = (a_outer_inv_ptr + gl.load(a_outer_start_ptr), w_outer_inv_ptr)
    else:
        outer = tables
    out = (out_ptr, pitch)
    w = (w_desc, w_scales_desc)
    gl.warp_specialize(
        [
            (_multiply, (sizes, tables, rings, outer, out, 0, ROWS, TAIL, FP4, BLOCK_L, GROUP_M)),
            (_multiply, (sizes, tables, rings, outer, out, 1, ROWS, TAIL, FP4, BLOCK_L, GROUP_M)),
            (_produce, (sizes, tables, rings, a, w, ROWS, TAIL, FP4, BLOCK_L, GROUP_M)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, PRODUCER_REGISTERS],
    )


def pick_config(format: Format, rows_per_expert: int | None) -> Config:
    """The least tile that holds the rows of nearly every expert, two deviations above their mean; else the largest."""
    configs = CONFIGS[format]
    rows = math.inf if rows_per_expert is None else rows_per_expert + 2 * math.sqrt(rows_per_expert)
    return configs[min((size for size in configs if size >= rows), default=max(configs))]


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
    """As grouped_gemm_scaled.grouped_gemm_scaled, of expanded rows, e4m3 or NVFP4, and windows that begin at a multiple
    of 128; square or not is the same here."""
    assert format in CONFIGS and (columns is None or columns[0] % TILE.value == 0), (format, columns)
    L, N, K, first, width = check_scaled_rows(
        "grouped_gemm_scaled", a, w_values_LNK, w_scales, out_XN, row_start_P, num_rows_L, format=format,
        dgrad=False, w_outer_inv=w_outer_inv_L, columns=columns, expanded=True,
    )  # fmt: skip
    config = config or pick_config(format, rows_per_expert)
    fp4 = format is NVFP4
    rows_of_atoms, atoms = w_scales.shape[0] // TILE.value, w_scales.shape[1] // 4
    atoms_of_a_step = format.expanded_group // format.block // 4
    _rows_times_weight_kernel[(num_programs(out_XN.device, num_sms),)](
        descriptor(a.values, config.rows, format.expanded_group),
        descriptor(a.values, config.tail, format.expanded_group) if config.tail else None,
        a.start_1,
        descriptor(words_of(w_values_LNK), 1, TILE.value, WORDS.value),
        descriptor(words_of(w_scales).view(rows_of_atoms, atoms * 4, 32), 1, 4 * atoms_of_a_step, 32),
        out_XN,
        out_start_1,
        row_start_P,
        num_rows_L,
        a.outer_inv,
        a.outer_inv_start_1,
        w_outer_inv_L,
        stop_1,
        L,
        N,
        first,
        width,
        out_XN.shape[1],
        K,
        ROWS=config.rows,
        TAIL=config.tail,
        FP4=fp4,
        BLOCK_L=max(32, next_power_of_2(L)),
        STAGES=config.num_stages,
        GROUP_M=GROUP_M,
        num_warps=4,
    )
