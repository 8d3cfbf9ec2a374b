"""What the Gluon kernels for sm_90 share: names that differ between Tritons, descriptors, a tile's way out."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# By their names in newer Tritons, or in 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int32: gl.int32,
}


@functools.cache
def shared_layout(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    """How a box that TMA moves lies in shared memory: swizzled as the tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


def descriptor(t: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block), shared_layout(t.dtype, *block))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def put_rows(result, out_ptr, row, col, row_end, width, pitch):
    """A tile of BF16 at (row, col), no row from row_end and no column from width."""
    LANES: gl.constexpr = result.shape[1] // 8 if result.shape[1] < 128 else 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    result = gl.convert_layout(result, LAYOUT)
    rows = row + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    mask = (rows < row_end)[:, None] & (cols < width)[None, :]
    gl.store(out_ptr + rows.to(gl.int64)[:, None] * pitch + cols[None, :], result, mask=mask)
