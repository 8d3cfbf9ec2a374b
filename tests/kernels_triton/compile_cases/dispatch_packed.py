"""dispatch_packed: values are read and written 16 bytes a thread, an outer scale as two halves."""

from tests.compile_check import Case

from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_triton.dispatch_packed import pick_tile, wire_options

from .dispatch import PROGRAMS

TABLES = {"tokens_table_ptr": "*i64", "scores_table_ptr": "*i64", "row_to_slot_ptr": "*i32"}
PAIRS = {"pair_rows_ptr": "*i32", "pair_start_ptr": "*i32", "pair_output_ptr": "*i32"}
PAIRS |= {"num_pairs_ptr": "*i32", "num_routes_ptr": "*i32"}
BUNDLE = {"values_ptr": "*i32", "start_ptr": "*i64", "scales_ptr": "*i32", "scales_start_ptr": "*i64"}
OUTER = {"outer_inv_ptr": "*i32", "outer_inv_start_ptr": "*i64"}
WORDS = ("num_rows_ptr", "start_ptr", "scales_start_ptr", "outer_inv_start_ptr", "stop_ptr")


def case(pairs: bool, format, D: int, expanded: bool, most_rows: int | None = None) -> Case:
    absent = ("scales_ptr", "scales_start_ptr") if expanded else ()
    tile = pick_tile(format, D, most_rows=most_rows, programs=PROGRAMS)
    return Case(
        f"dispatch_packed:_dispatch_packed_{'pairs' if pairs else 'routes'}",
        {
            **TABLES,
            **(PAIRS if pairs else {"num_rows_ptr": "*i32", "sources": "i32"}),
            **{name: type for name, type in BUNDLE.items() if name not in absent},
            **(OUTER if format.two_level else {}),
            "row_scores_ptr": "*fp32",
            "stop_ptr": "*i64",
            "T_max": "i32",
        },
        {
            **({} if format.two_level else dict.fromkeys(OUTER)),
            **dict.fromkeys(absent),
            "K": 8,
            **({"K2": 8, "J": 2, "W": 2, "PAIRS": tile.rows, "UNROLL": tile.unroll} if pairs else {"ROWS": tile.rows}),
            **wire_options(format, D, tile, expanded),
        },
        name=f"{format.name} D {D}{' expanded' if expanded else ''}{f', {most_rows} rows' if most_rows else ''}",
        num_warps=tile.num_warps,
        options=tile.options,
        unaligned=tuple(word for word in WORDS if word not in absent),
        # Of few rows a thread has 4 to 8 bytes of codes, which become 16.
        expect=(
            *(() if most_rows and expanded else ("ld.global.v4.b32",)),
            "st.global.v4.b32",
            *(("ld.global.b16",) if format.two_level else ()),
        ),
        forbid=("st.global.b8",) if expanded else ("ld.global.b8", "st.global.b8"),
    )


CASES = tuple(
    case(pairs, format, D, expanded, most_rows)
    for pairs in (False, True)
    for format, D in ((MXFP8_E4M3, 7168), (NVFP4, 2880))
    for expanded in (False, True)
    for most_rows in (None, 16, 256)
)
