"""Grouped GEMM on block-scaled operands over the real rows r of each local expert e, summed in FP32.

    forward  out[r] = bf16(a[r] @ w[e].T)         dgrad  out[r] = bf16(dy[r] @ w[e])
    wgrad    out[e] = round(dy_e.T @ x_e)         or     round(fp32(out[e]) + dy_e.T @ x_e)

An operand is values times scales, a scale for each block of the contraction; NVFP4 multiplies the sum by the inverse
outer scale of the row, then by that of the expert. Expert e has num_rows_L[e] rows from row_start_P[e], a multiple of
128; rows of padding are neither read for a result nor written.

Grid: persistent, one program an SM; the counts are read on the device. Reads and writes local memory only; no barrier
before or after it. Values come by TMA as in grouped_gemm, scales by plain loads from blocked order.

Three ways to multiply. With SCALED_DOT the tensor cores take the scales (sm_100). Without, E8M0 blocks are multiplied
as they are, one block of the contraction at a time, and each FP32 product by both scales as it is added: right for
every scale. Two-level operands become BF16 in registers, which is exact. The bits of an output depend on its own row
and column alone, not on what else lies in the tile.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_moe.formats import Format
from dist_moe.quantized import check_scaled_rows, check_scaled_wgrad
from dist_moe.shapes import next_power_of_2

from . import grouped_gemm
from ._device import begin, delay, is_interpreting, num_programs
from ._launch import launched
from ._scaled import ATOM_C, ATOM_R, ELEMENTS, powers
from ._scaled_operands import e2m1_values, row_tile, row_tile_ends, scale_codes, scaled_e2m1
from .grouped_gemm import GROUP_M, MAX_ROW, _store_tile, _tile_place

E2M1_UNIT = tl.constexpr(2.0**126)


@dataclass(frozen=True)
class Config(grouped_gemm.Config):
    """As of grouped_gemm, block_k in values; without scaled_dot the least of it and a block of an E8M0 format."""

    scaled_dot: bool = False  # the tensor cores multiply by the scales


# (rows of a tile, scaled_dot). Not tuned: chosen to compile without spills.
CONFIGS = {
    (128, False): Config(128, 128, 64, num_warps=8, num_stages=4),
    (64, False): Config(64, 128, 64, num_warps=8, num_stages=4),
    (128, True): Config(128, 128, 128, num_warps=4, num_stages=3, scaled_dot=True),
}
# With 4 warps Triton 3.9 spills.
WGRAD_SCALED_DOT = Config(128, 128, 128, num_warps=8, num_stages=3, scaled_dot=True)


def pick_config(kind: str, *, scaled_dot: bool, rows_per_expert: int | None = None) -> Config:
    """Tile of a product; kind is "forward", "dgrad" or "wgrad", rows_per_expert what an expert gets on average."""
    if kind == "wgrad" and scaled_dot:
        return WGRAD_SCALED_DOT
    decode = kind != "wgrad" and rows_per_expert is not None and rows_per_expert <= 64
    return CONFIGS[64 if decode and not scaled_dot else 128, scaled_dot]


@functools.cache
def has_scaled_dot(device: torch.device) -> bool:
    """Whether tensor cores take block scales: compute capability 10.x."""
    return not is_interpreting() and torch.cuda.get_device_capability(device)[0] == 10


def step(config: Config, format: Format) -> int:
    """Values of the contraction that are multiplied together."""
    return config.block_k if config.scaled_dot or format.two_level else format.block


# ---- rows times weight ---------------------------------------------------------------------------------------------


# Words of the place record are at odd and even words: no variant for each.
@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "a_start_ptr",
        "a_scales_start_ptr",
        "out_start_ptr",
        "stop_ptr",
        "a_outer_start_ptr",
    ]
)
def _rows_times_weight_kernel(
    a_desc,  # [X, contraction] values
    a_start_ptr,  # [1] i64
    a_scales_ptr,  # bytes
    a_scales_start_ptr,  # [1] i64
    w_desc,  # [L, N, K] values
    w_scales_ptr,  # bytes, [L, whole atoms]
    out_ptr,  # [X, out_stride] bf16
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
    out_stride,
    contraction,
    DGRAD: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Forward (w transposed) and dgrad; program p takes output tiles p, p + programs, ...

    Example: row_start [0, 128, 256], num_rows [1, 2], a[r] = 1, 2, 3 for rows 0, 128, 129 in each of K = 32 columns,
    w[0] = 1 and w[1] = 2 everywhere: these rows of out are 32, 128 and 192, the others as they were.
    """
    begin()
    E2M1: tl.constexpr = ELEMENT == "e2m1"
    PER_BYTE: tl.constexpr = 2 if E2M1 else 1
    NUM_SCALES: tl.constexpr = BLOCK_K // BLOCK
    if tl.load(stop_ptr) != 0:
        return
    a_start = tl.load(a_start_ptr).to(tl.int32)
    a_scales_ptr += tl.multiple_of(tl.load(a_scales_start_ptr), 16)
    out_ptr += tl.load(out_start_ptr) * out_stride
    if TWO_LEVEL:
        a_outer_inv_ptr += tl.load(a_outer_start_ptr)
    padded_S = tl.cdiv(contraction // BLOCK, ATOM_C) * ATOM_C
    scales_per_expert = (tl.cdiv(all_columns, ATOM_R) * ATOM_R).to(tl.int64) * padded_S
    ends_L = row_tile_ends(num_rows_ptr, L, BLOCK_M, BLOCK_L)
    num_tiles_m = tl.max(ends_L)
    num_tiles_n = tl.cdiv(width, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0)):
        delay(tile)
        tile_m, tile_n = _tile_place(tile, num_tiles_m, num_tiles_n, GROUP_M)
        expert, row, row_end = row_tile(ends_L, tile_m, row_start_ptr, num_rows_ptr, BLOCK_M)
        row = tl.multiple_of(row, BLOCK_M)
        col = first_column + tile_n * BLOCK_N
        expert_scales_ptr = w_scales_ptr + expert * scales_per_expert
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, contraction, BLOCK_K):
            a_codes = scale_codes(a_scales_ptr, row, k // BLOCK, padded_S, BLOCK_M, NUM_SCALES)
            w_codes = scale_codes(expert_scales_ptr, col, k // BLOCK, padded_S, BLOCK_N, NUM_SCALES)
            a = a_desc.load([a_start + row, k // PER_BYTE])
            if DGRAD:
                w = w_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N).T
            else:
                w = w_desc.load([expert, col, k // PER_BYTE]).reshape(BLOCK_N, BLOCK_K // PER_BYTE)
            if SCALED_DOT:
                if TWO_LEVEL:
                    a_codes = a_codes.to(tl.float8e4nv, bitcast=True)
                    w_codes = w_codes.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot_scaled(a, a_codes, ELEMENT, w.T, w_codes, ELEMENT, acc)
            elif TWO_LEVEL:
                w = scaled_e2m1(w, w_codes, BLOCK_N, BLOCK_K)
                acc = tl.dot(scaled_e2m1(a, a_codes, BLOCK_M, BLOCK_K), w.T, acc)
            else:
                if E2M1:
                    a = e2m1_values(a, BLOCK_M, BLOCK_K) * E2M1_UNIT
                    w = e2m1_values(w, BLOCK_N, BLOCK_K) * E2M1_UNIT
                acc += tl.dot(a, w.T) * (powers(a_codes) * tl.trans(powers(w_codes)))
        if TWO_LEVEL:
            rows = row + tl.arange(0, BLOCK_M)
            if not SCALED_DOT:
                acc *= 65536.0  # both operands are 2^-8 times what they stand for
            acc *= tl.load(a_outer_inv_ptr + rows, mask=rows < row_end, other=0.0)[:, None]
            acc *= tl.load(w_outer_inv_ptr + expert)
        out_col = col - first_column
        _store_tile(out_ptr, acc, row, out_col, row_end, width, out_stride, False)


# ---- weight gradients ----------------------------------------------------------------------------------------------


@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "dy_start_ptr",
        "dy_scales_start_ptr",
        "x_start_ptr",
        "x_scales_start_ptr",
        "stop_ptr",
    ]
)
def _wgrad_kernel(
    dy_desc,  # [X, N] values
    dy_start_ptr,  # [1] i64
    dy_scales_ptr,  # bytes
    dy_scales_start_ptr,  # [1] i64
    x_desc,  # [X, K] values
    x_start_ptr,  # [1] i64
    x_scales_ptr,  # bytes
    x_scales_start_ptr,  # [1] i64
    out_ptr,  # [L, N, K] bf16 or fp32
    row_start_ptr,  # [L + 1] i32
    num_rows_ptr,  # [L] i32
    stop_ptr,  # [1] i64
    L,
    N,
    K,
    ACCUMULATE: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Weight gradients; program p takes tiles p, p + programs, ... of the [L, N, K] outputs.

    Rows of padding are zeros with finite scales, so that whole steps may be read.
    Example: row_start [0, 128, 128, 256], num_rows [1, 0, 2], dy = 1, 2, 3 in rows 0, 128, 129 and x = 1: out is 1,
    0 (untouched when accumulating) and 2 + 3 = 5.
    """
    begin()
    NUM_SCALES: tl.constexpr = BLOCK_K // BLOCK
    if tl.load(stop_ptr) != 0:
        return
    dy_start = tl.load(dy_start_ptr).to(tl.int32)
    x_start = tl.load(x_start_ptr).to(tl.int32)
    dy_scales_ptr += tl.multiple_of(tl.load(dy_scales_start_ptr), 16)
    x_scales_ptr += tl.multiple_of(tl.load(x_scales_start_ptr), 16)
    scale_cols = tl.load(row_start_ptr + L) // BLOCK
    num_tiles_m = tl.cdiv(N, BLOCK_M)
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    tiles_per_expert = num_tiles_m * num_tiles_n
    for tile in tl.range(tl.program_id(0), L * tiles_per_expert, tl.num_programs(0)):
        delay(tile)
        expert = tile // tiles_per_expert
        tile_m, tile_n = _tile_place(tile % tiles_per_expert, num_tiles_m, num_tiles_n, GROUP_M)
        n = tile_m * BLOCK_M
        k = tile_n * BLOCK_N
        row_start = tl.multiple_of(tl.load(row_start_ptr + expert), 128)
        row_end = row_start + tl.load(num_rows_ptr + expert)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(row_start, row_end, BLOCK_K):
            dy_codes = scale_codes(dy_scales_ptr, n, row // BLOCK, scale_cols, BLOCK_M, NUM_SCALES)
            x_codes = scale_codes(x_scales_ptr, k, row // BLOCK, scale_cols, BLOCK_N, NUM_SCALES)
            dy = dy_desc.load([dy_start + row, n])
            x = x_desc.load([x_start + row, k])
            if SCALED_DOT:
                acc = tl.dot_scaled(dy.T, dy_codes, ELEMENT, x, x_codes, ELEMENT, acc)
            else:
                acc += tl.dot(dy.T, x) * (powers(dy_codes) * tl.trans(powers(x_codes)))
        n_end = N
        if ACCUMULATE:
            n_end = tl.where(row_start < row_end, N, 0)  # nothing is touched without rows
        _store_tile(out_ptr + expert.to(tl.int64) * N * K, acc, n, k, n_end, K, K, ACCUMULATE)


# ---- launchers -----------------------------------------------------------------------------------------------------


def _format_options(format: Format) -> dict:
    return {"ELEMENT": ELEMENTS[format.value_dtype], "BLOCK": format.block}


def _tile_options(config: Config, format: Format) -> dict:
    return {
        "SCALED_DOT": config.scaled_dot,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": step(config, format),
        "GROUP_M": GROUP_M,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _bytes(tensor: Tensor) -> Tensor:
    """For dtypes that Triton does not know."""
    return tensor.view(torch.uint8)


def _descriptor(op: str, values: Tensor, format: Format, block: list[int]) -> TensorDescriptor:
    assert values.shape[-2] <= MAX_ROW, f"{op}: more rows than a TMA coordinate can name"
    values = _bytes(values) if format.values_per_byte == 2 else values
    return TensorDescriptor(values, list(values.shape), list(values.stride()), block)


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
    format,
    stop_1,
    num_sms,
    rows_per_expert,
    config,
    w_outer_inv=None,
    columns=None,
) -> None:
    dgrad = op == "grouped_gemm_scaled_dgrad"
    L, N, K, first, width = check_scaled_rows(
        op, a, w, w_scales, out, row_start_P, num_rows_L, format=format, dgrad=dgrad, w_outer_inv=w_outer_inv,
        columns=columns,
    )  # fmt: skip
    contraction, all_columns = (N, K) if dgrad else (K, N)
    device = a.values.device
    if config is None:
        kind = "dgrad" if dgrad else "forward"
        config = pick_config(kind, scaled_dot=has_scaled_dot(device), rows_per_expert=rows_per_expert)
    if first % config.block_n:  # a tile's scales lie in one row of atoms
        config = replace(config, block_n=ATOM_R.value // 2)
    C, bytes_k = config.block_n, step(config, format) // format.values_per_byte
    _rows_times_weight_kernel[(num_programs(device, num_sms),)](
        _descriptor(op, a.values, format, [config.block_m, bytes_k]),
        a.start_1,
        _bytes(a.scales),
        a.scales_start_1,
        _descriptor(op, w, format, [1, bytes_k, C] if dgrad else [1, C, bytes_k]),
        _bytes(w_scales),
        out,
        out_start_1,
        row_start_P,
        num_rows_L,
        a.outer_inv,
        a.outer_inv_start_1,
        w_outer_inv,
        stop_1,
        L,
        all_columns,
        first,
        width,
        out.shape[1],
        contraction,
        DGRAD=dgrad,
        TWO_LEVEL=format.two_level,
        **_format_options(format),
        BLOCK_L=max(32, next_power_of_2(L)),  # few variants to compile
        **_tile_options(config, format),
    )


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
    """out[r] = bf16(a[r] @ w[e].T), NVFP4 times the outer scales; see reference_products.grouped_gemm_scaled.

    Args:    rows_per_expert: see pick_config, which config overrides.  num_sms: at most that many programs.
    Raises:  ValueError for other dtypes, layouts or widths.
    """
    operands = (a, w_values_LNK, w_scales, out_XN, out_start_1, row_start_P, num_rows_L)
    options = {"format": format, "stop_1": stop_1, "w_outer_inv": w_outer_inv_L, "columns": columns}
    options |= {"num_sms": num_sms, "rows_per_expert": rows_per_expert, "config": config}
    _rows_times_weight("grouped_gemm_scaled", *operands, **options)


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
    """out[r] = bf16(dy[r] @ w[e]); see reference_products.grouped_gemm_scaled_dgrad, and grouped_gemm_scaled."""
    operands = (dy, w_values_LNK, w_transposed_scales, out_XK, out_start_1, row_start_P, num_rows_L)
    options = {"num_sms": num_sms, "rows_per_expert": rows_per_expert, "config": config}
    _rows_times_weight("grouped_gemm_scaled_dgrad", *operands, format=format, stop_1=stop_1, **options)


def grouped_gemm_scaled_wgrad(
    dy, x, row_start_P, num_rows_L, out_LNK, *, format, accumulate, stop_1, num_sms=None, config=None
) -> None:
    """out[e] = dy_e.T @ x_e, rounded once; see reference_products.grouped_gemm_scaled_wgrad.

    Expanded columns are multiplied by grouped_gemm, whole experts with their padding, which is zeros.
    Args:    num_sms, config: as in grouped_gemm_scaled.
    Raises:  ValueError for other dtypes, layouts or widths, and for formats with two values in a byte.
    """
    op = "grouped_gemm_scaled_wgrad"
    check_scaled_wgrad(op, dy, x, row_start_P, num_rows_L, out_LNK, format=format)
    if dy.expanded:
        operands = (dy.values, dy.start_1, x.values, x.start_1, row_start_P, out_LNK)
        how = {"accumulate": accumulate, "stop_1": stop_1, "num_sms": num_sms, "config": config}
        grouped_gemm.grouped_gemm_wgrad(*operands, **how)
        return
    L, N, K = out_LNK.shape
    config = config or pick_config("wgrad", scaled_dot=has_scaled_dot(out_LNK.device))
    rows = step(config, format)
    _wgrad_kernel[(num_programs(out_LNK.device, num_sms),)](
        _descriptor(op, dy.values, format, [rows, config.block_m]),
        dy.start_1,
        _bytes(dy.scales),
        dy.scales_start_1,
        _descriptor(op, x.values, format, [rows, config.block_n]),
        x.start_1,
        _bytes(x.scales),
        x.scales_start_1,
        out_LNK,
        row_start_P,
        num_rows_L,
        stop_1,
        L,
        N,
        K,
        ACCUMULATE=accumulate,
        **_format_options(format),
        **_tile_options(config, format),
    )
