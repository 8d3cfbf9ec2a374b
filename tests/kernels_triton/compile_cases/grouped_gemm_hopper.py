"""grouped_gemm_hopper: Gluon, for sm_90 alone."""

import torch
from tests.compile_check import Case

from dist_moe.kernels_triton._fitted import BOX, MAIN, STEP
from dist_moe.kernels_triton._hopper import shared_layout
from dist_moe.kernels_triton.grouped_gemm_hopper import CONFIG, GROUP_M, W13_BOX, weights_box


def desc(*block: int) -> str:
    return f"tensordesc<bf16{list(block)},{shared_layout(torch.bfloat16, *block)!r}>"


ROWS = {
    "main_desc": desc(MAIN.value, STEP.value),
    "box_desc": desc(BOX.value, STEP.value),
    "tail_desc": desc(CONFIG.tail, STEP.value),
}


def case(
    kernel: str, name: str, pointers: dict, starts: tuple, sizes: tuple, constexprs: dict, block_l=128, **options
) -> Case:
    return Case(
        f"grouped_gemm_hopper:{kernel}",
        {
            **ROWS,
            **pointers,
            **dict.fromkeys((*starts, "stop_ptr"), "*i64"),
            "row_start_ptr": "*i32",
            **dict.fromkeys(("L", *sizes), "i32"),
        },
        {**constexprs, "BLOCK_L": block_l, "STAGES": CONFIG.num_stages, "GROUP_M": GROUP_M},
        name=f"{name}, up to {block_l} experts",
        num_warps=4,
        options=options,
        aligned=sizes,
        unaligned=(*starts, "stop_ptr"),
        expect=(
            "cp.async.bulk.tensor.2d.shared::",
            *(f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16" for rows in (32, 64, 128, 256)),
            "setmaxnreg",
        ),
        archs=(90,),
    )


def rows_times_weight(dgrad: bool, block_l: int = 128) -> Case:
    return case(
        "_rows_times_weight_kernel",
        "dgrad" if dgrad else "forward",
        {"w_desc": desc(*weights_box(dgrad)), "out_ptr": "*bf16"},
        ("a_start_ptr", "out_start_ptr"),
        ("width", "contraction"),
        {"DGRAD": dgrad},
        block_l,
    )


def swiglu(act: str, keep_h1: bool, block_l: int = 128) -> Case:
    return case(
        "_grouped_gemm_swiglu",
        act + " with h1" * keep_h1,
        {"w13_desc": desc(*W13_BOX), "h1_ptr": "*bf16", "h2_ptr": "*bf16", "alpha": "fp32", "limit": "fp32"},
        ("x_start_ptr", "h1_start_ptr", "h2_start_ptr"),
        ("D", "F"),
        {"ACT": act, "KEEP_H1": keep_h1},
        block_l,
        enable_fp_fusion=False,
    )


CASES = (
    rows_times_weight(dgrad=False, block_l=512),
    rows_times_weight(dgrad=True),
    swiglu("plain", keep_h1=False),
    swiglu("clamped", keep_h1=True, block_l=512),
)
