"""dispatch: rows of peers are read, and own rows written, 16 bytes a thread."""

from tests.compile_check import Case

from dist_moe.kernels_triton._rows import pick_row_tile

WIDE = ("ld.global.v4.b32", "st.global.v4.b32")
NARROW = ("ld.global.b16", "st.global.b16", "ld.global.v2", "st.global.v2")
TABLES = {"tokens_table_ptr": "*i64", "scores_table_ptr": "*i64", "row_to_slot_ptr": "*i32"}
PAIRS = {"pair_rows_ptr": "*i32", "pair_start_ptr": "*i32", "pair_output_ptr": "*i32", "num_pairs_ptr": "*i32"}
ROWS = {"num_rows_ptr": "*i32", "rows_ptr": "*bf16", "start_ptr": "*i64", "row_scores_ptr": "*fp32", "stop_ptr": "*i64"}


def case(pairs: bool, D: int, half: int) -> Case:
    tile = pick_row_tile(D)
    sizes = {"J": 2, "PAIRS": tile.rows, "W": 2} if pairs else {"ROWS": tile.rows}
    return Case(
        f"dispatch:{'_dispatch_pairs' if pairs else '_dispatch_routes'}",
        {**TABLES, **(PAIRS if pairs else {"sources": "i32"}), **ROWS, "T_max": "i32"},
        {"HALF": half, "K": 8, "D": D, "BLOCK_D": tile.block_d, **sizes},
        name=f"D {D} half {half}",
        num_warps=tile.num_warps,
        options=tile.options,
        unaligned=("num_rows_ptr", "start_ptr", "stop_ptr"),
        expect=WIDE,
        forbid=NARROW,
    )


CASES = tuple(
    case(pairs, D, half) for pairs in (False, True) for D, half in ((7168, 0), (7168, 1), (2880, 0), (256, 0))
)
