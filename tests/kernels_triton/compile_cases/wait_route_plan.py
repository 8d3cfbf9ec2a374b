"""wait_route_plan: polled with loads that acquire, ids 16 bytes a thread; all slots in registers without a spill."""

from tests.compile_check import Case

from dist_moe import shapes
from dist_moe.kernels_triton.wait_route_plan import pick_config
from dist_moe.shapes import next_power_of_2

from .barrier import COUNTS, POLLS
from .plan_slots import BF16, EXPANDED_NVFP4, FORWARD, MXFP8

TABLES = ("row_start", "num_rows", "num_routes", "num_pairs", "row_to_slot", "pair_rows", "pair_start", "pair_output")
TYPES = {
    **FORWARD,
    "signals_ptr": "*i64",
    "sent_ptr": "*i64",
    "finished_ptr": "*i64",
    "ids_table_ptr": "*i64",
    "header_table_ptr": "*i64",
    **{f"{name}_ptr": "*i32" for name in TABLES},
    "timeout_ns": "i64",
    "T_max": "i32",
    "J": "i32",
    "capacity": "i32",
}


# Numbers that a small context passes as 1, which Triton then takes as constants.
ONES = ("W", "L", "T_max", "J", "capacity", "num_slots", "deepest")


def case(
    name: str, W: int, T_max: int, K: int, E: int, *, alignment=1, save=False, waits=True, ones=(), **format
) -> Case:
    left_out = ones if waits else (*ones, "signals_ptr", "sent_ptr")
    assert shapes.is_small_routing(W, T_max, K, E)
    config = pick_config(W, T_max, K, E // W)
    return Case(
        "wait_route_plan:_wait_route_plan",
        {key: value for key, value in TYPES.items() if key not in left_out},
        {
            **({} if waits else {"signals_ptr": None, "sent_ptr": None}),
            **dict.fromkeys(ones, 1),
            "STAGE": shapes.PUBLISHED,
            "LANES": config.lanes,
            "K": K,
            "ID_ALIGNMENT": 16 if K % 8 == 0 else 2,
            "ALIGNMENT": alignment,
            "TOKENS": config.tokens,
            "BLOCK_K": config.block_k,
            "WORDS": config.words,
            "BLOCK_E": next_power_of_2(max(E, 32)),
            "SAVE": save,
            "TRAINING": save,
            **(format or BF16),
            "BLOCK_W": next_power_of_2(W),
            "BLOCK_L": next_power_of_2(E // W),
        },
        name=name,
        num_warps=config.num_warps,
        expect=(COUNTS, "bar.sync", ".cas.b64", *((POLLS, "%globaltimer") if waits else ()))
        + ("ld.global.v4.b32",) * (K == 8),
        forbid=("atom.global.sys",),
    )


CASES = (
    case("W-2 T-128 K-8 E-256", 2, 128, 8, 256),
    case("W-2 T-256 K-8 E-256 save", 2, 256, 8, 256, save=True),
    case("W-4 T-128 K-8 E-128 mxfp8 save", 4, 128, 8, 128, alignment=128, save=True, **MXFP8),
    case("W-8 T-64 K-8 E-256 nvfp4", 8, 64, 8, 256, alignment=128, **EXPANDED_NVFP4),
    case("W-1 T-512 K-6 E-384 alone", 1, 512, 6, 384, waits=False),
    case("W-32 T-128 K-1 E-128", 32, 128, 1, 128),
    case("W-1 T-1 K-496 E-496", 1, 1, 496, 496, save=True),
    case("one of all", 1, 1, 1, 1, save=True, ones=ONES),
)
