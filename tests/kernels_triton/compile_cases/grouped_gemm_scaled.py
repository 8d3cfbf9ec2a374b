"""grouped_gemm_scaled: both ways to multiply; on sm_100 the tensor cores take the scales."""

from dataclasses import replace

from tests.compile_check import Case

from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_triton.grouped_gemm_scaled import (
    CONFIGS,
    WGRAD_SCALED_DOT,
    _format_options,
    _tile_options,
    step,
)

VALUES = {MXFP8_E4M3: "fp8e4nv", MXFP8_E5M2: "fp8e5", MXFP4: "u8", NVFP4: "u8"}
BLOCK_SCALED = {MXFP8_E4M3: "kind::mxf8f6f4.block_scale", MXFP8_E5M2: "kind::mxf8f6f4.block_scale"}
BLOCK_SCALED |= {MXFP4: "kind::mxf4.block_scale", NVFP4: "kind::mxf4nvf4.block_scale"}


def common(format, config) -> dict:
    """Fields of a Case and what depends on the way to multiply."""
    options = _tile_options(config, format)
    fields = {"num_warps": options.pop("num_warps"), "num_stages": options.pop("num_stages")}
    fields["constexprs"] = {**_format_options(format), **options}
    if config.scaled_dot:
        fields |= {"archs": (100,), "expect_sm100": (BLOCK_SCALED[format],)}
    else:
        fields |= {"archs": (90,), "expect_sm90": ("wgmma.mma_async",)}
    return fields | {"forbid": ("mma.sync",)}


def name(*words, config) -> str:
    return "-".join([*words, f"{config.block_m}x{config.block_n}", "scaled" if config.scaled_dot else "by hand"])


def rows_case(kind: str, format, config, block_l: int = 128) -> Case:
    fields = common(format, config)
    bytes_k = step(config, format) // format.values_per_byte
    dtype = VALUES[format]

    w_block = f"1, {bytes_k}, {config.block_n}" if kind == "dgrad" else f"1, {config.block_n}, {bytes_k}"
    outer = {"a_outer_inv_ptr": "*fp32", "a_outer_start_ptr": "*i64", "w_outer_inv_ptr": "*fp32"}
    constexprs = {} if format.two_level else dict.fromkeys(outer)
    constexprs |= {"DGRAD": kind == "dgrad", "TWO_LEVEL": format.two_level, "BLOCK_L": block_l}
    return Case(
        "grouped_gemm_scaled:_rows_times_weight_kernel",
        {
            "a_desc": f"tensordesc<{dtype}[{config.block_m}, {bytes_k}]>",
            "a_start_ptr": "*i64",
            "a_scales_ptr": "*u8",
            "a_scales_start_ptr": "*i64",
            "w_desc": f"tensordesc<{dtype}[{w_block}]>",
            "w_scales_ptr": "*u8",
            "out_ptr": "*bf16",
            "out_start_ptr": "*i64",
            "row_start_ptr": "*i32",
            "num_rows_ptr": "*i32",
            **(outer if format.two_level else {}),
            "stop_ptr": "*i64",
            "L": "i32",
            **dict.fromkeys(("all_columns", "first_column", "width", "out_stride", "contraction"), "i32"),
        },
        name=name(kind, format.name, config=config),
        aligned=("all_columns", "first_column", "width", "out_stride", "contraction"),
        unaligned=("a_start_ptr", "a_scales_start_ptr", "out_start_ptr", "a_outer_start_ptr", "stop_ptr"),
        expect=("cp.async.bulk.tensor.2d", "cp.async.bulk.tensor.3d", "st.global.v4.b32"),
        **fields | {"constexprs": fields["constexprs"] | constexprs},
    )


def wgrad_case(format, config, dtype: str, accumulate: bool) -> Case:
    fields = common(format, config)
    values = VALUES[format]

    def desc(rows: int, cols: int) -> str:
        return f"tensordesc<{values}[{rows}, {cols}]>"

    return Case(
        "grouped_gemm_scaled:_wgrad_kernel",
        {
            "dy_desc": desc(step(config, format), config.block_m),
            "dy_start_ptr": "*i64",
            "dy_scales_ptr": "*u8",
            "dy_scales_start_ptr": "*i64",
            "x_desc": desc(step(config, format), config.block_n),
            "x_start_ptr": "*i64",
            "x_scales_ptr": "*u8",
            "x_scales_start_ptr": "*i64",
            "out_ptr": f"*{dtype}",
            "row_start_ptr": "*i32",
            "num_rows_ptr": "*i32",
            "stop_ptr": "*i64",
            **dict.fromkeys(("L", "N", "K"), "i32"),
        },
        name=name("wgrad", format.name, dtype, "accumulate" if accumulate else "overwrite", config=config),
        aligned=("N", "K"),
        unaligned=("dy_start_ptr", "dy_scales_start_ptr", "x_start_ptr", "x_scales_start_ptr", "stop_ptr"),
        expect=("cp.async.bulk.tensor.2d", "st.global.v4.b32"),
        **fields | {"constexprs": fields["constexprs"] | {"ACCUMULATE": accumulate}},
    )


BY_HAND, DECODE, SCALED = CONFIGS[128, False], CONFIGS[64, False], CONFIGS[128, True]
CASES = (
    *(rows_case("forward", format, config) for format in (MXFP8_E4M3, NVFP4) for config in (BY_HAND, DECODE, SCALED)),
    *(rows_case("forward", format, config) for format in (MXFP8_E5M2, MXFP4) for config in (BY_HAND, SCALED)),
    *(
        rows_case("forward", format, replace(config, block_n=64))
        for format, config in ((NVFP4, BY_HAND), (NVFP4, SCALED))
    ),
    *(rows_case("dgrad", MXFP8_E4M3, config) for config in (BY_HAND, DECODE, SCALED)),
    wgrad_case(MXFP8_E4M3, BY_HAND, "bf16", True),
    wgrad_case(MXFP8_E4M3, BY_HAND, "fp32", False),
    wgrad_case(MXFP8_E5M2, BY_HAND, "fp32", True),
    wgrad_case(MXFP8_E4M3, WGRAD_SCALED_DOT, "bf16", False),
    wgrad_case(MXFP8_E4M3, WGRAD_SCALED_DOT, "fp32", True),
)
