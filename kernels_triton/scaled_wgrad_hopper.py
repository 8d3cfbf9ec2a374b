"""Weight gradients of e4m3 blocks on sm_90, in Gluon; elsewhere, and for e5m2, grouped_gemm_scaled runs.

    out[e] = round(dy_e.T @ x_e)    or    round(fp32(out[e]) + dy_e.T @ x_e)

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

FP8 tensor cores want the contraction, here rows, to be contiguous, and every output would need two scales a block. So
four warps load tiles and make BF16 of both operands, scales included, and eight multiply as in wgrad_hopper. BF16 holds
value times scale exactly for scales from 2^-117 to 2^67; below, it rounds at 2^-133, and above it is infinite. Rows of
padding are zeros with finite scales, so that whole steps are read.
"""

from dataclasses import dataclass

import torch
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
from dist_moe.quantized import check_scaled_wgrad

from ._device import delay, num_programs
from ._launch import launched
from .scaled_hopper import BLOCK, _copy_scales, _descriptor, words
from .wgrad_hopper import _barrier, _load, _tile

STEP = gl.constexpr(64)  # rows: two blocks, half an atom of scales
SLOTS = gl.constexpr(3)  # of the ring of BF16 tiles
PRODUCER_REGISTERS = gl.constexpr(88)
GROUP_M = 4

# Four e4m3 values and their scales times 2^60 as BF16 -> four BF16. Exponent and mantissa of a value are put where BF16
# has the low ones of its own, which is the value times 2^-120, and multiplied by 2^60 and by the scale.
TO_BF16 = gl.constexpr("""{
.reg .b32 lo, hi, lo4, hi4, up;
mov.b32 up, 0x5d805d80;
prmt.b32 lo, $2, 0, 0x1404;
prmt.b32 hi, $2, 0, 0x3424;
shr.b32 lo4, lo, 4;
shr.b32 hi4, hi, 4;
and.b32 lo4, lo4, 0x07f007f0;
and.b32 hi4, hi4, 0x07f007f0;
lop3.b32 lo, lo, 0x80008000, lo4, 0xea;
lop3.b32 hi, hi, 0x80008000, hi4, 0xea;
mul.bf16x2 lo, lo, up;
mul.bf16x2 hi, hi, up;
mul.bf16x2 $0, lo, $3;
mul.bf16x2 $1, hi, $4;
}""")


@dataclass(frozen=True)
class Config:
    block_n: int
    num_stages: int


CONFIGS = {  # 256 columns beside old FP32 values would spill
    torch.bfloat16: Config(block_n=256, num_stages=3),
    torch.float32: Config(block_n=128, num_stages=4),
}


