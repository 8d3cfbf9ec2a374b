"""Signals between ranks, waits with a deadline, and the check that all ranks make the same call.

    signal   peers' signals[stage, rank] = 2 * generation + aborted, released at system scope
    wait     until own signals[stage, w] >= 2 * generation for every w, acquired at system scope
    verify   VERSION, CONFIG_HASH, CALL, KIND of every rank's header = rank 0's, and 0 <= T <= T_max

Grids: signal and verify 1 program, wait one a rank; in a forward the first launch of route verifies. A launch after
which a rank has reached a stage ends with the signal: the last of its programs sends it (send_when_last). A launch of
at most 32 programs that needs the peers begins with the wait, in each of them (wait_for_all). No launch both signals
and waits, so a wait needs nothing of its own device that has not already run: ranks may share a device, and interpreted
programs may run one after another.

Order across ranks: what a rank's earlier launches wrote, to its own or a peer's regions, is complete when its signal
starts; the release makes it visible to the peer whose wait acquires the flag, and to that peer's later launches. A flag
has one writer (rank `rank` writes column `rank`) and only grows, so it is never reset and a late wait loses nothing. A
rank can be at most one generation of a stage ahead: to go further it needs the flag of the next stage from all.
Epochs (Context.reset) sit in the upper half of a generation: flags of an older epoch are too small for a wait.
"""

import triton
import triton.language as tl

from dist_moe import shapes
from dist_moe.meeting import Signal
from dist_moe.shapes import next_power_of_2

from ._device import begin, clock_ns, clocks_ns, delay, is_last, poll, poll_lanes
from ._fault import set_fault
from ._launch import launched

RESET = tl.constexpr(shapes.RESET)
EPOCH_SHIFT = tl.constexpr(shapes.EPOCH_SHIFT)
ABORT = tl.constexpr(shapes.HEADER_ABORT)
T_WORD = tl.constexpr(shapes.HEADER_T)
KIND_WORD = tl.constexpr(shapes.HEADER_KIND)
LAST_WORD = tl.constexpr(shapes.HEADER_FORWARD)
BACKWARD = tl.constexpr(shapes.KIND_BACKWARD)
BY_ROUTE = tl.constexpr(shapes.KIND_BY_ROUTE)
CODE_MASK = tl.constexpr((1 << shapes.FAULT_RANK_SHIFT) - 1)
MISMATCH = tl.constexpr(shapes.FAULT_MISMATCH)
ABORTED = tl.constexpr(shapes.FAULT_ABORTED)
TIMEOUT = tl.constexpr(shapes.FAULT_TIMEOUT)


