"""The oracle of the formats beside torchao's quantisers: where the recipe is the same, bits are equal."""

import pytest
import torch

from dist_moe import reference_formats as oracle
from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.testing import rows_sqnr_db

pytestmark = pytest.mark.torchao

MX = (MXFP8_E4M3, MXFP8_E5M2, MXFP4)
EACH_MX = pytest.mark.parametrize("format", MX, ids=lambda f: f.name)
NAN, INF = float("nan"), float("inf")


def codes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def ours(x_RC: torch.Tensor, format) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of values and codes of scales."""
    found = oracle.quantize_rows(x_RC, format=format)
    return codes(found.values), codes(found.scales)


def theirs(x_RC: torch.Tensor, format, mode: str = "RCEIL") -> tuple[torch.Tensor, torch.Tensor]:
    """The same of MX formats, by torchao."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scales, values = to_mx(x_RC.contiguous(), format.value_dtype, format.block, ScaleCalculationMode[mode])
    return codes(values), codes(scales)


def their_nvfp4(x_GRC: torch.Tensor, amax_G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of values, codes of scales and the outer scales, which multiply back: one for each of G."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    outer_G = per_tensor_amax_to_scale(amax_G)
    scales, values = nvfp4_quantize(x_GRC.contiguous(), NVFP4.block, outer_G[:, None, None])
    return values, codes(scales).view(*x_GRC.shape[:2], -1), outer_G


def their_nvfp4_rows(x_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With an outer scale a row, as activations have it here."""
    values, scales, outer_R = their_nvfp4(x_RC[:, None], x_RC.float().abs().amax(dim=1))
    return values[:, 0], scales[:, 0], outer_R


def blocks_of_every_bf16_amax(block: int) -> torch.Tensor:
    """[every finite magnitude of bf16, block]: random values under it, and itself with either sign."""
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = (2 * torch.rand(len(amax), block) - 1) * amax.float()[:, None]
    x[::2, 7], x[1::2, 7] = amax[::2].float(), -amax[1::2].float()
    return x.bfloat16()


# ---- MX formats: RCEIL is our recipe -------------------------------------------------------------------------------


@EACH_MX
def test_rceil_gives_our_bits_for_every_amax_of_bf16(format):
    """But under the least scale: there torchao leaves values as they are, too small for the format, and we scale."""
    x = blocks_of_every_bf16_amax(32)
    (values, scales), (their_values, their_scales) = ours(x, format), theirs(x, format)
    assert torch.equal(scales, their_scales)
    scaled = scales[:, 0] > 0
    assert torch.equal(values[scaled], their_values[scaled]) and scaled.sum() > 30_000
    least = x.abs().amax(dim=1)[~scaled]
    assert least.max() <= format.largest * 2.0**-127 and values[~scaled].any()
    sign_bits = 0x80 if format.values_per_byte == 1 else 0x88
    assert not (their_values[~scaled] & ~sign_bits & 0xFF).any()


@EACH_MX
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rceil_gives_our_bits_for_rows_columns_and_weights(format, dtype):
    x = (torch.randn(256, 512) * torch.exp2(torch.randint(-100, 100, (256, 1)).float())).to(dtype)
    values, scales = theirs(x, format)
    for found, want in zip(ours(x, format), (values, scales), strict=True):
        assert torch.equal(found, want)
    weights = oracle.quantize_weights(x.view(2, 128, 512), format=format)
    assert torch.equal(codes(weights.values).view(values.shape), values)
    assert torch.equal(oracle.from_blocked(codes(weights.scales), 128, 16, num_groups=2).view(scales.shape), scales)
    if format.values_per_byte == 1:
        starts, counts = torch.tensor([0, 256]).int(), torch.tensor([256]).int()
        columns = oracle.quantize_columns(x, format=format, row_start_P=starts, num_rows_L=counts)
        values, scales = theirs(x.T, format)
        assert torch.equal(codes(columns.values), values.T) and torch.equal(codes(columns.scales), scales.T)


@EACH_MX
def test_torchao_reads_our_codes_as_we_do(format):
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    x = torch.randn(64, 256) * torch.exp2(torch.randint(-100, 100, (64, 1)).float())
    found = oracle.quantize_rows(x, format=format)
    values = found.values if format.values_per_byte == 1 else codes(found.values)
    back = to_dtype(values, found.scales, format.value_dtype, format.block, torch.float32)
    assert torch.equal(back, oracle.dequantize_rows(found, format=format))


@pytest.mark.parametrize("shape", [(128, 4), (200, 10), (5, 90)])
def test_the_blocked_order_of_scales_is_torchaos(shape):
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.randint(1, 255, shape, dtype=torch.uint8)
    assert torch.equal(oracle.to_blocked(scales[None]).flatten(), to_blocked(scales).flatten())


# ---- MX formats: where recipes differ ------------------------------------------------------------------------------


@EACH_MX
def test_just_above_the_largest_times_a_power_of_two_rceil_may_round_down(format):
    """By an FP32 logarithm, which does not see the last bits of a large exponent: the amax is then clamped."""
    powers = torch.exp2(torch.arange(20.0, 100.0))
    x = torch.zeros(len(powers), 32)
    x[:, 0] = (format.largest * powers).nextafter(torch.tensor(INF))
    (values, scales), (their_values, their_scales) = ours(x, format), theirs(x, format)
    assert torch.equal(scales, their_scales + 1)
    assert (their_values[:, 0] == format.largest_code).all() and (values[:, 0] < format.largest_code).all()


@EACH_MX
def test_inf_breaks_our_block_and_is_clamped_by_torchao(format):
    x = torch.ones(2, 32)
    x[0, 5], x[1, 5] = NAN, INF
    (_, scales), (their_values, their_scales) = ours(x, format), theirs(x, format)
    assert scales[:, 0].tolist() == [255, 255] and their_scales[:, 0].tolist() == [255, 254]
    assert oracle.unpack_codes(their_values, format)[1, 5] == format.largest_code


@EACH_MX
def test_blocks_of_zeros_are_the_same(format):
    x = torch.tensor([[0.0], [-0.0]]).repeat(1, 32)
    for found, want in zip(ours(x, format), theirs(x, format), strict=True):
        assert torch.equal(found, want)


def back(values: torch.Tensor, scales: torch.Tensor, format) -> torch.Tensor:
    v = oracle.decode(oracle.unpack_codes(values, format), format)
    return v * oracle.scale_values(scales, format).repeat_interleave(format.block, dim=1)


@pytest.mark.parametrize(
    "mode, amax, share, factor, dbs",
    [
        ("FLOOR", 896, 0.16, 0.5, (30.6, 18.8)),
        ("EVEN", 896, 0.12, 0.5, (31.1, 19.0)),
        ("CEIL", 960, 0.83, 2, (31.5, 16.8)),
    ],
)
def test_other_modes_are_other_recipes(mode, amax, share, factor, dbs):
    """FLOOR and EVEN clamp, CEIL rounds amax up to a power of two before it divides by 2^8."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([960.0, 957.0])
    assert back(*theirs(x, MXFP8_E4M3, mode), MXFP8_E4M3)[0, :2].tolist() == [amax, amax]
    x = torch.randn(4096, 256).bfloat16()
    ratio = oracle.decode_e8m0(theirs(x, MXFP8_E4M3, mode)[1]) / oracle.decode_e8m0(ours(x, MXFP8_E4M3)[1])
    assert ratio.unique().tolist() == sorted([1, factor])
    assert (ratio != 1).float().mean() == pytest.approx(share, abs=0.01)
    for format, db in zip((MXFP8_E4M3, MXFP4), dbs, strict=True):
        found = back(*theirs(x, format, mode), format)
        assert rows_sqnr_db(found.view(1, -1), x.float().view(1, -1)).item() == pytest.approx(db, abs=0.1)


# ---- NVFP4: the same up to the rounding of an outer scale ----------------------------------------------------------


def rows_of_every_bf16_amax(largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a block with amax `largest` and 15 others, of every smaller amax of bf16; and the amax of the blocks."""
    blocks = blocks_of_every_bf16_amax(16)
    amax = blocks.abs().amax(dim=1).float()
    blocks, amax = blocks[amax <= largest], amax[amax <= largest]
    num_rows = len(blocks) // 15
    first = torch.full((num_rows, 1, 16), largest).bfloat16()
    x = torch.cat([first, blocks[-15 * num_rows :].view(num_rows, 15, 16)], dim=1)
    return x.flatten(1), x.abs().amax(dim=2).float()


@pytest.mark.parametrize("exponent", [-20, 0, 60])
def test_rows_whose_amax_is_a_power_of_two_have_our_bits(exponent):
    """There 2688 / amax is exact. torchao's least block scale is 2^-6, ours 2^-9: smaller blocks keep more bits."""
    x, block_amax = rows_of_every_bf16_amax(2.0**exponent)
    found = oracle.quantize_rows(x, format=NVFP4)
    values, scales, outer_R = their_nvfp4_rows(x)
    assert torch.equal(outer_R, found.outer_inv_R)
    in_range = block_amax * 2.0**-exponent >= 2.0**-6 / 448
    assert torch.equal(scales[in_range], codes(found.scales)[in_range]) and in_range.sum() > 2000
    of_bytes = in_range.repeat_interleave(8, dim=1)
    assert torch.equal(values[of_bytes], codes(found.values)[of_bytes])
    assert (scales[~in_range] == 8).all() and codes(found.scales)[~in_range].unique().tolist() == list(range(1, 9))


def test_other_rows_and_weights_differ_by_one_code_here_and_there():
    """torchao divides by 6 and by amax / 2688, we multiply by rounded reciprocals: another rounding near a tie."""
    x = torch.randn(4096, 512).bfloat16()
    found = oracle.quantize_rows(x, format=NVFP4)
    rows = (codes(found.values), codes(found.scales), found.outer_inv_R)
    w = torch.randn(64, 64, 128).bfloat16()
    found = oracle.quantize_weights(w, format=NVFP4)
    scales = oracle.from_blocked(codes(found.scales), 64, 8, num_groups=64)
    weights = (codes(found.values), scales, found.outer_inv_G)
    for mine, them in ((rows, their_nvfp4_rows(x)), (weights, their_nvfp4(w, w.float().abs().amax(dim=(1, 2))))):
        values, their_values = (oracle.unpack_codes(side[0], NVFP4).int() for side in (mine, them))
        scales, their_scales = mine[1].int(), them[1].int()
        assert (scales - their_scales).abs().max() == 1
        assert (scales != their_scales).float().mean() < 2e-3  # about 1e-3
        same = (scales == their_scales).repeat_interleave(16, dim=-1)
        assert (values - their_values).abs()[same].max() == 1
        assert (values != their_values).float().mean() < 2e-3  # about 6e-4
        assert torch.allclose(mine[2], them[2], rtol=2e-7, atol=0)


def test_one_outer_scale_for_all_rows_costs_small_rows():
    """torchao's recipe for activations. On rows of equal size there is nothing in it."""
    for least, ours_db, theirs_db in ((0, 20.0, 20.0), (-16, 20.0, 13.5)):
        x = (torch.randn(256, 2048) * torch.exp2(torch.linspace(0, least, 256))[:, None]).bfloat16()
        found = oracle.dequantize_rows(oracle.quantize_rows(x, format=NVFP4), format=NVFP4)
        values, scales, outer_1 = their_nvfp4(x[None], x.float().abs().amax()[None])
        their_found = back(values[0], scales[0], NVFP4) * outer_1
        for v, worst in ((found, ours_db), (their_found, theirs_db)):
            assert rows_sqnr_db(v, x.float()).min() == pytest.approx(worst, abs=0.2)


def test_zeros_and_what_is_not_finite_in_nvfp4():
    """NaN and Inf break the row on both sides; torchao divides zeros by their amax, and has NaN of them too."""
    x = torch.ones(3, 32)
    x[0] = 0
    x[1, 5], x[2, 5] = NAN, INF
    found = oracle.dequantize_rows(oracle.quantize_rows(x, format=NVFP4), format=NVFP4)
    assert not found[0].any() and found[1:].isnan().all()
    values, scales, outer_R = their_nvfp4_rows(x)
    assert (back(values, scales, NVFP4) * outer_R[:, None]).isnan().all()
