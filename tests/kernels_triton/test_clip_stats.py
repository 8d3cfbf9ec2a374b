"""count_clips against the oracle: exact counts, strict limits, and padding and neighbours full of what would count."""

import pytest
import torch

from dist_moe import reference
from dist_moe.kernels_triton.clip_stats import count_clips

OPS = pytest.mark.parametrize("op", [count_clips, reference.count_clips], ids=["triton", "reference"])
START = 3  # rows of a neighbour before and after


def counts_of(op, h1, real_R, limit, *, stop=0, before=(0, 0, 0), **options) -> list[int]:
    """Of the rows h1 [R, 2F] among neighbours of 9e9, where those that are not real are padding."""
    R, device = len(h1), h1.device
    view = torch.full((START + R + 4, h1.shape[1]), 9e9, dtype=torch.bfloat16, device=device)
    view[START : START + R] = torch.where(real_R[:, None], h1, 9e9)
    row_to_slot_R = torch.full((R + 4,), 7, dtype=torch.int32, device=device)
    row_to_slot_R[:R][~real_R] = -1
    counts_3 = torch.tensor(before, device=device)
    op(
        view,
        torch.tensor([START], device=device),
        torch.tensor([0, R // 2, R], dtype=torch.int32, device=device),
        row_to_slot_R,
        counts_3,
        limit=limit,
        stop_1=torch.tensor([stop], device=device),
        **options,
    )
    return counts_3.tolist()


@pytest.mark.parametrize("limit", [0.0, 1.5, -0.25])
@pytest.mark.parametrize("R, F", [(0, 32), (1, 32), (33, 96), (40, 288)])
def test_equals_the_oracle(R, F, limit, device):
    h1 = torch.randn(R, 2 * F).bfloat16().to(device)
    real_R = (torch.rand(R) < 0.7).to(device)
    wanted = counts_of(reference.count_clips, h1, real_R, limit)
    assert counts_of(count_clips, h1, real_R, limit) == wanted
    assert counts_of(count_clips, h1, real_R, limit, num_sms=1) == wanted
    gate, up = h1[real_R].float().chunk(2, dim=1)
    assert wanted == [int((gate > limit).sum()), int((up.abs() > limit).sum()), F * int(real_R.sum())]


@OPS
def test_values_at_the_limit_and_nan_are_not_counted(op, device):
    row = torch.tensor([1.0, 1.0078125, float("nan"), float("inf")] * 8).bfloat16()
    h1 = torch.cat([row, -row])[None].to(device)
    real_R = torch.ones(1, dtype=torch.bool, device=device)
    assert counts_of(op, h1, real_R, 1.0) == [16, 16, 32]


@OPS
def test_docstring_example_is_added_to_what_is_there(op, device):
    h1 = torch.tensor([[3.0, 1.0, -2.0, 1.0], [0.0, 2.0, 1.0, 5.0]]).bfloat16().to(device)
    real_R = torch.ones(2, dtype=torch.bool, device=device)
    assert counts_of(op, h1, real_R, 1.0) == [2, 2, 4]
    assert counts_of(op, h1, real_R, 1.0, before=(2**40, 1, 0)) == [2**40 + 2, 3, 4]
    assert counts_of(op, h1, real_R, 1.0, stop=1, before=(5, 6, 7)) == [5, 6, 7]
