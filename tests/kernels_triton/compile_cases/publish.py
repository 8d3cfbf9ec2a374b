"""publish: x is copied 16 bytes a thread at a time; the widest tiles of ids do not spill."""

from tests.compile_check import Case

from dist_moe import shapes
from dist_moe.kernels_triton.publish import pick_config

TYPES = {
    "x_ptr": "*bf16",
    "ids_ptr": "*i64",
    "scores_ptr": "*fp32",
    "check_ptr": "*bf16",
    "tokens_ptr": "*bf16",
    "out_ids_ptr": "*i16",
    "out_scores_ptr": "*fp32",
    "header_ptr": "*i64",
    "call_ptr": "*i64",
    "check_skip_ptr": "*i64",
    "stop_ptr": "*i64",
    "num_tokens": "i32",
    "kind": "i32",
    "config_hash": "i64",
    "x_stride_t": "i32",
    "check_stride_t": "i32",
    "ids_stride_t": "i32",
    "ids_stride_k": "i32",
    "scores_stride_t": "i32",
    "scores_stride_k": "i32",
}


def case(name: str, D: int, K: int, E: int, check_is_x: bool, packed: bool = False) -> Case:
    config = pick_config(D, K)
    return Case(
        "publish:_publish",
        {key: value for key, value in TYPES.items() if not (packed and key == "tokens_ptr")},
        {
            **({"tokens_ptr": None} if packed else {}),
            "D": D,
            "K": K,
            "E": E,
            "CHECK_IS_X": check_is_x,
            "BLOCK_T": config.block_t,
            "BLOCK_D": config.block_d,
            "BLOCK_K": config.block_k,
        },
        name=name,
        num_warps=config.num_warps,
        aligned=("x_stride_t", "check_stride_t"),
        expect=("ld.global.v4.b32",) if packed else ("ld.global.v4.b32", "st.global.v4.b32"),
        forbid=("ld.global.b16",),
    )


CASES = (
    case("forward", 7168, 8, 256, True),
    case("backward", 7168, 8, 256, False),
    case("packed", 7168, 8, 256, True, packed=True),
    case("D-2880", 2880, 4, 128, True),
    case("D-32", 32, 8, 64, True),
    case("many-routes", 2048, 2048, shapes.MAX_EXPERTS, True),
)
