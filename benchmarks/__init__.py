"""Benchmarks: `python -m benchmarks.bench_op`, `python -m benchmarks.bench_path`, `python -m benchmarks.report`."""

import os

# NVLink multicast is never used: it needs rights that a container or a virtual machine may lack.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
