"""Device helpers of the kernels: flags at system scope, clock, delays. The only file with inline PTX.

Every piece of inline PTX has its interpreted twin registered here. Flags are int64 words in symmetric memory: a writer
makes its data visible with store_release, a reader that has polled the value may read that data. A volatile load has no
acquire and is not a poll.

DIST_MOE_DEBUG_DELAY_NS, read at import, has the programs of the path sleep at random before their work and before a
signal, so that an order that holds by luck alone shows as other bits. 0, the default, leaves no trace in the PTX.
"""

import functools
import os

import torch
import triton
import triton.language as tl

# Grid of a persistent kernel when interpreted: two, so that work is really split; each program more is only slower.
NUM_PROGRAMS_INTERPRETED = 2

DELAY_VARIABLE = "DIST_MOE_DEBUG_DELAY_NS"
MAX_DELAY_NS = 1_000_000  # what one nanosleep takes

_CLOCK_NS = tl.constexpr("mov.u64 $0, %globaltimer;")
_CLOCKS_NS = tl.constexpr("{ .reg .b32 lane; mov.b32 lane, $1; mov.u64 $0, %globaltimer; }")
_POLL = tl.constexpr("ld.acquire.sys.global.b64 $0, [$1];")
_SLEEP_NS = tl.constexpr("nanosleep.u32 $1; mov.u32 $0, $1;")
_RECIPROCAL = tl.constexpr("rcp.rn.f32 $0, $1;")
_THROUGH_BF16 = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)
_PROXY_FENCE = tl.constexpr("fence.proxy.async; mov.b32 $0, 0;")
_AWAIT_PREVIOUS = tl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")
LEAVE_CLOCK = tl.constexpr("")  # leave_clock of a buffer that _clocks has made before any launch


