"""The oracle of the formats against what it is not made from: tables of ml_dtypes, and search."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format_cases import expert_rows

from dist_moe import reference_formats as oracle
from dist_moe.formats import FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, padded_scales
from dist_moe.testing import rows_sqnr_db

MX = (MXFP8_E4M3, MXFP8_E5M2, MXFP4)
ML_DTYPES = {
    MXFP8_E4M3: ml_dtypes.float8_e4m3fn,
    MXFP8_E5M2: ml_dtypes.float8_e5m2,
    MXFP4: ml_dtypes.float4_e2m1fn,
    NVFP4: ml_dtypes.float4_e2m1fn,
}
EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
EACH_MX = pytest.mark.parametrize("format", MX, ids=lambda f: f.name)
FP32_BITS = st.integers(0, 2**32 - 1)
NAN, INF = float("nan"), float("inf")


def fp32(bits: list[int]) -> torch.Tensor:
    return torch.tensor(np.array(bits, np.uint32).view(np.float32))


def table(format) -> np.ndarray:
    """float64 values of all codes, by ml_dtypes."""
    codes = np.arange(16 if format.values_per_byte == 2 else 256, dtype=np.uint8)
    return codes.view(ML_DTYPES[format]).astype(np.float64)


def nearest(v: np.ndarray, format) -> np.ndarray:
    """Codes of finite float64 values by search: the nearest finite magnitude, the even code of two."""
    values = table(format)
    magnitudes = values[: len(values) // 2]
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    gap = np.abs(np.minimum(np.abs(v), format.largest)[..., None] - magnitudes)  # float64 far beyond would tie
    best = gap == gap.min(axis=-1, keepdims=True)
    codes = np.arange(len(magnitudes))
    preferred = np.where(best, np.where(codes % 2 == 0, codes, codes + 1000), 10**6).min(axis=-1) % 1000
    return (preferred + np.where(np.signbit(v), len(values) // 2, 0)).astype(np.uint8)


# ---- values and scales ---------------------------------------------------------------------------------------------


@EACH_FORMAT
def test_every_code_has_the_value_that_ml_dtypes_gives(format):
    want = table(format)
    found = oracle.decode(torch.arange(len(want), dtype=torch.uint8), format).double().numpy()
    assert np.array_equal(found, want, equal_nan=True)
    assert np.array_equal(np.signbit(found)[np.isfinite(want)], np.signbit(want)[np.isfinite(want)])


def test_every_e8m0_code_has_the_value_that_ml_dtypes_gives():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    found = oracle.decode_e8m0(torch.arange(256, dtype=torch.uint8)).numpy()
    assert np.array_equal(found, want, equal_nan=True) and np.isnan(found[255])


@EACH_FORMAT
def test_values_of_the_format_keep_their_codes(format):
    values = table(format)
    finite = np.isfinite(values)
    codes = oracle.encode(torch.tensor(values[finite], dtype=torch.float32), format)
    assert np.array_equal(codes.numpy(), np.arange(len(values))[finite])


@EACH_FORMAT
def test_midpoints_and_their_neighbours_are_rounded_to_nearest_even(format):
    magnitudes = table(format)[: len(table(format)) // 2]
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    middle = ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(np.float32)
    v = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    v = np.concatenate([v, -v])
    assert np.array_equal(oracle.encode(torch.tensor(v), format).numpy(), nearest(v.astype(np.float64), format))


@EACH_FORMAT
@settings(max_examples=40)
@given(bits=st.lists(FP32_BITS, min_size=1, max_size=64))
def test_any_finite_value_is_rounded_to_the_nearest(format, bits):
    v = fp32(bits)
    v = v[v.isfinite()]
    assert np.array_equal(oracle.encode(v, format).numpy(), nearest(v.double().numpy(), format))


@EACH_FORMAT
def test_many_values_are_rounded_to_the_nearest(format):
    v = torch.randn(20_000) * torch.exp2(torch.randint(-20, 20, (20_000,)).float())
    assert np.array_equal(oracle.encode(v, format).numpy(), nearest(v.double().numpy(), format))


@EACH_FORMAT
def test_values_above_the_largest_are_clamped_and_nan_is_kept(format):
    v = torch.tensor([1.001 * format.largest, 3e38, INF, NAN])
    codes = [format.largest_code] * 3
    sign = 0x80 if format.values_per_byte == 1 else 8
    assert oracle.encode(v, format).tolist() == [*codes, format.nan_code]
    assert oracle.encode(-v[:3], format).tolist() == [code | sign for code in codes]


@settings(max_examples=40)
@given(bits=st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=64))
def test_scales_are_the_least_power_of_two_that_is_not_less(bits):
    m = fp32(bits)
    for value, code in zip(m.double().tolist(), oracle.encode_e8m0(m).tolist(), strict=True):
        assert code == 255 if value > 2.0**127 else (value <= 2.0 ** (code - 127))
        assert code == 0 or value > 2.0 ** (code - 128)


def test_scales_at_powers_of_two_subnormals_zero_and_nan():
    powers = [2.0 ** (code - 127) for code in range(255)]
    assert oracle.encode_e8m0(torch.tensor(powers)).tolist() == list(range(255))
    up = torch.tensor(powers).nextafter(torch.tensor(INF))
    assert oracle.encode_e8m0(up).tolist() == list(range(1, 256))
    assert oracle.encode_e8m0(torch.tensor([0.0, 2.0**-149, INF, NAN])).tolist() == [0, 0, 255, 255]


# ---- blocks --------------------------------------------------------------------------------------------------------


def mx_by_search(block: np.ndarray, format) -> tuple[np.ndarray, int]:
    """Codes and scale code of one block of finite FP32 values."""
    m = float(np.float32(np.abs(block).max()) * np.float32(1 / format.largest))
    code = 0 if m == 0 else max(math.ceil(math.log2(m)) - 1, -127) + 127
    while 2.0 ** (code - 127) < m:
        code += 1
    return nearest(block.astype(np.float64) / 2.0 ** (code - 127), format), code


def nvfp4_by_search(row: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes, block scale codes and inverse outer scale of a row of finite FP32 values."""
    one = np.float32(1)
    outer = np.float32(2688) * (one / np.maximum(np.abs(row).max(), np.float32(eps)))
    blocks = row.reshape(-1, 16)
    scales = np.abs(blocks).max(axis=1) * outer * np.float32(1 / 6)
    scale_codes = nearest(np.clip(scales, 2.0**-9, 448).astype(np.float64), MXFP8_E4M3)
    scale_values = table(MXFP8_E4M3)[scale_codes].astype(np.float32)
    codes = nearest((blocks * (outer / scale_values)[:, None]).astype(np.float64), NVFP4)
    return codes.reshape(-1), scale_codes, one / outer


