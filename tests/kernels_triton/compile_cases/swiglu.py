"""swiglu: 16-byte accesses, rounded division, no fused multiply-add."""

from tests.compile_check import Case

from dist_moe.kernels_triton.swiglu import CONFIGS

KERNELS = {
    "forward": ("swiglu:_swiglu_kernel", {"h2_ptr": "*bf16", "h2_start_ptr": "*i64"}),
    "backward": (
        "swiglu:_swiglu_backward_kernel",
        {"g2_ptr": "*bf16", "g2_start_ptr": "*i64", "score_ptr": "*fp32", "score_grad_ptr": "*fp32"},
    ),
}

CASES = tuple(
    Case(
        kernel,
        {
            "h1_ptr": "*bf16",
            "h1_start_ptr": "*i64",
            "num_rows_ptr": "*i32",
            "stop_ptr": "*i64",
            "F": "i32",
            "alpha": "fp32",
            "limit": "fp32",
            **types,
        },
        {"CLAMPED": clamped, "BLOCK_R": CONFIGS[kind].block_r, "BLOCK_F": CONFIGS[kind].block_f},
        name="clamped" if clamped else "plain",
        num_warps=CONFIGS[kind].num_warps,
        aligned=("F",),
        unaligned=("h1_start_ptr", "h2_start_ptr", "g2_start_ptr", "num_rows_ptr", "stop_ptr"),
        expect=("ld.global.v4.b32", "st.global.v4.b32", "rcp.rn.f32"),
        options={name: value for name, value in CONFIGS[kind].options.items() if name != "num_warps"},
        forbid=("ld.global.b16", "st.global.b16", "fma.rn.f32"),
    )
    for kind, (kernel, types) in KERNELS.items()
    for clamped in (False, True)
)
