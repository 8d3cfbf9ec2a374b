"""swiglu_quantize, its backward: 16-byte loads, no fused multiply-add, exact division unless fast_math, no spills."""

from tests.compile_check import Case

from dist_moe import formats
from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_triton._scaled import format_options
from dist_moe.kernels_triton.swiglu_backward_quantize import BACKWARD
from dist_moe.kernels_triton.swiglu_quantize import Config, pick_forward

CONVERSIONS = {MXFP8_E4M3: ("cvt.rn.satfinite.e4m3x2.f32",), MXFP8_E5M2: ("cvt.rn.satfinite.e5m2x2.f32",)}


def case(
    kernel: str, config: Config, pointers: dict, starts: tuple, tables: tuple, constexprs: dict, fast_math, **fields
) -> Case:
    return Case(
        f"{kernel[1:]}:{kernel}",  # a file of its own each
        {
            "h1_ptr": "*bf16",
            **pointers,
            **dict.fromkeys(("h1_start_ptr", *starts, "stop_ptr"), "*i64"),
            **dict.fromkeys(("num_rows_ptr", *tables), "*i32"),
            "F": "i32",
            **({"values_stride": "i32"} if kernel == "_swiglu_quantize" else {}),
            "alpha": "fp32",
            "limit": "fp32",
        },
        {**constexprs, "FAST_MATH": fast_math},
        num_warps=config.num_warps,
        options={name: value for name, value in config.options.items() if name != "num_warps"},
        aligned=("F", *(("values_stride",) if kernel == "_swiglu_quantize" else ())),
        forbid=("ld.global.b16", "fma.rn.f32", "rcp.rn.f32" if fast_math else "div.full.f32"),
        **fields,
    )


def forward(format, clamped: bool, fast_math: bool = False, F: int = 2048, expanded: bool = False) -> Case:
    config = pick_forward(F, format.two_level, expanded)
    outer = ("outer_inv_ptr", "outer_inv_start_ptr")
    scales = () if expanded else ("scales_ptr", "scales_start_ptr")
    values = "*u8" if not expanded else "*fp16" if format.two_level else "*bf16"
    starts = ("values_start_ptr", *scales[1:], *(outer[1:] if format.two_level else ()))
    return case(
        "_swiglu_quantize",
        config,
        {
            "values_ptr": values,
            **dict.fromkeys(scales[:1], "*u8"),
            "L": "i32",
            **({"outer_inv_ptr": "*fp32"} if format.two_level else {}),
        },
        starts,
        ("row_start_ptr",),
        {
            **({} if format.two_level else dict.fromkeys(outer)),
            **(dict.fromkeys(("scales_ptr", "scales_start_ptr")) if expanded else {}),
            **format_options(format),
            "VALUES_PER_BYTE": format.values_per_byte,
            "TWO_LEVEL": format.two_level,
            "EPS": formats.ROW_EPS,
            "CLAMPED": clamped,
            "BLOCK_L": 128,
            "BLOCK_R": config.block_r,
            "BLOCK_F": config.block_f,
            "PARTS": config.parts,
        },
        fast_math,
        name=f"{format.name}{' clamped' if clamped else ''}{' fast' if fast_math else ''}{f' {F}' * (F != 2048)}"
        f"{' expanded' if expanded else ''}",
        unaligned=("h1_start_ptr", *starts, "stop_ptr"),
        expect=("ld.global.v4.b32", *CONVERSIONS.get(format, ())),
    )


def backward(format, clamped: bool, columns: bool = True, fast_math: bool = False, expanded: bool = False) -> Case:
    column_parts = [
        f"{matrix}_{part}{start}_ptr"
        for matrix in ("g1", "h2")
        for part in ("columns", "column_scales")
        for start in ("", "_start")
    ]
    names = ["g1_rows_ptr", "g1_rows_start_ptr", "g1_row_scales_ptr", "g1_row_scales_start_ptr"]
    absent = [name for name in column_parts if not columns or (expanded and "scales" in name)]
    names += [name for name in column_parts if name not in absent]
    pointers = {"g2_ptr": "*bf16", "score_ptr": "*fp32", "score_grad_ptr": "*fp32"}
    starts = ("g2_start_ptr", *(name for name in names if "start" in name))
    return case(
        "_swiglu_backward_quantize",
        BACKWARD,
        pointers
        | {name: "*bf16" if expanded and "columns" in name else "*u8" for name in names if "start" not in name},
        starts,
        ("row_to_slot_ptr",),
        {
            **dict.fromkeys(absent),
            **format_options(format),
            "CLAMPED": clamped,
        },
        fast_math,
        name=f"{format.name}{' clamped' if clamped else ''}{'' if columns else ' rows'}{' fast' if fast_math else ''}"
        + " expanded" * expanded,
        unaligned=("h1_start_ptr", *starts, "row_to_slot_ptr", "num_rows_ptr", "stop_ptr"),
        expect=("ld.global.v4.b32", *CONVERSIONS[format], *(("st.global.v4.b32",) if expanded else ())),
    )


CASES = (
    forward(MXFP8_E4M3, clamped=True),
    forward(MXFP8_E4M3, clamped=False, fast_math=True),
    forward(MXFP4, clamped=False),
    forward(MXFP8_E4M3, clamped=False, expanded=True),
    *(forward(NVFP4, clamped=True, F=F) for F in (96, 768, 1536, 2880, 8192, 14336)),
    *(forward(NVFP4, clamped=clamped, F=F, expanded=True) for F in (768, 2880, 14336) for clamped in (False, True)),
    backward(MXFP8_E4M3, clamped=True),
    backward(MXFP8_E4M3, clamped=False, fast_math=True),
    backward(MXFP8_E4M3, clamped=True, expanded=True),
    backward(MXFP8_E4M3, clamped=False, fast_math=True, expanded=True),
    backward(MXFP8_E5M2, clamped=False, columns=False),
)
