"""Forward product of block-scaled weights and expanded rows on sm_90, in Gluon.

    out[r] = bf16((a[r] @ w[e].T * a_outer_inv[r]) * w_outer_inv[e])          outer scales of NVFP4 alone

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

Rows are read by every tile of columns, so their producer has multiplied them by their scales already: "expanded", 16
bits a value, exact, in the order of formats.expanded_order. Weights are read once or a few times: they stay codes in
memory and become 16-bit values in registers, from where the tensor cores take them as the operand of 128 rows; the
result comes out transposed. That costs some two instructions a value, for all rows of a tile together.

    e2m1 codes and e4m3 scales -> FP16. A code whose bits are put at the top of a half's mantissa and the end of its
        exponent is its value times 2^-14; that times the scale is exact: the least product is 2^-24. So the FP32 sum
        is multiplied by 2^14.
    e4m3 codes and E8M0 scales -> BF16. A code in the same place is its value times 2^-120, which times 2^120 and times
        the scale is exact, or rounded once where it is subnormal. Up to scale 2^7, and no weight that a model learns
        has more, both are one factor; a warp that sees a larger one multiplies twice. NaN counts as infinity.

The sum does not care for the order of the contraction, so it is that in which a thread finds whole words of codes that
share a scale: see `_take`, `_halves_of_e2m1` and `_halves_of_e4m3`. The bits of an output depend on its own row and
column alone.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dist_moe.formats import EXPANDED_GROUP_BYTES, MXFP8_E4M3, NVFP4, Format
from dist_moe.quantized import check_scaled_rows
from dist_moe.shapes import next_power_of_2

from ._device import begin, delay, num_programs
from ._launch import launched
from ._scaled import words_of
from .grouped_gemm import GROUP_M
from .scaled_hopper import _row_tile_ends, _store, _tile
from .wgrad_hopper import _load

TILE = gl.constexpr(128)  # columns of the result, rows of weights, in a tile
SIDE_ROWS = gl.constexpr(64)  # of these, what four warps multiply
PART = gl.constexpr(64)  # values of the contraction that are converted and multiplied together
WORDS = gl.constexpr(EXPANDED_GROUP_BYTES // 4)  # of codes of a row in a step: 128 values of e4m3, 256 of e2m1
# Of a thread. With fewer for the producer, ptxas finds too few for the others and waits for every product.
MULTIPLIER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(200), gl.constexpr(112)
UNSCALED = gl.constexpr(2.0**14)

# Of a word its odd codes, or its even ones: signs at the top of every byte and magnitudes at bits 3 to 1. The upper
# byte of each 16 bits is then a half, and after a shift the lower byte.
PAIRS_OF_E2M1 = """
    lop3.b32 z, {signs}, {magnitudes}, 0x80808080, 0xe4;
    and.b32 h, z, 0x8e008e00;
    mul.rn.f16x2 {upper}, h, $10;
    shl.b32 z, z, 8;
    and.b32 h, z, 0x8e008e00;
    mul.rn.f16x2 {lower}, h, $10;
"""
# Of word w bytes 0 and 2, and bytes 1 and 3, at the end of the exponent and the top of the mantissa of a BF16.
PAIRS_OF_E4M3 = """
    shl.b32 y, {word}, 4;
    and.b32 y, y, 0x07f007f0;
    shl.b32 x, {word}, 8;
    lop3.b32 {lower}, x, 0x80008000, y, 0xea;
    shr.u32 y, {word}, 4;
    and.b32 y, y, 0x07f007f0;
    lop3.b32 {upper}, {word}, 0x80008000, y, 0xea;
"""
# Values are multiplied by 2^(120 + s) where every scale 2^s that the warp sees is at most 2^7, else by 2^120 and by
# 2^s; the code of 2^-127 is 0, as a BF16 it is subnormal.
FACTORS_OF_E4M3 = """
    add.u32 f0, {scale0}, 0x3c003c00;
    add.u32 f1, {scale1}, 0x3c003c00;
    max.u32 x, {scale0}, {scale1};
    setp.gt.u32 far, x, 0x43004300;
    vote.sync.any.pred far, far, 0xffffffff;
    @!far bra.uni NEAR;
    {boosted}
    max.u32 f0, {scale0}, 0x00400040;
    max.u32 f1, {scale1}, 0x00400040;
    NEAR:
