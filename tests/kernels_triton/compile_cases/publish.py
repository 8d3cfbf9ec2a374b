"""publish: x is copied 16 bytes a thread at a time, or quantised with every rounding asked for; the widest tiles of ids
do not spill."""

from tests.compile_check import Case

from dist_moe import shapes
from dist_moe.formats import MXFP8_E4M3, NVFP4, Format, packed_row_bytes
from dist_moe.kernels_triton._scaled import format_options
from dist_moe.kernels_triton.publish import pick_config

from .barrier import ENDING, ENDS, NO_ENDING, SENDS, SIZES
from .quantize import INEXACT

TYPES = {
    "x_ptr": "*bf16",
    "ids_ptr": "*i64",
    "scores_ptr": "*fp32",
    "check_ptr": "*bf16",
    "tokens_ptr": "*bf16",
    "out_ids_ptr": "*i16",
    "out_scores_ptr": "*fp32",
    "header_ptr": "*i64",
    "call_ptr": "*i64",
    "check_skip_ptr": "*i64",
    "stop_ptr": "*i64",
    "num_tokens": "i32",
    "kind": "i32",
    "config_hash": "i64",
    "x_stride_t": "i32",
    "check_stride_t": "i32",
    "ids_stride_t": "i32",
    "ids_stride_k": "i32",
    "scores_stride_t": "i32",
    "scores_stride_k": "i32",
    **SIZES,
}
WITH_SIGNAL, NO_SIGNAL = ENDING | {"signal_header_ptr": "*i64"}, NO_ENDING | {"signal_header_ptr": None}
NO_FORMAT = {"WIRE_BYTES": 0, "ELEMENT": None, "VALUES_PER_BYTE": 1, "BLOCK": 1, "RECIPROCAL": 1.0, "TWO_LEVEL": False}


def case(name: str, D: int, K: int, E: int, check_is_x: bool = True, copies: bool = True, signals: bool = True) -> Case:
    config = pick_config(D, K)
    return Case(
        "publish:_publish",
        {key: value for key, value in TYPES.items() if copies or key != "tokens_ptr"}
        | (WITH_SIGNAL if signals else {}),
        {
            **({} if copies else {"tokens_ptr": None}),
            **(ENDS if signals else NO_SIGNAL),
            **NO_FORMAT,
            "D": D,
            "K": K,
            "E": E,
            "CHECK_IS_X": check_is_x,
            "BLOCK_T": config.block_t,
            "BLOCK_D": config.block_d,
            "BLOCK_K": config.block_k,
        },
        name=name,
        num_warps=config.num_warps,
        aligned=("x_stride_t", "check_stride_t"),
        expect=("ld.global.v4.b32", *(("st.global.v4.b32",) if copies else ()), *(SENDS if signals else ())),
        forbid=("ld.global.b16",),
    )


def packed_case(format: Format, D: int, K: int, E: int) -> Case:
    config = pick_config(D, K, packed=True)
    options = dict(config.options)
    return Case(
        "publish:_publish",
        TYPES | {"tokens_ptr": "*u8"} | WITH_SIGNAL,
        {
            **ENDS,
            "D": D,
            "K": K,
            "E": E,
            "CHECK_IS_X": True,
            "BLOCK_T": config.block_t,
            "BLOCK_D": config.block_d,
            "BLOCK_K": config.block_k,
            "WIRE_BYTES": packed_row_bytes(format, D),
            "VALUES_PER_BYTE": format.values_per_byte,
            "TWO_LEVEL": format.two_level,
            **format_options(format),
        },
        name=f"{format.name} D-{D}",
        num_warps=options.pop("num_warps"),
        options=options,
        aligned=("x_stride_t", "check_stride_t"),
        expect=("ld.global.v4.b32", *SENDS, *(("div.rn.f32",) if format.two_level else ())),
        forbid=("ld.global.b16", *INEXACT),
    )


CASES = (
    case("forward", 7168, 8, 256),
    case("backward", 7168, 8, 256, check_is_x=False),
    case("backward by route", 7168, 8, 256, copies=False, signals=False),
    case("without a signal", 7168, 8, 256, signals=False),
    case("D-2880", 2880, 4, 128),
    case("D-32", 32, 8, 64),
    case("many-routes", 2048, 2048, shapes.MAX_EXPERTS),
    *(packed_case(format, D, 8, 256) for format in (MXFP8_E4M3, NVFP4) for D in (2048, 2880, 7168, 16384)),
)
