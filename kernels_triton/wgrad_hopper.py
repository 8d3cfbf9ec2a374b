"""Weight gradients of the grouped GEMM on sm_90, in Gluon; elsewhere grouped_gemm.grouped_gemm_wgrad runs.

    out[e] = round(dy_e.T @ x_e)    or    round(fp32(out[e]) + dy_e.T @ x_e)

of BF16 rows, or of the expanded columns of MXFP8, whose values times scales are BF16.

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

An expert of 512 rows is eight steps a tile, so what stands between two tiles decides: one warp keeps a ring of stages
filled across tiles by TMA while eight multiply, and a tile leaves through shared memory by a TMA store that runs under
the next tile. Plain Triton can have neither: its loop over steps drains at every tile, and the masked tail of a tile
is a step that nothing overlaps.

Where it accumulates, the old tile comes by TMA, under the products of its own tile, into the place in shared memory
from which the new one leaves. The order there:
    old values read, new ones written over them, both by all eight warps -> fence and barrier -> TMA store
    -> in a step of the next tile, store_wait: read out of shared memory -> barrier -> TMA load
    -> mbarrier `old` -> old values read
so the async proxy never writes what a warp or a store still reads. All of it is issued by the multiplying warps, since
a store is waited for by the threads that issued it.

The last step of an expert may hold rows behind its end, which are another expert's or NaN: the multiplying warps write
zeros over them in the ring, in both operands (0 * NaN is NaN), before the tensor cores read it. Expanded columns have
zeros of their own there, up to the next multiple of 128 rows: their last step is as any other.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dist_moe.quantized import check_scaled_wgrad

from ._device import begin, delay, num_programs
from ._hopper import barrier, descriptor, load_box, store_box
from ._launch import launched
from .grouped_gemm import Config, check_wgrad

CONFIGS = {
    torch.bfloat16: Config(128, 256, 64, num_warps=8, num_stages=3),
    torch.float32: Config(128, 128, 64, num_warps=8, num_stages=4),
}
PRODUCER_REGISTERS = gl.constexpr(40)
GROUP_M = 4
FETCH_STEP = gl.constexpr(2)  # of a tile: in which its old values are fetched


@gluon.jit
def _tile(
    tile,
    rows_ptrs,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Expert, row and column of the tile in out[expert], and the expert's rows: as in grouped_gemm; expanded columns in
    whole steps."""
    row_start_ptr, num_rows_ptr = rows_ptrs
    num_tiles_m = gl.cdiv(N, BLOCK_M)
    num_tiles_n = gl.cdiv(K, BLOCK_N)
    expert = tile // (num_tiles_m * num_tiles_n)
    place = tile % (num_tiles_m * num_tiles_n)
    group = place // (GROUP_M * num_tiles_n)
    group_size = gl.minimum(num_tiles_m - group * GROUP_M, GROUP_M)
    place = place % (GROUP_M * num_tiles_n)
    m = (group * GROUP_M + place % group_size) * BLOCK_M
    n = place // group_size * BLOCK_N
    row_start = gl.load(row_start_ptr + expert)
    if num_rows_ptr is None:
        row_end = gl.load(row_start_ptr + expert + 1)
    else:
        row_end = row_start + gl.cdiv(gl.load(num_rows_ptr + expert), BLOCK_K) * BLOCK_K
    return expert, m, n, row_start, row_end