@triton.jit
def send(
    signals_table_ptr,  # [W] addresses of every rank's signals, int64 [3, W]
    sent_ptr,  # [3] int64
    header_ptr,  # [16] int64, this rank's
    fault_ptr,  # [8] int64
    rank,
    W,
    STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Of one program; lane w releases the flag of peer w.

    Example (W = 2, rank 1, stage COMBINED = 1, sent = [5, 4, 0]): sent becomes [5, 5, 0] and word 1 * 2 + 1 = 3 of
    both ranks' signals 2 * 5 = 10. With fault word 3 | 0 << 8 (an overflow): header word ABORT = 3, flags 11.
    Once more: nothing, for of an epoch's aborted flags the first stays; flags 13 would tell a slow peer that waits for
    generation 5 that it was done.
    """
    delay(rank)
    offs_w = tl.arange(0, BLOCK_W)
    base_W = tl.load(signals_table_ptr + offs_w, mask=offs_w < W, other=0)
    code = tl.load(fault_ptr) & CODE_MASK if STAGE != RESET else tl.zeros((), tl.int64)
    generation = tl.load(sent_ptr + STAGE) + 1
    own_ptr = tl.load(signals_table_ptr + rank).to(tl.pointer_type(tl.int64)) + STAGE * W + rank
    last = tl.load(own_ptr)  # only this rank writes it
    has_aborted = ((last & 1) != 0) & ((last >> (1 + EPOCH_SHIFT)) == (generation >> EPOCH_SHIFT))
    sends = (code == 0) | ~has_aborted
    if sends & (code != 0):
        tl.store(header_ptr + ABORT, code)
    tl.debug_barrier()  # every lane has read `sent` before it changes, and the header is written before any release
    if sends:
        tl.store(sent_ptr + STAGE, generation)
        flag_ptr_W = base_W.to(tl.pointer_type(tl.int64)) + (STAGE * W + rank)
        flag = generation * 2 + (code != 0).to(tl.int64)
        delay(generation)
        tl.atomic_xchg(flag_ptr_W, tl.zeros([BLOCK_W], tl.int64) + flag, mask=offs_w < W, sem="release", scope="sys")


@launched
@triton.jit(do_not_specialize=["rank", "W"])
def _signal(signals_table_ptr, sent_ptr, header_ptr, fault_ptr, rank, W, STAGE: tl.constexpr, BLOCK_W: tl.constexpr):
    """One program."""
    begin()
    send(signals_table_ptr, sent_ptr, header_ptr, fault_ptr, rank, W, STAGE, BLOCK_W)


def signal(*, stage, rank, signals, sent_S, header, fault_F):
    """Tell every peer that this rank reached `stage`. Arguments and result: reference.signal."""
    W = len(signals.peers)
    _signal[(1,)](
        signals.table_W,
        sent_S,
        header.own,
        fault_F,
        rank,
        W,
        STAGE=stage,
        BLOCK_W=next_power_of_2(W),
        num_warps=1,
    )


@triton.jit
def send_when_last(
    signals_table_ptr,
    sent_ptr,
    header_ptr,
    fault_ptr,
    finished_ptr,
    rank,
    W,
    STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The end of every program of a launch after which this rank has reached the stage: the last of them signals.

    Its release covers what all programs of the launch stored, with plain stores and in peers' memory too, though other
    SMs stored it: is_last says why. It covers earlier launches as the signal of a launch of its own does.
    Example: of 3 programs that come as 2, 0, 1 the third sends; finished is 1, 2 and then 0 again.
    """
    if is_last(finished_ptr):
        send(signals_table_ptr, sent_ptr, header_ptr, fault_ptr, rank, W, STAGE, BLOCK_W)


def ending(then: Signal | None) -> tuple[tuple, dict]:
    """What a launch that ends with send_when_last passes for it: arguments, all None or 0 without, and constexprs."""
    if then is None:
        return (None, None, None, None, None, 0, 0), {"STAGE": 0, "BLOCK_W": 1}
    W = len(then.signals.peers)
    words = (then.signals.table_W, then.sent_S, then.header.own, then.fault_F, then.finished_1)
    return (*words, then.rank, W), {"STAGE": then.stage, "BLOCK_W": next_power_of_2(W)}


@launched
@triton.jit(do_not_specialize=["timeout_ns", "W"])
def _wait(
    signals_ptr,  # [3, W] int64, this rank's
    sent_ptr,  # [3] int64
    fault_ptr,  # [8] int64
    timeout_ns,
    W,
    STAGE: tl.constexpr,
):
    """Program w waits for rank w; it leaves when its flag is there, at the deadline, or when a fault is set.

    Programs that wait for peers which have come hold nobody up, so run one after another they end within one deadline
    of the last peer that came: the first program to miss its peer sets the fault, and all others leave at once.

    Example (W = 2, stage 1, sent = [5, 5, 0], target 10): flags [10, 8] pass rank 0 and time out on rank 1, fault words
    TIMEOUT | 1 << 8, 1, 5; flags [10, 11] end with ABORTED | 1 << 8, 1.
    """
    begin()
    w = tl.program_id(0)
    delay(w)
    target = tl.load(sent_ptr + STAGE) * 2
    flag_ptr = signals_ptr + STAGE * W + w
    start_ns = clock_ns()
    waited_ns = start_ns - start_ns
    # The fault word steers only and orders nothing: a volatile load. The flag is polled after the clock is read, so one
    # that came in time is seen, however long this program was off the device.
    fault = tl.load(fault_ptr, volatile=True)
    flag = poll(flag_ptr)
    while (flag < target) & (fault == 0) & (waited_ns <= timeout_ns):
        waited_ns = clock_ns() - start_ns
        fault = tl.load(fault_ptr, volatile=True)
        flag = poll(flag_ptr)
    if fault == 0:
        if flag < target:
            set_fault(fault_ptr, TIMEOUT, w, STAGE, target // 2, 0)
        elif flag == target + 1:  # of this generation; a peer that is ahead has passed it, whatever it did later
            set_fault(fault_ptr, ABORTED, w, STAGE, 0, 0)


def wait(*, stage, rank, timeout_ns, signals, sent_S, fault_F):
    """Wait until every rank has signalled `stage`. Arguments and result: reference.wait."""
    W = len(signals.peers)
    _wait[(W,)](signals.own, sent_S, fault_F, timeout_ns, W, STAGE=stage, num_warps=1)


# What a round of polls saw, in one number: lanes that miss their peer, and times these, aborted ones and what steers.
AN_ABORT, A_FAULT, LATE = tl.constexpr(1 << 10), tl.constexpr(1 << 20), tl.constexpr(1 << 21)


@triton.jit
def wait_for_all(
    signals_ptr,  # [3, W] int64, this rank's
    sent_ptr,  # [3] int64
    fault_ptr,  # [8] int64
    timeout_ns,
    W,
    STAGE: tl.constexpr,
    LANES: tl.constexpr,  # threads of a program, at least W
):
    """Wait as _wait does, in every program of a small launch, lane w for rank w; whether all came and no fault is set.

    What a program loads afterwards is as its peers stored it before they signalled: the lanes acquire, and the
    reduction of a round and the barrier at the end stand between them and the other threads. A program of several warps
    must not part in the loop, so nothing that a thread sees for itself decides: flags, fault and clock, the last two
    those of lane 0, are added up over the lanes, and the sum is one for all. The launch has at most 32 programs.
    Run one after another, programs end within one deadline: the first to miss a peer sets the fault, the others leave.

    Example (W = 2, target 10): flags [10, 8] are 1 lane missing; [10, 11] an abort of this generation, which
    needs no other flag.
    """
    lane = tl.arange(0, LANES)
    is_peer = lane < W
    delay(tl.program_id(0))
    target = tl.load(sent_ptr + STAGE) * 2
    flag_ptrs = signals_ptr + STAGE * W + tl.where(is_peer, lane, 0)  # the other lanes look on, and count for nothing
    start_ns = clocks_ns(lane)
    flag = tl.where(is_peer, poll_lanes(flag_ptrs), target)
    seen = _seen(flag, target, fault_ptr, lane, lane < 0)
    while (seen % AN_ABORT != 0) & (seen < AN_ABORT):
        # Flags are polled after the clock is read, so one that came in time is seen.
        is_late = clocks_ns(lane) - start_ns > timeout_ns
        flag = tl.where(is_peer, poll_lanes(flag_ptrs), target)
        seen = _seen(flag, target, fault_ptr, lane, is_late)
    tl.debug_barrier()
    has_fault = (seen // A_FAULT) % 2 != 0
    aborted = tl.min(tl.where(flag == target + 1, lane, LANES))
    missing = tl.min(tl.where(flag < target, lane, LANES))
    if ~has_fault & (aborted < LANES):
        set_fault(fault_ptr, ABORTED, aborted, STAGE, 0, 0)
    elif ~has_fault & (missing < LANES):
        set_fault(fault_ptr, TIMEOUT, missing, STAGE, target // 2, 0)
    return ~has_fault & (aborted == LANES) & (missing == LANES)


@triton.jit
def _seen(flag, target, fault_ptr, lane, is_late):
    """One number for all threads: lanes that are missing, lanes aborted, whether a fault is set, whether it is late."""
    fault = tl.load(fault_ptr + lane * 0, volatile=True)  # steers only and orders nothing
    by_lane = (flag < target).to(tl.int32) + (flag == target + 1).to(tl.int32) * AN_ABORT
    steers = (fault != 0).to(tl.int32) * A_FAULT + is_late.to(tl.int32) * LATE
    return tl.sum(by_lane + tl.where(lane == 0, steers, 0))


@triton.jit
def verify_headers(
    header_table_ptr,  # [W] addresses of every rank's header, int64 [16]
    fault_ptr,  # [8] int64
    num_tokens_max,
    W,
    BLOCK_W: tl.constexpr,
):
    """Of one program; lane w reads the header of rank w. The lowest rank that differs is named, by its first such word.
    Returns whether one does.

    Example (W = 3, T_max = 64): headers (version, hash, call, kind, T) of (1, 7, 2, 1, 64), (1, 7, 2, 1, 0),
    (1, 7, 3, 3, 5): rank 2 differs in word 2, fault words MISMATCH | 2 << 8, 2, 2, 3.
    """
    offs_w = tl.arange(0, BLOCK_W)
    mask_w = offs_w < W
    header_ptr_W = tl.load(header_table_ptr + offs_w, mask=mask_w, other=0).to(tl.pointer_type(tl.int64))
    header_ptr_0 = tl.load(header_table_ptr).to(tl.pointer_type(tl.int64))
    # key = rank * 16 + word of what is wrong; BLOCK_W * 16 when nothing is.
    key = tl.zeros((), tl.int32) + BLOCK_W * 16
    is_backward = (tl.load(header_ptr_0 + KIND_WORD) & ~BY_ROUTE) == BACKWARD
    for word in tl.static_range(LAST_WORD + 1):
        if word != ABORT:
            found_W = tl.load(header_ptr_W + word, mask=mask_w, other=0)
            if word == T_WORD:
                wrong_W = (found_W < 0) | (found_W > num_tokens_max)
            else:
                wrong_W = found_W != tl.load(header_ptr_0 + word)
            if word > ABORT:
                wrong_W = wrong_W & is_backward
            key = tl.minimum(key, tl.min(tl.where(wrong_W & mask_w, offs_w * 16 + word, BLOCK_W * 16)))
    if key < BLOCK_W * 16:
        wrong_rank = key // 16
        wrong_word = key % 16
        expected = tl.load(header_ptr_0 + wrong_word)
        if wrong_word == T_WORD:
            expected = tl.full((), num_tokens_max, tl.int64)
        found = tl.load(tl.load(header_table_ptr + wrong_rank).to(tl.pointer_type(tl.int64)) + wrong_word)
        set_fault(fault_ptr, MISMATCH, wrong_rank, wrong_word, expected, found)
    return key < BLOCK_W * 16


@launched
@triton.jit(do_not_specialize=["num_tokens_max", "W"])
def _verify(header_table_ptr, fault_ptr, num_tokens_max, W, BLOCK_W: tl.constexpr):
    """One program."""
    begin()
    delay(W)
    verify_headers(header_table_ptr, fault_ptr, num_tokens_max, W, BLOCK_W)


def verify(*, header, num_tokens_max, rank, fault_F):
    """Compare all ranks' headers. Arguments and result: reference.verify."""
    W = len(header.peers)
    _verify[(1,)](header.table_W, fault_F, num_tokens_max, W, BLOCK_W=next_power_of_2(W), num_warps=1)
