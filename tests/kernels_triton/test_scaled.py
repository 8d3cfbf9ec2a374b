"""Expanded values that never were codes: the bits of codes that are expanded, for every kind of value."""

import pytest
import torch
import triton
import triton.language as tl
from tests.format_cases import assert_same_bits

from dist_moe.formats import MXFP8_E4M3, NVFP4
from dist_moe.kernels_triton._scaled import (
    e2m1_codes,
    expanded,
    format_options,
    in_expanded_order,
    quantise,
    quantise_and_expand,
    rounded_to_e2m1,
    rounded_to_e4m3,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

C = 256  # of a row: whole groups of both formats
NAN, INF = float("nan"), float("inf")


@triton.jit
def _expand_both(
    x_ptr, outer_ptr, of_codes_ptr, direct_ptr, R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr, RECIPROCAL: tl.constexpr, TWO_LEVEL: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    blocks = tl.reshape(tl.load(x_ptr + place), (R, C // BLOCK, BLOCK))
    outer = tl.load(outer_ptr + tl.arange(0, R))[:, None]
    codes, scales = quantise(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
    tl.store(of_codes_ptr + place, expanded(tl.reshape(codes, (R, C)), scales, ELEMENT, BLOCK))
    direct = quantise_and_expand(blocks, outer, 2, ELEMENT, RECIPROCAL, TWO_LEVEL)
    tl.store(direct_ptr + place, in_expanded_order(direct, ELEMENT))


@triton.jit
def _round(x_ptr, codes_ptr, values_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(codes_ptr + place, e2m1_codes(tl.load(x_ptr + place)))
    tl.store(values_ptr + place, rounded_to_e2m1(tl.load(x_ptr + place)))


@triton.jit
def _round_scales(x_ptr, out_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out_ptr + place, rounded_to_e4m3(tl.load(x_ptr + place)))


def rows(device) -> torch.Tensor:
    """FP32 [32, C]: bit patterns at random, ties, powers over the whole range, both zeros, what is not finite."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (8, C), generator=g).int().view(torch.float32)
    ties = torch.randint(-28, 29, (8, C), generator=g) * 0.25
    spread = torch.randn(8, C, generator=g) * torch.exp2(torch.randint(-140, 120, (8, 1), generator=g).float())
    rest = torch.randn(8, C, generator=g)
    rest[0], rest[1], rest[2], rest[3, :16], rest[4, ::7] = 0.0, -0.0, NAN, 0.0, -0.0
    rest[5, 40], rest[6, 3], rest[7, 200] = NAN, INF, -INF
    return torch.cat([bits, ties, spread, rest]).to(device)


@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda f: f.name)
def test_expanded_at_once_or_by_way_of_codes(format, device):
    x = rows(device)
    amax = x.abs().nan_to_num(NAN, posinf=INF).amax(1)
    for outer in (torch.ones_like(amax), 2688 / amax.clamp(min=1e-12)):
        found = [torch.full((len(x), C), 7.0, dtype=format.expanded_dtype, device=device) for _ in range(2)]
        _expand_both[(1,)](
            x, outer, *found, len(x), C, **format_options(format), TWO_LEVEL=format.two_level, enable_fp_fusion=False
        )  # fmt: skip
        assert_same_bits(found[1:], found[:1])
        assert found[1].isnan().any() and (found[1][:16].nan_to_num() != 0).float().mean() > 0.2


def test_values_of_e2m1_are_those_of_its_codes(device):
    of_codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    of_codes = torch.cat([of_codes, -of_codes])
    upper = torch.arange(-(2**15), 2**15) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):  # of the bits below what a value keeps
        x = (upper | low).int().view(torch.float32).to(device)
        codes, values = torch.full_like(x, 99, dtype=torch.uint8), torch.full_like(x, NAN)
        _round[(1,)](x, codes, values, len(x))
        finite = ~x.isnan().cpu()
        assert_same_bits([values.cpu()[finite]], [of_codes[codes.cpu().long()][finite]])
        assert values.abs().max() == 6 and (values.cpu()[~finite].abs() == 6).all()


def test_scales_are_rounded_as_a_conversion_to_e4m3(device):
    """From 2^-9 to 448: all values, the middles between two, ties to even, and their neighbours."""
    values = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, *(middles.nextafter(torch.tensor(to)) for to in (-INF, INF))])
    x = torch.cat([x, torch.full((512 - len(x),), NAN)]).to(device)
    found = torch.zeros_like(x)
    _round_scales[(1,)](x, found, len(x), enable_fp_fusion=False)
    want = x.to(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(-1), want.nan_to_num(-1)) and want[~want.isnan()].unique().numel() == 0x7E
