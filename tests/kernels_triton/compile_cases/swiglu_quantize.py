"""swiglu_quantize: 16-byte loads, no fused multiply-add, exact division unless fast_math, no spills."""

from tests.compile_check import Case

from dist_moe import formats
from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_triton._scaled import format_options
from dist_moe.kernels_triton.swiglu_quantize import pick_config

CONVERSIONS = {MXFP8_E4M3: ("cvt.rn.satfinite.e4m3x2.f32",), MXFP8_E5M2: ("cvt.rn.satfinite.e5m2x2.f32",)}


def case(kernel: str, kind: str, pointers: dict, starts: list, constexprs: dict, fast_math: bool, **fields) -> Case:
    config = pick_config(kind)
    return Case(
        f"swiglu_quantize:{kernel}",
        {
            "h1_ptr": "*bf16",
            **pointers,
            **dict.fromkeys(("h1_start_ptr", *starts, "stop_ptr"), "*i64"),
            **dict.fromkeys(("row_to_slot_ptr", "num_rows_ptr"), "*i32"),
            "F": "i32",
            "alpha": "fp32",
            "limit": "fp32",
        },
        {**constexprs, "FAST_MATH": fast_math},
        num_warps=config.num_warps,
        options={name: value for name, value in config.options.items() if name != "num_warps"},
        aligned=("F",),
        unaligned=("h1_start_ptr", *starts, "row_to_slot_ptr", "num_rows_ptr", "stop_ptr"),
        forbid=("ld.global.b16", "fma.rn.f32", "rcp.rn.f32" if fast_math else "div.full.f32"),
        **fields,
    )


def forward(format, clamped: bool, fast_math: bool = False) -> Case:
    kind = "rows_two_level" if format.two_level else "rows"
    outer = ("outer_inv_ptr", "outer_inv_start_ptr")
    return case(
        "_swiglu_quantize",
        kind,
        {"values_ptr": "*u8", "scales_ptr": "*u8", **({"outer_inv_ptr": "*fp32"} if format.two_level else {})},
        ["values_start_ptr", "scales_start_ptr", *(outer[1:] if format.two_level else ())],
        {
            **({} if format.two_level else dict.fromkeys(outer)),
            **format_options(format),
            "VALUES_PER_BYTE": format.values_per_byte,
            "TWO_LEVEL": format.two_level,
            "EPS": formats.ROW_EPS,
            "CLAMPED": clamped,
            "BLOCK_R": pick_config(kind).block_r,
            "BLOCK_F": pick_config(kind).block_f,
        },
        fast_math,
        name=f"{format.name}{' clamped' if clamped else ''}{' fast' if fast_math else ''}",
        expect=("ld.global.v4.b32", *CONVERSIONS.get(format, ())),
    )


def backward(format, clamped: bool, columns: bool = True, fast_math: bool = False) -> Case:
    column_parts = [
        f"{matrix}_{part}{start}_ptr"
        for matrix in ("g1", "h2")
        for part in ("columns", "column_scales")
        for start in ("", "_start")
    ]
    names = ["g1_rows_ptr", "g1_rows_start_ptr", "g1_row_scales_ptr", "g1_row_scales_start_ptr"]
    names += column_parts if columns else []
    pointers = {"g2_ptr": "*bf16", "score_ptr": "*fp32", "score_grad_ptr": "*fp32"}
    return case(
        "_swiglu_backward_quantize",
        "backward",
        pointers | {name: "*u8" for name in names if "start" not in name},
        ["g2_start_ptr", *(name for name in names if "start" in name)],
        {
            **({} if columns else dict.fromkeys(column_parts)),
            **format_options(format),
            "CLAMPED": clamped,
        },
        fast_math,
        name=f"{format.name}{' clamped' if clamped else ''}{'' if columns else ' rows'}{' fast' if fast_math else ''}",
        expect=("ld.global.v4.b32", *CONVERSIONS[format]),
    )


CASES = (
    forward(MXFP8_E4M3, clamped=True),
    forward(MXFP8_E4M3, clamped=False, fast_math=True),
    forward(MXFP4, clamped=False),
    forward(NVFP4, clamped=True),
    backward(MXFP8_E4M3, clamped=True),
    backward(MXFP8_E4M3, clamped=False, fast_math=True),
    backward(MXFP8_E5M2, clamped=False, columns=False),
)
