"""plan_slots: single programs of one warp, up to 64 ranks."""

from tests.compile_check import Case

TYPES = {
    "rank_rows_ptr": "*i64",
    "call_ptr": "*i64",
    "slot_used_ptr": "*i64",
    "slot_layers_ptr": "*i64",
    "slot_calls_ptr": "*i64",
    "place_ptr": "*i64",
    "fault_ptr": "*i64",
    "rank": "i32",
    "deepest": "i32",
    "W": "i32",
    "D": "i32",
    "F": "i32",
    "x_bytes": "i64",
    "total_bytes": "i64",
    "stage": "i32",
    "output_columns": "i32",
}
BF16 = {"BLOCK": 0, "PER_BYTE": 1, "OUTER_SCALES": False, "GROUP": 0}
MXFP8 = {"BLOCK": 32, "PER_BYTE": 1, "OUTER_SCALES": False, "GROUP": 0}
NVFP4 = {"BLOCK": 16, "PER_BYTE": 2, "OUTER_SCALES": True, "GROUP": 0}
EXPANDED_MXFP8, EXPANDED_NVFP4 = MXFP8 | {"GROUP": 128}, NVFP4 | {"GROUP": 256}
FORWARD = {
    **TYPES,
    "num_rows_ptr": "*i32",
    "stats_ptr": "*i64",
    "slot": "i32",
    "depth": "i32",
    "num_slots": "i32",
    "L": "i32",
    "slot_bytes": "i64",
    "x_h1_bytes": "i64",
}

CASES = (
    *(
        Case(
            "plan_slots:_plan_forward",
            FORWARD,
            {"SAVE": True, "TRAINING": True, "BLOCK_W": 64, "BLOCK_L": 512, **how},
            name=f"save {name}",
            num_warps=1,
            expect=(".cas.b64",),
        )
        for name, how in (("bf16", BF16), ("mxfp8", MXFP8), ("expanded mxfp8", EXPANDED_MXFP8))
    ),
    *(
        Case(
            "plan_slots:_plan_forward",
            FORWARD,
            {"SAVE": False, "TRAINING": False, "BLOCK_W": 1, "BLOCK_L": 128, **how},
            name=f"inference {name}",
            num_warps=1,
        )
        for name, how in (("bf16", BF16), ("nvfp4", NVFP4), ("expanded nvfp4", EXPANDED_NVFP4))
    ),
    *(
        Case(
            "plan_slots:_plan_backward",
            {**TYPES, "saved_place_ptr": "*i64", "header_ptr": "*i64", "num_slots": "i32"},
            {"TRAINING": True, "BLOCK_W": 64, **how},
            name=name,
            num_warps=1,
            expect=(".cas.b64",),
        )
        for name, how in (("bf16", BF16), ("mxfp8", MXFP8), ("expanded mxfp8", EXPANDED_MXFP8))
    ),
)
