"""Which accesses of a GPU reach pinned host memory that is mapped into its addresses, and how fast:

    python -m benchmarks.host_access

Plain stores and loads, copies, atomics, and the products of the path with every operand and result there, which loads
and stores by TMA. Ends with 1 when something reads or writes anything else than in the device's own memory.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dist_moe import registry, vmm

from .gemms import BACKWARD, FORWARD, ExpertGemms

SIZE = 2**28  # bytes on the host, and as many on the device behind them
OPERANDS = ("w13", "w2", "x", "dy", "h1", "h2", "out_D", "out_2F", "out_F", "dw13", "dw2")


def rate(run: Callable[[], object]) -> str:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return f"{SIZE / (time.perf_counter() - start) / 1e9:7.1f} GB/s"


def plain(part: Tensor) -> dict[str, tuple[bool, str]]:
    """What was done: whether it came out right, and its rate."""
    values = part.view(torch.bfloat16)
    data = torch.randn(len(values), device=part.device).bfloat16()
    loaded = torch.empty_like(data)
    stores = rate(lambda: torch.mul(data, 2, out=values))
    found = {"stores": (torch.equal(values, data * 2), stores)}
    loads = rate(lambda: torch.mul(values, 0.5, out=loaded))
    found["loads"] = (torch.equal(loaded, data), loads)
    copies = rate(lambda: values.copy_(data))
    found["copies"] = (torch.equal(values, data), copies)
    for dtype in (torch.int32, torch.int64, torch.float32):
        counts, index = part.view(dtype)[:1024].zero_(), torch.randint(1024, (2**20,), device=part.device)
        counts.index_add_(0, index, torch.ones(len(index), dtype=dtype, device=part.device))
        found[f"atomic adds of {dtype}"] = (torch.equal(counts.long(), torch.bincount(index, minlength=1024)), "")
    return found


def products(part: Tensor) -> dict[str, tuple[bool, str]]:
    """The grouped products, once in memory of torch's and once with all tensors in this part; equal bits are right."""
    ops = registry.resolve(part.device)
    weights = (torch.randn(4, *shape, device=part.device).bfloat16() for shape in ((768, 512), (512, 384)))
    rank = ExpertGemms([300, 0, 1, 723], *weights)
    wanted = {}
    for product in (*FORWARD, *BACKWARD):
        rank.run(ops, product)
        wanted[product] = rank.result(product).clone()
    end = 0
    for name in OPERANDS:
        tensor = getattr(rank, name)
        there = part[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        setattr(rank, name, there.copy_(tensor))
        end += tensor.nbytes
    found = {}
    for product in (*FORWARD, *BACKWARD):
        rank.result(product).fill_(float("nan"))
        rank.run(ops, product)
        found[product] = (torch.equal(rank.result(product), wanted[product]), "")
    return found


def main() -> int:
    there = vmm.map_buffer(vmm.Sections(0, SIZE, SIZE), "cuda")
    wrong = 0
    for place, part in (("host", there[:SIZE]), ("device", there[SIZE:])):
        for what, (right, speed) in (plain(part) | products(part)).items():
            print(f"{place:6s} {what:28s} {'right' if right else 'WRONG'} {speed}")
            wrong += not right
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
