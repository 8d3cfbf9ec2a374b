"""The oracle of the products of block-scaled operands, in plain PyTorch.

Operands are multiplied out and added up in FP64, where no scale overflows, and the sum is rounded to FP32.
"""

import torch
from torch import Tensor

from .formats import ROW_ALIGNMENT, Format, padded_scales
from .quantized import Bundle, check_scaled_rows, check_scaled_wgrad
from .reference_formats import decode, from_blocked, gather_rows, scale_values, unpack_codes
from .reference_swiglu import swiglu_quantize
from .shapes import cdiv


def _segments(row_start_P: Tensor, num_rows_L: Tensor):
    """(expert, its real rows) of every local expert, rows relative to the stage's first."""
    for e, (start, count) in enumerate(zip(row_start_P.tolist(), num_rows_L.tolist(), strict=False)):
        assert start % ROW_ALIGNMENT == 0, f"an expert starts at row {start}"
        yield e, slice(start, start + count)


def _exact(codes: Tensor, scales: Tensor, format: Format) -> Tensor:
    """FP64 values of codes [R, C] with scales [R, C / block]."""
    scales = scale_values(scales, format).double().repeat_interleave(format.block, dim=1)
    return decode(codes, format).double() * scales[:, : codes.shape[1]]


def _scale_bytes(bundle: Bundle, first_row: int, num_rows: int, cols: int) -> Tensor:
    """Whole rows of atoms of the bundle's scale matrix, which has `cols` columns."""
    start = int(bundle.scales_start_1[0]) + first_row * cols
    return bundle.scales.view(torch.uint8)[start : start + num_rows * cols].view(num_rows, cols)


def rows_operand(bundle: Bundle, rows: slice, format: Format) -> Tensor:
    """FP64 [rows, C] of an operand with blocks along its rows; expanded, C holds whole groups."""
    R, start = rows.stop - rows.start, int(bundle.start_1[0])
    if bundle.expanded:
        values = bundle.values[start + rows.start : start + rows.stop]
        return gather_rows(values, values.shape[1], format).double()
    codes = unpack_codes(bundle.values[start + rows.start : start + rows.stop], format)
    S = codes.shape[1] // format.block
    blocked = _scale_bytes(bundle, rows.start, *padded_scales(R, S))
    return _exact(codes, from_blocked(blocked, R, S)[0], format)


def columns_operand(bundle: Bundle, rows: slice, rows_end: int, format: Format) -> Tensor:
    """FP64 [C, rows] of an operand with blocks along its columns, or of an expanded one."""
    start = int(bundle.start_1[0])
    if bundle.expanded:
        return bundle.values[start + rows.start : start + rows.stop].T.double()
    codes = bundle.values.view(torch.uint8)[start + rows.start : start + rows.stop].T
    C, S, first = len(codes), rows_end // format.block, rows.start // format.block
    natural = from_blocked(_scale_bytes(bundle, 0, *padded_scales(C, S)), C, S)[0]
    return _exact(codes, natural[:, first : first + cdiv(codes.shape[1], format.block)], format)


