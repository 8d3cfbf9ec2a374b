"""finish: NaN and the record on a fault, nothing without one."""

import pytest
import torch

from dist_moe import shapes
from dist_moe.kernels_triton.finish import finish

RECORD = [shapes.FAULT_OVERFLOW | 2 << shapes.FAULT_RANK_SHIFT, 12, 10, 0, 0, 0, 0, -1]


def records(device, words) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.full((shapes.FAULT_WORDS,), 99, dtype=torch.int64)
    return torch.tensor(words, dtype=torch.int64, device=device), host.pin_memory() if device.type == "cuda" else host


def synchronise(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_example(device):
    fault_F, host_fault_F = records(device, RECORD)
    assert RECORD[0] == 515
    out = torch.zeros(3, device=device)
    finish(fault_F, host_fault_F, [out])
    synchronise(device)
    assert out.isnan().all() and host_fault_F.tolist() == RECORD


@pytest.mark.parametrize("num_outs", range(5))
@pytest.mark.parametrize("fault", [False, True])
def test_up_to_four_outputs_of_two_dtypes(device, num_outs, fault):
    """An empty one (T = 0) among them; guards behind each stay as they were."""
    fault_F, host_fault_F = records(device, RECORD if fault else [0] * 8)
    sizes = [(5, 32), (0, 3), (2, 3000, 5), (1,)][:num_outs]
    wholes = [
        torch.ones(torch.Size(size).numel() + 7, dtype=dtype, device=device)
        for size, dtype in zip(sizes, [torch.bfloat16, torch.float32] * 2, strict=False)
    ]
    outs = [whole[:-7].view(size) for whole, size in zip(wholes, sizes, strict=True)]
    finish(fault_F, host_fault_F, outs)
    synchronise(device)
    assert all(out.isnan().all() if fault else (out == 1).all() for out in outs)
    assert all((whole[-7:] == 1).all() for whole in wholes)
    assert host_fault_F.tolist() == (RECORD if fault else [99] * 8)
