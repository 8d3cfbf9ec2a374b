"""count_clips: 16-byte loads, one integer addition a count."""

from tests.compile_check import Case

from dist_moe.kernels_triton.clip_stats import CONFIG

CASES = (
    Case(
        "clip_stats:_count_clips",
        {
            "h1_ptr": "*bf16",
            "h1_start_ptr": "*i64",
            "row_to_slot_ptr": "*i32",
            "num_rows_ptr": "*i32",
            "counts_ptr": "*i64",
            "stop_ptr": "*i64",
            "F": "i32",
            "limit": "fp32",
        },
        {"BLOCK_R": CONFIG.block_r, "BLOCK_F": CONFIG.block_f},
        num_warps=CONFIG.num_warps,
        aligned=("F",),
        unaligned=("h1_start_ptr", "row_to_slot_ptr", "num_rows_ptr", "stop_ptr"),
        expect=("ld.global.v4.b32", "add.u64"),
        forbid=("ld.global.b16",),
    ),
)
