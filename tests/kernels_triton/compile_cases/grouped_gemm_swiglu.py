"""grouped_gemm_swiglu: its tiles, with h1 and without."""

from dataclasses import replace

from tests.compile_check import Case

from dist_moe.kernels_triton.grouped_gemm import CONFIGS, GROUP_M
from dist_moe.kernels_triton.grouped_gemm_swiglu import OPTIONS, STAGES

from .grouped_gemm import STORE, TENSOR_CORES, TMA_2D


def case(tile: tuple[int, int], keep_h1: bool, clamped: bool) -> Case:
    config = replace(CONFIGS[tile], num_stages=max(CONFIGS[tile].num_stages, STAGES))
    return Case(
        "grouped_gemm_swiglu:_grouped_gemm_swiglu",
        {
            "x_desc": f"tensordesc<bf16[{config.block_m}, {config.block_k}]>",
            "w13_desc": f"tensordesc<bf16[1, 2, {config.block_n // 2}, {config.block_k}]>",
            **dict.fromkeys(("h1_ptr", "h2_ptr"), "*bf16"),
            **dict.fromkeys(("x_start_ptr", "h1_start_ptr", "h2_start_ptr", "stop_ptr"), "*i64"),
            "row_start_ptr": "*i32",
            **dict.fromkeys(("L", "D", "F"), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        {
            "KEEP_H1": keep_h1,
            "CLAMPED": clamped,
            "BLOCK_M": config.block_m,
            "BLOCK_F": config.block_n // 2,
            "BLOCK_K": config.block_k,
            "BLOCK_L": 128,
            "GROUP_M": GROUP_M,
        },
        name=f"{'x'.join(map(str, tile))} {'clamped' if clamped else 'plain'}{' keeps h1' * keep_h1}",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        options=OPTIONS,
        aligned=("D", "F"),
        unaligned=("x_start_ptr", "h1_start_ptr", "h2_start_ptr", "stop_ptr"),
        expect=(TMA_2D, "cp.async.bulk.tensor.4d", STORE),
        **TENSOR_CORES,
    )


CASES = (
    *(case((64, 128), *how) for how in ((False, False), (True, False), (False, True), (True, True))),
    # With many rows h1 is not kept.
    *(case(tile, False, clamped) for tile in ((128, 256), (128, 128), (128, 64)) for clamped in (False, True)),
)
