"""The oracle of the products of block-scaled operands, in plain PyTorch.

Operands are multiplied out and added up in FP64, where no scale overflows, and the sum is rounded to FP32.
"""

import torch
from torch import Tensor

from .formats import ROW_ALIGNMENT, Format, padded_scales
from .quantized import check_scaled_rows, check_scaled_wgrad
from .reference_formats import decode, from_blocked, scale_values, unpack_codes
from .shapes import cdiv


def _segments(row_start_P: Tensor, num_rows_L: Tensor):
    """(expert, its real rows) of every local expert, rows relative to the stage's first."""
    for e, (start, count) in enumerate(zip(row_start_P.tolist(), num_rows_L.tolist(), strict=False)):
        assert start % ROW_ALIGNMENT == 0, f"an expert starts at row {start}"
        yield e, slice(start, start + count)


def _exact(codes: Tensor, scales: Tensor, format: Format) -> Tensor:
    """FP64 values of codes [R, C] with scales [R, C / block]."""
    scales = scale_values(scales, format).double().repeat_interleave(format.block, dim=1)
    return decode(codes, format).double() * scales


def _scale_bytes(scales: Tensor, start_1: Tensor, first_row: int, num_rows: int) -> Tensor:
    """Rows of a padded scale matrix that begins at byte start_1 of its buffer."""
    cols = scales.shape[1]
    start = int(start_1[0]) + first_row * cols
    return scales.view(torch.uint8).view(-1)[start : start + num_rows * cols].view(num_rows, cols)


