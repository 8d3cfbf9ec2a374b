"""The helpers of _device: what they do (here), and what they compile to (test_compile.py)."""

import threading
import time

import pytest
import torch
from tests.kernels_triton import device_probes as probes

from dist_moe.kernels_triton import _device


def test_poll_reads_and_leaves_the_flag(device):
    flag, out = torch.tensor([41, 42, 43], device=device), torch.empty(1, dtype=torch.int64, device=device)
    probes._poll[(1,)](flag[1:], out)
    assert out.item() == 42 and flag.tolist() == [41, 42, 43]


def test_store_release_writes_one_flag_after_the_data(device):
    x = torch.arange(64, dtype=torch.int32, device=device)
    out, flag = torch.zeros_like(x), torch.tensor([1, 2, 3], device=device)
    probes._copy_then_release[(1,)](x, out, flag[1:], 2**40, 64)
    assert torch.equal(out, x) and flag.tolist() == [1, 2**40, 3]


def test_a_flag_that_is_there_is_passed_at_once(device):
    x = torch.arange(64, dtype=torch.int32, device=device)
    out, flag = torch.zeros_like(x), torch.tensor([5], device=device)
    probes._wait_then_copy[(1,)](flag, x, out, 5, 64)
    assert torch.equal(out, x)


@pytest.mark.interpreter
def test_a_wait_ends_when_another_thread_raises_the_flag():
    x, flag = torch.arange(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    out = torch.zeros_like(x)

    def raise_flag():
        time.sleep(0.05)
        flag.fill_(7)

    thread = threading.Thread(target=raise_flag)
    start = time.perf_counter()
    thread.start()
    probes._wait_then_copy[(1,)](flag, x, out, 7, 64)
    thread.join()
    assert torch.equal(out, x) and time.perf_counter() - start >= 0.05


def test_the_clock_counts_nanoseconds(device):
    first, second = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
    probes._read_clock[(1,)](first, 2, num_warps=1)
    first.tolist()
    time.sleep(0.05)
    probes._read_clock[(1,)](second, 2, num_warps=1)
    elapsed = second[0].item() - first[1].item()
    assert first[0] <= first[1] and 0.04e9 < elapsed < 60e9


def test_reciprocal_is_rounded_as_the_division(device):
    """Also where the result is subnormal, and of infinity."""
    x = torch.cat([1 + torch.rand(4096), torch.exp(torch.rand(4000) * 88), torch.full((96,), 3e38)])
    x[-1] = float("inf")
    out = torch.empty(len(x), device=device)
    probes._reciprocals[(8,)](x.to(device), out, 1024)
    assert torch.equal(out.cpu(), 1 / x)


@pytest.mark.parametrize("N", [32, 1024], ids=["one value a thread", "pairs"])
def test_through_bf16_is_the_cast_there_and_back(N, device):
    """Also where it rounds to infinity, of ties and of subnormals."""
    x = torch.cat([torch.randn(N - 8), torch.tensor([3.4e38, -3.4e38, float("inf"), 1e-40, 0.0, -0.0])])
    x = torch.cat([x, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])]).to(device)
    out = torch.empty_like(x)
    probes._through_bf16[(1,)](x, out, N)
    assert torch.equal(out.view(torch.int32), x.bfloat16().float().view(torch.int32))


def test_num_programs(device):
    available = _device.num_programs(device)
    if _device.is_interpreting():
        assert available == 2
    else:
        assert available == torch.cuda.get_device_properties(device).multi_processor_count
    assert _device.num_programs(device, 1) == 1
    assert _device.num_programs(device, num_sms=10_000) == available
