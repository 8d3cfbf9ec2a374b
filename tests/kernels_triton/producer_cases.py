"""Ranks whose experts begin at multiples of 128 rows, and bundles in poisoned memory, for tests of the producers."""

import torch
from tests.kernels_triton.row_cases import GUARD_ROWS, NAN, Ranks

from dist_moe import reference, shapes, testing
from dist_moe.formats import ROW_ALIGNMENT, Format, padded_scales
from dist_moe.quantized import Bundle
from dist_moe.shapes import align

POISON = 0xAB
SCALES_START = 384  # bytes, a multiple of 128
OUTER_START = 5


class AlignedRanks(Ranks):
    """Ranks with row maps as block-scaled modes have them."""

    def _route(self, r):
        rank, L = self.ranks[r], self.E // self.W
        routes = self.W * self.T_max * min(self.K, L)
        self.capacity = align(routes + L * (ROW_ALIGNMENT - 1), ROW_ALIGNMENT)
        fault_F = torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, device=self.device)
        plan = reference.route(
            ids=rank.ids,
            header=rank.header,
            rank=r,
            num_experts=self.E,
            capacity_rows=self.capacity,
            row_alignment=ROW_ALIGNMENT,
            fault_F=fault_F,
        )
        assert fault_F[0] == 0
        return plan

    def expanded_rows(self, format: Format, width: int) -> Bundle:
        """Everything in it is POISON."""
        codes = self.bundle(format, width)
        shape = (len(codes.values), align(width, format.expanded_group))
        values = torch.full((shape[0], 2 * shape[1]), POISON, dtype=torch.uint8, device=self.device)
        values = values.view(format.expanded_dtype)
        return codes._replace(values=values, scales=None, scales_start_1=None)

    def bundle(self, format: Format, width: int, columns: bool = False, expanded: bool = False) -> Bundle:
        """Everything in it is POISON; only columns are expanded, rows by expanded_rows."""
        R, per_byte = self.capacity, format.values_per_byte
        scales = (width, R // format.block) if columns else (R, width // format.block)
        num_bytes = padded_scales(*scales)[0] * padded_scales(*scales)[1] + SCALES_START + 128

        def poison(*shape, dtype):
            return torch.full(shape, POISON, dtype=torch.uint8, device=self.device).view(dtype)

        def word(value):
            return torch.tensor([value], dtype=torch.int64, device=self.device)

        if columns and expanded:
            return Bundle(poison(R + 2 * GUARD_ROWS, 2 * width, dtype=format.expanded_dtype), word(GUARD_ROWS))
        outer = (poison(4 * (R + 9), dtype=torch.float32), word(OUTER_START)) if format.two_level else (None, None)
        values = poison(R + 2 * GUARD_ROWS, width // per_byte, dtype=format.value_dtype)
        return Bundle(values, word(GUARD_ROWS), poison(num_bytes, dtype=format.scale_dtype), word(SCALES_START), *outer)


def aligned_ranks(device, routing, *, W, T, K, L, D, seed=0, T_max=None, ids=None) -> AlignedRanks:
    """Rows of many magnitudes, a few with NaN, Inf or blocks of zeros; a third of the scores is 0."""
    g = torch.Generator().manual_seed(seed)
    ids = testing.routing(routing, num_ranks=W, T=T, K=K, E=W * L, seed=seed) if ids is None else ids

    def rows(num: int) -> torch.Tensor:
        magnitude = torch.randint(-12, 12, (num, D // 32), generator=g).float().repeat_interleave(32, dim=1)
        x = (torch.randn(num, D, generator=g) * torch.exp2(magnitude)).bfloat16()
        x[1::3, :32] = 0
        x[2::7, 5], x[4::7, D - 3] = NAN, -float("inf")
        return x

    def scores(num: int) -> torch.Tensor:
        return torch.randn(num, K, generator=g) * (torch.rand(num, K, generator=g) > 0.3)

    x, dy = ([rows(len(i)) for i in ids] for _ in range(2))
    return AlignedRanks(device, x, list(ids), [scores(len(i)) for i in ids], E=W * L, T_max=T_max, dy=dy)


def assert_equal_bundles(found: Bundle, want: Bundle) -> None:
    """Equal bytes everywhere, so also where neither may write."""
    for part in ("values", "scales", "outer_inv"):
        a, b = getattr(found, part), getattr(want, part)
        if b is not None:
            if part == "values" and want.expanded:  # any NaN is as good as another
                a, b = (v.where(~v.isnan(), torch.full_like(v, NAN)) for v in (a, b))
            differ = (a.view(torch.uint8) != b.view(torch.uint8)).nonzero()
            assert len(differ) == 0, f"{part}: {len(differ)} bytes differ, the first at {differ[0].tolist()}"


def is_untouched(bundle: Bundle) -> bool:
    parts = (bundle.values, bundle.scales)
    return all(bool((t.view(torch.uint8) == POISON).all()) for t in parts if t is not None)