@gluon.jit
def _produce(tiles, rings, dy_desc, x_desc, dy_start, x_start, GROUP_M: gl.constexpr):
    """One warp: the rows of every tile into the ring, a step a stage, as stages become empty."""
    rows_ptrs, num_tiles, N, K = tiles
    dy_ring, x_ring, full, empty = rings
    STAGES: gl.constexpr = dy_ring.shape[0]
    BLOCK_K: gl.constexpr = dy_ring.shape[1]
    BLOCK_M: gl.constexpr = dy_ring.shape[2]
    BLOCK_N: gl.constexpr = x_ring.shape[2]
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        _, m, n, row_start, row_end = _tile(tile, rows_ptrs, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
        for row in range(row_start, row_end, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
            load_box(dy_desc, [dy_start + row, m], full.index(stage), dy_ring.index(stage))
            load_box(x_desc, [x_start + row, n], full.index(stage), x_ring.index(stage))
            step += 1


@gluon.jit
def _keep_rows(ring_stage, num_rows):
    """Zeros over the rows of a stage from num_rows on."""
    ROWS: gl.constexpr = ring_stage.shape[0]
    COLS: gl.constexpr = ring_stage.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [8, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    values = ring_stage.load(LAYOUT)
    ring_stage.store(gl.where((rows < num_rows)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _multiply(tiles, rings, out_desc, out_tile, old, ACCUMULATE: gl.constexpr, GROUP_M: gl.constexpr):
    """Eight warps: the products of every tile, and its way out."""
    rows_ptrs, num_tiles, N, K = tiles
    dy_ring, x_ring, full, empty = rings
    STAGES: gl.constexpr = dy_ring.shape[0]
    BLOCK_K: gl.constexpr = dy_ring.shape[1]
    BLOCK_M: gl.constexpr = dy_ring.shape[2]
    BLOCK_N: gl.constexpr = x_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    out_MN = out_tile.reshape([BLOCK_M, BLOCK_N])
    step = 0
    num_fetched = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        delay(tile)
        expert, m, n, row_start, row_end = _tile(tile, rows_ptrs, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
        if row_start < row_end or not ACCUMULATE:
            fetch_row = row_start + gl.minimum(FETCH_STEP, gl.cdiv(row_end - row_start, BLOCK_K) - 1) * BLOCK_K
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=ACC)
            for row in range(row_start, row_end, BLOCK_K):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                if row + BLOCK_K > row_end:
                    _keep_rows(dy_ring.index(stage), row_end - row)
                    _keep_rows(x_ring.index(stage), row_end - row)
                    fence_async_shared()
                    barrier()
                acc = warpgroup_mma(dy_ring.index(stage).permute((1, 0)), x_ring.index(stage), acc, is_async=True)
                if ACCUMULATE:
                    if row == fetch_row:
                        tma.store_wait(0)
                        barrier()
                        mbarrier.expect(old, out_desc.block_type.nbytes)
                        load_box(out_desc, [expert, m, n], old, out_tile)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=row > row_start)
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=row_start < row_end)
            if ACCUMULATE:
                mbarrier.wait(old, num_fetched & 1)
                num_fetched += 1
                acc += out_MN.load(ACC).to(gl.float32)
            else:
                tma.store_wait(0)
            out_MN.store(acc.to(out_desc.dtype))
            fence_async_shared()
            store_box(out_desc, [expert, m, n], out_tile)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize_on_alignment=["dy_start_ptr", "x_start_ptr", "num_rows_ptr", "stop_ptr"])
def _wgrad_kernel(
    dy_desc,  # [X, N] bf16
    dy_start_ptr,  # [1] i64
    x_desc,  # [X, K] bf16
    x_start_ptr,  # [1] i64
    out_desc,  # [L, N, K] bf16 or fp32
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32 of expanded columns; None: rows end where the next expert's begin
    stop_ptr,  # [1] i64
    L,
    N,
    K,
    ACCUMULATE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes tiles p, p + programs, ... of the [L, N, K] outputs; example: grouped_gemm._wgrad_kernel."""
    begin()
    if gl.load(stop_ptr) != 0:
        return
    BLOCK_K: gl.constexpr = dy_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = dy_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = x_desc.block_type.shape[1]
    dy_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], dy_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], x_desc.layout)
    out_tile = gl.allocate_shared_memory(out_desc.dtype, [1, BLOCK_M, BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if ACCUMULATE:
        old = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(old, count=1)
    else:  # a barrier that nothing waits for would lie where the partitions' arguments are passed
        old = full
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    num_tiles = L * gl.cdiv(N, BLOCK_M) * gl.cdiv(K, BLOCK_N)
    dy_start = gl.load(dy_start_ptr).to(gl.int32)
    x_start = gl.load(x_start_ptr).to(gl.int32)
    tiles = ((row_start_ptr, num_rows_ptr), num_tiles, N, K)
    rings = (dy_ring, x_ring, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (tiles, rings, out_desc, out_tile, old, ACCUMULATE, GROUP_M)),
            (_produce, (tiles, rings, dy_desc, x_desc, dy_start, x_start, GROUP_M)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


def _launch(
    dy_XN, dy_start_1, x_XK, x_start_1, row_start_P, num_rows_L, out_LNK, *, accumulate, stop_1, num_sms, config
):
    check_wgrad(dy_XN, x_XK, out_LNK)
    L, N, K = out_LNK.shape
    config = config or CONFIGS[out_LNK.dtype]
    _wgrad_kernel[(num_programs(dy_XN.device, num_sms),)](
        descriptor(dy_XN, config.block_k, config.block_m),
        dy_start_1,
        descriptor(x_XK, config.block_k, config.block_n),
        x_start_1,
        descriptor(out_LNK, 1, config.block_m, config.block_n),
        row_start_P,
        num_rows_L,
        stop_1,
        L,
        N,
        K,
        ACCUMULATE=accumulate,
        STAGES=config.num_stages,
        GROUP_M=GROUP_M,
        num_warps=config.num_warps,
    )


def grouped_gemm_wgrad(
    dy_XN, dy_start_1, x_XK, x_start_1, row_start_P, out_LNK, *, accumulate, stop_1, num_sms=None, config=None
) -> None:
    """Arguments, errors and result: grouped_gemm.grouped_gemm_wgrad."""
    how = {"accumulate": accumulate, "stop_1": stop_1, "num_sms": num_sms, "config": config}
    _launch(dy_XN, dy_start_1, x_XK, x_start_1, row_start_P, None, out_LNK, **how)


def grouped_gemm_scaled_wgrad(
    dy, x, row_start_P, num_rows_L, out_LNK, *, format, accumulate, stop_1, num_sms=None, config=None
) -> None:
    """As grouped_gemm_scaled.grouped_gemm_scaled_wgrad, of expanded columns.

    Raises:  ValueError also for columns that are codes and scales.
    """
    op = "grouped_gemm_scaled_wgrad"
    check_scaled_wgrad(op, dy, x, row_start_P, num_rows_L, out_LNK, format=format)
    if not dy.expanded:
        raise ValueError(f"{op}: columns must be expanded here, got {dy.values.dtype}; pass BF16 of value times scale")
    operands = (dy.values, dy.start_1, x.values, x.start_1, row_start_P, num_rows_L, out_LNK)
    _launch(*operands, accumulate=accumulate, stop_1=stop_1, num_sms=num_sms, config=config)
