"""The helpers of _device, in the probes of ../device_probes.py."""

from tests.compile_check import Case

# A poll is one load with acquire: neither a read-modify-write nor a volatile load.
ACQUIRE = "ld.global.sys.acquire.b64"
RELEASE = "atom.global.sys.release.exch.b64"
PROBES = "tests.kernels_triton.device_probes"

CASES = (
    Case(f"{PROBES}:_poll", {"flag_ptr": "*i64", "out_ptr": "*i64"}, expect=(ACQUIRE,), forbid=("volatile", "atom.")),
    Case(
        f"{PROBES}:_wait_then_copy",
        {"flag_ptr": "*i64", "x_ptr": "*i32", "out_ptr": "*i32", "target": "i64"},
        {"N": 1024},
        expect=(ACQUIRE, "st.global.v4.b32"),
    ),
    Case(
        f"{PROBES}:_copy_then_release",
        {"x_ptr": "*i32", "out_ptr": "*i32", "flag_ptr": "*i64", "value": "i64"},
        {"N": 1024},
        expect=(RELEASE, "bar.sync"),
    ),
    Case(f"{PROBES}:_reciprocals", {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"N": 1024}, expect=("rcp.rn.f32",)),
    Case(
        f"{PROBES}:_through_bf16",
        {"x_ptr": "*fp32", "out_ptr": "*fp32"},
        {"N": 1024},
        expect=("cvt.rn.bf16x2.f32",),
        forbid=("cvt.rn.bf16.f32",),
    ),
    Case(f"{PROBES}:_read_clock", {"out_ptr": "*i64"}, {"N": 2}, num_warps=1, expect=("%globaltimer",)),
)
