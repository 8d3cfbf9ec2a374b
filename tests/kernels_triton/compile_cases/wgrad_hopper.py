"""wgrad_hopper: Gluon, for sm_90 alone."""

import torch
from tests.compile_check import Case

from dist_moe.kernels_triton._hopper import shared_layout
from dist_moe.kernels_triton.wgrad_hopper import CONFIGS, GROUP_M

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def desc(dtype: torch.dtype, *block: int) -> str:
    return f"tensordesc<{NAMES[dtype]}{list(block)},{shared_layout(dtype, *block)!r}>"


def case(dtype: torch.dtype, accumulate: bool, expanded: bool = False) -> Case:
    config = CONFIGS[dtype]
    return Case(
        "wgrad_hopper:_wgrad_kernel",
        {
            "dy_desc": desc(torch.bfloat16, config.block_k, config.block_m),
            "dy_start_ptr": "*i64",
            "x_desc": desc(torch.bfloat16, config.block_k, config.block_n),
            "x_start_ptr": "*i64",
            "out_desc": desc(dtype, 1, config.block_m, config.block_n),
            "row_start_ptr": "*i32",
            **({"num_rows_ptr": "*i32"} if expanded else {}),
            "stop_ptr": "*i64",
            "L": "i32",
            "N": "i32",
            "K": "i32",
        },
        {
            **({} if expanded else {"num_rows_ptr": None}),
            "ACCUMULATE": accumulate,
            "STAGES": config.num_stages,
            "GROUP_M": GROUP_M,
        },
        name=f"{config.block_m}x{config.block_n}-{NAMES[dtype]}-{'accumulate' if accumulate else 'overwrite'}"
        + "-expanded" * expanded,
        num_warps=config.num_warps,
        aligned=("N", "K"),
        unaligned=("dy_start_ptr", "x_start_ptr", *(("num_rows_ptr",) if expanded else ()), "stop_ptr"),
        expect=(
            "cp.async.bulk.tensor.2d.shared::",
            "cp.async.bulk.tensor.3d.global.shared::cta",
            f"wgmma.mma_async.sync.aligned.m64n{config.block_n}k16.f32.bf16.bf16",
            "setmaxnreg",
        ),
        archs=(90,),
    )


CASES = tuple(
    case(dtype, accumulate, expanded) for dtype in CONFIGS for accumulate in (False, True) for expanded in (False, True)
)
