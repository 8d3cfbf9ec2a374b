"""copy_x: 16 bytes a thread, wherever the device says that the rows lie."""

from tests.compile_check import Case

CASES = (
    Case(
        "copy_x:_copy",
        {
            "src_ptr": "*bf16",
            "src_offset_ptr": "*i64",
            "dst_ptr": "*bf16",
            "dst_offset_ptr": "*i64",
            "stop_ptr": "*i64",
            "num_elements": "i32",
        },
        {"BLOCK": 8192},
        num_warps=8,
        aligned=("num_elements",),
        unaligned=("src_offset_ptr", "dst_offset_ptr", "stop_ptr"),
        expect=("ld.global.v4.b32", "st.global.v4.b32"),
    ),
)
