"""mega_forward: what is counted is released, a wait acquires it and fences it for TMA; both schemes of pulling."""

from tests.compile_check import Case

from dist_moe.kernels_triton.mega_forward import CONFIG, UNROLL
from dist_moe.shapes import next_power_of_2

from .barrier import COUNTS, ENDING, ENDS, NO_ENDING, SENDS
from .grouped_gemm import STORE, TENSOR_CORES, TMA_2D

# Of count_done, an atom or a red, and of await_count; Triton's own fences are of shared memory.
ORDER = (".global.gpu.release.add.u32", "ld.global.gpu.acquire.b32", "fence.proxy.async;")
TABLES = ("row_to_slot", "pair_rows", "pair_start", "pair_output", "num_pairs", "num_routes", "row_start")
WORDS = ("x_start_ptr", "h2_start_ptr", "stop_ptr")


def case(name: str, D: int, K: int, *, dedup=True, clamped=False, sums=False, signals=True) -> Case:
    m, n, k = CONFIG.block_m, CONFIG.block_n, CONFIG.block_k
    return Case(
        "mega_forward:_mega_forward",
        {
            "queue_ptr": "*i32",
            **dict.fromkeys(("tokens_table_ptr", "scores_table_ptr", "outputs_table_ptr"), "*i64"),
            **{f"{table}_ptr": "*i32" for table in TABLES},
            "row_scores_ptr": "*fp32",
            "x_desc": f"tensordesc<bf16[{m}, {k}]>",
            "h2_desc": f"tensordesc<bf16[{m}, {k}]>",
            "w13_desc": f"tensordesc<bf16[1, 2, {n // 2}, {k}]>",
            "w2_desc": f"tensordesc<bf16[1, {n}, {k}]>",
            **dict.fromkeys(("x_ptr", "h2_ptr"), "*bf16"),
            **dict.fromkeys((*WORDS, "finished_ptr"), "*i64"),
            **({"h3_ptr": "*bf16", "h3_start_ptr": "*i64"} if sums else {}),
            **(ENDING | {"header_ptr": "*i64"} if signals else {}),
            **dict.fromkeys(("T_max", "num_outputs", "L", "F", "rank", "W"), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        {
            **(ENDS if signals else {key: v for key, v in NO_ENDING.items() if key in ("STAGE", "BLOCK_W")}),
            **({} if signals else dict.fromkeys(("signals_table_ptr", "sent_ptr", "header_ptr", "fault_ptr"))),
            **({} if sums else dict.fromkeys(("h3_ptr", "h3_start_ptr"))),
            "DEDUP": dedup,
            "CLAMPED": clamped,
            "K": K,
            "K2": next_power_of_2(K),
            "J": min(K, 2),
            "D": D,
            "BLOCK_D": min(CONFIG.block_d, next_power_of_2(D)),
            "UNROLL": UNROLL,
            "BLOCK_M": m,
            "BLOCK_N": n,
            "BLOCK_K": k,
            "BLOCK_L": 256,
        },
        name=name,
        num_warps=CONFIG.num_warps,
        num_stages=CONFIG.num_stages,
        options={key: value for key, value in CONFIG.options.items() if key not in ("num_warps", "num_stages")},
        aligned=("F",),
        unaligned=(*WORDS, *["h3_start_ptr"] * sums, "num_pairs_ptr", "num_routes_ptr"),
        expect=(TMA_2D, "cp.async.bulk.tensor.4d", STORE, COUNTS, *ORDER, *SENDS * signals),
        **TENSOR_CORES,
    )


CASES = (
    case("D 7168 sums", 7168, 8, sums=True),
    case("D 4096 per route", 4096, 2, dedup=False),
    case("D 2880 clamped", 2880, 4, clamped=True),
    case("D 2048 alone", 2048, 8, signals=False),
)