def unpacked(values: torch.Tensor, format) -> np.ndarray:
    values = values.view(torch.uint8).numpy()
    if format.values_per_byte == 1:
        return values
    return np.stack([values % 16, values // 16], axis=-1).reshape(values.shape[0], -1)  # even index: low half


def wide_range(*shape: int) -> torch.Tensor:
    """Finite values whose blocks differ in magnitude by up to 2^240, some blocks among the subnormals."""
    x = torch.randn(shape) * torch.exp2(
        torch.randint(-140, 100, (*shape[:-1], shape[-1] // 32)).float()
    ).repeat_interleave(32, dim=-1)
    return x


@EACH_MX
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mx_rows_equal_a_search(format, dtype):
    x = wide_range(40, 96).to(dtype)
    found = oracle.quantize_rows(x, format=format)
    codes, scales = unpacked(found.values, format), found.scales.view(torch.uint8).numpy()
    for r in range(40):
        for s in range(3):
            want, scale = mx_by_search(x[r, 32 * s : 32 * s + 32].float().numpy(), format)
            assert scales[r, s] == scale
            assert np.array_equal(codes[r, 32 * s : 32 * s + 32], want)


@EACH_MX
@settings(max_examples=40)
@given(bits=st.lists(FP32_BITS, min_size=32, max_size=32))
def test_any_mx_block_equals_a_search(format, bits):
    x = fp32(bits)[None]
    found = oracle.quantize_rows(x, format=format)
    if x.isfinite().all():
        want, scale = mx_by_search(x[0].numpy(), format)
    else:
        want, scale = np.full(32, format.nan_code), 255
    assert found.scales.view(torch.uint8).item() == scale
    assert np.array_equal(unpacked(found.values, format)[0], want)


def test_nvfp4_rows_equal_a_search():
    x = torch.randn(60, 96) * torch.exp2(torch.randint(-60, 60, (60, 1)).float())
    x *= torch.exp2(torch.randint(-12, 1, (60, 6)).float()).repeat_interleave(16, dim=1)
    found = oracle.quantize_rows(x, format=NVFP4)
    for r in range(60):
        codes, scales, outer_inv = nvfp4_by_search(x[r].numpy(), eps=1e-8)
        assert np.array_equal(unpacked(found.values, NVFP4)[r], codes)
        assert np.array_equal(found.scales.view(torch.uint8)[r].numpy(), scales)
        assert found.outer_inv_R[r].item() == outer_inv


@settings(max_examples=40)
@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=32, max_size=32))
def test_any_nvfp4_row_of_bf16_equals_a_search(bits):
    x = fp32([b << 16 for b in bits])
    x = torch.where(x.isfinite(), x, 1.0)
    found = oracle.quantize_rows(x[None], format=NVFP4)
    codes, scales, outer_inv = nvfp4_by_search(x.numpy(), eps=1e-8)
    assert np.array_equal(unpacked(found.values, NVFP4)[0], codes)
    assert np.array_equal(found.scales.view(torch.uint8)[0].numpy(), scales) and found.outer_inv_R.item() == outer_inv


def test_nvfp4_weights_share_one_outer_scale_an_expert():
    w = torch.randn(3, 32, 64) * torch.tensor([1.0, 1e-3, 1e-14])[:, None, None]
    found = oracle.quantize_weights(w, format=NVFP4)
    scales = oracle.from_blocked(found.scales.view(torch.uint8), 32, 4, num_groups=3)
    for g in range(3):
        codes, scale_codes, outer_inv = nvfp4_by_search(w[g].numpy().reshape(-1), eps=1e-12)
        assert np.array_equal(unpacked(found.values[g], NVFP4).reshape(-1), codes)
        assert np.array_equal(scales[g].numpy().reshape(-1), scale_codes)
        assert found.outer_inv_G[g].item() == outer_inv
        assert torch.equal(found.outer_G.reciprocal(), found.outer_inv_G)


@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP8_E5M2], ids=lambda f: f.name)
def test_columns_are_the_rows_of_the_transposed(format):
    x = wide_range(96, 256).T.contiguous()  # magnitudes differ along the rows
    start_P, num_rows_L = torch.tensor([0, 256], dtype=torch.int32), torch.tensor([256], dtype=torch.int32)
    rows = oracle.quantize_rows(x.T, format=format)
    for blocked in (False, True):
        columns = oracle.quantize_columns(x, format=format, blocked=blocked, row_start_P=start_P, num_rows_L=num_rows_L)
        assert torch.equal(columns.values.view(torch.uint8), rows.values.view(torch.uint8).T)
        scales = columns.scales.view(torch.uint8)
        scales = oracle.from_blocked(scales, 96, 8)[0] if blocked else scales.T
        assert torch.equal(scales, rows.scales.view(torch.uint8))
        back = oracle.dequantize_columns(columns, format=format, blocked=blocked)
        assert torch.equal(back, oracle.dequantize_rows(rows, format=format).T)


