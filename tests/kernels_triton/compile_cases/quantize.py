"""quantize: every rounding is asked for, wide accesses, e4m3 and e5m2 by the conversion that saturates."""

from tests.compile_check import Case

from dist_moe import formats
from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_triton._scaled import format_options
from dist_moe.kernels_triton.quantize import pick_config

CONVERSIONS = {MXFP8_E4M3: ("cvt.rn.satfinite.e4m3x2.f32",), MXFP8_E5M2: ("cvt.rn.satfinite.e5m2x2.f32",)}
INEXACT = ("fma.rn.f32", ".ftz", "div.approx", "div.full", "rcp.approx", "ex2.approx")
WIDTH = 7168


def sizes(op: str, width: int = 0, two_level: bool = False) -> dict:
    config = pick_config(op, width, two_level)
    return {"BLOCK_R": config.block_r, "BLOCK_C": config.block_c}


def options(op: str, width: int = 0, two_level: bool = False) -> dict:
    """Fields of a Case."""
    config = pick_config(op, width, two_level)
    return {"num_warps": config.num_warps, "options": {k: v for k, v in config.options.items() if k != "num_warps"}}


def rows(name: str, format, x: str, blocked: bool, num_experts: int = 0, width: int = WIDTH) -> Case:
    experts = {"row_start_ptr": "*i32", "num_rows_ptr": "*i32"} if num_experts else {}
    return Case(
        "quantize:_quantize_rows",
        {
            "x_ptr": x,
            "values_ptr": "*u8",
            "scales_ptr": "*u8",
            **({"outer_inv_ptr": "*fp32"} if format.two_level else {}),
            **experts,
            **dict.fromkeys(("R", "C", "L", "x_stride_r", "values_stride", "scales_stride"), "i32"),
        },
        {
            "x_stride_c": 1,
            **({} if format.two_level else {"outer_inv_ptr": None}),
            **({} if experts else {"row_start_ptr": None, "num_rows_ptr": None}),
            **format_options(format),
            "VALUES_PER_BYTE": format.values_per_byte,
            "TWO_LEVEL": format.two_level,
            "EPS": formats.ROW_EPS,
            "BLOCKED": blocked,
            "BLOCK_L": num_experts,
            **sizes("quantize_rows", width, format.two_level),
            "PARTS": pick_config("quantize_rows", width, format.two_level).parts,
        },
        name=name,
        **options("quantize_rows", width, format.two_level),
        aligned=("C", "x_stride_r", "values_stride"),
        unaligned=("scales_ptr", "row_start_ptr", "num_rows_ptr"),
        expect=("ld.global.v4.b32", *CONVERSIONS.get(format, ()), *(("div.rn.f32",) if format.two_level else ())),
        forbid=INEXACT,
    )


COLUMNS = tuple(
    Case(
        "quantize:_quantize_columns",
        {
            "x_ptr": "*bf16",
            "values_ptr": "*u8",
            "scales_ptr": "*u8",
            "row_start_ptr": "*i32",
            "num_rows_ptr": "*i32",
            **dict.fromkeys(("R", "C", "L", "x_stride_r", "values_stride", "scales_stride"), "i32"),
        },
        {
            "x_stride_c": 1,
            **format_options(format),
            "BLOCKED": blocked,
            "BLOCK_L": 128,
            **sizes("quantize_columns"),
        },
        name=f"{format.name}{' blocked' if blocked else ''}",
        **options("quantize_columns"),
        aligned=("C", "x_stride_r", "values_stride", "scales_stride"),
        unaligned=("row_start_ptr", "num_rows_ptr"),
        expect=("ld.global.v4.b32", *CONVERSIONS[format]),
        forbid=INEXACT,
    )
    for format, blocked in ((MXFP8_E4M3, False), (MXFP8_E4M3, True), (MXFP8_E5M2, False))
)

SIZES = dict.fromkeys(("N", "K", "stride_g", "stride_n"), "i32")
WEIGHTS = tuple(
    Case(
        "quantize:_quantize_weights",
        {
            "w_ptr": "*bf16",
            "values_ptr": "*u8",
            "scales_ptr": "*u8",
            **({"transposed_scales_ptr": "*u8"} if square else {}),
            **({"amax_ptr": "*i32", "outer_ptr": "*fp32", "outer_inv_ptr": "*fp32"} if format.two_level else {}),
            **SIZES,
        },
        {
            "stride_k": 1,
            **({} if square else {"transposed_scales_ptr": None}),
            **({} if format.two_level else {"amax_ptr": None, "outer_ptr": None, "outer_inv_ptr": None}),
            **format_options(format),
            "VALUES_PER_BYTE": format.values_per_byte,
            "TWO_LEVEL": format.two_level,
            "EPS": formats.WEIGHT_EPS,
            "SQUARE": square,
            **sizes("quantize_weights"),
        },
        name=f"{format.name}{' square' if square else ''}",
        **options("quantize_weights", two_level=format.two_level),
        aligned=tuple(SIZES),
        expect=("ld.global.v4.b32", *CONVERSIONS.get(format, ())),
        forbid=INEXACT,
    )
    for format, square in ((MXFP8_E4M3, True), (MXFP8_E4M3, False), (MXFP4, False), (NVFP4, False))
)

CASES = (
    rows("e4m3", MXFP8_E4M3, "*bf16", blocked=False),
    rows("e4m3 blocked, experts", MXFP8_E4M3, "*bf16", blocked=True, num_experts=128),
    rows("e4m3 of fp32, narrow", MXFP8_E4M3, "*fp32", blocked=True, width=96),
    rows("e5m2 blocked, experts", MXFP8_E5M2, "*bf16", blocked=True, num_experts=128),
    rows("mxfp4", MXFP4, "*bf16", blocked=False),
    *(rows(f"nvfp4 {width}", NVFP4, "*bf16", blocked=False, width=width) for width in (96, 2048, 4096, WIDTH, 16384)),
    rows("nvfp4 blocked of fp32", NVFP4, "*fp32", blocked=True, num_experts=128),
    rows("nvfp4 blocked of long fp32", NVFP4, "*fp32", blocked=True, num_experts=128, width=16384),
    *COLUMNS,
    *WEIGHTS,
    Case(
        "quantize:_weight_amax",
        {"w_ptr": "*bf16", "amax_ptr": "*i32", **SIZES},
        {"stride_k": 1, **sizes("quantize_weights")},
        **options("quantize_weights", two_level=True),
        aligned=tuple(SIZES),
        expect=("ld.global.v4.b32", "max.s32"),
    ),
)
