"""The fault record on the device (words in shapes.py)."""

import triton
import triton.language as tl

from dist_moe import shapes

from ._device import store_release

FAULT_WORDS = tl.constexpr(shapes.FAULT_WORDS)
RANK_SHIFT = tl.constexpr(shapes.FAULT_RANK_SHIFT)


@triton.jit
def set_fault(fault_ptr, CODE: tl.constexpr, rank, a, b, c):
    """Record a fault unless an earlier one is there; a, b and c are what the code's comment in shapes.py lists."""
    word = CODE + (rank.to(tl.int64) << RANK_SHIFT)
    if tl.atomic_cas(fault_ptr, tl.zeros_like(word), word) == 0:
        tl.store(fault_ptr + 1, a)
        tl.store(fault_ptr + 2, b)
        tl.store(fault_ptr + 3, c)


@triton.jit
def tell_host(fault_ptr, host_fault_ptr):
    """Copy the record to pinned host memory, word 0 last and released at system scope: a host that reads word 0 != 0
    reads the details that belong to it."""
    word = tl.arange(0, FAULT_WORDS)
    tl.store(host_fault_ptr + word, tl.load(fault_ptr + word), mask=word > 0)
    store_release(host_fault_ptr, tl.load(fault_ptr))
