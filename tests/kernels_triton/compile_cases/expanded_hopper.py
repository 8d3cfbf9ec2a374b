"""expanded_hopper: Gluon, for sm_90 alone."""

import torch
from tests.compile_check import Case

from dist_moe.formats import NVFP4, Format
from dist_moe.kernels_triton._hopper import shared_layout
from dist_moe.kernels_triton.expanded_hopper import CONFIGS, Config
from dist_moe.kernels_triton.grouped_gemm import GROUP_M


def desc(name: str, dtype: torch.dtype, *block: int) -> str:
    return f"tensordesc<{name}{list(block)},{shared_layout(dtype, *block)!r}>"


def case(format: Format, config: Config) -> Case:
    fp4 = format is NVFP4
    dtype, step = (("fp16", torch.float16), 256) if fp4 else (("bf16", torch.bfloat16), 128)
    outer = ("a_outer_inv_ptr", "a_outer_start_ptr", "w_outer_inv_ptr")
    return Case(
        "expanded_hopper:_rows_times_weight_kernel",
        {
            "a_desc": desc(*dtype, config.rows, step),
            **({"tail_desc": desc(*dtype, config.tail, step)} if config.tail else {}),
            "a_start_ptr": "*i64",
            "w_desc": desc("i32", torch.int32, 1, 128, 32),
            "w_scales_desc": desc("i32", torch.int32, 1, 16 if fp4 else 4, 32),
            "out_ptr": "*bf16",
            "out_start_ptr": "*i64",
            "row_start_ptr": "*i32",
            "num_rows_ptr": "*i32",
            **(dict(zip(outer, ("*fp32", "*i64", "*fp32"), strict=True)) if fp4 else {}),
            "stop_ptr": "*i64",
            **dict.fromkeys(("L", "all_columns", "first_column", "width", "pitch", "contraction"), "i32"),
        },
        {
            "ROWS": config.rows,
            "TAIL": config.tail,
            **({} if config.tail else {"tail_desc": None}),
            "FP4": fp4,
            "BLOCK_L": 128,
            "STAGES": config.num_stages,
            "GROUP_M": GROUP_M,
            **({} if fp4 else dict.fromkeys(outer)),
        },
        name=f"{format.name}-{config.rows + config.tail} rows",
        num_warps=4,
        aligned=("all_columns", "width", "pitch", "contraction"),
        unaligned=("a_start_ptr", "out_start_ptr", *(("a_outer_start_ptr",) if fp4 else ()), "stop_ptr"),
        expect=("cp.async.bulk.tensor.2d.shared::", f"k16.f32.{'f16.f16' if fp4 else 'bf16.bf16'}", "setmaxnreg"),
        archs=(90,),
    )


CASES = tuple(case(format, config) for format, configs in CONFIGS.items() for config in configs.values())
