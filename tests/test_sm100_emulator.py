"""The emulator of sm_100 PTX: lanes, memory and barriers against the PTX ISA, and the faults that it must find."""

import numpy as np
import pytest

from tests.sm100 import Deadlock, EmulationError, GlobalMemory, Launch, UnsupportedInstruction, emulate
from tests.sm100.small_kernels import BARRIER, lanes, run, wait

LANES = np.arange(32)


# Lanes of a warp


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and validity of shfl.sync, by the pseudo-code of the PTX ISA."""
    segment, clamp = c >> 8 & 31, c & 31
    max_lane, min_lane = (lane & segment) | (clamp & ~segment), lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": min_lane | (b & ~segment)}[mode]
    valid = source >= max_lane if mode == "up" else source <= max_lane
    return (source if valid else lane), valid


@pytest.mark.parametrize("mode", ("idx", "up", "down", "bfly"))
@pytest.mark.parametrize("b", (0, 1, 5, 16, 31))
@pytest.mark.parametrize("width", (32, 8))
def test_shuffles(mode, b, width):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    text = f"""{{.reg .pred p; .reg .b32 x; shfl.sync.{mode}.b32 x|p, a, {b}, {c}, -1;
        selp.b32 d, 1000, 0, p; add.u32 d, d, x;}}"""
    got = lanes(text, np.uint32, LANES.astype(np.uint32))
    expected = [shuffled(mode, lane, b, c) for lane in range(32)]
    assert got.tolist() == [source + 1000 * valid for source, valid in expected]


def test_votes_and_active_lanes():
    text = """{{.reg .pred p, q; .reg .b32 x; setp.gt.u32 p, a, 20; {} }}"""
    values = LANES.astype(np.uint32)
    ballot = "vote.sync.ballot.b32 d, p, -1;"
    assert lanes(text.format(ballot), np.uint32, values)[0] == 0xFFE00000
    for mode, expected in (("any", 1), ("all", 0), ("uni", 0)):
        vote = f"vote.sync.{mode}.pred q, !p, -1; selp.b32 d, 1, 0, q;"
        assert lanes(text.format(vote), np.uint32, values).tolist() == [expected] * 32
    active = "mov.b32 d, 5; @!p bra OUT; activemask.b32 d; OUT:"
    assert lanes(text.format(active), np.uint32, values).tolist() == [5] * 21 + [0xFFE00000] * 11
    total = "redux.sync.add.u32 d, a, -1;"
    assert lanes(text.format(total), np.uint32, values).tolist() == [496] * 32


def test_one_lane_is_elected_and_not_always_the_first():
    leaders = set()
    for seed in range(6):
        out = np.zeros(32, np.uint32)
        run(
            """elect.sync %r2|%p1, -1; selp.b32 %r3, 100, 0, %p1; add.u32 %r3, %r3, %r2;
            mul.wide.u32 %q1, %r0, 4; add.u64 %q1, %q0, %q1; st.global.u32 [%q1], %r3;""",
            out,
            seed=seed,
        )
        leader = int(out.min())
        assert out.tolist() == [leader + 100 * (lane == leader) for lane in range(32)]
        leaders.add(leader)
    assert len(leaders) > 1


def test_lanes_leave_a_loop_one_by_one_and_meet_again():
    """Each lane adds its own number of terms; the ballot behind the loop sees all lanes."""
    text = """{.reg .pred p; .reg .b32 i; mov.b32 i, 0; mov.b32 d, 0;
    LOOP: setp.ge.u32 p, i, a; @p bra OUT; add.u32 i, i, 1; add.u32 d, d, i; bra LOOP;
    OUT: setp.ge.u32 p, d, 0; vote.sync.ballot.b32 i, p, -1; setp.ne.u32 p, i, 0xFFFFFFFF; @p mov.b32 d, 0; }"""
    assert lanes(text, np.uint32, LANES.astype(np.uint32)).tolist() == [n * (n + 1) // 2 for n in range(32)]


def test_predicated_instructions_leave_other_lanes_alone():
    text = (
        """{.reg .pred p; and.b32 d, a, 1; setp.eq.u32 p, d, 1; mov.b32 d, 7; @p mov.b32 d, 9; @!p add.u32 d, d, a;}"""
    )
    assert lanes(text, np.uint32, LANES.astype(np.uint32)).tolist() == [9 if n % 2 else 7 + n for n in range(32)]


def test_a_shuffle_must_not_read_a_lane_that_is_elsewhere():
    with pytest.raises(EmulationError, match=r"does not take part.*shfl"):
        lanes(
            "{.reg .pred p; setp.lt.u32 p, a, 8; mov.b32 d, 0; @!p bra OUT; shfl.sync.idx.b32 d, a, 9, 31, 255; OUT:}",
            np.uint32,
            LANES.astype(np.uint32),
        )


# Memory


def test_vectors_and_widths():
    source = np.arange(32 * 16, dtype=np.uint8)
    out = np.zeros(32 * 4, np.uint32)
    run(
        """
        mul.wide.u32 %q2, %r0, 16; add.u64 %q3, %q0, %q2; add.u64 %q4, %q1, %q2;
        ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%q3];
        ld.global.nc.L1::no_allocate.s8 %r6, [%q3+15];
        ld.global.u8 %r7, [%q3+15];
        ld.relaxed.gpu.global.u16 %h1, [%q3+2];
        cvt.u32.u16 %r8, %h1;
        st.global.v4.b32 [%q4], {%r5, %r6, %r7, %r8};
        """,
        source,
        out,
    )
    rows = source.reshape(32, 16)
    got = out.reshape(32, 4)
    assert got[:, 0].tolist() == rows.view(np.uint32)[:, 3].tolist()
    assert got[:, 1].tolist() == rows[:, 15].view(np.int8).astype(np.int32).view(np.uint32).tolist()
    assert got[:, 2].tolist() == rows[:, 15].tolist()
    assert got[:, 3].tolist() == rows.view(np.uint16)[:, 1].tolist()


def test_atomics_count_every_lane():
    out = np.zeros(2, np.uint32)
    run("atom.global.add.u32 %r2, [%q0], %r0; red.relaxed.gpu.global.max.u32 [%q0+4], %r2;", out, grid=3)
    assert out.tolist() == [3 * 496, 3 * 496 - 31]


@pytest.mark.parametrize(
    "body, message",
    (
        ("ld.global.u32 %r2, [%q0+128];", "out of bounds: 4 bytes at"),
        ("ld.global.u32 %r2, [%q0+-4];", "out of bounds"),
        ("st.global.u8 [%q0+128], %r2;", "out of bounds"),
        ("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%q0+4];", "not a multiple of the 16 bytes"),
        ("ld.shared.u32 %r2, [%r1+4096];", "shared access out of bounds"),
        ("st.shared.u32 [0], %r2;", "shared access out of bounds"),
    ),
)
def test_bounds_and_alignment(body, message):
    buffer = np.zeros(128 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    with pytest.raises(EmulationError, match=message):
        run(body, buffer[start : start + 128])


def test_read_only_buffers_are_not_written():
    buffer, memory = np.zeros(4, np.uint32), GlobalMemory()
    address = memory.add(buffer, "weights", writable=False)
    ptx = ".entry k(.param .u64 p) { .reg .b64 %q<2>; ld.param.u64 %q0, [p]; st.global.u32 [%q0], 1; ret; }"
    launch = Launch((1, 1, 1), (32, 1, 1), (np.uint64(address).tobytes(),))
    with pytest.raises(EmulationError, match="write to weights, which is read only"):
        emulate(ptx, launch, memory)


def test_shared_memory_is_poisoned():
    out = np.zeros(32, np.uint32)
    run("ld.shared.u32 %r2, [%r1+64]; mul.wide.u32 %q1, %r0, 4; add.u64 %q1, %q0, %q1; st.global.u32 [%q1], %r2;", out)
    assert (out == 0xFFFFFFFF).all()


def test_ctas_have_their_own_memory_and_indices():
    out = np.zeros(5, np.uint32)
    run(
        """
        mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x; mad.lo.u32 %r4, %r2, 10, %r3;
        st.shared.u32 [%r1], %r4; ld.shared.u32 %r5, [%r1];
        mul.wide.u32 %q1, %r2, 4; add.u64 %q1, %q0, %q1; st.global.u32 [%q1], %r5;
        """,
        out,
        grid=5,
        resident_ctas=2,
    )
    assert out.tolist() == [5, 15, 25, 35, 45]


# What is not known is an error


@pytest.mark.parametrize(
    "body",
    (
        "frobnicate.b32 %r2, %r3;",
        "add.wobbly.s32 %r2, %r3, %r4;",
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};",
        "tcgen05.mma.cta_group::2.kind::mxf4.block_scale.block32 [%r2], %q0, %q1, %r3, [%r4], [%r5], %p1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r2], [%q0, {%r3, %r4}], [%r5], %h1;",
        "fence.proxy.alias;",
        "mov.b32 %r2, %q0;",
        "cvt.rn.satfinite.e3m2x2.f32 %h1, %r2, %r3;",
        "ld.local.u32 %r2, [%r3];",
    ),
)
def test_unknown_instructions_and_modifiers(body):
    with pytest.raises(UnsupportedInstruction, match="unsupported") as raised:
        run(body)
    assert body.rstrip(";").split()[0] in str(raised.value)


# Barriers


def test_named_barriers_order_warps():
    """Warp 1 writes what warp 0 reads; warps 2 and 3 meet at a barrier of their own, one of them without waiting."""
    out = np.zeros(2, np.uint32)
    for seed in range(5):
        out[:] = 0
        run(
            """
            shr.u32 %r2, %r0, 5; setp.ge.u32 %p1, %r2, 2; @%p1 bra OTHERS;
            setp.eq.u32 %p2, %r2, 1;
            @%p2 st.shared.u32 [%r1], 42;
            barrier.cta.sync.aligned 1, 64;
            ld.shared.u32 %r3, [%r1]; @!%p2 st.global.u32 [%q0], %r3;
            bra END;
            OTHERS: setp.eq.u32 %p2, %r2, 2; @%p2 bra FIRST;
            st.shared.u32 [%r1+4], 43; bar.arrive 2, 64; bra END;
            FIRST: bar.sync 2, 64; ld.shared.u32 %r3, [%r1+4]; st.global.u32 [%q0+4], %r3;
            END:
            """,
            out,
            block=128,
            seed=seed,
        )
        assert out.tolist() == [42, 43]


def test_mbarrier_phases():
    """Three warps arrive and wait, twice; one waits by the token of its arrival."""
    out = np.zeros(2, np.uint64)
    for seed in range(5):
        run(
            f"""
            setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;
            mbarrier.init.shared.b64 [%r1], 96;
            READY: bar.sync 0;
            setp.lt.u32 %p1, %r0, 32; @%p1 st.shared.u32 [%r1+8], 7;
            mbarrier.arrive.shared::cta.b64 %q5, [%r1];
            setp.ge.u32 %p2, %r0, 64; @%p2 bra BY_TOKEN;
            {wait(0)}
            bra SECOND;
            BY_TOKEN: mbarrier.try_wait.shared::cta.b64 %p3, [%r1], %q5; @!%p3 bra BY_TOKEN;
            SECOND: @!%p1 ld.shared.u32 %r2, [%r1+8]; @!%p1 st.global.u32 [%q0], %r2;
            mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];
            {wait(1)}
            mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.b64 %q2, 1, 0, %p2; st.global.u64 [%q0+8], %q2;
            END:
            """,
            out,
            block=96,
            seed=seed,
        )
        assert out.tolist() == [7, 0]


@pytest.mark.parametrize(
    "body, message",
    (
        ("mbarrier.arrive.shared.b64 _, [%r1+8];", "no mbarrier was initialised"),
        ("@!%p15 mbarrier.arrive.shared.b64 _, [%r1], 2;", "over-arrival"),
        ("mbarrier.arrive.shared.b64 _, [%r1];", "over-arrival: 32 arrivals, 1 of 1"),
        ("@!%p15 mbarrier.init.shared.b64 [%r1], 1;", "where there is one already"),
        ("st.shared.u32 [%r1+4], 0;", "holds an mbarrier"),
        ("@!%p15 mbarrier.inval.shared.b64 [%r1]; mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;", "no mbarrier"),
        ("bar.sync 1, 48;", "not whole warps"),
    ),
)
def test_barrier_faults(body, message):
    with pytest.raises(EmulationError, match=message):
        run(BARRIER + body)


def test_deadlocks_name_the_instruction_of_each_warp():
    body = f"{BARRIER} setp.gt.u32 %p1, %r0, 31; @%p1 bra SECOND; bar.sync 3, 64; bra END; SECOND: {wait(0)} END:"
    with pytest.raises(Deadlock) as raised:
        run(body, block=64)
    message = str(raised.value)
    assert "warp 0 at bar.sync 3, 64" in message and "barrier 3: 32 of 64 threads" in message
    assert "warp 1 at mbarrier.try_wait" in message and "phase 0, 1 of 1 arrivals and 0 bytes pending" in message


def test_a_loop_without_end_is_reported():
    with pytest.raises(EmulationError, match="no end after"):
        run("LOOP: bra LOOP;", max_steps=10_000)
