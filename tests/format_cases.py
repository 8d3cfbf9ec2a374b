"""What tests of the quantisers and of prepared weights share."""

import torch

from dist_moe.formats import padded_scales

NAN, INF = float("nan"), float("inf")

# A block of every kind: the rest of it is drawn.
EDGES = (0.0, -0.0, 2.0**-149, -(2.0**-130), 448.0, 6.0, 57344.0, 448.0 * 2**70, 6.0 * 2**-120, 957.0, 3.38e38, -1.0)
BROKEN = (NAN, INF, -INF)


def hard_values(R: int, C: int) -> torch.Tensor:
    """Blocks of all magnitudes, then a row for each edge value, a row of zeros, a row for each broken value."""
    scale = torch.randint(-140, 100, (R, C // 32)).float().repeat_interleave(32, dim=1)
    x = torch.randn(R, C) * torch.exp2(scale)
    for row, value in enumerate((*EDGES, *BROKEN)):
        if row + 1 < R:
            x[row + 1] = value * torch.rand(C).mul(2).sub(1) if value in (957.0, 3.38e38) else x[row + 1]
            x[row + 1, (7 * row) % C] = 960.0 if value == 957.0 else value
            x[row + 1, (7 * row + 1) % C] = value
    x[0] = 0
    return x


def expert_rows(counts, C: int, dtype=torch.float32):
    """A buffer of experts' rows with NaN between them and after them, starts and counts."""
    padded = [padded_scales(n, 4)[0] for n in counts]
    starts = torch.tensor([0, *padded]).cumsum(0)
    x = torch.full((int(starts[-1]) + 128, C), NAN, dtype=dtype)
    for start, n in zip(starts.tolist(), counts, strict=False):
        x[start : start + n] = torch.randn(n, C) * torch.exp2(torch.randint(-9, 9, (n, 1)).float())
    return x, starts.int(), torch.tensor(counts, dtype=torch.int32)


def assert_same_bits(found, want, what: str = "") -> None:
    """Of tensors, or of None on both sides. Of a NaN in 16 bits only that it is one: which depends on the machine."""
    for name, a, b in zip(getattr(want, "_fields", ("rows",)), found, want, strict=True):
        assert (a is None) == (b is None), f"{what} {name}"
        if b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, f"{what} {name}: {a.dtype} {a.shape}"
            if b.dtype in (torch.bfloat16, torch.float16):
                a, b = (torch.where(t.isnan(), torch.nan, t) for t in (a, b))
            differ = (a.cpu().contiguous().view(torch.uint8) != b.cpu().contiguous().view(torch.uint8)).nonzero()
            assert len(differ) == 0, f"{what} {name}: {len(differ)} bytes differ, the first at {differ[0].tolist()}"
