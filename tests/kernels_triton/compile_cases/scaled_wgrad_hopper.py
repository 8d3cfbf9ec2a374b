"""scaled_wgrad_hopper: Gluon, for sm_90 alone."""

import torch
from tests.compile_check import Case

from dist_moe.kernels_triton.scaled_hopper import shared_layout
from dist_moe.kernels_triton.scaled_wgrad_hopper import CONFIGS, GROUP_M, STEP

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def desc(cols: int) -> str:
    block = (STEP.value, cols)
    return f"tensordesc<fp8e4nv{list(block)},{shared_layout(*block)!r}>"


def case(dtype: torch.dtype, accumulate: bool) -> Case:
    config, name = CONFIGS[dtype], NAMES[dtype]
    return Case(
        "scaled_wgrad_hopper:_wgrad_kernel",
        {
            "dy_desc": desc(128),
            "dy_start_ptr": "*i64",
            "dy_scales_ptr": "*i32",
            "dy_scales_start_ptr": "*i64",
            "x_desc": desc(config.block_n),
            "x_start_ptr": "*i64",
            "x_scales_ptr": "*i32",
            "x_scales_start_ptr": "*i64",
            "out_ptr": f"*{name}",
            "row_start_ptr": "*i32",
            "stop_ptr": "*i64",
            **dict.fromkeys(("L", "N", "K"), "i32"),
        },
        {"ACCUMULATE": accumulate, "STAGES": config.num_stages, "GROUP_M": GROUP_M},
        name=f"{name}-{'accumulate' if accumulate else 'overwrite'}",
        num_warps=8,
        aligned=("N", "K"),
        unaligned=("dy_start_ptr", "dy_scales_start_ptr", "x_start_ptr", "x_scales_start_ptr", "stop_ptr"),
        expect=("cp.async.bulk.tensor.2d.shared::", "k16.f32.bf16.bf16", "setmaxnreg", "mul.bf16x2"),
        archs=(90,),
    )


CASES = tuple(case(dtype, accumulate) for dtype in CONFIGS for accumulate in (False, True))
