"""combine and reduce: 16 bytes a thread into peers, products and sums rounded one by one (no fused multiply-add)."""

from dataclasses import replace

from tests.compile_check import Case

from dist_moe import shapes
from dist_moe.kernels_triton._rows import pick_row_tile
from dist_moe.kernels_triton.combine import rows_together

from .barrier import COUNTS, ENDING, ENDS, NO_ENDING, POLLS, SENDS, SIZES
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


def reduce_case(dedup: bool, scaled: bool, D: int, ends: bool = False, few: tuple[int, int] = ()) -> Case:
    """few: most tokens, programs."""
    tile = pick_row_tile(D, *few)
    return Case(
        "combine:_reduce",
        {
            "out_ptr": "*bf16",
            "outputs_ptr": "*bf16",
            "ids_ptr": "*i16",
            "stop_ptr": "*i64",
            "T": "i32",
            "out_stride_t": "i32",
            **({"scores_ptr": "*fp32"} if scaled else {}),
            **({"host_fault_ptr": "*i64"} if ends else {}),
        },
        {
            **({} if scaled else nothing("scores_ptr")),
            **({} if ends else nothing("host_fault_ptr")),
            **({"W": 8, "J": 8} if dedup else {"W": 0, "J": 8}),
            "L": 32,
            "K": 8,
            "K2": 8,
            "D": D,
            "TOKENS": tile.rows,
            "BLOCK_D": tile.block_d,
            "TOGETHER": rows_together(tile),
        },
        name=f"{'pairs' if dedup else 'routes'} {'scaled' if scaled else 'unscaled'}{' last' * ends} D {D}"
        + (f", {few[0]} tokens" if few else ""),
        num_warps=tile.num_warps,
        options=tile.options | NO_FUSION,
        aligned=("out_stride_t",),
        unaligned=("stop_ptr",),
        expect=WIDE + ("atom.global.sys.release.exch.b64", "bar.sync") * ends,
        forbid=FUSED,
    )


def wait_reduce_case(dedup: bool, D: int, tokens: int) -> Case:
    case = reduce_case(dedup, not dedup, D, True, (tokens, shapes.MOST_WAITING_PROGRAMS))
    types = {name: kind for name, kind in case.types.items() if name != "stop_ptr"}
    types |= dict.fromkeys(("fault_ptr", "signals_ptr", "sent_ptr", "finished_ptr"), "*i64")
    return replace(
        case,
        kernel="combine:_wait_reduce",
        types=types | {"timeout_ns": "i64", "num_ranks": "i32"},
        constexprs={**case.constexprs, "STAGE": shapes.COMBINED, "LANES": 32 * case.num_warps},
        options=NO_FUSION | {"maxnreg": 255},
        unaligned=(),
        expect=(*case.expect, POLLS, "%globaltimer", COUNTS),
        forbid=(*case.forbid, "atom.global.sys.acquire"),
    )


def collect_case(ids: str, out: str) -> Case:
    integers = ("T", "num_experts", "out_stride_t", "out_stride_k", "ids_stride_t", "ids_stride_k")
    return Case(
        "combine:_collect_score_grads",
        {
            "out_ptr": out,
            "ids_ptr": ids,
            "score_grads_ptr": "*fp32",
            "stop_ptr": "*i64",
            **dict.fromkeys(integers, "i32"),
        },
        {"K": 8, "K2": 8, "TOKENS": 128},
        name=f"{ids} {out}",
        unaligned=("stop_ptr",),
    )


CASES = (
    *(combine_case(pairs, D, backward) for pairs in (False, True) for D in (7168, 2880) for backward in (False, True)),
    *(combine_case(pairs, 7168, False, 2560) for pairs in (False, True)),
    *(
        combine_case(pairs, *few)
        for pairs in (False, True)
        for few in ((7168, False, None, 16), (2048, True, None, 256))
    ),
    *(reduce_case(*case, ends) for case in ((False, True, 7168), (True, False, 7168)) for ends in (False, True)),
    reduce_case(False, False, 7168),
    reduce_case(False, True, 2880),
    reduce_case(False, True, 2048, True, (128, PROGRAMS)),
    *(wait_reduce_case(dedup, *few) for dedup in (False, True) for few in ((2048, 16), (7168, 128))),
    collect_case("*i64", "*fp32"),
    collect_case("*i32", "*bf16"),
)
