"""What the oracles share: words of the device, rows inside larger buffers, and quantised rows put into bundles."""

import torch
from torch import Tensor

from . import shapes
from .formats import SCALE_ATOM, Format
from .quantized import Bundle, Quantized
from .reference_formats import (
    dequantize_columns,
    expand_rows,
    from_blocked,
    quantize_columns,
    quantize_rows,
    to_blocked,
)
from .shapes import align


def stopped(stop_1: Tensor) -> bool:
    return int(stop_1[0]) != 0


def set_fault(fault_F: Tensor, code: int, rank: int, *details: int) -> None:
    """Record a fault unless an earlier one is there."""
    if int(fault_F[0]) == 0:
        fault_F[1 : 1 + len(details)] = torch.tensor(details, dtype=torch.int64)
        fault_F[0] = code | rank << shapes.FAULT_RANK_SHIFT


def rows_of(view_XC: Tensor, start_1: Tensor, row_start_P: Tensor) -> Tensor:
    start = int(start_1[0])
    return view_XC[start : start + int(row_start_P[-1])]


def real_rows(row_start_P: Tensor, num_rows_L: Tensor) -> Tensor:
    """bool [R]: which of all rows are not padding, which comes last in an expert."""
    real_R = torch.zeros(int(row_start_P[-1]), dtype=torch.bool, device=row_start_P.device)
    for start, count in zip(row_start_P.tolist(), num_rows_L.tolist(), strict=False):
        real_R[start : start + count] = True
    return real_R


def _scale_matrix(bundle: Bundle, num_rows: int, num_cols: int) -> Tensor:
    """The bytes of a call's blocked scales, as the padded shape says."""
    start = int(bundle.scales_start_1[0])
    return bundle.scales.view(torch.uint8)[start : start + num_rows * num_cols].view(num_rows, num_cols)


def put_quantized(bundle: Bundle, found: Quantized, real_R: Tensor, format: Format, first: int = 0) -> None:
    """Real rows of `found`, scales in natural order, into a bundle from column `first` on; others stay as they are.

    Columns of scales that only fill an atom become 0. An expanded bundle takes whole rows.
    """
    if bundle.expanded:
        start, real = int(bundle.start_1[0]), real_R.nonzero().flatten()
        bundle.values[start + real] = expand_rows(found, format)[real]
        _put_outer(bundle, found, real, format)
        return
    values, real = bundle.values.view(torch.uint8), real_R.nonzero().flatten()
    (R, C), S, atom = found.values.shape, found.scales.shape[1], SCALE_ATOM[1]
    byte, s = first // format.values_per_byte, first // format.block
    values[int(bundle.start_1[0]) + real, byte : byte + C] = found.values.view(torch.uint8)[real]
    matrix = _scale_matrix(bundle, R, align(bundle.values.shape[1] * format.values_per_byte // format.block, atom))
    natural = from_blocked(matrix, *matrix.shape)[0].clone()
    natural[real, s : align(s + S, atom)] = 0
    natural[real, s : s + S] = found.scales.view(torch.uint8)[real]
    matrix.copy_(to_blocked(natural[None]))
    _put_outer(bundle, found, real, format)


def _put_outer(bundle: Bundle, found: Quantized, real: Tensor, format: Format) -> None:
    if format.two_level:
        bundle.outer_inv[int(bundle.outer_inv_start_1[0]) + real] = found.outer_inv_R[real]


def put_rows(bundle: Bundle, v_RC: Tensor, real_R: Tensor, format: Format, first: int = 0) -> None:
    """Quantise real rows into columns first .. first + C of a bundle; those of padding stay as they are."""
    if len(v_RC):
        found = quantize_rows(torch.where(real_R[:, None], v_RC, 0.0), format=format)
        put_quantized(bundle, found, real_R, format, first)


def put_columns(bundle: Bundle | None, v_RC: Tensor, real_R: Tensor, format: Format, first: int = 0) -> None:
    """Quantise columns into columns first .. first + C of a bundle, if there is one; rows of padding are zeros.

    Expanded, they are multiplied out again. Experts begin at multiples of 128, so that the rows may count as those of
    one.
    """
    R, C = v_RC.shape
    if bundle is None or R == 0:
        return
    ends = torch.tensor([0, R], dtype=torch.int32, device=v_RC.device)
    v = torch.where(real_R[:, None], v_RC, 0.0)
    found = quantize_columns(v, format=format, blocked=True, row_start_P=ends, num_rows_L=ends[1:])
    start = int(bundle.start_1[0])
    if bundle.expanded:
        expanded = dequantize_columns(found, format=format, blocked=True)
        bundle.values[start : start + R, first : first + C] = expanded.to(bundle.values.dtype)
        return
    bundle.values.view(torch.uint8)[start : start + R, first : first + C] = found.values.view(torch.uint8)
    scales = found.scales.view(torch.uint8).flatten()
    start = int(bundle.scales_start_1[0]) + first * (R // format.block)  # the atoms of a window lie together
    bundle.scales.view(torch.uint8)[start : start + len(scales)] = scales