@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP8_E5M2], ids=lambda f: f.name)
def test_square_blocks_of_weights_have_the_same_scales_in_both_orientations(format):
    w = torch.randn(2, 64, 96) * torch.exp2(torch.arange(3.0)).repeat_interleave(32)
    found = oracle.quantize_weights(w, format=format, square=True)
    along_k = oracle.from_blocked(found.scales.view(torch.uint8), 64, 3, num_groups=2)
    along_n = oracle.from_blocked(found.transposed_scales.view(torch.uint8), 96, 2, num_groups=2)
    for g in range(2):
        for n in range(2):
            for k in range(3):
                block = w[g, 32 * n : 32 * n + 32, 32 * k : 32 * k + 32]
                want, scale = mx_by_search(block.numpy(), format)
                codes = found.values[g].view(torch.uint8)[32 * n : 32 * n + 32, 32 * k : 32 * k + 32]
                assert np.array_equal(codes.numpy(), want)
                assert (along_k[g, 32 * n : 32 * n + 32, k] == scale).all()
                assert (along_n[g, 32 * k : 32 * k + 32, n] == scale).all()


@EACH_FORMAT
def test_weights_along_k_are_rows_but_for_the_outer_scale(format):
    w = torch.randn(2, 32, 96)
    w[:, :, 5] = 4.0  # every row has the amax of its expert, so that NVFP4's outer scales are equal too
    w = w.clamp(-4, 4)
    weights = oracle.quantize_weights(w, format=format)
    rows = oracle.quantize_rows(w.view(64, 96), format=format)
    assert torch.equal(weights.values.view(torch.uint8).view(64, -1), rows.values.view(torch.uint8))
    scales = oracle.from_blocked(weights.scales.view(torch.uint8), 32, 96 // format.block, num_groups=2)
    assert torch.equal(scales.reshape(64, -1), rows.scales.view(torch.uint8))
    back = oracle.dequantize_weights(weights, format=format)
    assert torch.equal(back.view(64, 96), oracle.dequantize_rows(rows, format=format))


# ---- situations ----------------------------------------------------------------------------------------------------


def test_rounds_957_in_a_block_with_amax_960_under_a_scale_rounded_up():
    """Rounded down, the scale would be 2 and both would be clamped to 896."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([960.0, 957.0])
    found = oracle.quantize_rows(x, format=MXFP8_E4M3)
    assert found.scales.view(torch.uint8).item() == 127 + 2
    assert oracle.dequantize_rows(found, format=MXFP8_E4M3)[0, :2].tolist() == [960.0, 960.0]


@EACH_MX
def test_the_largest_times_a_power_of_two_is_exact(format):
    for k in range(-100, 100, 7):
        x = torch.full((1, 32), format.largest * 2.0**k)
        found = oracle.quantize_rows(x, format=format)
        assert found.scales.view(torch.uint8).item() == 127 + k
        assert torch.equal(oracle.dequantize_rows(found, format=format), x)


@EACH_FORMAT
def test_zeros_quantise_to_zeros_under_finite_scales(format):
    found = oracle.quantize_rows(torch.zeros(2, 64), format=format)
    assert not found.values.view(torch.uint8).any()
    assert found.scales.float().isfinite().all() and (format.two_level or not found.scales.view(torch.uint8).any())
    assert not oracle.dequantize_rows(found, format=format).any()
    weights = torch.randn(3, 32, 64)
    weights[1] = 0  # an expert
    found = oracle.quantize_weights(weights, format=format)
    back = oracle.dequantize_weights(found, format=format)
    assert not back[1].any() and back[0].any() and back.isfinite().all()
    assert torch.equal(found.values.view(torch.uint8)[1].any(), torch.tensor(False))


def test_negative_zero_keeps_its_sign():
    x = torch.full((1, 32), -0.0)
    assert (oracle.quantize_rows(x, format=MXFP8_E4M3).values.view(torch.uint8) == 0x80).all()
    assert (oracle.quantize_rows(x, format=NVFP4).values.view(torch.uint8) == 0x88).all()


@EACH_MX
@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_nan_or_inf_breaks_its_block_and_no_other(format, broken):
    x = torch.randn(2, 96)
    clean = oracle.dequantize_rows(oracle.quantize_rows(x, format=format), format=format)
    x[1, 40] = broken
    found = oracle.quantize_rows(x, format=format)
    back = oracle.dequantize_rows(found, format=format)
    assert found.scales.view(torch.uint8)[1, 1] == 0xFF and back[1, 32:64].isnan().all()
    assert (unpacked(found.values, format)[1, 32:64] == format.nan_code).all()
    back[1, 32:64] = clean[1, 32:64]
    assert torch.equal(back, clean)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_nan_or_inf_breaks_its_row_in_nvfp4_and_its_expert_of_weights(broken):
    x = torch.randn(3, 64)
    x[1, 40] = broken
    found = oracle.quantize_rows(x, format=NVFP4)
    back = oracle.dequantize_rows(found, format=NVFP4)
    assert back[1].isnan().all() and back[[0, 2]].isfinite().all()
    assert found.scales.view(torch.uint8)[1, 2] == 0x7F
    w = torch.randn(2, 32, 64)
    w[1, 3, 5] = broken
    back = oracle.dequantize_weights(oracle.quantize_weights(w, format=NVFP4), format=NVFP4)
    assert back[1].isnan().all() and back[0].isfinite().all()


@pytest.mark.parametrize("blocked", [False, True])
def test_blocks_of_columns_never_hold_two_experts(blocked):
    """Experts of 0, 1, 7, 8, 9, 127, 128 and 129 rows: each is quantised as if it were alone."""
    counts = [0, 1, 7, 8, 9, 127, 128, 129]
    x, start_P, num_rows_L = expert_rows(counts, 96)
    options = {"format": MXFP8_E4M3, "blocked": blocked}
    found = oracle.quantize_columns(x, **options, row_start_P=start_P, num_rows_L=num_rows_L)
    end = int(start_P[-1])
    scales = found.scales.view(torch.uint8)
    if blocked:  # of the rows in use, packed
        scales = oracle.from_blocked(scales.flatten()[: 128 * end // 32], 96, end // 32)[0].T
    for start, n in zip(start_P.tolist(), counts, strict=False):
        alone = torch.zeros(padded_scales(n, 4)[0], 96)
        alone[:n] = x[start : start + n]
        if n:
            one = {"row_start_P": torch.tensor([0, len(alone)]).int(), "num_rows_L": torch.tensor([n]).int()}
            want = oracle.quantize_columns(alone, format=MXFP8_E4M3, **one)
            assert torch.equal(
                found.values[start : start + len(alone)].view(torch.uint8), want.values.view(torch.uint8)
            )
            assert torch.equal(scales[start // 32 : (start + len(alone)) // 32], want.scales.view(torch.uint8))
    back = oracle.dequantize_columns(found, **options, rows_end=end)
    assert back.isfinite().all()  # nothing of the NaN between experts


@EACH_FORMAT
def test_padding_rows_and_scales_are_zeros_whatever_the_buffer_held(format):
    x, start_P, num_rows_L = expert_rows([3, 0, 130], 96)
    found = oracle.quantize_rows(x, format=format, blocked=True, row_start_P=start_P, num_rows_L=num_rows_L)
    S, end = 96 // format.block, int(start_P[-1])
    scales = found.scales.view(torch.uint8)
    natural = oracle.from_blocked(scales, len(x), padded_scales(1, S)[1])[0]
    assert not natural[:end, S:].any()  # columns that only fill an atom
    real = torch.zeros(len(x), dtype=torch.bool)
    real[:3] = real[128:258] = True
    assert not found.values.view(torch.uint8)[:end][~real[:end]].any()
    zero_scale = oracle.quantize_rows(torch.zeros(1, 32), format=format).scales.view(torch.uint8)[0, 0]
    assert (natural[:end, :S][~real[:end]] == zero_scale).all()
    want = oracle.quantize_rows(torch.where(x.isnan(), 0.0, x)[:end], format=format)
    assert torch.equal(found.values.view(torch.uint8)[:end], want.values.view(torch.uint8))


def test_rows_after_the_last_expert_are_left_alone():
    x, start_P, num_rows_L = expert_rows([3, 5], 64)
    for op in (oracle.quantize_rows, oracle.quantize_columns):
        for blocked in (False, True):
            options = {"format": MXFP8_E4M3, "blocked": blocked, "row_start_P": start_P, "num_rows_L": num_rows_L}
            out = op(x, **options)
            for tensor in out[:2]:
                tensor.view(torch.uint8).fill_(0xAB)
            assert op(x, **options, out=out) is out
            assert (out.values.view(torch.uint8)[256:] == 0xAB).all()
            scales = out.scales.view(torch.uint8)
            written = 256 // 32 * 64
            if blocked:  # with what fills the atoms: columns of scales, or rows
                written = 256 * 4 if op is oracle.quantize_rows else 128 * 256 // 32
            assert (scales.flatten()[written:] == 0xAB).all() and not (scales.flatten()[:written] == 0xAB).any()


@EACH_FORMAT
@pytest.mark.parametrize("C", [96, 160, 2880])
def test_scale_columns_that_do_not_fill_an_atom(format, C):
    x = torch.randn(5, C)
    natural, blocked = (oracle.quantize_rows(x, format=format, blocked=b) for b in (False, True))
    padded = oracle.from_blocked(blocked.scales.view(torch.uint8), 128, blocked.scales.shape[1])[0]
    S = C // format.block
    assert blocked.scales.shape == padded_scales(5, S)
    assert torch.equal(padded[:5, :S], natural.scales.view(torch.uint8))
    assert not padded[5:].any() and not padded[:, S:].any()


@EACH_FORMAT
def test_strided_sources(format):
    wide = torch.randn(64, 200).bfloat16()
    views = (wide[:, 8:104], wide[::2, ::2][:, :96], wide.T[:96, :].T[:, :96])
    for x in views:
        found, want = (oracle.quantize_rows(t, format=format) for t in (x, x.contiguous()))
        for a, b in zip(found[:2], want[:2], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@EACH_FORMAT
def test_unit_normal_data_comes_back(format):
    """Whole / worst row of these: E4M3 31.5 / 30.5, E5M2 25.5 / 24.4, MXFP4 18.8 / 17.4, NVFP4 20.5 / 19.3 dB."""
    bar = {"mxfp8_e4m3": 29.5, "mxfp8_e5m2": 23.5, "mxfp4": 16.5, "nvfp4": 18.5}[format.name]
    x = torch.randn(100, 512)
    assert rows_sqnr_db(oracle.dequantize_rows(oracle.quantize_rows(x, format=format), format=format), x).min() > bar


# ---- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("G, rows, cols", [(1, 128, 4), (1, 1, 1), (2, 130, 5), (3, 256, 90), (1, 0, 3)])
def test_blocked_order_byte_by_byte_and_back(G, rows, cols):
    scales = torch.randint(1, 255, (G, rows, cols), dtype=torch.uint8)
    blocked = oracle.to_blocked(scales)
    padded_rows, padded_cols = padded_scales(rows, cols)
    assert blocked.shape == (G * padded_rows, padded_cols)
    flat = blocked.flatten()
    g, r, c = torch.meshgrid(torch.arange(G), torch.arange(rows), torch.arange(cols), indexing="ij")
    atom = (g * (padded_rows // 128) + r // 128) * (padded_cols // 4) + c // 4
    assert torch.equal(flat[atom * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4], scales)
    assert int((flat != 0).sum()) == scales.numel()  # all padding is zero
    assert torch.equal(oracle.from_blocked(blocked, rows, cols, num_groups=G), scales)


def test_the_example_of_the_blocked_order():
    scales = torch.zeros(1, 128, 4, dtype=torch.uint8)
    scales[0, 33, 2] = 1
    assert oracle.to_blocked(scales).flatten().nonzero().item() == 22


@EACH_FORMAT
@pytest.mark.parametrize("D", [32, 96, 512])
def test_wire_rows_there_and_back(format, D):
    x = torch.randn(5, D).bfloat16()
    rows = oracle.quantize_rows(x, format=format)
    packed = oracle.pack_rows(x, format=format)
    back = oracle.unpack_rows(packed, format, D)
    for a, b in zip(rows[:2], back[:2], strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert rows.outer_inv_R is None or torch.equal(rows.outer_inv_R, back.outer_inv_R)
    used = D // format.values_per_byte + D // format.block + format.outer_scale_bytes
    assert packed.shape[1] % 16 == 0 and not packed[:, used:].any()


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: oracle.quantize_rows(torch.zeros(2, 48), format=NVFP4), ValueError, "a multiple of 32"),
        (lambda: oracle.quantize_rows(torch.zeros(2, 0), format=NVFP4), ValueError, "a multiple of 32"),
        (lambda: oracle.quantize_rows(torch.zeros(2, 2, 64), format=NVFP4), ValueError, "2 dimensions"),
        (lambda: oracle.quantize_rows(torch.zeros(2, 64).half(), format=NVFP4), TypeError, "bfloat16 or float32"),
        (lambda: oracle.quantize_weights(torch.zeros(2, 48, 64), format=NVFP4), ValueError, "last 2 multiples of 32"),
        (lambda: oracle.quantize_weights(torch.zeros(2, 32, 64), format=NVFP4, square=True), ValueError, "along rows"),
        (lambda: oracle.pack_rows(torch.zeros(2, 64), format=NVFP4, out_TB=torch.zeros(2, 40)), ValueError, "uint8"),
    ],
)
def test_refusals(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_refusals_of_experts_rows():
    x, start_P, num_rows_L = expert_rows([3], 64)
    options = {"row_start_P": start_P, "num_rows_L": num_rows_L}
    with pytest.raises(ValueError, match="nvfp4 has two values of a row in a byte"):
        oracle.quantize_columns(x, format=NVFP4, **options)
    with pytest.raises(ValueError, match="rows of two experts"):
        oracle.quantize_columns(x, format=MXFP8_E4M3, row_start_P=None, num_rows_L=None)
    with pytest.raises(ValueError, match="come together"):
        oracle.quantize_rows(x, format=MXFP8_E4M3, row_start_P=start_P)
    with pytest.raises(ValueError, match="multiple of 128"):
        oracle.quantize_rows(x[:100], format=MXFP8_E4M3, **options)
    with pytest.raises(ValueError, match="int32"):
        oracle.quantize_rows(x, format=MXFP8_E4M3, row_start_P=start_P.long(), num_rows_L=num_rows_L)
    out = oracle.quantize_rows(x, format=MXFP8_E4M3)
    with pytest.raises(ValueError, match=r"out\.values must be torch.float8_e5m2"):
        oracle.quantize_rows(x, format=MXFP8_E5M2, out=out)
