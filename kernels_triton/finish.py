"""finish: the last launch of a direction. On a fault, NaN into every returned tensor and the record to the host.

Without a fault nothing is touched. A forward that returns one sum ends with reduce instead, which does the same to it.
Grid: persistent programs over blocks of each tensor; program 0 also tells the host.
"""

import triton
import triton.language as tl

from ._device import begin, num_programs
from ._fault import tell_host
from ._launch import launched

MAX_OUTS = 4
BLOCK = 1024


@triton.jit
def _fill_with_nan(out_ptr, num_elements, BLOCK: tl.constexpr):
    if out_ptr is not None:
        nan = tl.full([BLOCK], float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        for block in range(tl.program_id(0), tl.cdiv(num_elements, BLOCK), tl.num_programs(0)):
            i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out_ptr + i, nan, mask=i < num_elements)


@launched
@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3"])
def _finish(
    fault_ptr,  # int64 [FAULT_WORDS]
    host_fault_ptr,  # int64 [FAULT_WORDS], pinned host memory
    out0_ptr,  # bf16 or fp32 [n0], or None; so the others
    out1_ptr,
    out2_ptr,
    out3_ptr,
    n0,
    n1,
    n2,
    n3,
    BLOCK: tl.constexpr,
):
    """Example: fault [515, 12, 10, 0, ...] (overflow of rank 2: 12 rows needed, 10 there) and an out of 3 elements give
    out [NaN, NaN, NaN] and the same eight words on the host."""
    begin()
    if tl.load(fault_ptr) == 0:
        return
    _fill_with_nan(out0_ptr, n0, BLOCK)
    _fill_with_nan(out1_ptr, n1, BLOCK)
    _fill_with_nan(out2_ptr, n2, BLOCK)
    _fill_with_nan(out3_ptr, n3, BLOCK)
    if tl.program_id(0) == 0:
        tell_host(fault_ptr, host_fault_ptr)


def finish(fault_F, host_fault_F, outs):
    """End a direction: see the file.

    Args:    fault_F: int64 [8] on the device.  host_fault_F: int64 [8], pinned host memory.  outs: up to four
             contiguous tensors of bf16 or fp32, never the caller's own accumulators.
    Order:   after everything that writes `outs`.
    Source:  reference.finish.
    """
    assert len(outs) <= MAX_OUTS and all(out.is_contiguous() for out in outs)
    padded = [*outs, *[None] * (MAX_OUTS - len(outs))]
    sizes = [0 if out is None else out.numel() for out in padded]
    _finish[(num_programs(fault_F.device),)](fault_F, host_fault_F, *padded, *sizes, BLOCK=BLOCK)
