"""Rows times weights on sm_90, in Gluon; elsewhere, and where experts have few rows or very many, grouped_gemm runs.

    forward  out[r] = bf16(a[r] @ w[e].T)         dgrad  out[r] = bf16(dy[r] @ w[e])
    swiglu   h1[r] = bf16(x[r] @ w13[e].T)        h2[r] = bf16(swiglu(h1[r]))

Grid: persistent, one program an SM; reads and writes local memory only, no barrier before or after it.

A tile of weights costs as much to bring as one of rows, so the rows behind the last whole tile of an expert are dear if
they are a tile of their own, and padding if they fill one. Here the weights are the operand of 128 rows of the tensor
cores, and the rows are the other, of 64, 128 or 256. The last tile of an expert takes up to TAIL rows more, as a second
product with the weights that are there, and a tile of fewer rows is a smaller product. The result comes out transposed,
and is turned on its way out.

One warp keeps a ring of stages filled across tiles by TMA; two groups of four warps multiply 64 weights each, and never
wait for each other.

With SwiGLU eight rows of gate and the eight of up that go with them alternate in the operand, by a descriptor of rank 5
over w13 seen as [L, F / 8, 2, 8, D], so that a thread has both halves of what it activates.

The bits are those of grouped_gemm and grouped_gemm_swiglu: all add the same products in the same order.
"""

from dataclasses import dataclass

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

from dist_moe.shapes import next_power_of_2

from ._device import begin, delay, num_programs
from ._fitted import BOX, MAIN, SIDE_ROWS, STEP, TILE, produce, row_tile_ends, tile_of
from ._hopper import descriptor, put_rows
from ._launch import launched
from .grouped_gemm import check_product
from .grouped_gemm_swiglu import check_swiglu
from .swiglu import gate_up

MULTIPLIER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(96)  # of a thread
GROUP_M = 4  # tiles of rows, as many rows as eight of grouped_gemm, that go together before the next tile of weights


@dataclass(frozen=True)
class Config:
    tail: int  # rows that the last tile of an expert may have more
    num_stages: int


CONFIG = Config(tail=32, num_stages=4)


