"""Benchmarks: `python -m dist_moe bench`; of the repository `python -m benchmarks.bench_path`, `bench_op`, `report`.

Installed as dist_moe.benchmarks; modules import each other relatively, so that both names work.
"""

import os

# NVLink multicast is never used: it needs rights that a container or a virtual machine may lack.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
