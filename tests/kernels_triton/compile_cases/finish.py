"""finish: word 0 of the host's record is released at system scope, after the others."""

from tests.compile_check import Case

CASES = (
    Case(
        "finish:_finish",
        {
            "fault_ptr": "*i64",
            "host_fault_ptr": "*i64",
            "out0_ptr": "*bf16",
            "out1_ptr": "*fp32",
            "out2_ptr": "*fp32",
            **{f"n{i}": "i64" for i in range(4)},
        },
        {"out3_ptr": None, "BLOCK": 1024},
        expect=("atom.global.sys.release.exch.b64", "bar.sync"),
    ),
)
