"""combine: 16 bytes a thread into peers, products and sums rounded one by one (no fused multiply-add)."""

from tests.compile_check import Case

from dist_moe.kernels_triton._rows import pick_row_tile

from .barrier import ENDING, ENDS, NO_ENDING, SENDS, SIZES
from .dispatch import PROGRAMS

WIDE = ("ld.global.v4.b32", "st.global.v4.b32")
NO_FUSION = {"enable_fp_fusion": False}
FUSED = ("fma.rn.f32",)
ROWS = {"row_to_slot_ptr": "*i32", "rows_ptr": "*bf16", "start_ptr": "*i64", "stop_ptr": "*i64"}
PAIRS = {"pair_rows_ptr": "*i32", "pair_start_ptr": "*i32", "pair_output_ptr": "*i32", "num_pairs_ptr": "*i32"}
GRADS = {"score_grads_table_ptr": "*i64", "row_score_grads_ptr": "*fp32"}


def nothing(*names: str) -> dict:
    return dict.fromkeys(names)


def combine_case(pairs: bool, D: int, backward: bool, width: int | None = None, most_rows: int | None = None) -> Case:
    """With a width, a window of the columns, from rows of its width, and no signal."""
    name = f"D {D} {'backward' if backward else 'forward'}" + (f" width {width}" if width else "")
    name += f", {most_rows} rows" if most_rows else ""
    signals, width = width is None, width or D
    tile = pick_row_tile(width, most_rows, PROGRAMS)
    count = "num_routes_ptr" if pairs else "num_rows_ptr"
    integers = {"num_slots": "i32", "first_column": "i32"}
    types = {"outputs_table_ptr": "*i64", count: "*i32", **ROWS, **integers, **SIZES, **(GRADS if backward else {})}
    types |= ENDING | {"header_ptr": "*i64"} if signals else {}
    constexprs = {"D": D, "WIDTH": width, "PITCH": width, "BLOCK_D": tile.block_d}
    constexprs |= {} if backward else nothing(*GRADS)
    constexprs |= ENDS if signals else NO_ENDING | nothing("header_ptr")
    if pairs:
        types |= {**PAIRS, "num_outputs": "i32", **({} if backward else {"row_scores_ptr": "*fp32"})}
        constexprs |= {
            "PAIRS": tile.rows,
            "SOURCES": 2,
            "UNROLL": tile.unroll,
            **(nothing("row_scores_ptr") if backward else {}),
        }
    else:
        types["sources"] = "i32"
        constexprs |= {"ROWS": tile.rows}
    return Case(
        f"combine:{'_combine_pairs' if pairs else '_combine_routes'}",
        types,
        constexprs,
        name=name,
        num_warps=tile.num_warps,
        options=tile.options | (NO_FUSION if pairs else {}),
        unaligned=(count, "start_ptr", "stop_ptr"),  # words inside larger tensors
        expect=WIDE + SENDS * signals,
        forbid=FUSED,
    )


CASES = (
    *(combine_case(pairs, D, backward) for pairs in (False, True) for D in (7168, 2880) for backward in (False, True)),
    *(combine_case(pairs, 7168, False, 2560) for pairs in (False, True)),
    *(
        combine_case(pairs, *few)
        for pairs in (False, True)
        for few in ((7168, False, None, 16), (2048, True, None, 256))
    ),
)