"""


def _e2m1_to_halves() -> str:
    text = "{ .reg .b32 x, y, z, h, o<8>;"
    for word, first in ((8, 0), (9, 4)):
        o = [f"o{first + i}" for i in range(4)]
        text += f"shr.u32 y, ${word}, 3;" + PAIRS_OF_E2M1.format(
            signs=f"${word}", magnitudes="y", upper=o[3], lower=o[1]
        )
        text += f"shl.b32 x, ${word}, 4; shl.b32 y, ${word}, 1;"
        text += PAIRS_OF_E2M1.format(signs="x", magnitudes="y", upper=o[2], lower=o[0])
    return text + "".join(f"mov.b32 ${i}, o{i};" for i in range(8)) + "}"


def _e4m3_to_halves() -> str:
    """Of four words of a row and four of another, whose scales are in the first and the fifth."""
    text = "{ .reg .b32 x, y, f0, f1, v<16>; .reg .pred far;"
    for i in range(8):
        text += PAIRS_OF_E4M3.format(word=f"${16 + i}", lower=f"v{2 * i}", upper=f"v{2 * i + 1}")
    boosted = "mov.b32 x, 0x7b807b80;" + "".join(f"mul.rn.bf16x2 v{i}, v{i}, x;" for i in range(16))  # 2^120 twice
    text += FACTORS_OF_E4M3.format(scale0="$24", scale1="$28", boosted=boosted)
    for i in range(16):  # result 2 c + upper of word 2 b + c of either row
        place = 4 * (i % 4) + i // 4
        text += f"mul.rn.bf16x2 ${place}, v{i}, f{i // 8};"
    return text + "}"


DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

E2M1_TO_HALVES = gl.constexpr(_e2m1_to_halves())
E4M3_TO_HALVES = gl.constexpr(_e4m3_to_halves())
E4M3_REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))
SCALES_TO_HALVES = gl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 a, b;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    prmt.b32 $0, a, a, 0x1010;
    prmt.b32 $1, a, a, 0x3232;
    prmt.b32 $2, b, b, 0x1010;
    prmt.b32 $3, b, b, 0x3232;
    }"""
)


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
                _load(tail_desc, [a_start + row + ROWS, k], full.index(stage), tail_ring.index(stage))
            else:
                mbarrier.expect(full.index(stage), NBYTES)
            _load(w_desc, [expert, col, k // (STEP // WORDS)], full.index(stage), w_ring.index(stage))
            _load(w_scales_desc, [rows_of_atoms, k // ATOM * 4, 0], full.index(stage), w_scales.index(stage))
            _load(a_desc, [a_start + row, k], full.index(stage), a_ring.index(stage))
            step += 1


@gluon.jit
def _half_of_words(words, SIDE: gl.constexpr):
    """[4 atoms, 4, 32] words of scales -> [64, atoms] of the rows of a side; word 4 (r % 32) + r // 32 has row r."""
    ATOMS: gl.constexpr = words.shape[0] // 4
    words = gl.permute(gl.reshape(words, [ATOMS, 4, 8, 2, 2]), (4, 1, 2, 0, 3))  # r bits: 5, 4 3, 2 1 0; atom; 6
    return gl.reshape(gl.split(words)[SIDE], [SIDE_ROWS, ATOMS])


@gluon.jit
def _scales_of_e2m1(words, SIDE: gl.constexpr, WORDS_LAYOUT: gl.constexpr):
    """An atom of four rows of 32 words for every 64 values -> four [64, 4, 1]: a scale of every word, twice in FP16."""
    words = _half_of_words(words, SIDE)
    words = gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(2, WORDS_LAYOUT)), 2)
    return gl.inline_asm_elementwise(
        SCALES_TO_HALVES, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _scales_of_e4m3(words, SIDE: gl.constexpr, WORDS_LAYOUT: gl.constexpr):
    """The atom of a step -> [64, 4, 1] of the four scales of a row, twice in BF16."""
    words = gl.reshape(_half_of_words(words, SIDE), [SIDE_ROWS])
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))
    place = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS_LAYOUT)))
    codes = (gl.expand_dims(words, 1) >> gl.expand_dims(8 * place, 0)) & 0xFF
    return gl.expand_dims(codes * 0x00800080, 2)


@gluon.jit
def _halves_of_e2m1(words, scales):
    """[R, 4, 2] words and [R, 4, 1] scales -> FP16 [R, 64].

    Word 2 a + c of row r, a, c < 4, 2, has codes d + 4 e, d, e < 4, 2. Column 32 c + 8 d + 2 a + e of the result is
    that code: what the tensor cores take from thread a of four. The assembly takes words c = 0, 1 together, and
    returns them as e = 0, 1.
    """
    p0, p1, p2, p3, q0, q1, q2, q3 = gl.inline_asm_elementwise(
        E2M1_TO_HALVES,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, scales],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False,
        pack=2,
    )
    p = gl.join(gl.join(p0, p1), gl.join(p2, p3))  # [R, a, e, d bit 0, d bit 1]
    q = gl.join(gl.join(q0, q1), gl.join(q2, q3))
    return gl.reshape(gl.permute(gl.join(p, q), (0, 5, 4, 3, 1, 2)), [words.shape[0], PART])


