"""scaled_fp4_hopper: Gluon, for sm_90 alone."""

from tests.compile_check import Case

from dist_moe.kernels_triton.grouped_gemm import GROUP_M
from dist_moe.kernels_triton.scaled_fp4_hopper import CONFIGS, Config, shared_layout


def desc(*block: int) -> str:
    return f"tensordesc<i32{list(block)},{shared_layout(*block)!r}>"


def case(config: Config) -> Case:
    return Case(
        "scaled_fp4_hopper:_rows_times_weight_kernel",
        {
            "a_desc": desc(config.rows, 32),
            "a_start_ptr": "*i64",
            "a_scales_ptr": "*i32",
            "a_scales_start_ptr": "*i64",
            "w_desc": desc(1, 128, 32),
            "w_scales_desc": desc(1, 16, 32),
            "out_ptr": "*bf16",
            "out_start_ptr": "*i64",
            "row_start_ptr": "*i32",
            "num_rows_ptr": "*i32",
            "a_outer_inv_ptr": "*fp32",
            "a_outer_start_ptr": "*i64",
            "w_outer_inv_ptr": "*fp32",
            "stop_ptr": "*i64",
            **dict.fromkeys(("L", "all_columns", "first_column", "width", "pitch", "contraction"), "i32"),
        },
        {
            "ROWS": config.rows,
            "BLOCK_L": 128,
            "STAGES": config.num_stages,
            "SLOTS": config.num_slots,
            "GROUP_M": GROUP_M,
        },
        name=f"{config.rows} rows",
        num_warps=8,
        aligned=("all_columns", "width", "pitch", "contraction"),
        unaligned=("a_start_ptr", "a_scales_start_ptr", "out_start_ptr", "a_outer_start_ptr", "stop_ptr"),
        expect=("cp.async.bulk.tensor.2d.shared::", "k16.f32.f16.f16", "setmaxnreg", "st.global.v4.b32"),
        archs=(90,),
    )


CASES = tuple(map(case, CONFIGS.values()))