@gluon.jit
def _convert_tile(to, values, words, step):
    """Two blocks of 32 rows, the first or second half of an atom, as BF16 with the scales of their columns."""
    ACROSS: gl.constexpr = values.shape[1] // 128  # warps side by side
    DOWN: gl.constexpr = gl.num_warps() // ACROSS
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK // DOWN, 4], [1, 32], [DOWN, ACROSS], [1, 0])
    column_words = words.load(gl.SliceLayout(0, LAYOUT)) >> (step % 2 * 16)
    for block in gl.static_range(STEP // BLOCK):
        code = (column_words >> (8 * block)) & 0xFF
        scale = gl.where(code == 255, 0x7FC0, gl.minimum(code + 60, 255) << 7).to(gl.int16)
        tile = values.slice(block * BLOCK, BLOCK, 0).load(LAYOUT).to(gl.int8, bitcast=True)
        scales, _tile = gl.broadcast(gl.expand_dims(scale, 0), tile)
        found = gl.inline_asm_elementwise(TO_BF16, "=r,=r,r,r,r", [tile, scales], dtype=gl.int16, is_pure=True, pack=4)
        to.slice(block * BLOCK, BLOCK, 0).store(found.to(gl.bfloat16, bitcast=True))


@gluon.jit
def _convert(step, rings, converted):
    """A stage as BF16 into the ring that the tensor cores read. Experts have an even number of steps."""
    dy_ring, x_ring, dy_scales, x_scales, full = rings
    dy_tiles, x_tiles, c_full, c_empty = converted
    STAGES: gl.constexpr = dy_ring.shape[0]
    stage = step % STAGES
    slot = step % SLOTS
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    mbarrier.wait(c_empty.index(slot), (step // SLOTS & 1) ^ 1)
    _convert_tile(dy_tiles.index(slot), dy_ring.index(stage), dy_scales.index(stage), step)
    _convert_tile(x_tiles.index(slot), x_ring.index(stage), x_scales.index(stage), step)
    fence_async_shared()
    mbarrier.arrive(c_full.index(slot))


@gluon.jit
def _produce(sizes, row_start_ptr, rings, converted, dy, x, GROUP_M: gl.constexpr):
    """Four warps: e4m3 tiles into their ring, AHEAD steps before the same warps make BF16 of them."""
    num_tiles, N, K, scale_cols = sizes
    dy_ring, x_ring, dy_scales, x_scales, full = rings
    dy_desc, dy_start, dy_scales_ptr = dy
    x_desc, x_start, x_scales_ptr = x
    STAGES: gl.constexpr = dy_ring.shape[0]
    AHEAD: gl.constexpr = STAGES - 1
    BLOCK_M: gl.constexpr = dy_ring.shape[2]
    BLOCK_N: gl.constexpr = x_ring.shape[2]
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        _expert, m, n, row_start, row_end = _tile(tile, row_start_ptr, N, K, BLOCK_M, BLOCK_N, GROUP_M)
        dy_row_ptr = dy_scales_ptr + (m // 128).to(gl.int64) * 32 * scale_cols
        x_row_ptr = x_scales_ptr + (n // 128).to(gl.int64) * 32 * scale_cols
        for row in range(row_start, row_end, STEP):
            stage = step % STAGES
            _copy_scales(dy_scales.index(stage), dy_row_ptr + row // 128 * 128, 0, 1)
            for part in gl.static_range(BLOCK_N // 128):
                # A row of atoms behind the last is not there; its columns are not stored.
                part_ptr = x_row_ptr + gl.where(n + part * 128 < K, part * 32 * scale_cols, 0)
                _copy_scales(x_scales.index(stage).slice(part * 128, 128, 0), part_ptr + row // 128 * 128, 0, 1)
            async_copy.mbarrier_arrive(full.index(stage))
            _barrier()  # of the arrivals of all warps, which count on the one that follows
            mbarrier.expect(full.index(stage), dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
            _load(dy_desc, [dy_start + row, m], full.index(stage), dy_ring.index(stage))
            _load(x_desc, [x_start + row, n], full.index(stage), x_ring.index(stage))
            if step >= AHEAD:
                _convert(step - AHEAD, rings, converted)
            step += 1
    for last in range(gl.maximum(step - AHEAD, 0), step):
        _convert(last, rings, converted)


@gluon.jit
def _multiply(sizes, row_start_ptr, converted, out_ptr, ACCUMULATE: gl.constexpr, GROUP_M: gl.constexpr):
    """Eight warps: the products of every tile, and its way out."""
    num_tiles, N, K, _scale_cols = sizes
    dy_tiles, x_tiles, c_full, c_empty = converted
    BLOCK_M: gl.constexpr = dy_tiles.shape[2]
    BLOCK_N: gl.constexpr = x_tiles.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        expert, m, n, row_start, row_end = _tile(tile, row_start_ptr, N, K, BLOCK_M, BLOCK_N, GROUP_M)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=ACC)
        for row in range(row_start, row_end, STEP):
            slot = step % SLOTS
            mbarrier.wait(c_full.index(slot), step // SLOTS & 1)
            acc = warpgroup_mma(dy_tiles.index(slot).permute((1, 0)), x_tiles.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(c_empty.index((step + SLOTS - 1) % SLOTS), pred=row > row_start)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(c_empty.index((step + SLOTS - 1) % SLOTS), pred=row_start < row_end)
        if row_start < row_end or not ACCUMULATE:
            rows = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ACC))
            cols = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))
            ptrs = out_ptr + (expert.to(gl.int64) * N + rows)[:, None] * K + cols[None, :]
            mask = (rows < N)[:, None] & (cols < K)[None, :]
            if ACCUMULATE:
                acc += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
            gl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@launched
@gluon.jit(
    do_not_specialize=["L"],
    do_not_specialize_on_alignment=[
        "dy_start_ptr",
        "dy_scales_start_ptr",
        "x_start_ptr",
        "x_scales_start_ptr",
        "stop_ptr",
    ],
)
def _wgrad_kernel(
    dy_desc,  # [X, N] values
    dy_start_ptr,  # [1] i64
    dy_scales_ptr,  # i32, four codes a word
    dy_scales_start_ptr,  # [1] i64
    x_desc,  # [X, K] values
    x_start_ptr,  # [1] i64
    x_scales_ptr,  # i32
    x_scales_start_ptr,  # [1] i64
    out_ptr,  # [L, N, K] bf16 or fp32
    row_start_ptr,  # [L + 1] i32
    stop_ptr,  # [1] i64
    L,
    N,
    K,
    ACCUMULATE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes tiles p, p + programs, ... of out; example: grouped_gemm_scaled._wgrad_kernel."""
    if gl.load(stop_ptr) != 0:
        return
    BLOCK_M: gl.constexpr = dy_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = x_desc.block_type.shape[1]
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BF16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dy_ring = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, STEP, BLOCK_M], dy_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, STEP, BLOCK_N], x_desc.layout)
    dy_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, STEP, BLOCK_M], BF16)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, STEP, BLOCK_N], BF16)
    dy_scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], WORDS)
    x_scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(c_full.index(slot), count=1)
        mbarrier.init(c_empty.index(slot), count=1)
    fence_async_shared()
    sizes = (L * gl.cdiv(N, BLOCK_M) * gl.cdiv(K, BLOCK_N), N, K, gl.load(row_start_ptr + L) // BLOCK)
    rings = (dy_ring, x_ring, dy_scales, x_scales, full)
    converted = (dy_tiles, x_tiles, c_full, c_empty)
    dy = (dy_desc, gl.load(dy_start_ptr).to(gl.int32), dy_scales_ptr + gl.load(dy_scales_start_ptr) // 4)
    x = (x_desc, gl.load(x_start_ptr).to(gl.int32), x_scales_ptr + gl.load(x_scales_start_ptr) // 4)
    gl.warp_specialize(
        [
            (_multiply, (sizes, row_start_ptr, converted, out_ptr, ACCUMULATE, GROUP_M)),
            (_produce, (sizes, row_start_ptr, rings, converted, dy, x, GROUP_M)),
        ],
        [4],
        [PRODUCER_REGISTERS],
    )


def grouped_gemm_scaled_wgrad(
    dy, x, row_start_P, num_rows_L, out_LNK, *, format, accumulate, stop_1, num_sms=None, config=None
) -> None:
    """As grouped_gemm_scaled.grouped_gemm_scaled_wgrad, of e4m3."""
    assert format is MXFP8_E4M3, format
    check_scaled_wgrad("grouped_gemm_scaled_wgrad", dy, x, row_start_P, num_rows_L, out_LNK, format=format)
    L, N, K = out_LNK.shape
    config = config or CONFIGS[out_LNK.dtype]
    _wgrad_kernel[(num_programs(out_LNK.device, num_sms),)](
        _descriptor(dy.values, STEP.value, 128),
        dy.start_1,
        words(dy.scales),
        dy.scales_start_1,
        _descriptor(x.values, STEP.value, config.block_n),
        x.start_1,
        words(x.scales),
        x.scales_start_1,
        out_LNK,
        row_start_P,
        stop_1,
        L,
        N,
        K,
        ACCUMULATE=accumulate,
        STAGES=config.num_stages,
        GROUP_M=GROUP_M,
        num_warps=8,
    )