def _rows_operand(values, start_1, scales, scales_start_1, rows: slice, format: Format) -> Tensor:
    """FP64 [rows, C] of an operand with blocks along its rows."""
    R, start = rows.stop - rows.start, int(start_1[0])
    codes = unpack_codes(values[start + rows.start : start + rows.stop], format)
    blocked = _scale_bytes(scales, scales_start_1, rows.start, padded_scales(R, 1)[0])
    return _exact(codes, from_blocked(blocked, R, codes.shape[1] // format.block)[0], format)


def _columns_operand(values, start_1, scales, scales_start_1, rows: slice, format: Format) -> Tensor:
    """FP64 [C, rows] of an operand with blocks along its columns."""
    C, start = values.shape[1], int(start_1[0])
    codes = values.view(torch.uint8)[start + rows.start : start + rows.stop].T
    blocked = _scale_bytes(scales, scales_start_1, 0, padded_scales(C, 1)[0])
    first = rows.start // format.block
    natural = from_blocked(blocked, C, scales.shape[1])[0][:, first : first + cdiv(codes.shape[1], format.block)]
    scales = scale_values(natural, format).double().repeat_interleave(format.block, dim=1)
    return decode(codes, format).double() * scales[:, : codes.shape[1]]


def _scaled_rows(
    op,
    a,
    a_start_1,
    a_scales,
    a_scales_start_1,
    w,
    w_scales,
    out,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    a_outer_inv=None,
    a_outer_inv_start_1=None,
    w_outer_inv=None,
    stop_1,
):
    dgrad = op == "grouped_gemm_scaled_dgrad"
    outer = {"a_outer_inv": a_outer_inv, "w_outer_inv": w_outer_inv}
    tensors = (a, a_scales, w, w_scales, out, row_start_P, num_rows_L)
    L, N, K = check_scaled_rows(op, *tensors, format=format, dgrad=dgrad, **outer)
    if int(stop_1[0]) != 0:
        return
    scales_LWS = from_blocked(
        w_scales.view(torch.uint8), *((K, N // format.block) if dgrad else (N, K // format.block)), L
    )
    for e, rows in _segments(row_start_P, num_rows_L):
        codes = unpack_codes(w[e], format)
        weight = _exact(codes.T if dgrad else codes, scales_LWS[e], format)
        acc = (_rows_operand(a, a_start_1, a_scales, a_scales_start_1, rows, format) @ weight.T).float()
        if format.two_level:
            first = int(a_outer_inv_start_1[0])
            acc = acc * a_outer_inv[first + rows.start : first + rows.stop, None] * w_outer_inv[e]
        first = int(out_start_1[0])
        out[first + rows.start : first + rows.stop] = acc.to(out.dtype)


def grouped_gemm_scaled(
    a_values_XK,
    a_start_1,
    a_scales,
    a_scales_start_1,
    w_values_LNK,
    w_scales,
    out_XN,
    out_start_1,
    row_start_P,
    num_rows_L,
    *,
    format,
    a_outer_inv=None,
    a_outer_inv_start_1=None,
    w_outer_inv_L=None,
    stop_1,
    num_sms=None,
    rows_per_expert=None,
) -> None:
    """out[r] = bf16(a[r] @ w[e].T) for the rows r of each local expert e; NVFP4: bf16((acc * row_inv) * expert_inv).

    Args:    a_values_XK, a_scales: what quantize_rows(blocked=True) makes, inside larger buffers: row r of the stage is
             row a_start_1 + r, and its scales, seen as [any, align(K / block, 4)], begin at byte a_scales_start_1, a
             multiple of 16.  w_values_LNK, w_scales: of quantize_weights, blocks along K or square.
             out_XN: bf16, from row out_start_1 on.  row_start_P, num_rows_L: int32; expert e has num_rows_L[e] rows
             from row_start_P[e], a multiple of 128.
             a_outer_inv, w_outer_inv_L: FP32, of two-level formats: of the stage's row r, at a_outer_inv_start_1 + r,
             and of the expert.  All starts: int64 [1], device.  stop_1: nothing is touched when it is not 0.
    Rows of padding are neither read nor written: whoever reads out reads the real rows only.
    Raises:  ValueError for other dtypes, layouts or widths.
    """
    a, w, out = (a_values_XK, a_start_1, a_scales, a_scales_start_1), (w_values_LNK, w_scales), (out_XN, out_start_1)
    _scaled_rows(
        "grouped_gemm_scaled",
        *a,
        *w,
        *out,
        row_start_P,
        num_rows_L,
        format=format,
        a_outer_inv=a_outer_inv,
        a_outer_inv_start_1=a_outer_inv_start_1,
        w_outer_inv=w_outer_inv_L,
        stop_1=stop_1,
    )


def grouped_gemm_scaled_dgrad(
    dy_values_XN,
    dy_start_1,
    dy_scales,
    dy_scales_start_1,
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
    dy, w, out = (
        (dy_values_XN, dy_start_1, dy_scales, dy_scales_start_1),
        (w_values_LNK, w_transposed_scales),
        (out_XK, out_start_1),
    )
    _scaled_rows(
        "grouped_gemm_scaled_dgrad",
        *dy,
        *w,
        *out,
        row_start_P,
        num_rows_L,
        format=format,
        stop_1=stop_1,
    )


def grouped_gemm_scaled_wgrad(
    dy_values_XN,
    dy_start_1,
    dy_scales,
    dy_scales_start_1,
    x_values_XK,
    x_start_1,
    x_scales,
    x_scales_start_1,
    row_start_P,
    num_rows_L,
    out_LNK,
    *,
    format,
    accumulate,
    stop_1,
    num_sms=None,
) -> None:
    """out[e] = dy_e.T @ x_e over the expert's real rows, rounded once; added in FP32 to what is there if accumulating.

    Args:    dy, x: what quantize_columns(blocked=True) makes, inside larger buffers: values as in grouped_gemm_scaled;
             scales seen as [any, R / 32], R the rows that were quantised (by capacity), from a byte that is a multiple
             of 16.  out_LNK: bf16 or fp32, contiguous; an expert without rows gets zeros, or is left untouched when
             accumulating.
    Raises:  ValueError for other dtypes, layouts or widths, and for formats with two values in a byte.
    """
    tensors = (dy_values_XN, dy_scales, x_values_XK, x_scales, row_start_P, num_rows_L, out_LNK)
    check_scaled_wgrad("grouped_gemm_scaled_wgrad", *tensors, format=format)
    if int(stop_1[0]) != 0:
        return
    for e, rows in _segments(row_start_P, num_rows_L):
        if rows.start == rows.stop:
            if not accumulate:
                out_LNK[e] = 0
            continue
        dy_NR = _columns_operand(dy_values_XN, dy_start_1, dy_scales, dy_scales_start_1, rows, format)
        x_KR = _columns_operand(x_values_XK, x_start_1, x_scales, x_scales_start_1, rows, format)
        grad_NK = (dy_NR @ x_KR.T).float()
        out_LNK[e] = (out_LNK[e].float() + grad_NK if accumulate else grad_NK).to(out_LNK.dtype)
