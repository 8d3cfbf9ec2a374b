"""scaled_hopper: Gluon, for sm_90 alone."""

import torch
from tests.compile_check import Case

from dist_moe.kernels_triton._hopper import shared_layout
from dist_moe.kernels_triton.grouped_gemm import GROUP_M


def desc(*block: int) -> str:
    return f"tensordesc<fp8e4nv{list(block)},{shared_layout(torch.float8_e4m3fn, *block)!r}>"


def case(rows: int, square: bool, stages: int, dgrad: bool = False) -> Case:
    return Case(
        "scaled_hopper:_rows_times_weight_kernel",
        {
            "a_desc": desc(rows, 128),
            "a_start_ptr": "*i64",
            "a_scales_ptr": "*i32",
            "a_scales_start_ptr": "*i64",
            "w_desc": desc(1, 128, 128),
            "w_scales_ptr": "*i32",
            "out_ptr": "*bf16",
            "out_start_ptr": "*i64",
            "row_start_ptr": "*i32",
            "num_rows_ptr": "*i32",
            "stop_ptr": "*i64",
            **dict.fromkeys(("L", "all_columns", "first_column", "width", "pitch", "contraction"), "i32"),
        },
        {"ROWS": rows, "SQUARE": square, "DGRAD": dgrad, "BLOCK_L": 128, "STAGES": stages, "GROUP_M": GROUP_M},
        name=f"{'dgrad' if dgrad else 'forward'}-{rows} rows-{'square' if square else 'along K'}",
        num_warps=8,
        aligned=("all_columns", "width", "pitch", "contraction"),
        unaligned=("a_start_ptr", "a_scales_start_ptr", "out_start_ptr", "stop_ptr"),
        expect=("cp.async.bulk.tensor.2d.shared::", "k32.f32.e4m3.e4m3", "setmaxnreg", "st.global.v4.b32"),
        archs=(90,),
    )


CASES = (case(128, True, 5), case(128, True, 4, dgrad=True), case(64, False, 8), case(32, False, 8), case(16, False, 8))
