"""barrier: flags are released and acquired at system scope; a poll is one load, never a read-modify-write."""

from tests.compile_check import Case

from dist_moe import shapes

ACQUIRE = "ld.global.sys.acquire.b64"
RELEASE = "atom.global.sys.release.exch.b64"
SIGNAL = {"signals_table_ptr": "*i64", "sent_ptr": "*i64", "header_ptr": "*i64", "fault_ptr": "*i64"}
SIZES = {"rank": "i32", "W": "i32"}
# What a launch that ends with a signal takes more, on 8 ranks; what stands there without; and what its end must hold:
# the count, with all of a program before it, and the release.
ENDING = {"signals_table_ptr": "*i64", "sent_ptr": "*i64", "fault_ptr": "*i64", "finished_ptr": "*i64"}
ENDS = {"STAGE": shapes.COMBINED, "BLOCK_W": 8}
NO_ENDING = dict.fromkeys(ENDING) | {"STAGE": 0, "BLOCK_W": 1}
COUNTS = "atom.global.gpu.acq_rel.add.u64"
SENDS = (COUNTS, "bar.sync", RELEASE)
POLLS = "ld.acquire.sys.global.b64"  # of the lanes of a launch that waits itself

CASES = (
    # bar.sync: the abort code in the header comes before any lane's release.
    Case(
        "barrier:_signal",
        {**SIGNAL, **SIZES},
        {"STAGE": shapes.PUBLISHED, "BLOCK_W": 8},
        name="published",
        num_warps=1,
        expect=(RELEASE, "bar.sync"),
    ),
    Case(
        "barrier:_signal",
        {**SIGNAL, **SIZES},
        {"STAGE": shapes.RESET, "BLOCK_W": 64},
        name="reset",
        num_warps=1,
        expect=(RELEASE, "bar.sync"),
    ),
    Case(
        "barrier:_wait",
        {"signals_ptr": "*i64", "sent_ptr": "*i64", "fault_ptr": "*i64", "timeout_ns": "i64", "W": "i32"},
        {"STAGE": shapes.COMBINED},
        num_warps=1,
        expect=(ACQUIRE, "%globaltimer", ".cas.b64"),
        forbid=("atom.global.sys",),
    ),
    Case(
        "barrier:_verify",
        {"header_table_ptr": "*i64", "fault_ptr": "*i64", "num_tokens_max": "i32", "W": "i32"},
        {"BLOCK_W": 8},
        num_warps=1,
        expect=(".cas.b64",),
    ),
)
