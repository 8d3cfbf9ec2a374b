"""The smallest kernels around the helpers of _device: interpreted by test_device.py, compiled by test_compile.py."""

import triton
import triton.language as tl

from dist_moe.kernels_triton._device import clock_ns, poll, reciprocal, store_release, through_bf16


@triton.jit
def _poll(flag_ptr, out_ptr):
    tl.store(out_ptr, poll(flag_ptr))


@triton.jit
def _wait_then_copy(flag_ptr, x_ptr, out_ptr, target, N: tl.constexpr):
    """The reader's side of a flag: poll, read."""
    flag = poll(flag_ptr)
    while flag < target:
        flag = poll(flag_ptr)
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


@triton.jit
def _copy_then_release(x_ptr, out_ptr, flag_ptr, value, N: tl.constexpr):
    """The writer's side of a flag: write, release."""
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i))
    store_release(flag_ptr, value)


@triton.jit
def _read_clock(out_ptr, N: tl.constexpr):
    for i in tl.static_range(N):
        tl.store(out_ptr + i, clock_ns())


@triton.jit
def _reciprocals(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, reciprocal(tl.load(x_ptr + i)))


@triton.jit
def _through_bf16(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, through_bf16(tl.load(x_ptr + i)))
