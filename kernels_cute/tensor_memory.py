"""Order and places in tensor memory that the multiplying warp and the epilogue share."""

from cutlass import Int32, cute
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from .tiles import Tile


@cute.jit
def accumulator_at(base, turn: Int32, tile: Tile):
    """The first column of the accumulator whose turn it is, of tensor memory from `base` on."""
    shift = tile.accumulator_shift if turn == 1 else 0
    return base + shift


@dsl_user_op
def reads_done(*, loc=None, ip=None):
    """What this thread read of tensor memory is in its registers, and comes before what it signals next."""
    cute.arch.fence_view_async_tmem_load(loc=loc, ip=ip)
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def after_signal(*, loc=None, ip=None):
    """What follows in tensor memory comes after the signal that was waited for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
