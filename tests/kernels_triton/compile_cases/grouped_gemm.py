"""grouped_gemm: every tile that pick_config chooses; TMA brings the operands, tensor cores read shared memory."""

from tests.compile_check import ARCHS, Case

from dist_moe.kernels_triton.grouped_gemm import CONFIGS, GROUP_M, Config

TMA_2D = "cp.async.bulk.tensor.2d"
TMA_3D = "cp.async.bulk.tensor.3d"
STORE = "st.global.v4.b32"
TENSOR_CORES = {"expect_sm90": ("wgmma.mma_async",), "expect_sm100": ("tcgen05.mma",), "forbid": ("mma.sync",)}


def tile(config: Config) -> dict[str, int]:
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    return {**blocks, "GROUP_M": GROUP_M}


def rows_case(kind: str, config: Config, block_l: int = 128, archs: tuple[int, ...] = ARCHS) -> Case:
    weight = [config.block_n, config.block_k] if kind == "forward" else [config.block_k, config.block_n]
    return Case(
        "grouped_gemm:_rows_times_weight_kernel",
        {
            "a_desc": f"tensordesc<bf16[{config.block_m}, {config.block_k}]>",
            "a_start_ptr": "*i64",
            "w_desc": f"tensordesc<bf16[1, {weight[0]}, {weight[1]}]>",
            "out_ptr": "*bf16",
            "out_start_ptr": "*i64",
            "row_start_ptr": "*i32",
            "stop_ptr": "*i64",
            "L": "i32",
            "width": "i32",
            "contraction": "i32",
        },
        {"DGRAD": kind == "dgrad", "BLOCK_L": block_l, **tile(config)},
        name=f"{kind}-{config.block_m}x{config.block_n}-L{block_l}",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=("width", "contraction"),
        unaligned=("a_start_ptr", "out_start_ptr", "stop_ptr"),
        expect=(TMA_2D, TMA_3D, STORE),
        archs=archs,
        **TENSOR_CORES,
    )


def wgrad_case(config: Config, dtype: str, accumulate: bool) -> Case:
    return Case(
        "grouped_gemm:_wgrad_kernel",
        {
            "dy_desc": f"tensordesc<bf16[{config.block_k}, {config.block_m}]>",
            "dy_start_ptr": "*i64",
            "x_desc": f"tensordesc<bf16[{config.block_k}, {config.block_n}]>",
            "x_start_ptr": "*i64",
            "out_ptr": f"*{dtype}",
            "row_start_ptr": "*i32",
            "stop_ptr": "*i64",
            "L": "i32",
            "N": "i32",
            "K": "i32",
        },
        {"ACCUMULATE": accumulate, **tile(config)},
        name=f"{config.block_m}x{config.block_n}-{dtype}-{'accumulate' if accumulate else 'overwrite'}",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=("N", "K"),
        unaligned=("dy_start_ptr", "x_start_ptr", "stop_ptr"),
        expect=(TMA_2D, STORE),
        **TENSOR_CORES,
    )


# On sm_90 sums lie in registers: each kind with each tile. On sm_100 the largest for both, each other for one of them.
ON_BOTH = {"forward": ((128, 64), (64, 128)), "dgrad": ((128, 256), (128, 128), (64, 256))}
# Each tile and dtype, each tile overwritten and added to; the largest in all ways but one that needs least.
WGRADS = {
    (128, 256): (("bf16", True), ("fp32", True), ("bf16", False)),
    (128, 128): (("bf16", True), ("fp32", False)),
    (128, 64): (("fp32", True), ("bf16", False)),
}
CASES = (
    rows_case("forward", CONFIGS[128, 256], 512),  # most experts
    *(
        rows_case(kind, config, archs=ARCHS if tile in ON_BOTH[kind] else (90,))
        for kind in ON_BOTH
        for tile, config in CONFIGS.items()
        if (kind, tile) != ("forward", (128, 256))
    ),
    *(wgrad_case(CONFIGS[tile], *how) for tile in WGRADS for how in WGRADS[tile]),
)
