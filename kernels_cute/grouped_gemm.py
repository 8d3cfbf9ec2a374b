"""The products of block-scaled operands on sm_100: what the op registry calls. Not executed on hardware.

Operands, results and errors are those of reference_products.grouped_gemm_scaled and its two siblings. Nothing here
waits for the device: tiles are chosen by what the host knows, rows are counted by the kernel.
"""

import functools

import torch
from torch import Tensor

from dist_moe.config import BlockScaledKernelConfig
from dist_moe.formats import SCALE_ATOM, Format
from dist_moe.quantized import Bundle, check_bundle, check_scaled_rows, check_scaled_wgrad
from dist_moe.shapes import Activation

from . import build
from .tiles import ARCHS, SCALE_UNIT, Product, Tile, pick, tile_of

BUFFERS = {"x_values", "x_scales", "w_values", "w_scales", "out", "h2_values", "h2_scales"}  # not words
ALPHA, LIMIT = 1.0, float("inf")  # of an activation that is not clamped: not read


def grouped_gemm_scaled(
    a: Bundle,
    w_values_LNK: Tensor,
    w_scales: Tensor,
    out_XN: Tensor,
    out_start_1: Tensor,
    row_start_P: Tensor,
    num_rows_L: Tensor,
    *,
    format: Format,
    w_outer_inv_L: Tensor | None = None,
    columns: tuple[int, int] | None = None,
    square: bool = False,
    stop_1: Tensor,
    num_sms: int | None = None,
    rows_per_expert: int | None = None,
    kernel_config: BlockScaledKernelConfig | None = None,
) -> None:
    """out[r] = bf16(a[r] @ w[e].T), NVFP4 times the outer scales; see reference_products.grouped_gemm_scaled.

    Args:    rows_per_expert: see tiles.pick, which kernel_config overrides.  num_sms: at most that many programs.
             columns: of whole atoms of scales: first a multiple of 128.
    Raises:  ValueError for other dtypes, layouts or widths, and for a kernel_config that is not built.
    """
    given = rows_arguments(
        "grouped_gemm_scaled", a, w_values_LNK, w_scales, out_XN, out_start_1, row_start_P, num_rows_L, format=format,
        w_outer_inv=w_outer_inv_L, columns=columns, stop_1=stop_1,
    )  # fmt: skip
    _launch(Product("forward", format), rows_per_expert, kernel_config, a.values.device, num_sms, given)


def grouped_gemm_scaled_dgrad(
    dy: Bundle,
    w_values_LNK: Tensor,
    w_transposed_scales: Tensor,
    out_XK: Tensor,
    out_start_1: Tensor,
    row_start_P: Tensor,
    num_rows_L: Tensor,
    *,
    format: Format,
    stop_1: Tensor,
    num_sms: int | None = None,
    rows_per_expert: int | None = None,
    kernel_config: BlockScaledKernelConfig | None = None,
) -> None:
    """out[r] = bf16(dy[r] @ w[e]); see reference_products.grouped_gemm_scaled_dgrad.

    Args, Raises: as in grouped_gemm_scaled.
    """
    given = rows_arguments(
        "grouped_gemm_scaled_dgrad", dy, w_values_LNK, w_transposed_scales, out_XK, out_start_1, row_start_P,
        num_rows_L, format=format, stop_1=stop_1,
    )  # fmt: skip
    _launch(Product("dgrad", format), rows_per_expert, kernel_config, dy.values.device, num_sms, given)


def grouped_gemm_scaled_wgrad(
    dy: Bundle,
    x: Bundle,
    row_start_P: Tensor,
    num_rows_L: Tensor,
    out_LNK: Tensor,
    *,
    format: Format,
    accumulate: bool,
    stop_1: Tensor,
    num_sms: int | None = None,
    kernel_config: BlockScaledKernelConfig | None = None,
) -> None:
    """out[e] = dy_e.T @ x_e, or added to it in FP32; see reference_products.grouped_gemm_scaled_wgrad.

    Whole blocks of 32 rows are multiplied: rows of padding in an expert's last block are zeros with finite scales, as
    quantize_columns makes them.
    """
    given = wgrad_arguments(dy, x, row_start_P, num_rows_L, out_LNK, format=format, stop_1=stop_1)
    product = Product("wgrad", format, out_bits=8 * out_LNK.element_size(), accumulate=accumulate)
    _launch(product, None, kernel_config, dy.values.device, num_sms, given)


