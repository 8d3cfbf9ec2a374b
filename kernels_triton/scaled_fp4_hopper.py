"""Forward product of NVFP4 operands on sm_90, in Gluon; of other formats, scaled_hopper runs.

    out[r] = bf16((a[r] @ w[e].T * a_outer_inv[r]) * w_outer_inv[e])

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

The tensor cores multiply FP16. An e2m1 code whose bits are put at the top of a half's mantissa and the end of its
exponent is its value times 2^-14, and that times an e4m3 scale is exact in FP16: the least product is 2^-24. So each
value costs little more than a mask and a multiplication, two at a time, and the FP32 sum is multiplied by 2^28.

Weights are the operand of 128 rows and go from the ring that TMA fills into registers, and from there to the tensor
cores; the result comes out transposed. Four other warps convert the rows, into a second ring. The sum does not care
for the order of the contraction, so it is that in which a thread finds whole words of eight codes and whole words of
four scales: see `_converted`. The bits of an output depend on its own row and column alone.
"""

import functools
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

from dist_moe.formats import NVFP4
from dist_moe.quantized import check_scaled_rows
from dist_moe.shapes import next_power_of_2

from ._device import delay, num_programs
from ._launch import launched
from .grouped_gemm import GROUP_M
from .scaled_hopper import _row_tile_ends, _store, _tile, words
from .wgrad_hopper import _load

STEP = gl.constexpr(256)  # values of the contraction in a stage: 32 words of codes and four atoms of scales
WORDS = gl.constexpr(32)
HALF = gl.constexpr(128)  # of a step, what is converted and multiplied together
TILE = gl.constexpr(128)  # columns of the result, rows of weights, in a tile
ATOM_COLUMNS = gl.constexpr(64)  # values of the contraction whose scales are in one atom
CONVERTER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(112), gl.constexpr(40)
UNSCALED = gl.constexpr(2.0**28)  # of the product of two values that are 2^-14 of what they mean

# Of a word its odd codes, or its even ones: signs at the top of every byte and magnitudes at bits 3 to 1. The upper
# byte of each 16 bits is then a half, and after a shift the lower byte.
PAIRS = """
    lop3.b32 z, {signs}, {magnitudes}, 0x80808080, 0xe4;
    and.b32 h, z, 0x8e008e00;
    mul.rn.f16x2 {upper}, h, $10;
    shl.b32 z, z, 8;
    and.b32 h, z, 0x8e008e00;
    mul.rn.f16x2 {lower}, h, $10;
"""


def _codes_to_halves() -> str:
    text = "{ .reg .b32 x, y, z, h, o<8>;"
    for word, first in ((8, 0), (9, 4)):
        o = [f"o{first + i}" for i in range(4)]
        text += f"shr.u32 y, ${word}, 3;" + PAIRS.format(signs=f"${word}", magnitudes="y", upper=o[3], lower=o[1])
        text += f"shl.b32 x, ${word}, 4; shl.b32 y, ${word}, 1;"
        text += PAIRS.format(signs="x", magnitudes="y", upper=o[2], lower=o[0])
    return text + "".join(f"mov.b32 ${i}, o{i};" for i in range(8)) + "}"


CODES_TO_HALVES = gl.constexpr(_codes_to_halves())
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
    num_slots: int  # of the ring of converted rows


CONFIGS = {
    16: Config(16, num_stages=8, num_slots=4),
    32: Config(32, num_stages=7, num_slots=4),
    64: Config(64, num_stages=5, num_slots=4),
}


