"""copy_x: equal bits, and nothing beside them."""

import pytest
import torch

from dist_moe import reference
from dist_moe.kernels_triton.copy_x import copy_x

OPS = (copy_x, reference.copy_x)


def word(value: int, device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


def test_example(device):
    src = torch.arange(256, dtype=torch.float32, device=device).bfloat16()
    dst = torch.full((256,), -1.0, dtype=torch.bfloat16, device=device)
    copy_x(src, word(64, device), dst, word(128, device), 3, 32, stop_1=word(0, device))
    assert torch.equal(dst[128:224], src[64:160])
    assert (dst[:128] == -1).all() and (dst[224:] == -1).all()


@pytest.mark.parametrize(
    "num_rows, width",
    [
        pytest.param(0, 64, id="no rows"),
        pytest.param(1, 32, id="one short row"),
        pytest.param(64, 64, id="one whole block"),
        pytest.param(129, 96, id="blocks and a tail"),
    ],
)
def test_equals_the_oracle(device, num_rows, width):
    """NaN bits travel too; src has the shape of `tokens`, dst that of the activation buffer."""
    tokens = torch.randint(-(2**15), 2**15, (2, 150, width), dtype=torch.int16, device=device).view(torch.bfloat16)
    results = []
    for op in OPS:
        buffer = torch.zeros(20000, dtype=torch.int16, device=device).view(torch.bfloat16)
        op(tokens, word(64, device), buffer, word(192, device), num_rows, width, stop_1=word(0, device))
        results.append(buffer.view(torch.int16))
    assert torch.equal(*results)


def test_save_and_restore(device):
    x = torch.randn(5, 96, device=device).bfloat16()
    buffer = torch.full((4096,), float("nan"), dtype=torch.bfloat16, device=device)
    back = torch.zeros_like(x)
    copy_x(x, word(0, device), buffer, word(640, device), 5, 96, stop_1=word(0, device))
    copy_x(buffer, word(640, device), back, word(0, device), 5, 96, stop_1=word(0, device))
    assert torch.equal(back, x)


def test_offsets_past_2_to_the_31(device):
    """Untouched memory of the huge buffer costs nothing on a CPU."""
    x = torch.randn(2, 64, device=device).bfloat16()
    huge = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=device)
    copy_x(x, word(0, device), huge, word(2**31 + 64, device), 2, 64, stop_1=word(0, device))
    assert torch.equal(huge[2**31 + 64 : 2**31 + 192].view(2, 64), x)


def test_a_stopped_call_touches_nothing(device):
    src, dst = torch.ones(64, device=device).bfloat16(), torch.zeros(64, device=device).bfloat16()
    copy_x(src, word(0, device), dst, word(0, device), 1, 64, stop_1=word(1, device))
    assert not dst.any()