def grouped_gemm_scaled_swiglu(
    a: Bundle,
    w13_values_L2FD: Tensor,
    w13_scales: Tensor,
    h2_rows: Bundle,
    row_start_P: Tensor,
    num_rows_L: Tensor,
    *,
    format: Format,
    activation: Activation,
    fast_math: bool = False,
    h1_X2F: Tensor | None = None,
    h1_start_1: Tensor | None = None,
    stop_1: Tensor,
    num_sms: int | None = None,
    kernel_config: BlockScaledKernelConfig | None = None,
) -> None:
    """h2 = quantise(act(bf16(a[r] @ w13[e].T))): grouped_gemm_scaled and swiglu_quantize in one, with their rounding.

    Args:    h2_rows: bundle of rows of F values; of rows of padding nothing is written.  format: MXFP8.
             h1_X2F, h1_start_1: bf16 gate and up, for a backward; None: not stored.
             fast_math: the approximate reciprocal in the sigmoid.
    Raises:  as grouped_gemm_scaled; ValueError when F is no multiple of 128, as the scales of up would begin inside
             an atom: use the two ops.
    """
    given = swiglu_arguments(
        a, w13_values_L2FD, w13_scales, h2_rows, row_start_P, num_rows_L, format=format, activation=activation,
        h1_X2F=h1_X2F, h1_start_1=h1_start_1, stop_1=stop_1,
    )  # fmt: skip
    flags = {"clamped": activation.clamped, "fast_math": fast_math, "stores_h1": h1_X2F is not None}
    _launch(Product("swiglu", format, **flags), None, kernel_config, a.values.device, num_sms, given)


# ---- arguments of the kernel ----------------------------------------------------------------------------------------


