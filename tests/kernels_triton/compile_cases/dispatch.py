"""dispatch: rows of peers are read, and own rows written, 16 bytes a thread."""

from tests.compile_check import Case

from dist_moe.kernels_triton._rows import pick_row_tile

WIDE = ("ld.global.v4.b32", "st.global.v4.b32")
NARROW = ("ld.global.b16", "st.global.b16", "ld.global.v2", "st.global.v2")
TABLES = {"tokens_table_ptr": "*i64", "scores_table_ptr": "*i64", "row_to_slot_ptr": "*i32"}
PAIRS = {"pair_rows_ptr": "*i32", "pair_start_ptr": "*i32", "pair_output_ptr": "*i32", "num_pairs_ptr": "*i32"}
ROWS = {"rows_ptr": "*bf16", "start_ptr": "*i64", "row_scores_ptr": "*fp32", "stop_ptr": "*i64"}
PROGRAMS = 264  # of an H200


def case(pairs: bool, D: int, half: int, width: int | None = None, most_rows: int | None = None) -> Case:
    """With a width, a window of the columns, whose rows have its width."""
    name, width = f"D {D} half {half}" + (f" width {width}" if width else ""), width or D
    name += f", {most_rows} rows" if most_rows else ""
    tile = pick_row_tile(width, most_rows, PROGRAMS)
    count = "num_routes_ptr" if pairs else "num_rows_ptr"
    sizes = {"K2": 8, "J": 2, "PAIRS": tile.rows, "W": 2, "UNROLL": tile.unroll} if pairs else {"ROWS": tile.rows}
    return Case(
        f"dispatch:{'_dispatch_pairs' if pairs else '_dispatch_routes'}",
        {
            **TABLES,
            **(PAIRS if pairs else {"sources": "i32"}),
            count: "*i32",
            **ROWS,
            "T_max": "i32",
            "first_column": "i32",
        },
        {"HALF": half, "K": 8, "D": D, "WIDTH": width, "PITCH": width, "BLOCK_D": tile.block_d, **sizes},
        name=name,
        num_warps=tile.num_warps,
        options=tile.options,
        unaligned=(count, "start_ptr", "stop_ptr"),
        expect=WIDE,
        forbid=NARROW,
    )


CASES = tuple(
    case(pairs, *sizes)
    for pairs in (False, True)
    for sizes in ((7168, 0), (7168, 1), (2880, 0), (256, 0), (7168, 0, 2560), (7168, 0, None, 16), (2048, 1, None, 256))
)
