"""reduce, wait_reduce and collect_score_grads: as combine; the last program of a sum that waits counts."""

from dataclasses import replace

from tests.compile_check import Case

from dist_moe import shapes
from dist_moe.kernels_triton._rows import pick_row_tile
from dist_moe.kernels_triton.reduce import rows_together

from .barrier import COUNTS, POLLS
from .combine import FUSED, NO_FUSION, WIDE, nothing
from .dispatch import PROGRAMS


def reduce_case(dedup: bool, scaled: bool, D: int, ends: bool = False, few: tuple[int, int] = ()) -> Case:
    """few: most tokens, programs."""
    tile = pick_row_tile(D, *few)
    return Case(
        "reduce:_reduce",
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
        kernel="reduce:_wait_reduce",
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
        "reduce:_collect_score_grads",
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
    *(reduce_case(*case, ends) for case in ((False, True, 7168), (True, False, 7168)) for ends in (False, True)),
    reduce_case(False, False, 7168),
    reduce_case(False, True, 2880),
    reduce_case(False, True, 2048, True, (128, PROGRAMS)),
    *(wait_reduce_case(dedup, *few) for dedup in (False, True) for few in ((2048, 16), (7168, 128))),
    collect_case("*i64", "*fp32"),
    collect_case("*i32", "*bf16"),
)