def _scaled_rows(
    op, a, w, w_scales, out, out_start_1, row_start_P, num_rows_L, *, format, stop_1, w_outer_inv=None, columns=None
):
    dgrad = op == "grouped_gemm_scaled_dgrad"
    L, N, K, first, width = check_scaled_rows(
        op, a, w, w_scales, out, row_start_P, num_rows_L, format=format, dgrad=dgrad, w_outer_inv=w_outer_inv,
        columns=columns, expanded=None,
    )  # fmt: skip
    if int(stop_1[0]) != 0:
        return
    shape = (K, N // format.block) if dgrad else (N, K // format.block)
    scales_LWS = from_blocked(w_scales.view(torch.uint8), *shape, L)
    window, out_start = slice(first, first + width), int(out_start_1[0])
    for e, rows in _segments(row_start_P, num_rows_L):
        codes = unpack_codes(w[e], format)
        weight = _exact((codes.T if dgrad else codes)[window], scales_LWS[e, window], format)
        acc = (rows_operand(a, rows, format)[:, : weight.shape[1]] @ weight.T).float()
        if format.two_level:
            outer_start = int(a.outer_inv_start_1[0])
            acc = acc * a.outer_inv[outer_start + rows.start : outer_start + rows.stop, None] * w_outer_inv[e]
        out[out_start + rows.start : out_start + rows.stop, :width] = acc.to(out.dtype)


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
) -> None:
    """out[r] = bf16(a[r] @ w[e].T) for the rows r of each local expert e; NVFP4: bf16((acc * row_inv) * expert_inv).

    Args:    a: Bundle of rows, as quantize_rows(blocked=True) makes them.  w_values_LNK, w_scales: of quantize_weights,
             blocks along K or square.  out_XN: bf16, from row out_start_1 on.  row_start_P, num_rows_L: int32; expert e
             has num_rows_L[e] rows from row_start_P[e], a multiple of 128.  w_outer_inv_L: FP32, of two-level formats.
             columns: (first, width), the columns that are computed, into the first `width` of out_XN, which may be
             wider; first is a multiple of 64.  None: all.
             square: the weights' blocks are square, which an implementation may count on.
             All starts: int64 [1], device.  stop_1: nothing is touched when it is not 0.
    Rows of padding are neither read nor written: whoever reads out reads the real rows only.
    Raises:  ValueError for other dtypes, layouts or widths.
    """
    operands = (a, w_values_LNK, w_scales, out_XN, out_start_1, row_start_P, num_rows_L)
    options = {"format": format, "stop_1": stop_1, "w_outer_inv": w_outer_inv_L, "columns": columns}
    _scaled_rows("grouped_gemm_scaled", *operands, **options)


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
) -> None:
    """out[r] = bf16(dy[r] @ w[e]): blocks of dy along N, weights of square blocks with their transposed scales.

    Args, Raises: as in grouped_gemm_scaled; formats with one value a byte.
    """
    operands = (dy, w_values_LNK, w_transposed_scales, out_XK, out_start_1, row_start_P, num_rows_L)
    _scaled_rows("grouped_gemm_scaled_dgrad", *operands, format=format, stop_1=stop_1)


def grouped_gemm_scaled_wgrad(
    dy, x, row_start_P, num_rows_L, out_LNK, *, format, accumulate, stop_1, num_sms=None
) -> None:
    """out[e] = dy_e.T @ x_e over the expert's real rows, rounded once; added in FP32 to what is there if accumulating.

    Args:    dy, x: Bundles of columns, as quantize_columns(blocked=True) makes them, or both expanded.
             out_LNK: bf16 or fp32, contiguous; an expert without rows gets zeros, or keeps its own when accumulating.
    Raises:  ValueError for other dtypes, layouts or widths, and for formats with two values in a byte.
    """
    check_scaled_wgrad("grouped_gemm_scaled_wgrad", dy, x, row_start_P, num_rows_L, out_LNK, format=format)
    if int(stop_1[0]) != 0:
        return
    rows_end = int(row_start_P[-1])
    for e, rows in _segments(row_start_P, num_rows_L):
        if rows.start == rows.stop:
            if not accumulate:
                out_LNK[e] = 0
            continue
        grad_NK = (columns_operand(dy, rows, rows_end, format) @ columns_operand(x, rows, rows_end, format).T).float()
        out_LNK[e] = (out_LNK[e].float() + grad_NK if accumulate else grad_NK).to(out_LNK.dtype)


def grouped_gemm_scaled_swiglu(
    a,
    w13_values_L2FD,
    w13_scales,
    h2_rows,
    row_start_P,
    num_rows_L,
    *,
    format,
    activation,
    fast_math=False,
    h1_X2F=None,
    h1_start_1=None,
    stop_1,
    num_sms=None,
) -> None:
    """h2 = quantise(act(bf16(a[r] @ w13[e].T))): grouped_gemm_scaled and swiglu_quantize, with their rounding.

    Args:    as of both; h1_X2F, h1_start_1: bf16 gate and up; None: not stored.
    """
    rows_end = int(row_start_P[-1])
    h1, start_1 = h1_X2F, h1_start_1
    if h1 is None:
        h1 = a.values.new_zeros(rows_end, w13_values_L2FD.shape[1], dtype=torch.bfloat16)
        start_1 = torch.zeros_like(stop_1)
    operands, tables = (a, w13_values_L2FD, w13_scales), (row_start_P, num_rows_L)
    grouped_gemm_scaled(*operands, h1, start_1, *tables, format=format, stop_1=stop_1)
    options = {"format": format, "activation": activation, "fast_math": fast_math, "stop_1": stop_1}
    swiglu_quantize(h1, start_1, h2_rows, *tables, **options)