def _delay_ns(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_DELAY_NS:
        raise ValueError(f"{DELAY_VARIABLE} must be an integer from 0 to {MAX_DELAY_NS}, got {text!r}")
    return int(text)


DELAY_NS = tl.constexpr(_delay_ns(os.environ.get(DELAY_VARIABLE, "0")))


@triton.jit
def begin():
    """The first statement of every launched kernel: the launch before it has ended, and what it wrote is visible.

    _launch launches a kernel as soon as all programs of the one before it in the stream have left (programmatic
    dependent launch), before what they wrote has settled; that is awaited here. A launch ends after its own wait, so
    all earlier ones have ended too. None lets the next one launch earlier (griddepcontrol.launch_dependents): that made
    large calls slower, docs/performance.md.
    """
    tl.inline_asm_elementwise(_AWAIT_PREVIOUS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if LEAVE_CLOCK != "":
        tl.inline_asm_elementwise(LEAVE_CLOCK, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def leave_clock(address: int, most: int) -> str:
    """PTX of one thread of a program: count it in the int64 at address, and put its clock, in ns, behind the last of
    them; no more than `most` are put there."""
    return f"""{{
        .reg .pred first, fits;
        .reg .b32 thread;
        .reg .b64 count, place, now;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.u64 count, {address};
        mov.u64 place, {most};
        mov.u64 now, %globaltimer;
        @first atom.global.add.u64 place, [count], 1;
        setp.lt.u64 fits, place, {most};
        mad.lo.u64 place, place, 8, count;
        @fits st.global.u64 [place+8], now;
        mov.b32 $0, 0;
    }}"""


@triton.jit
def poll(flag_ptr):
    """The int64 at flag_ptr, acquired at system scope: sm_90 and later make it one load, not a read-modify-write."""
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def poll_lanes(flag_ptrs):
    """The same of a tensor of addresses, which Triton would add to. A barrier stands between it and what it orders."""
    addresses = flag_ptrs.to(tl.int64)
    return tl.inline_asm_elementwise(_POLL, "=l,l", [addresses], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def count_done(counter_ptr):
    """Count, in an int32 of this device, an item whose stores await_count makes visible to who waits for it."""
    tl.debug_barrier()  # the counting thread is one of many: the others' stores must come first
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def await_count(counter_ptr, needed):
    """Wait until so many have counted themselves; what they stored may be read, by TMA too, whose accesses are ordered
    with those of threads by a fence alone. Only for items of lower tickets of a launch, all of which somebody has."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < needed:
        pass
    tl.inline_asm_elementwise(_PROXY_FENCE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_release(flag_ptr, value):
    """*flag_ptr = value, released at system scope: what this program wrote before it is visible to who polls it."""
    tl.debug_barrier()  # the releasing thread is one of many: the others' stores must come first
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="sys")


@triton.jit
def is_last(finished_ptr):
    """Whether every other program of this launch, whose grid has one axis, has come here before this one.

    finished_ptr counts them, 0 before the launch and after it: the last one, which is alone then, sets it back for a
    later launch. What programs wrote before they came is visible to the last one, and to whoever acquires what that one
    releases afterwards, at system scope too: each step of the chain (barrier of a program, count, barrier, release) has
    a scope that holds both of its sides, and causality goes through all of them.
    """
    tl.debug_barrier()  # the counting thread is one of many: the others' stores must come first
    last = tl.atomic_add(finished_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    tl.debug_barrier()  # and the others' loads after it
    if last:
        tl.store(finished_ptr, 0)
    return last


@triton.jit
def clock_ns():
    """The GPU's global timer in nanoseconds, int64; the same for all programs of a device.

    Every warp reads its own: a loop that ends by the clock needs num_warps=1, else the warps may part in it.
    """
    return tl.inline_asm_elementwise(_CLOCK_NS, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def clocks_ns(lanes):
    """clock_ns by lane, of a tensor of one lane a thread: what programs of several warps decide by, after a reduction,
    which gives all threads one answer."""
    return tl.inline_asm_elementwise(_CLOCKS_NS, "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def reciprocal(v):
    """1 / v in FP32, rounded to nearest even: the bits of the division for half its instructions."""
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def through_bf16(v):
    """FP32 v rounded to BF16, two values an instruction: the cast there and back converts them one by one."""
    return tl.inline_asm_elementwise(_THROUGH_BF16, "=r,=r,r,r", [v], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def delay(salt):
    """Sleep a random time up to DELAY_NS, which the GPU may double; salt is any integer that tells items apart.

    Every warp draws its own, by its clock. Without DELAY_NS: no code.
    """
    if DELAY_NS > 0:
        drawn = (clock_ns() + tl.program_id(0) * 0x3C6EF372 + salt * 0x5851F42D).to(tl.uint32) * 0x9E3779B1
        drawn = (drawn ^ (drawn >> 15)) * 0x85EBCA77
        ns = (drawn.to(tl.uint64) * (DELAY_NS + 1) >> 32).to(tl.uint32)
        tl.inline_asm_elementwise(_SLEEP_NS, "=r,r", [ns], dtype=tl.uint32, is_pure=False, pack=1)


def is_interpreting() -> bool:
    """Whether the kernels of this process run in Triton's interpreter."""
    return not isinstance(poll, triton.JITFunction)


def num_programs(device: torch.device, num_sms: int | None = None) -> int:
    """Programs of a persistent kernel: the device's SMs, at most num_sms; 2 when interpreting."""
    available = NUM_PROGRAMS_INTERPRETED if is_interpreting() else _num_sms(torch.device(device))
    return available if num_sms is None else min(available, num_sms)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


if is_interpreting():
    import ctypes
    import time

    import numpy as np

    from dist_moe._interpreter import decode, encode, register_asm
    from dist_moe.symm import fence

    def _sleep(ns):
        time.sleep(ns.item() * 1e-9)
        return ns

    def interpreted_clock():
        return np.array([time.perf_counter_ns()])

    def interpreted_nothing():
        return np.zeros(1, np.int32)

    register_asm(_CLOCK_NS.value, interpreted_clock)
    register_asm(_CLOCKS_NS.value, lambda lanes: np.full(lanes.shape, time.perf_counter_ns()))

    def _poll(addresses):
        unique, lane = np.unique(addresses, return_inverse=True)
        flags = np.array([ctypes.c_int64.from_address(int(address)).value for address in unique])
        fence()
        return flags[lane].reshape(addresses.shape)

    register_asm(_POLL.value, _poll)

    def _divide_one(v):
        with np.errstate(divide="ignore"):
            return np.float32(1) / v

    register_asm(_SLEEP_NS.value, _sleep)
    register_asm(_RECIPROCAL.value, _divide_one)
    register_asm(_THROUGH_BF16.value, lambda v: decode(encode(v, tl.bfloat16), tl.bfloat16))
    register_asm(_AWAIT_PREVIOUS.value, interpreted_nothing)
    register_asm(_PROXY_FENCE.value, interpreted_nothing)