@gluon.jit
def _scales(words):
    """[R, 4] words of four scales -> [R, 4] of each scale of a word, twice in FP16."""
    return gl.inline_asm_elementwise(
        SCALES_TO_HALVES, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _halves(words):
    """[R, 32] words -> two [R, 4, 4]: of the eight words of every thread the first four and the last four."""
    R: gl.constexpr = words.shape[0]
    return gl.split(gl.permute(gl.reshape(words, [R, 4, 2, 4]), (0, 1, 3, 2)))


@gluon.jit
def _converted(words, first_scale, second_scale, LAYOUT: gl.constexpr):
    """[R, 4, 4] words -> FP16 [R, 128].

    Word 4 a + 2 b + c of row r, a, b, c < 4, 2, 2, has codes d + 4 e, d, e < 4, 2, and scale b of those of a. Column
    64 b + 32 c + 8 d + 2 a + e of the result is that code: what the tensor cores take from thread a of four.
    The assembly takes words c = 0, 1 together, and returns them as e = 0, 1.
    """
    R: gl.constexpr = words.shape[0]
    words = gl.convert_layout(words, LAYOUT)
    scale = gl.join(first_scale, second_scale)
    scale = gl.convert_layout(gl.reshape(gl.join(scale, scale), [R, 4, 4]), LAYOUT)
    p0, p1, p2, p3, q0, q1, q2, q3 = gl.inline_asm_elementwise(
        CODES_TO_HALVES,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, scale],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    p = gl.join(gl.join(p0, p1), gl.join(p2, p3))  # [R, a, b e, d bit 0, d bit 1]
    q = gl.join(gl.join(q0, q1), gl.join(q2, q3))
    halves = gl.reshape(gl.join(p, q), [R, 4, 2, 2, 2, 2, 2])
    return gl.reshape(gl.permute(halves, (0, 2, 6, 5, 4, 1, 3)), [R, HALF])


@gluon.jit
def _produce(sizes, tables, rings, a, w, ROWS: gl.constexpr, BLOCK_L: gl.constexpr, GROUP_M: gl.constexpr):
    """One warp: the codes of every tile, and the scales of its weights, into the ring, a step a stage."""
    L, all_columns, first_column, width, contraction = sizes
    a_ring, w_ring, w_scales, full, empty = rings
    a_desc, a_start = a
    w_desc, w_scales_desc = w
    STAGES: gl.constexpr = a_ring.shape[0]
    NBYTES: gl.constexpr = a_desc.block_type.nbytes + w_desc.block_type.nbytes + w_scales_desc.block_type.nbytes
    ends_L = _row_tile_ends(tables[1], L, ROWS, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        expert, row, _, col = _tile(tile, ends_L, tables, width, ROWS, GROUP_M)
        col += first_column
        rows_of_atoms = expert * gl.cdiv(all_columns, TILE) + col // TILE
        for k in range(0, contraction, STEP):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), NBYTES)
            _load(w_desc, [expert, col, k // 8], full.index(stage), w_ring.index(stage))
            _load(w_scales_desc, [rows_of_atoms, k // 16, 0], full.index(stage), w_scales.index(stage))
            _load(a_desc, [a_start + row, k // 8], full.index(stage), a_ring.index(stage))
            step += 1


@gluon.constexpr_function
def _rows_layout(rows, what):
    """Of the warps that convert rows: 1 words of scales [rows, 4], 2 of codes [rows, 32], 3 half of them [rows, 4, 4].

    A lane has pairs of words, for all four words of scales, whose codes alternate in the result, if it can: the result
    is then stored 16 bytes at a time. With few rows the others belong to other warps.
    """
    warps = {16: [(0, 1), (0, 2)], 32: [(0, 2), (16, 0)], 64: [(16, 0), (32, 0)]}
    own = {16: [], 32: [(0, 1)]}.get(rows, [(0, 1), (0, 2)])
    first, lane, shape, place = {
        1: ([], [0, 0], [rows, 4], lambda r, a: [r, a]),
        2: ([[0, 1], [0, 4]], [0, 2], [rows, 32], lambda r, a: [r, 8 * a]),
        3: ([[0, 0, 1]], [0, 0, 2], [rows, 4, 4], lambda r, a: [r, a, 0]),
    }[what]
    lanes = [place(1, 0), place(2, 0), place(4, 0), lane, place(8, 0)]
    registers = first + [place(*base) for base in own]
    return gl.DistributedLinearLayout(registers, lanes, [place(*base) for base in warps[rows]], [], shape)


@gluon.jit
def _scale_words(words_ptr, places, atoms_4, num_atoms):
    """Words of four scales, 0 behind the last atom."""
    return gl.load(words_ptr + places, mask=(atoms_4 < num_atoms)[None, :], other=0)


@gluon.jit
def _convert_rows(
    sizes, tables, rings, rows, a_scales_ptr, ROWS: gl.constexpr, BLOCK_L: gl.constexpr, GROUP_M: gl.constexpr
):
    """Four warps: the rows of every tile in FP16 into the second ring, half a step a slot."""
    L, _all_columns, first_column, width, contraction = sizes
    a_ring, _w_ring, _w_scales, full, empty = rings
    row_ring, row_full, row_empty = rows
    STAGES: gl.constexpr = a_ring.shape[0]
    SLOTS: gl.constexpr = row_ring.shape[0]
    CODES: gl.constexpr = _rows_layout(ROWS, 2)
    HALVES: gl.constexpr = _rows_layout(ROWS, 3)
    SCALES: gl.constexpr = _rows_layout(ROWS, 1)
    ends_L = _row_tile_ends(tables[1], L, ROWS, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    atoms_of_a_row = gl.cdiv(contraction, ATOM_COLUMNS)
    rows_R = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCALES))
    atoms_4 = gl.arange(0, 4, layout=gl.SliceLayout(0, SCALES))
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        _expert, row, _, _ = _tile(tile, ends_L, tables, width, ROWS, GROUP_M)
        rows_of_atom = row % 128 + rows_R
        places = (rows_of_atom % 32 * 4 + rows_of_atom // 32)[:, None] + atoms_4[None, :] * 128
        words_ptr = a_scales_ptr + (row // 128 * atoms_of_a_row).to(gl.int64) * 128
        following = _scale_words(words_ptr, places, atoms_4, atoms_of_a_row)
        for k in range(0, contraction, STEP):
            stage = step % STAGES
            scales = _scales(following)
            words_ptr += STEP // ATOM_COLUMNS * 128
            following = _scale_words(words_ptr, places, atoms_4 + k // ATOM_COLUMNS + 4, atoms_of_a_row)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            for h in gl.static_range(2):
                half = step * 2 + h
                slot = half % SLOTS
                mbarrier.wait(row_empty.index(slot), (half // SLOTS & 1) ^ 1)
                words = _halves(a_ring.index(stage).load(CODES))
                values = _converted(words[h], scales[2 * h], scales[2 * h + 1], HALVES)
                row_ring.index(slot).store(values)
                fence_async_shared()
                mbarrier.arrive(row_full.index(slot))
            mbarrier.arrive(empty.index(stage))
            step += 1


@gluon.jit
def _multiply(sizes, tables, rings, rows, outer, out, ROWS: gl.constexpr, BLOCK_L: gl.constexpr, GROUP_M: gl.constexpr):
    """Eight warps: weights into registers and FP16, the products of every tile, and its way out."""
    L, _all_columns, first_column, width, contraction = sizes
    _a_ring, w_ring, w_scales, full, empty = rings
    row_ring, row_full, row_empty = rows
    a_outer_ptr, w_outer_ptr = outer
    out_ptr, pitch = out
    STAGES: gl.constexpr = w_ring.shape[0]
    SLOTS: gl.constexpr = row_ring.shape[0]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [TILE, WORDS],
    )
    HALVES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [64, 0, 0]],
        [],
        [TILE, 4, 4],
    )
    # Word 4 (r % 32) + r // 32 of an atom has the scales of row r; an atom is four rows of 32 words.
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]], [[4, 0], [8, 0], [0, 4], [0, 8], [0, 16]], [[2, 0], [0, 1], [0, 2]], [], [16, 32]
    )
    ends_L = _row_tile_ends(tables[1], L, ROWS, BLOCK_L)
    num_tiles = gl.max(ends_L, 0) * gl.cdiv(width, TILE)
    rows_R = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ACC))
    half = 0
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        expert, row, row_end, col = _tile(tile, ends_L, tables, width, ROWS, GROUP_M)
        acc = gl.zeros([TILE, ROWS], gl.float32, layout=ACC)
        for k in range(0, contraction, STEP):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            words = _halves(w_ring.index(stage).reshape([TILE, WORDS]).load(CODES))
            scales = gl.reshape(w_scales.index(stage).reshape([16, 32]).load(SCALES), [4, 4, 8, 4])
            mbarrier.arrive(empty.index(stage))
            scales = _scales(gl.reshape(gl.permute(scales, (3, 1, 2, 0)), [TILE, 4]))
            for h in gl.static_range(2):
                values = _converted(words[h], scales[2 * h], scales[2 * h + 1], HALVES)
                values = gl.convert_layout(values, OPERAND)
                slot = half % SLOTS
                mbarrier.wait(row_full.index(slot), half // SLOTS & 1)
                acc = warpgroup_mma(values, row_ring.index(slot).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(row_empty.index((half + SLOTS - 1) % SLOTS), pred=k + h > 0)
                half += 1
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(row_empty.index((half + SLOTS - 1) % SLOTS))
        a_outer_R = gl.load(a_outer_ptr + row + rows_R, mask=row + rows_R < row_end, other=0.0)
        w_outer = gl.load(w_outer_ptr + expert)
        result = (acc * UNSCALED * a_outer_R[None, :] * w_outer).to(gl.bfloat16)
        _store(gl.permute(result, (1, 0)), out_ptr, row, col, row_end, width, pitch)


@launched
@gluon.jit(
    do_not_specialize=["L", "first_column"],
    do_not_specialize_on_alignment=[
        "a_start_ptr",
        "a_scales_start_ptr",
        "out_start_ptr",
        "a_outer_start_ptr",
        "stop_ptr",
    ],
)
def _rows_times_weight_kernel(
    a_desc,  # [X, K / 8] i32, eight codes a word
    a_start_ptr,  # [1] i64
    a_scales_ptr,  # i32, four codes a word
    a_scales_start_ptr,  # [1] i64
    w_desc,  # [L, N, K / 8] i32
    w_scales_desc,  # i32 [L * atoms along N, 4 * atoms along K, 32]
    out_ptr,  # [X, pitch] bf16
    out_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    a_outer_inv_ptr,  # fp32
    a_outer_start_ptr,  # [1] i64
    w_outer_inv_ptr,  # [L] fp32
    stop_ptr,  # [1] i64
    L,
    all_columns,
    first_column,
    width,
    pitch,
    contraction,
    ROWS: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes output tiles p, p + programs, ...; example: grouped_gemm_scaled._rows_times_weight_kernel."""
    if gl.load(stop_ptr) != 0:
        return
    a_ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], a_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1, TILE, WORDS], w_desc.layout)
    w_scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 16, 32], w_scales_desc.layout)
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], gl.float16)
    row_ring = gl.allocate_shared_memory(gl.float16, [SLOTS, ROWS, HALF], ROW_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    row_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(row_full.index(slot), count=1)
        mbarrier.init(row_empty.index(slot), count=1)
    fence_async_shared()
    a_start = gl.load(a_start_ptr).to(gl.int32)
    a_scales_ptr += gl.load(a_scales_start_ptr) // 4
    out_ptr += gl.load(out_start_ptr) * pitch
    a_outer_inv_ptr += gl.load(a_outer_start_ptr)
    sizes = (L, all_columns, first_column, width, contraction)
    tables = (row_start_ptr, num_rows_ptr)
    rings = (a_ring, w_ring, w_scales, full, empty)
    rows = (row_ring, row_full, row_empty)
    outer = (a_outer_inv_ptr, w_outer_inv_ptr)
    out = (out_ptr, pitch)
    gl.warp_specialize(
        [
            (_multiply, (sizes, tables, rings, rows, outer, out, ROWS, BLOCK_L, GROUP_M)),
            (_convert_rows, (sizes, tables, rings, rows, a_scales_ptr, ROWS, BLOCK_L, GROUP_M)),
            (_produce, (sizes, tables, rings, (a_desc, a_start), (w_desc, w_scales_desc), ROWS, BLOCK_L, GROUP_M)),
        ],
        [4, 1],
        [CONVERTER_REGISTERS, PRODUCER_REGISTERS],
    )


@functools.cache
def shared_layout(*block: int) -> gl.NVMMASharedLayout:
    """How a tile of words lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, gl.int32)


def _descriptor(words: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(words, list(words.shape), list(words.stride()), list(block), shared_layout(*block))


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).view(torch.int32)


def pick_config(rows_per_expert: int | None) -> Config:
    """Tile of 16 to 64 rows, by the rows of an expert; with 128 registers do not suffice."""
    rows = 64 if rows_per_expert is None else min(max(16, next_power_of_2(rows_per_expert)), 64)
    return CONFIGS[rows]


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
    """As grouped_gemm_scaled.grouped_gemm_scaled, of NVFP4 and windows that begin at a multiple of 128."""
    assert format is NVFP4 and (columns is None or columns[0] % TILE.value == 0), (format, columns)
    L, N, K, first, width = check_scaled_rows(
        "grouped_gemm_scaled", a, w_values_LNK, w_scales, out_XN, row_start_P, num_rows_L, format=format,
        dgrad=False, w_outer_inv=w_outer_inv_L, columns=columns,
    )  # fmt: skip
    config = config or pick_config(rows_per_expert)
    rows_of_atoms, atoms = w_scales.shape[0] // TILE.value, w_scales.shape[1] // 4
    _rows_times_weight_kernel[(num_programs(out_XN.device, num_sms),)](
        _descriptor(_words(a.values), config.rows, WORDS.value),
        a.start_1,
        words(a.scales),
        a.scales_start_1,
        _descriptor(_words(w_values_LNK), 1, TILE.value, WORDS.value),
        _descriptor(_words(w_scales).view(rows_of_atoms, atoms * 4, 32), 1, 16, 32),
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
        BLOCK_L=max(32, next_power_of_2(L)),
        STAGES=config.num_stages,
        SLOTS=config.num_slots,
        GROUP_M=GROUP_M,
        num_warps=8,
    )
