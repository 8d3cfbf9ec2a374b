"""publish: this rank's rows, resolved routes and header into its own symmetric regions.

    tokens[half, t] = x[t], or with a format its wire row: values, scales, inverse outer scale, zeros
    ids[t, k], scores[t, k] = resolved routes (reference.resolve_routes)
    header = version, configuration, call, kind, T, 0

Grid: one program a block of tokens, at least one; program 0 also counts the call and writes the header, and the last to
finish may send the signal PUBLISHED. Writes own memory only; peers read it after that signal, and the wait COMBINED of
the last call orders their reads before.
"""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from dist_moe import formats, shapes
from dist_moe.shapes import cdiv, next_power_of_2

from ._device import begin, delay
from ._launch import launched
from ._scaled import INFINITY, MAGNITUDE, bits_of, format_options, one_nan, outer_scale, pack_pairs, quantise
from .barrier import ending, send_when_last

VERSION = tl.constexpr(shapes.WIRE_VERSION)
HEADER_VERSION = tl.constexpr(shapes.HEADER_VERSION)
HEADER_CONFIG_HASH = tl.constexpr(shapes.HEADER_CONFIG_HASH)
HEADER_CALL = tl.constexpr(shapes.HEADER_CALL)
HEADER_KIND = tl.constexpr(shapes.HEADER_KIND)
HEADER_T = tl.constexpr(shapes.HEADER_T)
HEADER_ABORT = tl.constexpr(shapes.HEADER_ABORT)
NO_EXPERT = tl.constexpr(shapes.NO_EXPERT)
INVALID_EXPERT = tl.constexpr(shapes.INVALID_EXPERT)

EPS = tl.constexpr(formats.ROW_EPS)
TAIL = tl.constexpr(next_power_of_2(4 + formats.PACKED_ROW_ALIGNMENT))  # most bytes behind the scales of a wire row

TILE = 4096  # elements of a tile: with 4 warps four 16-byte loads of x in flight a thread
PACKED_TILE = 8192  # of rows that are quantised: a whole row, 16 elements a thread


@dataclass(frozen=True)
class Config:
    block_t: int
    block_d: int
    block_k: int
    num_warps: int = 4
    packed: bool = False

    @property
    def options(self) -> dict[str, int | bool]:
        """Of the compiler. Products of a quantiser are rounded, and 16 warps have 128 registers a thread; see
        quantize.Config."""
        return {"num_warps": self.num_warps, **({"enable_fp_fusion": False, "maxnreg": 128} if self.packed else {})}


