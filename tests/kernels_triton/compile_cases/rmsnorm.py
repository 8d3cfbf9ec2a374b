"""rmsnorm: 16 bytes a thread, in forward by asynchronous copies; exact division, products rounded before they are
added, no spills at any width."""

from tests.compile_check import Case

from dist_moe.kernels_triton.rmsnorm import pick_config

FORWARD = {"out_ptr": "*bf16", "kept_ptr": "*bf16", "rstd_ptr": "*fp32"}
BACKWARD = {
    "grad_out_ptr": "*bf16",
    "rstd_ptr": "*fp32",
    "grad_rows_ptr": "*bf16",
    "grad_scores_ptr": "*fp32",
    "partials_ptr": "*fp32",
    "grad_out_stride": "i32",
}
BOTH = {"rows_ptr": "*bf16", "ids_ptr": "*i16", "scores_ptr": "*fp32", "weight_ptr": "*bf16", "stop_ptr": "*i64"}


def case(backward: bool, D: int, *left_out: str, bf16: bool = False, kahan: bool = False, **how) -> Case:
    config = pick_config(D, backward, "weight_ptr" not in left_out)
    types = {**(BACKWARD if backward else FORWARD), **BOTH, "T": "i32", "eps": "fp32", "gain_center": "fp32"}
    name = f"D {D}{' bf16' if bf16 else ''}{' kahan' if kahan else ''}" + "".join(f" no {arg[:-4]}" for arg in left_out)
    return Case(
        f"rmsnorm:{'_rmsnorm_reduce_backward' if backward else '_rmsnorm_reduce'}",
        {arg: type for arg, type in types.items() if arg not in left_out},
        {
            **dict.fromkeys(left_out),
            "K": 8,
            "D": D,
            "NORM_BF16": bf16,
            "KAHAN": kahan,
            **config.constants,
        },
        name=name,
        num_warps=config.num_warps,
        options={key: value for key, value in config.options.items() if key != "num_warps"},
        aligned=("grad_out_stride",) if backward else (),
        unaligned=("stop_ptr",),
        expect=("ld.global.v4.b32" if backward else "cp.async.cg.shared.global", "st.global.v4.b32"),
        forbid=("fma.rn.f32", "div.full.f32"),
        **how,
    )


SAVED = ("kept_ptr", "rstd_ptr")
CASES = (
    case(False, 7168, "weight_ptr"),
    case(False, 7168, *SAVED, kahan=True),
    case(False, 2880, bf16=True),
    case(False, 16384),
    case(True, 7168),
    case(True, 7168, "weight_ptr", "partials_ptr"),
    case(True, 2880, "rstd_ptr", bf16=True),
    case(True, 16384, archs=(90, 100)),
    case(True, 16384, "rstd_ptr", kahan=True),
)