@gluon.jit
def _put(acc, out, row, row_end, col, ACT: gl.constexpr, KEEP_H1: gl.constexpr):
    """Transposed sums of the rows from row on and the weights from col on to their place, or activated. By 64 rows, for
    the shared memory that they are turned in, or 32, for the registers of what is activated."""
    ROWS: gl.constexpr = acc.shape[1]
    if ROWS > (64 if ACT is None else 32):
        first, second = gl.split(gl.permute(gl.reshape(acc, [SIDE_ROWS, 2, ROWS // 2]), (0, 2, 1)))
        _put(first, out, row, row_end, col, ACT, KEEP_H1)
        _put(second, out, row + ROWS // 2, row_end, col, ACT, KEEP_H1)
    elif ACT is None:
        out_ptr, width = out
        put_rows(gl.permute(acc.to(gl.bfloat16), (1, 0)), out_ptr, row, col, row_end, width, width)
    else:
        h1_ptr, h2_ptr, F, alpha, limit = out
        h1 = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [acc.to(gl.bfloat16)], dtype=gl.bfloat16, is_pure=False, pack=2
        )  # not declared pure: stays behind what left before, whose registers are free then
        both = gl.permute(gl.reshape(h1, [SIDE_ROWS // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        gate, up = gl.split(both)
        if KEEP_H1:
            _put_half(gate, h1_ptr, row, col // 2, row_end, F, 2 * F)
            _put_half(up, h1_ptr + F, row, col // 2, row_end, F, 2 * F)
        g, u, sig = gate_up(gate.to(gl.float32), up.to(gl.float32), alpha, limit, ACT == "clamped")
        _put_half((g * sig * u).to(gl.bfloat16), h2_ptr, row, col // 2, row_end, F, F)


@gluon.jit
def _put_half(values, out_ptr, row, col, row_end, width, pitch):
    """[4, 8, rows] of 32 columns."""
    columns: gl.constexpr = values.shape[0] * values.shape[1]
    turned = gl.permute(gl.reshape(values, [columns, values.shape[2]]), (1, 0))
    put_rows(turned, out_ptr, row, col, row_end, width, pitch)


@gluon.jit
def _contract(
    step,
    place,
    contraction,
    rings,
    out,
    SIDE: gl.constexpr,
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    KEEP_H1: gl.constexpr,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    BEHIND: gl.constexpr,
):
    """The products of 64 weights with a tile of ROWS rows and TAIL more, of a ring of their own or, BEHIND, of the next
    rows of the same one."""
    row, row_end, col = place
    a_ring, tail_ring, w_ring, full, empty = rings
    STAGES: gl.constexpr = w_ring.shape[0]
    acc = gl.zeros([SIDE_ROWS, ROWS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    if TAIL:
        TAIL_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        tail = gl.zeros([SIDE_ROWS, TAIL], gl.float32, layout=TAIL_ACC)
    for k in range(0, contraction, STEP):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if DGRAD:
            weights = w_ring.index(stage).reshape([STEP, TILE]).slice(SIDE * SIDE_ROWS, SIDE_ROWS, 1).permute((1, 0))
        else:
            weights = w_ring.index(stage).reshape([TILE, STEP]).slice(SIDE * SIDE_ROWS, SIDE_ROWS, 0)
        a_rows = a_ring.index(stage).slice(0, ROWS, 0)
        acc = warpgroup_mma(weights, a_rows.permute((1, 0)), acc, is_async=True)
        if TAIL:
            tail_rows = a_ring.index(stage).slice(ROWS, TAIL, 0) if BEHIND else tail_ring.index(stage)
            tail = warpgroup_mma(weights, tail_rows.permute((1, 0)), tail, is_async=True)
            acc, tail = warpgroup_mma_wait(2, deps=(acc, tail))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    if TAIL:
        acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    _put(acc, out, row, row_end, col, ACT, KEEP_H1)
    if TAIL:
        _put(tail, out, row + ROWS, row_end, col, ACT, KEEP_H1)


@gluon.jit
def _multiply(
    sizes,
    row_start_ptr,
    rings,
    out,
    SIDE: gl.constexpr,
    TAIL: gl.constexpr,
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    KEEP_H1: gl.constexpr,
    BLOCK_L: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Four warps: half of the weights of every tile times its rows, and the way out."""
    L, width, contraction = sizes
    ends_L = row_tile_ends(row_start_ptr, L, TAIL, BLOCK_L)
    num_tiles_n = gl.cdiv(width, TILE)
    tile_steps = gl.cdiv(contraction, STEP)
    step = 0
    for tile in range(gl.program_id(0), gl.max(ends_L, 0) * num_tiles_n, gl.num_programs(0)):
        delay(tile)
        _, row, row_end, col, boxes, has_tail = tile_of(tile, ends_L, row_start_ptr, num_tiles_n, TAIL, GROUP_M)
        at = (step, (row, row_end, col + SIDE * SIDE_ROWS), contraction, rings, out)
        if boxes == 4 and has_tail:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 256, TAIL, False)
        elif boxes == 4:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 256, 0, False)
        elif boxes == 3:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 128, 64, True)
        elif boxes == 2 and has_tail:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 128, TAIL, False)
        elif boxes == 2:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 128, 0, False)
        elif has_tail:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 64, TAIL, False)
        else:
            _contract(*at, SIDE, DGRAD, ACT, KEEP_H1, 64, 0, False)
        step += tile_steps


@gluon.jit
def _run(
    sizes,
    row_start_ptr,
    a,
    a_start,
    w_desc,
    out,
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    KEEP_H1: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    main_desc, _box_desc, tail_desc = a
    TAIL: gl.constexpr = tail_desc.block_type.shape[0]
    gl.static_assert(MAIN == 4 * BOX and TAIL <= BOX and STAGES > 1)
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MAIN, STEP], main_desc.layout)
    tail_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TAIL, STEP], tail_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    rings = (a_ring, tail_ring, w_ring, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (sizes, row_start_ptr, rings, out, 0, TAIL, DGRAD, ACT, KEEP_H1, BLOCK_L, GROUP_M)),
            (_multiply, (sizes, row_start_ptr, rings, out, 1, TAIL, DGRAD, ACT, KEEP_H1, BLOCK_L, GROUP_M)),
            (produce, (sizes, row_start_ptr, rings, a, a_start, w_desc, TAIL, DGRAD, BLOCK_L, GROUP_M)),
        ],
        [4, 1],
        [MULTIPLIER_REGISTERS, PRODUCER_REGISTERS],
    )


@launched
@gluon.jit(do_not_specialize=["L"], do_not_specialize_on_alignment=["a_start_ptr", "out_start_ptr", "stop_ptr"])
def _rows_times_weight_kernel(
    main_desc,  # [X, contraction] bf16 in boxes of MAIN rows
    box_desc,  # the same in boxes of BOX rows
    tail_desc,  # the same in boxes of TAIL rows
    a_start_ptr,  # [1] i64
    w_desc,  # [L, N, K] bf16
    out_ptr,  # [X, width] bf16
    out_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    stop_ptr,  # [1] i64
    L,
    width,
    contraction,
    DGRAD: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes output tiles p, p + programs, ...; example: grouped_gemm._rows_times_weight_kernel."""
    begin()
    if gl.load(stop_ptr) != 0:
        return
    out = (out_ptr + gl.load(out_start_ptr) * width, width)
    sizes = (L, width, contraction)
    a = (main_desc, box_desc, tail_desc)
    a_start = gl.load(a_start_ptr).to(gl.int32)
    _run(sizes, row_start_ptr, a, a_start, w_desc, out, DGRAD, None, False, BLOCK_L, STAGES, GROUP_M)


@launched
@gluon.jit(
    do_not_specialize=["L"],
    do_not_specialize_on_alignment=["x_start_ptr", "h1_start_ptr", "h2_start_ptr", "stop_ptr"],
)
def _grouped_gemm_swiglu(
    main_desc,  # [X, D] bf16 in boxes of MAIN rows
    box_desc,  # the same in boxes of BOX rows
    tail_desc,  # the same in boxes of TAIL rows
    x_start_ptr,  # [1] i64
    w13_desc,  # [L, F / 8, 2, 8, D] bf16
    h1_ptr,  # [X, 2F] bf16
    h1_start_ptr,  # [1] i64
    h2_ptr,  # [X, F] bf16
    h2_start_ptr,  # [1] i64
    row_start_ptr,  # [L + 1] i32
    stop_ptr,  # [1] i64
    L,
    D,
    F,
    alpha,
    limit,
    ACT: gl.constexpr,  # "plain" or "clamped"
    KEEP_H1: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Program p takes tiles p, p + programs, ...; example: grouped_gemm_swiglu._grouped_gemm_swiglu."""
    begin()
    if gl.load(stop_ptr) != 0:
        return
    h1_ptr += gl.load(h1_start_ptr) * 2 * F
    h2_ptr += gl.load(h2_start_ptr) * F
    a = (main_desc, box_desc, tail_desc)
    out = (h1_ptr, h2_ptr, F, alpha, limit)
    a_start = gl.load(x_start_ptr).to(gl.int32)
    _run((L, 2 * F, D), row_start_ptr, a, a_start, w13_desc, out, False, ACT, KEEP_H1, BLOCK_L, STAGES, GROUP_M)


def _row_descriptors(rows_XK: Tensor, config: Config) -> tuple[TensorDescriptor, ...]:
    return tuple(descriptor(rows_XK, rows, STEP.value) for rows in (MAIN.value, BOX.value, config.tail))


def _options(L: int, config: Config) -> dict:
    block_l = max(128, next_power_of_2(L))  # few variants to compile, which takes ten seconds and more
    return {"BLOCK_L": block_l, "STAGES": config.num_stages, "GROUP_M": GROUP_M, "num_warps": 4}


def weights_box(dgrad: bool) -> tuple[int, ...]:
    return (1, STEP.value, TILE.value) if dgrad else (1, TILE.value, STEP.value)


W13_BOX = (1, TILE.value // 16, 2, 8, STEP.value)


def _rows_times_weight(op, a, a_start_1, w_LNK, out, out_start_1, row_start_P, stop_1, num_sms, config) -> None:
    L, width, contraction = check_product(op, a, w_LNK, out)
    dgrad = op == "grouped_gemm_dgrad"
    config = config or CONFIG
    _rows_times_weight_kernel[(num_programs(a.device, num_sms),)](
        *_row_descriptors(a, config),
        a_start_1,
        descriptor(w_LNK, *weights_box(dgrad)),
        out,
        out_start_1,
        row_start_P,
        stop_1,
        L,
        width,
        contraction,
        DGRAD=dgrad,
        **_options(L, config),
    )


def grouped_gemm(
    a_XK,
    a_start_1,
    w_LNK,
    out_XN,
    out_start_1,
    row_start_P,
    *,
    stop_1,
    preset=None,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """Arguments, errors and result: grouped_gemm.grouped_gemm; preset and rows_per_expert change nothing here."""
    _rows_times_weight(
        "grouped_gemm", a_XK, a_start_1, w_LNK, out_XN, out_start_1, row_start_P, stop_1, num_sms, config
    )


def grouped_gemm_dgrad(
    dy_XN,
    dy_start_1,
    w_LNK,
    out_XK,
    out_start_1,
    row_start_P,
    *,
    stop_1,
    preset=None,
    num_sms=None,
    rows_per_expert=None,
    config=None,
) -> None:
    """Arguments, errors and result: grouped_gemm.grouped_gemm_dgrad; preset and rows_per_expert change nothing here."""
    _rows_times_weight(
        "grouped_gemm_dgrad", dy_XN, dy_start_1, w_LNK, out_XK, out_start_1, row_start_P, stop_1, num_sms, config
    )


def grouped_gemm_swiglu(
    x_XD,
    x_start_1,
    w13_L2FD,
    h1_X2F,
    h1_start_1,
    h2_XF,
    h2_start_1,
    row_start_P,
    *,
    keep_h1,
    activation,
    rows_per_expert=None,
    stop_1,
    num_sms=None,
    config=None,
) -> None:
    """Arguments, errors and result: grouped_gemm_swiglu.grouped_gemm_swiglu; rows_per_expert changes nothing here.

    The path takes it where h1 is not kept (calls.Path.fuses_swiglu).
    """
    L, N, D = check_swiglu("grouped_gemm_swiglu", x_XD, w13_L2FD, h2_XF, h1_X2F)
    F = N // 2
    config = config or CONFIG
    w13 = w13_L2FD.view(L, 2, F // 8, 8, D).transpose(1, 2)
    _grouped_gemm_swiglu[(num_programs(x_XD.device, num_sms),)](
        *_row_descriptors(x_XD, config),
        x_start_1,
        descriptor(w13, *W13_BOX),
        h1_X2F,
        h1_start_1,
        h2_XF,
        h2_start_1,
        row_start_P,
        stop_1,
        L,
        D,
        F,
        activation.alpha,
        activation.limit,
        ACT="clamped" if activation.clamped else "plain",
        KEEP_H1=keep_h1,
        enable_fp_fusion=False,
        **_options(L, config),
    )