def rows_arguments(
    op, a, w_values, w_scales, out, out_start_1, row_start_P, num_rows_L, *, format, stop_1, w_outer_inv=None,
    columns=None,
) -> dict:  # fmt: skip
    """Of forward and dgrad, checked; tensors by the names of the kernel's pointers, and sizes."""
    dgrad = op == "grouped_gemm_scaled_dgrad"
    L, N, K, first, width = check_scaled_rows(
        op, a, w_values, w_scales, out, row_start_P, num_rows_L, format=format, dgrad=dgrad, w_outer_inv=w_outer_inv,
        columns=columns,
    )  # fmt: skip
    if first % SCALE_ATOM[0]:
        raise ValueError(f"{op}: columns must begin at a multiple of {SCALE_ATOM[0]} here, got {columns}")
    contraction, all_columns = (N, K) if dgrad else (K, N)
    _check_words(op, out, a, out_start_1=out_start_1, stop_1=stop_1)
    given = _rows_operand(a) | {"w_values": w_values, "w_scales": w_scales, "w_outer": w_outer_inv}
    given |= {"out": out, "out_start": out_start_1, "row_start": row_start_P, "num_rows": num_rows_L, "stop": stop_1}
    given |= {"w_rows": L, "w_units": w_scales.numel() // SCALE_UNIT, "contraction": contraction}
    given |= {"all_columns": all_columns, "first_column": first, "width": width, "out_stride": out.shape[1], "L": L}
    return given | {"alpha": ALPHA, "limit": LIMIT}


def wgrad_arguments(dy, x, row_start_P, num_rows_L, out_LNK, *, format, stop_1) -> dict:
    """Of wgrad, checked, as rows_arguments."""
    check_scaled_wgrad("grouped_gemm_scaled_wgrad", dy, x, row_start_P, num_rows_L, out_LNK, format=format)
    L, N, K = out_LNK.shape
    for bundle in (dy, x):
        _check_words("grouped_gemm_scaled_wgrad", out_LNK, bundle, stop_1=stop_1)
    given = _rows_operand(dy) | {"w_values": x.values, "w_scales": x.scales, "w_start": x.start_1}
    given |= {
        "w_scales_start": x.scales_start_1,
        "w_rows": x.values.shape[0],
        "w_units": x.scales.numel() // SCALE_UNIT,
    }
    given |= {"out": out_LNK, "row_start": row_start_P, "num_rows": num_rows_L, "stop": stop_1, "contraction": N}
    given |= {"all_columns": K, "first_column": 0, "width": K, "out_stride": K, "L": L}
    return given | {"alpha": ALPHA, "limit": LIMIT}


def swiglu_arguments(
    a, w13_values, w13_scales, h2_rows, row_start_P, num_rows_L, *, format, activation, h1_X2F, h1_start_1, stop_1
) -> dict:
    """Of SwiGLU, checked, as rows_arguments."""
    op = "grouped_gemm_scaled_swiglu"
    if format.values_per_byte != 1:
        raise ValueError(f"{op}: {format.name} has two values of a row in a byte; use MXFP8, or the two ops")
    F = w13_values.shape[1] // 2
    if w13_values.shape[1] % (2 * SCALE_ATOM[0]):
        raise ValueError(f"{op}: F must be a multiple of {SCALE_ATOM[0]}, got {F}; use the two ops")
    check_bundle(op, "h2_rows", h2_rows, format, F)
    _check_words(op, a.values, h2_rows)
    out, start = h1_X2F, h1_start_1
    if h1_X2F is None:  # not stored, and its first row not read
        out, start = a.values.new_empty(0, 2 * F, dtype=torch.bfloat16), stop_1
    given = rows_arguments(
        op, a, w13_values, w13_scales, out, start, row_start_P, num_rows_L, format=format, stop_1=stop_1
    )
    given |= {"h2_values": h2_rows.values, "h2_start": h2_rows.start_1, "h2_scales": h2_rows.scales}
    given |= {"h2_scales_start": h2_rows.scales_start_1, "width": F}
    return given | ({"alpha": activation.alpha, "limit": activation.limit} if activation.clamped else {})


def _rows_operand(a: Bundle) -> dict:
    given = {"x_values": a.values, "x_start": a.start_1, "x_scales": a.scales, "x_scales_start": a.scales_start_1}
    given |= {"x_outer": a.outer_inv, "x_outer_start": a.outer_inv_start_1}
    return given | {"x_rows": a.values.shape[0], "x_units": a.scales.numel() // SCALE_UNIT}


def _check_words(op: str, out: Tensor, bundle: Bundle, **words: Tensor) -> None:
    """What the kernel reads as one word of 8 bytes on the result's device, that of a bundle among them."""
    words |= {"start_1": bundle.start_1, "scales_start_1": bundle.scales_start_1}
    if bundle.outer_inv is not None:
        words["outer_inv_start_1"] = bundle.outer_inv_start_1
    for name, word in words.items():
        fits = isinstance(word, Tensor) and word.dtype == torch.int64 and word.shape == (1,)
        if not fits or word.device != out.device:
            found = f"{word.dtype} {list(word.shape)} on {word.device}" if isinstance(word, Tensor) else word
            raise ValueError(f"{op}: {name} must be int64 [1] on {out.device}, got {found}")


def addresses(given: dict) -> dict:
    """With each tensor as its address. Raises ValueError for a buffer that does not begin at a multiple of 64 bytes."""
    found = {}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            found[name] = 0 if value is None else value
            continue
        found[name] = value.data_ptr()
        if name in BUFFERS and found[name] % build.ALIGNMENT:
            raise ValueError(
                f"grouped_gemm_scaled: {name} must begin at a multiple of {build.ALIGNMENT} bytes, got "
                f"{found[name]:#x}; pass a tensor of its own, or a view that begins at one"
            )
    return found


# ---- launch ---------------------------------------------------------------------------------------------------------


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    """Architecture and number of SMs. Raises ValueError for a GPU that nothing is compiled for."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if capability not in ARCHS:
        built = " and ".join(f"{major}.{minor}" for major, minor in ARCHS)
        raise ValueError(f"written for compute capability {built}, found {properties.major}.{properties.minor}")
    return ARCHS[capability], properties.multi_processor_count


def _launch(
    product: Product,
    rows_per_expert: int | None,
    kernel_config: BlockScaledKernelConfig | None,
    device: torch.device,
    num_sms: int | None,
    given: dict,
) -> None:
    """Run a product on the current stream of its device, compiled on first use."""
    arch, sms = _device(device)
    tile = tile_for(product, rows_per_expert, kernel_config)
    programs = sms if num_sms is None else min(sms, num_sms)
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel = build.kernel_of(product, tile)
    build.compiled(product, tile, arch)(*build.arguments(kernel, stream, programs=programs, **addresses(given)))


def tile_for(product: Product, rows_per_expert: int | None, kernel_config: BlockScaledKernelConfig | None) -> Tile:
    """The tile that is asked for, else the one that tiles.pick gives."""
    if kernel_config is not None:
        return tile_of(product.op, product.format, kernel_config)
    return pick(product.op, product.format, rows_per_expert)