@functools.cache
def pick_config(D: int, K: int, packed: bool = False) -> Config:
    """Tiles of one token (D > 2048) to 64 (small D); never a function of T, so that no T compiles anything. Tokens that
    are packed come one by one, whole as far as a tile reaches.

    One H200, T = 8192, K = 8: D = 7168 in 61 us, D = 2048 in 21 us: 3.9 and 3.2 TB/s read and written. 2026-11-29,
    kernel times of torch.profiler.
    """
    if packed:
        block_d = min(next_power_of_2(D), PACKED_TILE)
        return Config(1, block_d, min(next_power_of_2(K), 1024), max(block_d // 512, 1), True)
    block_d = min(next_power_of_2(D), TILE)
    block_t = min(TILE // block_d, 64)
    block_k = min(next_power_of_2(K), max(1024 // block_t, 1))
    return Config(block_t, block_d, block_k)


@triton.jit
def _not_finite(x):
    """1 for each row of a BF16 tile that holds Inf or NaN (all exponent bits set), else 0."""
    exponent = x.to(tl.int16, bitcast=True) & 0x7F80
    return tl.max((exponent == 0x7F80).to(tl.int32), axis=1)


@triton.jit
def _negative_zero():
    return tl.full([], -(2**31), tl.int32).to(tl.float32, bitcast=True)  # the literal -0.0 becomes +0.0 in Triton


@triton.jit
def _load_columns(x_ptr, t, mask_t, x_stride_t, d0, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = d0 + tl.arange(0, BLOCK_D)
    mask = mask_t[:, None] & (d < D)[None, :]
    return tl.load(x_ptr + t[:, None] * x_stride_t + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _pack(
    x_ptr,
    wire_ptr,  # [T_max, WIRE_BYTES] bytes
    t,
    mask_t,
    x_stride_t,
    D: tl.constexpr,
    WIRE_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    VALUES_PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the wire rows of tokens t; the bits of the largest magnitude of each row. A row wider than the tile is read
    twice, for its outer scale and whether it is finite come first.

    Example: D = 96 in NVFP4 is 48 bytes of values, 6 of scales, 4 of the inverse outer scale, then 6 zeros.
    """
    VALUES_END: tl.constexpr = D // VALUES_PER_BYTE
    NUM_SCALES: tl.constexpr = D // BLOCK
    if D <= BLOCK_D:
        x = _load_columns(x_ptr, t, mask_t, x_stride_t, 0, D, BLOCK_D)
        amax = bits_of(x) & MAGNITUDE
    else:
        amax = tl.zeros([BLOCK_T, BLOCK_D], tl.int32)
        for d0 in range(0, D, BLOCK_D):
            part = _load_columns(x_ptr, t, mask_t, x_stride_t, d0, D, BLOCK_D)
            amax = tl.maximum(amax, bits_of(part) & MAGNITUDE)
    amax_T = tl.max(amax, axis=1)
    outer = tl.full([BLOCK_T, 1], 1.0, tl.float32)
    tail = tl.zeros([BLOCK_T, 1], tl.int32)
    if TWO_LEVEL:
        outer = outer_scale(amax_T, EPS)[:, None]
        tail = bits_of(one_nan(tl.div_rn(1.0, outer)))
    row_ptrs = wire_ptr + t[:, None] * WIRE_BYTES
    for d0 in range(0, D, BLOCK_D):
        if D > BLOCK_D:
            x = _load_columns(x_ptr, t, mask_t, x_stride_t, d0, D, BLOCK_D)
        blocks = tl.reshape(x, (BLOCK_T, BLOCK_D // BLOCK, BLOCK))
        codes, scales = quantise(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
        codes = tl.reshape(codes, (BLOCK_T, BLOCK_D))
        if VALUES_PER_BYTE == 2:
            codes = pack_pairs(codes, BLOCK_T, BLOCK_D)
        byte = d0 // VALUES_PER_BYTE + tl.arange(0, BLOCK_D // VALUES_PER_BYTE)[None, :]
        tl.store(row_ptrs + byte, codes, mask=mask_t[:, None] & (byte < VALUES_END))
        scale = d0 // BLOCK + tl.arange(0, BLOCK_D // BLOCK)[None, :]
        tl.store(row_ptrs + VALUES_END + scale, scales, mask=mask_t[:, None] & (scale < NUM_SCALES))
    byte = tl.arange(0, TAIL)[None, :]
    tail = tl.where(byte < 4, tail >> (byte & 3) * 8, 0)
    mask_tail = mask_t[:, None] & (byte < WIRE_BYTES - VALUES_END - NUM_SCALES)
    tl.store(row_ptrs + VALUES_END + NUM_SCALES + byte, tail.to(tl.uint8), mask=mask_tail)
    return amax_T


@launched
@triton.jit(do_not_specialize=["num_tokens", "kind", "config_hash", "rank", "W"])
def _publish(
    x_ptr,  # [T, D] bf16
    ids_ptr,  # [T, K] int32 or int64
    scores_ptr,  # [T, K] bf16 or fp32
    check_ptr,  # [T, D] bf16
    tokens_ptr,  # [T_max, D] bf16, own half, or None; with a format [T_max, WIRE_BYTES] bytes
    out_ids_ptr,  # [T_max, K] int16
    out_scores_ptr,  # [T_max, K] fp32
    header_ptr,
    call_ptr,
    check_skip_ptr,
    stop_ptr,
    num_tokens,
    kind,
    config_hash,
    x_stride_t,
    check_stride_t,
    ids_stride_t,
    ids_stride_k,
    scores_stride_t,
    scores_stride_k,
    signals_table_ptr,  # None, as the pointers below, unless the signal comes with it
    sent_ptr,
    signal_header_ptr,  # header_ptr
    fault_ptr,
    finished_ptr,
    rank,
    W,
    D: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    CHECK_IS_X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WIRE_BYTES: tl.constexpr = 0,  # with a format, like what follows
    ELEMENT: tl.constexpr = None,
    VALUES_PER_BYTE: tl.constexpr = 1,
    BLOCK: tl.constexpr = 1,
    RECIPROCAL: tl.constexpr = 1.0,
    TWO_LEVEL: tl.constexpr = False,
):
    """Grid (blocks of tokens,).

    Example (E = 4, K = 4): ids [2, -7, 2, 9] with scores [1, 2, 3, 4] go out as ids [2, -1, -1, -2] and scores
    [4, 0, 0, 0]: slot 2 repeats expert 2, whose first slot carries 1 + 3. Ids [0, 3, 1, 1] with scores [0, 5, 2, -2]
    of a token with a NaN in x: ids [0, 3, 1, -1], scores [-0., 5, -0., 0].
    """
    begin()
    runs = tl.load(stop_ptr) == 0
    pid = tl.program_id(0)
    delay(pid)
    if runs & (pid == 0):
        call = tl.load(call_ptr) + 1
        tl.store(call_ptr, call)
        tl.store(header_ptr + HEADER_VERSION, VERSION)
        tl.store(header_ptr + HEADER_CONFIG_HASH, config_hash)
        tl.store(header_ptr + HEADER_CALL, call)
        tl.store(header_ptr + HEADER_KIND, kind)
        tl.store(header_ptr + HEADER_T, num_tokens)
        tl.store(header_ptr + HEADER_ABORT, 0)

    t = pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = (t < num_tokens) & runs
    check = tl.load(check_skip_ptr) == 0
    if WIRE_BYTES > 0:
        amax_T = _pack(
            x_ptr, tokens_ptr, t, mask_t, x_stride_t,
            D, WIRE_BYTES, ELEMENT, VALUES_PER_BYTE, BLOCK, RECIPROCAL, TWO_LEVEL, BLOCK_T, BLOCK_D,
        )  # fmt: skip
        broken_T = (check & (amax_T >= INFINITY)).to(tl.int32)
    else:
        broken_T = tl.zeros([BLOCK_T], dtype=tl.int32)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            mask_td = mask_t[:, None] & (d < D)[None, :]
            if tokens_ptr is not None:
                x = tl.load(x_ptr + t[:, None] * x_stride_t + d[None, :], mask=mask_td, other=0.0)
                tl.store(tokens_ptr + t[:, None] * D + d[None, :], x, mask=mask_td)
            if check:
                if CHECK_IS_X and tokens_ptr is not None:
                    broken_T |= _not_finite(x)
                else:
                    checked = tl.load(check_ptr + t[:, None] * check_stride_t + d[None, :], mask=mask_td, other=0.0)
                    broken_T |= _not_finite(checked)

    ids_row = ids_ptr + t * ids_stride_t
    scores_row = scores_ptr + t * scores_stride_t
    for k0 in range(0, K, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        mask_tk = mask_t[:, None] & (k < K)
        ids = tl.load(ids_row[:, None] + k.to(tl.int64) * ids_stride_k, mask=mask_tk, other=NO_EXPERT).to(tl.int64)
        repeated = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
        total = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)  # from +0.0, so that no sum is -0.0
        for j in range(K):
            other_k = tl.full([], j, tl.int64)
            other = tl.load(ids_row + other_k * ids_stride_k, mask=mask_t, other=NO_EXPERT).to(tl.int64)
            score = tl.load(scores_row + other_k * scores_stride_k, mask=mask_t, other=0.0).to(tl.float32)
            same = ids == other[:, None]
            repeated |= (same & (j < k)).to(tl.int32)
            total = tl.where(same & (j >= k), total + score[:, None], total)
        routed = (ids >= 0) & (ids < E) & (repeated == 0)
        out_ids = tl.where(routed, ids, tl.where(ids >= E, INVALID_EXPERT, NO_EXPERT))
        out_scores = tl.where(routed, total, 0.0)
        out_scores = tl.where(routed & (total == 0.0) & (broken_T != 0)[:, None], _negative_zero(), out_scores)
        tl.store(out_ids_ptr + t[:, None] * K + k, out_ids.to(tl.int16), mask=mask_tk)
        tl.store(out_scores_ptr + t[:, None] * K + k, out_scores, mask=mask_tk)
    if signals_table_ptr is not None:
        send_when_last(signals_table_ptr, sent_ptr, signal_header_ptr, fault_ptr, finished_ptr, rank, W, STAGE, BLOCK_W)


def publish(
    x_TD,
    ids_TK,
    scores_TK,
    *,
    half,
    check_TD,
    check_skip_1,
    kind,
    config_hash,
    num_experts,
    call_1,
    tokens,
    header,
    ids,
    scores,
    stop_1,
    format=None,
    then=None,
):
    """Publish one call; see reference.publish.

    Args:   x_TD, check_TD: bf16, unit inner stride, any row stride.  ids_TK: int32 or int64, any strides.
            scores_TK: bf16 or fp32, any strides.  check_TD may be x_TD itself, which saves reading it again.
            half: of `tokens`; None: x is not published.  format: then x is published quantised, and check_TD is x_TD.
            then: the signal PUBLISHED, sent by the last program; it goes out under a fault too.
    Order:  local; the signal PUBLISHED comes after, or with `then` at its end.
    """
    T, D = x_TD.shape
    K = ids_TK.shape[1]
    check_is_x = check_TD.data_ptr() == x_TD.data_ptr() and check_TD.stride() == x_TD.stride()
    packing = {}
    if format is not None:
        wire_bytes = formats.packed_row_bytes(format, D)
        assert check_is_x and half is not None and tokens.own.shape[2] == wire_bytes, (half, tokens.own.shape)
        packing = {"WIRE_BYTES": wire_bytes, "VALUES_PER_BYTE": format.values_per_byte, "TWO_LEVEL": format.two_level}
        packing |= format_options(format)
    assert x_TD.stride(1) == 1 and check_TD.stride(1) == 1, (x_TD.stride(), check_TD.stride())
    assert check_TD.shape == (T, D) and ids_TK.shape == scores_TK.shape == (T, K)
    config = pick_config(D, K, format is not None)
    signal, stage = ending(then)
    _publish[(max(1, cdiv(T, config.block_t)),)](
        x_TD,
        ids_TK,
        scores_TK,
        check_TD,
        None if half is None else tokens.own[half],
        ids.own,
        scores.own,
        header.own,
        call_1,
        check_skip_1,
        stop_1,
        T,
        kind,
        config_hash,
        x_TD.stride(0),
        check_TD.stride(0),
        *ids_TK.stride(),
        *scores_TK.stride(),
        *signal,
        D=D,
        K=K,
        E=num_experts,
        CHECK_IS_X=check_is_x,
        BLOCK_T=config.block_t,
        BLOCK_D=config.block_d,
        BLOCK_K=config.block_k,
        **stage,
        **packing,
        **config.options,
    )