@gluon.jit
def _halves_of_e4m3(words, scales):
    """[R, 4, 4] words and [R, 4, 1] scales -> BF16 [R, 64].

    Word 4 a + 2 b + c of row r, a, b, c < 4, 2, 2, has codes d + 2 e, d, e < 2, 2. Column 32 b + 16 c + 8 d + 2 a + e
    of the result is that code. The assembly takes words c = 0, 1 together, and returns them as e = 0, 1.
    """
    R: gl.constexpr = words.shape[0]
    p0, p1, q0, q1 = gl.inline_asm_elementwise(
        E4M3_TO_HALVES,
        E4M3_REGISTERS,
        [words, scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=8,
    )
    halves = gl.reshape(gl.join(gl.join(p0, p1), gl.join(q0, q1)), [R, 4, 2, 2, 2, 2])  # [R, a, b, e, d, c]
    return gl.reshape(gl.permute(halves, (0, 2, 5, 4, 1, 3)), [R, PART])


@gluon.jit
def _parts(words, FP4: gl.constexpr):
    """[R, 32] words of a step, thread a of four with 8 a to 8 a + 7 -> by part: four [R, 4, 2] or two [R, 4, 4]."""
    R: gl.constexpr = words.shape[0]
    if FP4:
        words = gl.permute(gl.reshape(words, [R, 4, 2, 2, 2]), (0, 1, 4, 3, 2))
        even, odd = gl.split(words)  # by the upper bit of the part
        p0, p1 = gl.split(even)
        p2, p3 = gl.split(odd)
        return p0, p1, p2, p3
    else:
        return gl.split(gl.permute(gl.reshape(words, [R, 4, 2, 4]), (0, 1, 3, 2)))


@gluon.jit
def _take(step, num_steps, w_ring, w_scales, full, SIDE: gl.constexpr, FP4: gl.constexpr):
    """The codes of a step, eight words of two rows a thread, and the words of its scales, which _half_of_words splits;
    behind the last step whatever is there."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [SIDE_ROWS, WORDS],
    )
    SCALE_ROWS: gl.constexpr = 16 if FP4 else 4
    # Of e2m1, an atom of words for each of the four lanes of a row. All hold words of both sides.
    OF_LANES: gl.constexpr = [[4, 0], [8, 0]] if FP4 else [[0, 0], [0, 0]]
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 2]], OF_LANES + [[0, 4], [0, 8], [0, 16]], [[2, 0], [0, 1]], [], [SCALE_ROWS, 32]
    )
    STAGES: gl.constexpr = w_ring.shape[0]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1, pred=step < num_steps)
    w_rows = w_ring.index(stage).reshape([TILE, WORDS]).slice(SIDE * SIDE_ROWS, SIDE_ROWS, 0)
    return w_rows.load(CODES), w_scales.index(stage).reshape([SCALE_ROWS, 32]).load(SCALES)


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
        parts = _parts(words, FP4)
        WORDS_LAYOUT: gl.constexpr = parts[0].type.layout
        if FP4:
            scales = _scales_of_e2m1(scale_words, SIDE, WORDS_LAYOUT)
        else:
            scales = _scales_of_e4m3(scale_words, SIDE, WORDS_LAYOUT)
        for part in gl.static_range(STEP // PART):
            if FP4:
                values = _halves_of_e2m1(parts[part], scales[part])
            else:
                values = _halves_of_e4m3(parts[part], scales)
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
                words, scale_words = _take(step + 1, num_steps, w_ring, w_scales, full, SIDE, FP4)
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
    words, scale_words = _take(0, num_steps, w_ring, w_scales, full, SIDE, FP4)
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
    _store(gl.permute(acc.to(gl.bfloat16), (1, 0)), out_ptr, row, col, row_end, width, pitch)


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


@functools.cache
def shared_layout(dtype: gl.dtype, *block: int) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, dtype)


def _descriptor(tensor: Tensor, dtype: gl.dtype, *block: int) -> TensorDescriptor:
    layout = shared_layout(dtype, *block)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


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
    fp4, dtype = format is NVFP4, DTYPES[format.expanded_dtype]
    rows_of_atoms, atoms = w_scales.shape[0] // TILE.value, w_scales.shape[1] // 4
    atoms_of_a_step = format.expanded_group // format.block // 4
    _rows_times_weight_kernel[(num_programs(out_XN.device, num_sms),)](
        _descriptor(a.values, dtype, config.rows, format.expanded_group),
        _descriptor(a.values, dtype, config.tail, format.expanded_group) if config.tail else None,
        a.start_1,
        _descriptor(words_of(w_values_LNK), gl.int32, 1, TILE.value, WORDS.value),
        _descriptor(words_of(w_scales).view(rows_of_atoms, atoms * 4, 32), gl.int32, 1, 4 * atoms_of_a_step, 32),
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
