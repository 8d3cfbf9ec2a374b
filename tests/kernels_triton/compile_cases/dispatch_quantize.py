"""dispatch_quantize: peers' rows are read 16 bytes a thread, every rounding is asked for."""

from tests.compile_check import Case

from dist_moe.formats import MXFP4, MXFP8_E4M3
from dist_moe.kernels_triton._scaled import format_options
from dist_moe.kernels_triton.dispatch_quantize import CHUNKS, pick_tile

CONVERSIONS = {MXFP8_E4M3: ("cvt.rn.satfinite.e4m3x2.f32",)}
PULLED = {"tokens_table_ptr": "*i64", "scores_table_ptr": "*i64"}
STAGED = {"staged_ptr": "*bf16", "staged_start_ptr": "*i64"}
TABLES = {"row_to_slot_ptr": "*i32", "num_rows_ptr": "*i32", "row_scores_ptr": "*fp32"}
PARTS = {"values_ptr": "*u8", "start_ptr": "*i64", "scales_ptr": "*u8", "scales_start_ptr": "*i64", "stop_ptr": "*i64"}
SIZES = ("T_max", "sources", "pitch", "first", "width", "D")
WORDS = ("start_ptr", "scales_start_ptr", "stop_ptr")
WORDS = ("staged_start_ptr", "num_rows_ptr", *(f"{of}_{word}" for of in ("rows", "columns") for word in WORDS))


def case(format, outputs: tuple[str, ...], half: int | None, scaled: bool, D: int, expanded: bool = False) -> Case:
    absent = dict.fromkeys(STAGED if half is not None else PULLED)
    types = {**(PULLED if half is not None else STAGED), **TABLES, **dict.fromkeys(SIZES, "i32")}
    for of in ("rows", "columns"):
        parts = {f"{of}_{part}": dtype for part, dtype in PARTS.items()}
        if of in outputs:
            types |= parts
        else:
            absent |= dict.fromkeys(parts)
    if expanded:
        types["columns_values_ptr"] = "*bf16"
        scales = ("columns_scales_ptr", "columns_scales_start_ptr")
        absent |= dict.fromkeys(name for name in scales if types.pop(name))
    tile = pick_tile(format, D)
    source = "staged" if half is None else f"half {half}"
    return Case(
        "dispatch_quantize:_dispatch_quantize",
        types,
        {
            **absent,
            "HALF": half,
            "K": None if half is None else 8,
            "SCALED": scaled,
            "VALUES_PER_BYTE": format.values_per_byte,
            **format_options(format),
            "BLOCK_D": tile.block_d,
            "CHUNKS": CHUNKS,
        },
        name=f"{format.name} {' and '.join(outputs)} {source}{' scaled' if scaled else ''} D {D}"
        + " expanded" * expanded,
        num_warps=tile.num_warps,
        options=tile.options | {"enable_fp_fusion": False},
        aligned=("pitch", "first", "width", "D"),
        unaligned=tuple(word for word in WORDS if word not in absent),
        expect=("ld.global.v4.b32", *CONVERSIONS.get(format, ()), *(("st.global.v4.b32",) if expanded else ())),
        forbid=("ld.global.b16", "ld.global.v2.b32", "fma.rn.f32"),
    )


CASES = (
    case(MXFP8_E4M3, ("rows", "columns"), 0, False, 7168),
    case(MXFP8_E4M3, ("rows", "columns"), 1, True, 2880),
    case(MXFP8_E4M3, ("rows", "columns"), None, True, 7168),
    case(MXFP8_E4M3, ("rows", "columns"), 0, False, 7168, expanded=True),
    case(MXFP8_E4M3, ("rows", "columns"), 1, True, 2880, expanded=True),
    case(MXFP8_E4M3, ("rows", "columns"), None, True, 7168, expanded=True),
    case(MXFP4, ("rows",), 0, False, 7168),
)
