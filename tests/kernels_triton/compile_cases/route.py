"""route: its kernels at a usual and at the extreme sizes; a table of peers' addresses gives vector loads."""

import triton
from tests.compile_check import Case

from dist_moe import shapes
from dist_moe.kernels_triton.route import pick_config

I32 = "*i32"
SIZES = {"rank": "i32", "L": "i32", "T_max": "i32", "blocks_of_rank": "i32"}


def cases(name: str, W: int, T_max: int, K: int, L: int, alignment: int = 1, **count) -> tuple[Case, ...]:
    aligned, width = alignment > 1, triton.next_power_of_2(W)
    config = pick_config(W, T_max, K, L, W * L if aligned else W)
    return (
        Case(
            "route:_count",
            {
                "ids_table_ptr": "*i64",
                "header_table_ptr": "*i64",
                "ids_ptr": "*i16",
                "below_ptr": I32,
                "group_rows_ptr": I32,
                "pairs_ptr": I32,
                "invalid_ptr": I32,
                "fault_ptr": "*i64",
                "W": "i32",
                **({} if aligned else {"group_size": "i32"}),
                **SIZES,
            },
            {
                **({"group_size": 1} if aligned else {}),
                "K": K,
                "BLOCK_T": config.block_t,
                "BLOCK_K": config.block_k,
                "BLOCK_E": config.count_e,
                "BLOCK_G": config.count_g,
                "BLOCK_W": width,
            },
            name=name,
            num_warps=config.count_warps,
            aligned=("T_max",),
            **count | {"expect": (*count.get("expect", ()), ".cas.b64")},
        ),
        Case(
            "route:_scan",
            {
                "below_ptr": I32,
                "group_rows_ptr": I32,
                "pairs_ptr": I32,
                "invalid_ptr": I32,
                "earlier_ptr": I32,
                "first_pair_ptr": I32,
                "first_route_ptr": I32,
                "row_start_ptr": I32,
                "num_rows_ptr": I32,
                "group_sums_ptr": I32 if aligned else "*i64",
                "num_routes_ptr": I32,
                "num_pairs_ptr": I32,
                "fault_ptr": "*i64",
                "num_groups": "i32",
                "L": "i32",
                "num_blocks": "i32",
                "slots_of_rank": "i32",
                "capacity": "i32",
            },
            {"K": K, "ALIGNED": aligned, "BLOCK_B": config.scan_b, "BLOCK_E": config.scan_e, "BLOCK_W": width},
            name=name,
            num_warps=config.scan_warps,
            expect=(".cas.b64",),
        ),
        Case(
            "route:_place",
            {
                "ids_ptr": "*i16",
                "below_ptr": I32,
                "earlier_ptr": I32,
                "first_pair_ptr": I32,
                "first_route_ptr": I32,
                "row_start_ptr": I32,
                "num_rows_ptr": I32,
                "expert_rows_ptr": I32,
                "rank_rows_ptr": "*i64",
                "row_to_slot_ptr": I32,
                "pair_rows_ptr": I32,
                "pair_start_ptr": I32,
                "pair_output_ptr": I32,
                "fault_ptr": "*i64",
                "W": "i32",
                "J": "i32",
                "capacity": "i32",
                **SIZES,
            },
            {
                "K": K,
                "ALIGNMENT": alignment,
                "BLOCK_T": config.block_t,
                "BLOCK_E": config.place_e,
                "BLOCK_W": min(width, 8),
                "ALL_W": width,
                "BLOCK_L": config.align_l,
                "UNROLL": min(config.block_k, 8),
            },
            name=name,
            num_warps=config.place_warps,
            aligned=("T_max",),
            expect=(".cas.b64",) * aligned,
            forbid=("red.global",) if aligned else ("atom.global", "red.global"),
        ),
    )


CASES = (
    *cases("E-256", 8, 8192, 8, 32, expect=("ld.global.v2.b32",), forbid=("ld.global.b16",)),
    *cases("aligned", 8, 8192, 8, 32, 128, expect=("ld.global.v2.b32",), forbid=("ld.global.b16",)),
    *cases("decode", 2, 16, 8, 64),
    *cases("K-10", 64, 8192, 10, 6),
    *cases("K-2048", 1, 256, 2048, 2048),
    *cases("one-expert-a-rank", 8, 8192, 1, 1),
    *cases("most-experts", 1, 8192, 32, shapes.MAX_EXPERTS, 128),
)
