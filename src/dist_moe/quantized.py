"""What the quantisers return, and the checks that all their implementations share."""

from typing import NamedTuple

import torch
from torch import Tensor

from .config import DIM_MULTIPLE
from .formats import ROW_ALIGNMENT, SCALE_ATOM, Format, packed_row_bytes, packed_row_width, padded_scales
from .shapes import align


class Quantized(NamedTuple):
    """Values with their scales; dtypes are the format's.

    values [R, C / values_per_byte].  scales: natural order, [R, C / block] of rows or [R / block, C] of columns; or
    blocked order, the padded matrix of the operand whose last dimension is what the product sums over:
    [align(R, 128), align(C / block, 4)] of rows or [align(C, 128), R / block] of columns.
    outer_inv_R: FP32 [R], what a two-level row was multiplied by, inverted; else None.
    Of columns in blocked order the matrix has rows_end / 32 columns, rows_end being the last word of row_start_P, and
    lies packed at the start of scales.
    """

    values: Tensor
    scales: Tensor
    outer_inv_R: Tensor | None


class Bundle(NamedTuple):
    """Quantised rows of one call inside the activation buffer; where they lie is decided on the device.

    values [X, C / values_per_byte], the whole buffer as rows of C values: row r of the call is row start_1 + r.
    Expanded, values are 16-bit floats, the format's expanded_dtype: code times block scale, so that scales and
    scales_start_1 are None. Of rows [X, align(C, expanded_group)], in every group in formats.expanded_order, zeros
    behind C; of columns [X, C] as they come.
    scales: the whole buffer in the dtype of scales, flat; the matrix of the call, always in blocked order, begins at
    byte scales_start_1, a multiple of 128. Of rows, blocks along a row, it is [rows, align(C / block, 4)], and of
    columns, blocks of 32 rows, [align(C, 128), rows / 32], where rows, with padding, is the last word of row_start_P.
    outer_inv: the whole buffer as FP32, flat, row r's at outer_inv_start_1 + r; None but for two-level formats.
    Starts: int64 [1], device.
    """

    values: Tensor
    start_1: Tensor
    scales: Tensor | None = None
    scales_start_1: Tensor | None = None
    outer_inv: Tensor | None = None
    outer_inv_start_1: Tensor | None = None

    @property
    def expanded(self) -> bool:
        return self.values.dtype in (torch.bfloat16, torch.float16)


class QuantizedWeights(NamedTuple):
    """Weights [G, N, K] of G experts, scales in blocked order, each expert padded to whole atoms by itself.

    values [G, N, K / values_per_byte].  scales [G * align(N, 128), align(K / block, 4)], for products that sum over K.
    transposed_scales [G * align(K, 128), align(N / block, 4)], for products that sum over N; None with blocks of a
    row.  outer_G, outer_inv_G: FP32 [G], of two-level formats, else None.
    """

    values: Tensor
    scales: Tensor
    transposed_scales: Tensor | None
    outer_G: Tensor | None
    outer_inv_G: Tensor | None


# Shape and dtype of every output, in the order of the fields; None where the format has none.
Layout = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


def rows_layout(R: int, C: int, format: Format, blocked: bool) -> Layout:
    scales = (R, C // format.block)
    return (
        ((R, C // format.values_per_byte), format.value_dtype),
        (padded_scales(*scales) if blocked else scales, format.scale_dtype),
        ((R,), torch.float32) if format.two_level else None,
    )


def columns_layout(R: int, C: int, format: Format, blocked: bool) -> Layout:
    num_blocks = R // format.block
    scales = padded_scales(C, num_blocks) if blocked else (num_blocks, C)
    return ((R, C), format.value_dtype), (scales, format.scale_dtype), None


def weights_layout(G: int, N: int, K: int, format: Format, square: bool) -> Layout:
    def scales(rows: int, cols: int):
        rows, cols = padded_scales(rows, cols // format.block)
        return (G * rows, cols), format.scale_dtype

    outer = ((G,), torch.float32) if format.two_level else None
    values = (G, N, K // format.values_per_byte), format.value_dtype
    return values, scales(N, K), scales(K, N) if square else None, outer, outer


def _empty(layout: Layout, device: torch.device) -> list[Tensor | None]:
    return [None if want is None else torch.empty(want[0], dtype=want[1], device=device) for want in layout]


def empty_weights(G: int, N: int, K: int, format: Format, square: bool, device: torch.device) -> QuantizedWeights:
    """Outputs of quantize_weights, not filled."""
    return QuantizedWeights(*_empty(weights_layout(G, N, K, format, square), device))


# Checks shared by every implementation of an op


def _check_source(op: str, name: str, x: Tensor, num_dims: int, num_widths: int) -> None:
    """Dtype and shape; the last num_widths dimensions hold blocks."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: {name} must be bfloat16 or float32, got {x.dtype}; call .bfloat16()")
    widths = x.shape[num_dims - num_widths :]
    if x.dim() != num_dims or any(size == 0 or size % DIM_MULTIPLE for size in widths):
        which = f"the last {num_widths} multiples" if num_widths > 1 else "the last a multiple"
        raise ValueError(
            f"{op}: {name} must have {num_dims} dimensions, {which} of {DIM_MULTIPLE}, got {list(x.shape)}"
        )


def _check_device(op: str, name: str, x: Tensor, other: Tensor) -> None:
    if other.device != x.device:
        raise ValueError(f"{op}: {name} must be on the device of the source, {x.device}, got {other.device}")


def _check_out(op: str, x: Tensor, out: Quantized | QuantizedWeights, layout: Layout) -> None:
    for name, found, want in zip(out._fields, out, layout, strict=True):
        if (found is None) != (want is None):
            raise ValueError(f"{op}: out.{name} must be {'None' if want is None else 'a tensor'}, got {found}")
        if want is None:
            continue
        shape, dtype = want
        _check_device(op, f"out.{name}", x, found)
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(f"{op}: out.{name} must be {dtype} {[*shape]}, got {found.dtype} {list(found.shape)}")
        if found.numel() and found.stride(-1) != 1:
            raise ValueError(f"{op}: out.{name} must have unit inner stride, got strides {found.stride()}")


def _check_blocked(op: str, *scales: Tensor | None) -> None:
    for scale in scales:
        if scale is not None and not scale.is_contiguous():
            raise ValueError(f"{op}: scales in blocked order must be contiguous, got strides {scale.stride()}")


def _check_experts(op: str, x_RC: Tensor, row_start_P: Tensor | None, num_rows_L: Tensor | None) -> None:
    if (row_start_P is None) != (num_rows_L is None):
        raise ValueError(f"{op}: row_start_P and num_rows_L come together")
    if row_start_P is None:
        return
    if x_RC.shape[0] % ROW_ALIGNMENT:
        raise ValueError(f"{op}: a buffer of experts' rows must have a multiple of {ROW_ALIGNMENT}, got {len(x_RC)}")
    for name, value in (("row_start_P", row_start_P), ("num_rows_L", num_rows_L)):
        _check_device(op, name, x_RC, value)
    _check_tables(op, row_start_P, num_rows_L, len(num_rows_L))


def _check_tables(op: str, row_start_P: Tensor, num_rows_L: Tensor, L: int) -> None:
    for name, value, size in (("row_start_P", row_start_P, L + 1), ("num_rows_L", num_rows_L, L)):
        if value.dtype != torch.int32 or value.shape != (size,) or not value.is_contiguous() or L == 0:
            raise ValueError(f"{op}: {name} must be contiguous int32 [{size}], got {value.dtype} {list(value.shape)}")


def _given_or_new(op: str, x: Tensor, out: Quantized | None, layout: Layout, blocked: bool) -> Quantized:
    if out is None:
        return Quantized(*_empty(layout, x.device))
    _check_out(op, x, out, layout)
    if blocked:
        _check_blocked(op, out.scales)
    return out


def rows_out(op: str, x_RC, format: Format, blocked: bool, row_start_P, num_rows_L, out: Quantized | None) -> Quantized:
    """Check the arguments of quantize_rows; its outputs, new ones unless given."""
    _check_source(op, "x_RC", x_RC, 2, 1)
    _check_experts(op, x_RC, row_start_P, num_rows_L)
    return _given_or_new(op, x_RC, out, rows_layout(*x_RC.shape, format, blocked), blocked)


def columns_out(op: str, x_RC, format: Format, blocked: bool, row_start_P, num_rows_L, out) -> Quantized:
    """Check the arguments of quantize_columns; its outputs, new ones unless given."""
    _check_source(op, "x_RC", x_RC, 2, 1)
    _check_experts(op, x_RC, row_start_P, num_rows_L)
    if row_start_P is None:
        raise ValueError(f"{op}: row_start_P and num_rows_L are needed: a block must not hold rows of two experts")
    if format.values_per_byte != 1:
        raise ValueError(f"{op}: {format.name} has two values of a row in a byte, columns need one; use MXFP8")
    return _given_or_new(op, x_RC, out, columns_layout(*x_RC.shape, format, blocked), blocked)


def weights_out(op: str, w_GNK, format: Format, square: bool, out: QuantizedWeights | None) -> QuantizedWeights:
    """Check the arguments of quantize_weights; its outputs, new ones unless given."""
    _check_source(op, "w_GNK", w_GNK, 3, 2)
    if square and format.values_per_byte != 1:
        raise ValueError(f"{op}: {format.name} has two values of a row in a byte, so its blocks lie along rows")
    if out is None:
        return empty_weights(*w_GNK.shape, format, square, w_GNK.device)
    _check_out(op, w_GNK, out, weights_layout(*w_GNK.shape, format, square))
    _check_blocked(op, *out[:3])
    return out


def packed_out(op: str, x_TD, format: Format, out_TB: Tensor | None) -> Tensor:
    """Check the arguments of pack_rows; its output, new unless given."""
    _check_source(op, "x_TD", x_TD, 2, 1)
    shape = (x_TD.shape[0], packed_row_bytes(format, x_TD.shape[1]))
    if out_TB is None:
        return torch.empty(shape, dtype=torch.uint8, device=x_TD.device)
    _check_device(op, "out_TB", x_TD, out_TB)
    if out_TB.dtype != torch.uint8 or out_TB.shape != shape or not out_TB.is_contiguous():
        raise ValueError(
            f"{op}: out_TB must be contiguous uint8 {list(shape)}, got {out_TB.dtype} {list(out_TB.shape)}"
        )
    return out_TB


# Bundles and products of them


def check_bundle(
    op: str, name: str, bundle: Bundle, format: Format, width: int, *, expanded_width: int | None = None
) -> None:
    """A bundle of rows, or columns, of `width` values, or, given expanded_width, expanded ones of that many; where it
    begins no check can read."""
    if width == 0 or width % DIM_MULTIPLE:
        raise ValueError(f"{op}: rows of {name} must have a multiple of {DIM_MULTIPLE} values, got {width}")
    values, scales = (format.value_dtype, (width // format.values_per_byte,)), (format.scale_dtype, ())
    if expanded_width is not None and bundle.expanded:
        values, scales = (format.expanded_dtype, (expanded_width,)), (None, "expanded values hold them")
    outer = (torch.float32, ()) if format.two_level else (None, f"{format.name} has no outer scales")
    for part, tensor, (dtype, size) in (
        ("values", bundle.values, values),
        ("scales", bundle.scales, scales),
        ("outer_inv", bundle.outer_inv, outer),
    ):
        if dtype is None:
            if tensor is not None:
                raise ValueError(f"{op}: {name}.{part} must be None, as {size}")
            continue
        fits = tensor is not None and tensor.dim() == 1 + len(size) and tensor.shape[1:] == size
        if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
            found = None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}"
            wanted = f"contiguous {dtype} [{', '.join(map(str, ('any', *size)))}]"
            raise ValueError(f"{op}: {name}.{part} must be {wanted}, got {found}")


def _check_one_byte(op: str, format: Format) -> None:
    if format.values_per_byte != 1:
        raise ValueError(f"{op}: {format.name} has no blocks along the dimension this sums over; use MXFP8")


def _check_window(op: str, out: Tensor, all_columns: int, columns: tuple[int, int] | None) -> tuple[int, int]:
    """First column and width of what is computed."""
    first, width = columns or (0, all_columns)
    half = SCALE_ATOM[0] // 2
    if first % half or first < 0 or width % DIM_MULTIPLE or width <= 0 or first + width > all_columns:
        wanted = f"(a multiple of {half}, a multiple of {DIM_MULTIPLE}) within {all_columns}"
        raise ValueError(f"{op}: columns must be {wanted}, got {columns}")
    fits = out.dim() == 2 and (out.shape[1] == width or (columns is not None and out.shape[1] > width))
    if out.dtype != torch.bfloat16 or not fits or not out.is_contiguous():
        wanted = f"[any, {width}{' or more' if columns else ''}]"
        raise ValueError(f"{op}: out must be contiguous bf16 {wanted}, got {out.dtype} {list(out.shape)}")
    return first, width


def check_scaled_rows(
    op: str,
    a: Bundle,
    w_values,
    w_scales,
    out,
    row_start_P,
    num_rows_L,
    *,
    format,
    dgrad,
    w_outer_inv,
    columns,
    expanded: bool | None = False,
) -> tuple[int, int, int, int, int]:
    """Check the arguments of grouped_gemm_scaled and its dgrad; L, N, K, first column and width of the result.

    expanded: whether the rows have to be; None: as they are.
    """
    if dgrad:
        _check_one_byte(op, format)
    V = format.values_per_byte
    fits = w_values.dim() == 3 and w_values.shape[1] % DIM_MULTIPLE == 0 and w_values.shape[2] * V % DIM_MULTIPLE == 0
    if w_values.dtype != format.value_dtype or not fits or not w_values.is_contiguous():
        wanted = f"contiguous {format.value_dtype} [L, N, K / {V}] with N and K multiples of {DIM_MULTIPLE}"
        raise ValueError(f"{op}: w_values_LNK must be {wanted}, got {w_values.dtype} {list(w_values.shape)}")
    L, N, K = w_values.shape[0], w_values.shape[1], w_values.shape[2] * V
    contraction, all_columns = (N, K) if dgrad else (K, N)
    may_be = None if dgrad or expanded is False else align(contraction, format.expanded_group)
    check_bundle(op, "dy" if dgrad else "a", a, format, contraction, expanded_width=may_be)
    if expanded and not a.expanded:
        raise ValueError(f"{op}: rows must be expanded, {format.expanded_dtype}, got {a.values.dtype}")
    rows, cols = padded_scales(all_columns, contraction // format.block)
    fits = w_scales.shape == (L * rows, cols) and w_scales.is_contiguous()
    if w_scales.dtype != format.scale_dtype or not fits:
        wanted = f"contiguous {format.scale_dtype} [{L * rows}, {cols}]"
        raise ValueError(f"{op}: w_scales must be {wanted}, got {w_scales.dtype} {list(w_scales.shape)}")
    if not format.two_level:
        if w_outer_inv is not None:
            raise ValueError(f"{op}: w_outer_inv_L must be None, as {format.name} has no outer scales")
    elif w_outer_inv is None or w_outer_inv.dtype != torch.float32 or w_outer_inv.shape != (L,):
        found = None if w_outer_inv is None else f"{w_outer_inv.dtype} {list(w_outer_inv.shape)}"
        raise ValueError(f"{op}: w_outer_inv_L must be fp32 [{L}], got {found}")
    _check_tables(op, row_start_P, num_rows_L, L)
    return L, N, K, *_check_window(op, out, all_columns, columns)


def check_scaled_wgrad(op: str, dy: Bundle, x: Bundle, row_start_P, num_rows_L, out, *, format) -> None:
    """Check the arguments of grouped_gemm_scaled_wgrad."""
    _check_one_byte(op, format)
    fits = out.dim() == 3 and out.shape[1] % DIM_MULTIPLE == 0 and out.shape[2] % DIM_MULTIPLE == 0
    if out.dtype not in (torch.bfloat16, torch.float32) or not fits or not out.is_contiguous():
        wanted = f"contiguous bf16 or fp32 [L, N, K] with N and K multiples of {DIM_MULTIPLE}"
        raise ValueError(f"{op}: out_LNK must be {wanted}, got {out.dtype} {list(out.shape)}")
    for name, bundle, width in (("dy", dy, out.shape[1]), ("x", x, out.shape[2])):
        check_bundle(op, name, bundle, format, width, expanded_width=width)
    if dy.expanded != x.expanded:
        raise ValueError(f"{op}: dy and x must both be expanded or neither, got {dy.values.dtype}, {x.values.dtype}")
    _check_tables(op, row_start_P, num_rows_L, out.shape[0])


# Producers of bundles


def check_producer(op: str, format: Format, rows: Bundle | None, columns: Bundle | None, width: int) -> None:
    """The bundles that an op makes, at least one, a chunk of columns at a time."""
    if format.two_level:
        raise ValueError(f"{op}: {format.name} has an outer scale over the whole row, which no chunk of it knows")
    if rows is None and columns is None:
        raise ValueError(f"{op}: rows and columns are both None, one must be given")
    if rows is not None:
        check_bundle(op, "rows", rows, format, width)
    if columns is not None:
        _check_one_byte(op, format)
        check_bundle(op, "columns", columns, format, width, expanded_width=width)


def check_staged(op: str, staged: Tensor, window: tuple[int, int], width: int) -> None:
    """Rows that hold columns first .. first + size of `width`, such that no other window has a part of an atom."""
    first, size = window
    end = first + size
    if first % SCALE_ATOM[0] or size % DIM_MULTIPLE or not 0 < size or (end % SCALE_ATOM[0] and end != width):
        wanted = f"(first, size) with ends at multiples of {SCALE_ATOM[0]} or at {width}"
        raise ValueError(f"{op}: window must be {wanted}, got {window}")
    if end > width:
        raise ValueError(f"{op}: window {window} ends behind the {width} columns of the bundles")
    fits = staged.dim() == 2 and staged.shape[1] >= size and staged.shape[1] % DIM_MULTIPLE == 0
    if staged.dtype != torch.bfloat16 or not fits or not staged.is_contiguous():
        wanted = f"contiguous bf16 [any, a multiple of {DIM_MULTIPLE} from {size} on]"
        raise ValueError(f"{op}: staged_XS must be {wanted}, got {staged.dtype} {list(staged.shape)}")


def check_wire_rows(op: str, tokens: Tensor, rows: Bundle, format: Format) -> int:
    """Packed rows uint8 [1, T_max, B] and the bundle they go to; the number of values in a row."""
    width = rows.values.shape[-1] * format.values_per_byte
    if rows.expanded:
        width = packed_row_width(format, tokens.shape[-1]) or rows.values.shape[-1]
    check_bundle(op, "rows", rows, format, width, expanded_width=align(width, format.expanded_group))
    num_bytes = packed_row_bytes(format, width)
    if tokens.dtype != torch.uint8 or tokens.dim() != 3 or tokens.shape[2] != num_bytes:
        wanted = f"uint8 [1, T_max, {num_bytes}] for rows of {width} values in {format.name}"
        raise ValueError(f"{op}: tokens must be {wanted}, got {tokens.dtype} {list(tokens.shape)}")
    return width


def check_swiglu_quantize(op: str, h1_X2F: Tensor, format: Format, rows: Bundle, row_start_P, num_rows_L) -> int:
    """Check the arguments of swiglu_quantize; F."""
    F = _half_width(op, h1_X2F)
    check_bundle(op, "rows", rows, format, F, expanded_width=align(F, format.expanded_group))
    _check_tables(op, row_start_P, num_rows_L, len(num_rows_L))
    return F


def check_swiglu_backward_quantize(
    op: str,
    h1_X2F: Tensor,
    g2_XF: Tensor,
    format: Format,
    g1_rows: Bundle,
    g1_columns: Bundle | None,
    h2_columns: Bundle | None,
) -> int:
    """Check the arguments of swiglu_backward_quantize; F."""
    _check_one_byte(op, format)
    F = _half_width(op, h1_X2F)
    _check_bf16_rows(op, "g2_XF", g2_XF, F)
    check_bundle(op, "g1_rows", g1_rows, format, 2 * F)
    for name, bundle, width in (("g1_columns", g1_columns, 2 * F), ("h2_columns", h2_columns, F)):
        if bundle is not None:
            check_bundle(op, name, bundle, format, width, expanded_width=width)
    return F


def _half_width(op: str, h1_X2F: Tensor) -> int:
    _check_bf16_rows(op, "h1_X2F", h1_X2F, h1_X2F.shape[-1])
    return h1_X2F.shape[1] // 2


def _check_bf16_rows(op: str, name: str, rows_XC: Tensor, width: int) -> None:
    if rows_XC.dtype != torch.bfloat16 or rows_XC.shape[1:] != (width,) or not rows_XC.is_contiguous():
        found = f"{rows_XC.dtype} {list(rows_XC.shape)}, strides {rows_XC.stride()}"
        raise ValueError(f"{op}: {name} must be contiguous bf16 [X, {width}], got {found}")
