"""dispatch_quantize and quantize_received: equal bytes to the oracle, also around what may be written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels_triton.producer_cases import (
    GUARD_ROWS,
    POISON,
    SCALES_START,
    AlignedRanks,
    aligned_ranks,
    assert_equal_bundles,
    is_untouched,
)
from tests.kernels_triton.row_cases import NAN, same_bits
from tests.strategies import routings

from dist_moe import reference, reference_formats, reference_producers
from dist_moe.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_triton import dispatch_quantize as kernels
from dist_moe.quantized import Quantized
from dist_moe.shapes import align

FORMATS_OF = {format.value_dtype: format for format in (MXFP8_E4M3, MXFP8_E5M2)}
# Where a row is not finite, numpy warns of what is meant to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def run(
    op,
    ranks: AlignedRanks,
    r: int,
    format,
    *,
    outputs="both",
    half=0,
    scaled=False,
    stops=(0, 0),
    num_sms=None,
    expanded=False,
):
    """(rows, columns, row_scores_R) of rank r by one implementation of dispatch_quantize."""
    rows = ranks.bundle(format, ranks.D) if outputs != "columns" else None
    columns = ranks.bundle(format, ranks.D, columns=True, expanded=expanded) if outputs != "rows" else None
    row_scores_R = ranks.row_floats()
    rows_stop_1, columns_stop_1 = (torch.tensor([stop], device=ranks.device) for stop in stops)
    op(
        ranks.plans[r],
        tokens=ranks.ranks[r].tokens,
        half=half,
        scores=ranks.ranks[r].scores,
        format=format,
        rows=rows,
        columns=columns,
        scaled_columns=scaled,
        row_scores_R=row_scores_R,
        rows_stop_1=None if rows is None else rows_stop_1,
        columns_stop_1=None if columns is None else columns_stop_1,
        num_sms=num_sms,
    )
    return rows, columns, row_scores_R


def run_received(
    op, ranks: AlignedRanks, r: int, format, widths, *, outputs="both", half=0, scaled=False, expanded=False
):
    """The same from staged rows, a window after the other in a buffer as wide as the first; the rest of it is NaN."""
    rows = ranks.bundle(format, ranks.D) if outputs != "columns" else None
    columns = ranks.bundle(format, ranks.D, columns=True, expanded=expanded) if outputs != "rows" else None
    all_XD, row_scores_R = ranks.dispatch(reference.dispatch, r, dedup=False, half=half)
    first = 0
    for width in widths:
        staged_XS = torch.full((len(all_XD), widths[0]), NAN, dtype=torch.bfloat16, device=ranks.device)
        staged_XS[:, :width] = all_XD[:, first : first + width]
        op(
            ranks.plans[r],
            staged_XS=staged_XS,
            staged_start_1=ranks.start_1(),
            window=(first, width),
            format=format,
            rows=rows,
            columns=columns,
            scaled_columns=scaled,
            row_scores_R=row_scores_R,
            rows_stop_1=ranks.stop_1,
            columns_stop_1=ranks.stop_1,
        )
        first += width
    return rows, columns, row_scores_R


def assert_same(found, want) -> None:
    for a, b in zip(found[:2], want[:2], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_equal_bundles(a, b)
    assert same_bits(found[2], want[2])


# (note, routing, W, T, K, L, D, format, outputs, half, scaled, widths of the windows)
CASES = [
    ("one token", "uniform", 1, 1, 1, 1, 32, MXFP8_E4M3, "both", 0, False, [32]),
    ("no token anywhere", "uniform", 2, 0, 2, 2, 32, MXFP8_E4M3, "both", 1, True, [32]),
    ("a tail of the chunk, e5m2", "uniform", 1, 5, 1, 1, 1056, MXFP8_E5M2, "both", 0, False, [640, 416]),
    ("scaled, an expert of more than an atom", "one_expert", 2, 70, 2, 2, 160, MXFP8_E4M3, "both", 1, True, [128, 32]),
    ("scaled columns alone", "dropped(0.5)", 3, 17, 3, 1, 288, MXFP8_E5M2, "columns", 1, True, [256, 32]),
    ("rows alone", "empty_ranks", 4, 6, 3, 1, 96, MXFP8_E4M3, "rows", 0, False, [96]),
    ("rows of two values in a byte", "duplicates", 1, 9, 2, 2, 160, MXFP4, "rows", 0, False, [128, 32]),
    ("scaled x, whose zeros keep signs", "uniform", 1, 40, 1, 1, 64, MXFP8_E4M3, "both", 0, True, [64]),
]
EACH_CASE = {
    "argnames": "routing, W, T, K, L, D, format, outputs, half, scaled, widths",
    "argvalues": [case[1:] for case in CASES],
    "ids": [case[0] for case in CASES],
}


@pytest.mark.parametrize(**EACH_CASE)
def test_equals_the_oracle(device, routing, W, T, K, L, D, format, outputs, half, scaled, widths):
    ranks = aligned_ranks(device, routing, W=W, T=T, K=K, L=L, D=D, T_max=T + 2)
    options = {"outputs": outputs, "half": half, "scaled": scaled}
    for r in range(W):
        want = run(reference_producers.dispatch_quantize, ranks, r, format, **options)
        assert_same(run(kernels.dispatch_quantize, ranks, r, format, **options), want)
    for op in (kernels.quantize_received, reference_producers.quantize_received):
        assert_same(run_received(op, ranks, W - 1, format, widths, **options), want)
    if outputs != "rows":
        options["expanded"] = True
        assert_expanded(ranks, W - 1, run(kernels.dispatch_quantize, ranks, W - 1, format, **options), want)
        assert_expanded(
            ranks, W - 1, run_received(kernels.quantize_received, ranks, W - 1, format, widths, **options), want
        )
        assert_expanded(ranks, W - 1, run(reference_producers.dispatch_quantize, ranks, W - 1, format, **options), want)


def assert_expanded(ranks: AlignedRanks, r: int, found, codes) -> None:
    """Columns hold what the codes stand for, and nothing is written around them; all else has the bits of `codes`."""
    assert_same((found[0], None, found[2]), (codes[0], None, codes[2]))
    columns, R = codes[1], ranks.num_rows(r)
    want = ranks.bundle(FORMATS_OF[columns.values.dtype], ranks.D, columns=True, expanded=True)
    values = columns.values[GUARD_ROWS : GUARD_ROWS + R].view(torch.uint8).view(columns.values.dtype)
    scales = columns.scales.view(torch.uint8)[SCALES_START:][: align(ranks.D, 128) * (R // 32)]
    quantized = Quantized(values, scales, None)
    if R:
        format = FORMATS_OF[columns.values.dtype]
        expanded = reference_formats.dequantize_columns(quantized, format=format, blocked=True)
        want.values[GUARD_ROWS : GUARD_ROWS + R] = expanded.bfloat16()
    assert_equal_bundles(found[1], want)


@settings(max_examples=6)
@given(routing=routings(num_ranks=(1, 2, 3), max_tokens=4, max_experts=2), half=st.integers(0, 1), scaled=st.booleans())
def test_any_routing(device, routing, half, scaled):
    W = len(routing.ids)
    sizes = {"W": W, "T": 0, "K": routing.ids[0].shape[1], "L": routing.num_experts // W, "D": 32}
    ranks = aligned_ranks(device, "", **sizes, T_max=routing.num_tokens_max, ids=routing.ids)
    options = {"half": half, "scaled": scaled}
    want = run(reference_producers.dispatch_quantize, ranks, 0, MXFP8_E4M3, **options)
    assert_same(run(kernels.dispatch_quantize, ranks, 0, MXFP8_E4M3, **options), want)


@pytest.mark.parametrize("ops", [kernels, reference_producers], ids=["kernel", "oracle"])
def test_example(device, ops):
    """One expert, token 1 as slot 0 and token 0 as slot 1: the docstring's numbers."""
    x = torch.tensor([448.0, -960.0]).bfloat16()[:, None].repeat(1, 32)
    scores = torch.tensor([[2.0], [0.5]])
    ranks = AlignedRanks(device, [x.flip(0)], [torch.zeros(2, 1, dtype=torch.int64)], [scores], E=1)
    rows, columns, row_scores_R = run(ops.dispatch_quantize, ranks, 0, MXFP8_E4M3)
    assert row_scores_R[:2].tolist() == [2, 0.5] and row_scores_R[2:].isnan().all()

    values = rows.values[GUARD_ROWS:].float()
    assert (values[0] == -240).all() and (values[1] == 448).all()
    scales = rows.scales.view(torch.uint8)[SCALES_START:]
    assert scales[:4].tolist() == [129, 0, 0, 0] and scales[16:20].tolist() == [127, 0, 0, 0]
    assert (scales[4:16] == POISON).all()

    values = columns.values[GUARD_ROWS : GUARD_ROWS + 128].float()
    assert (values[0] == -240).all() and (values[1] == 112).all() and not values[2:].any()
    scales = columns.scales.view(torch.uint8)[SCALES_START : SCALES_START + 512].view(32, 4, 4)
    assert (scales[:, 0, 0] == 129).all() and scales.count_nonzero() == 32

    _, columns, _ = run(ops.dispatch_quantize, ranks, 0, MXFP8_E4M3, scaled=True)
    values = columns.values[GUARD_ROWS : GUARD_ROWS + 2].float()
    assert values[:, 0].tolist() == [-240, 28]  # of -1920 and 224

    _, columns, _ = run(ops.dispatch_quantize, ranks, 0, MXFP8_E4M3, expanded=True)
    values = columns.values[GUARD_ROWS : GUARD_ROWS + 128].float()
    assert (values[0] == -960).all() and (values[1] == 448).all() and not values[2:].any()


@pytest.mark.parametrize("ops", [kernels, reference_producers], ids=["kernel", "oracle"])
@pytest.mark.parametrize("expanded", [False, True], ids=["codes", "expanded"])
def test_a_stopped_output_is_not_touched(device, ops, expanded):
    ranks = aligned_ranks(device, "uniform", W=2, T=5, K=2, L=1, D=32)
    whole = run(ops.dispatch_quantize, ranks, 0, MXFP8_E4M3, expanded=expanded)
    for stops in ((7, 0), (0, 7)):
        found = run(ops.dispatch_quantize, ranks, 0, MXFP8_E4M3, stops=stops, expanded=expanded)
        for bundle, want, stop in zip(found, whole, stops, strict=False):
            assert is_untouched(bundle) if stop else not is_untouched(bundle)
            if not stop:
                assert_equal_bundles(bundle, want)
        assert same_bits(found[2], whole[2])
    for outputs in ("both", "rows", "columns"):
        how = {"outputs": outputs, "stops": (7, 7), "expanded": expanded}
        *bundles, row_scores_R = run(ops.dispatch_quantize, ranks, 0, MXFP8_E4M3, **how)
        assert all(is_untouched(bundle) for bundle in bundles if bundle is not None)
        assert same_bits(row_scores_R, ranks.row_floats())


def test_equal_bits_for_any_number_of_programs(device):
    ranks = aligned_ranks(device, "uniform", W=2, T=4, K=2, L=3, D=32)
    want = run(kernels.dispatch_quantize, ranks, 1, MXFP8_E4M3)
    assert_same(run(kernels.dispatch_quantize, ranks, 1, MXFP8_E4M3, num_sms=1), want)


def test_offsets_past_2_to_the_31(device):
    """Values and scales lie past 2^31 bytes of the activation buffer; untouched memory of it costs nothing on a CPU."""
    ranks = aligned_ranks(device, "uniform", W=1, T=4, K=2, L=2, D=32)
    far_row, far_byte = 2**31 // 32 + 1, 2**31 + 128
    huge = torch.empty(far_byte + 2**16, dtype=torch.uint8, device=device)
    near = run(kernels.dispatch_quantize, ranks, 0, MXFP8_E4M3, scaled=True)
    R = ranks.num_rows(0)
    rows, columns = (
        bundle._replace(values=huge.view(MXFP8_E4M3.value_dtype).view(-1, 32), start_1=bundle.start_1 + far_row)
        for bundle in near[:2]
    )
    args = {"tokens": ranks.ranks[0].tokens, "scores": ranks.ranks[0].scores, "half": 0, "format": MXFP8_E4M3}
    args |= {"scaled_columns": True, "row_scores_R": near[2]}
    for name, bundle, other in (("rows", rows, "columns"), ("columns", columns, "rows")):
        stops = {"rows_stop_1": ranks.stop_1, "columns_stop_1": ranks.stop_1}
        kernels.dispatch_quantize(ranks.plans[0], **args, **stops, **{name: bundle, other: None})
        near_bundle = near[name == "columns"]
        found, want = (b.values.view(torch.uint8)[int(b.start_1) : int(b.start_1) + R] for b in (bundle, near_bundle))
        real = (ranks.plans[0].row_to_slot_R[:R] >= 0) | (name == "columns")
        assert torch.equal(found[real], want[real])
        far_scales = torch.tensor([far_byte], device=device)
        bundle = near_bundle._replace(scales=huge.view(MXFP8_E4M3.scale_dtype), scales_start_1=far_scales)
        before = near_bundle.scales.view(torch.uint8)[SCALES_START:-128]
        huge[far_byte : far_byte + len(before)] = POISON
        kernels.dispatch_quantize(ranks.plans[0], **args, **stops, **{name: bundle, other: None})
        assert torch.equal(huge[far_byte : far_byte + len(before)], before)


@pytest.mark.parametrize("ops", [kernels, reference_producers], ids=["kernel", "oracle"])
def test_refusals(device, ops):
    ranks = aligned_ranks(device, "uniform", W=1, T=2, K=1, L=1, D=160)
    rows, columns = ranks.bundle(MXFP8_E4M3, 160), ranks.bundle(MXFP8_E4M3, 160, columns=True)
    args = {"rows": rows, "columns": columns, "format": MXFP8_E4M3, "half": 0, "scaled_columns": False}
    args |= {"tokens": ranks.ranks[0].tokens, "scores": ranks.ranks[0].scores, "row_scores_R": ranks.row_floats()}
    args |= {"rows_stop_1": ranks.stop_1, "columns_stop_1": ranks.stop_1}

    def refuses(match, **changed):
        with pytest.raises(ValueError, match=match):
            ops.dispatch_quantize(ranks.plans[0], **{**args, **changed})

    refuses("nvfp4 has an outer scale over the whole row", format=NVFP4)
    refuses("rows and columns are both None", rows=None, columns=None)
    refuses("mxfp4 has no blocks along the dimension", rows=None, format=MXFP4)
    refuses(r"rows\.values must be contiguous torch\.float8_e5m2", format=MXFP8_E5M2)
    refuses(r"columns\.values must be .* \[any, 160\]", columns=columns._replace(values=columns.values[:, :128]))
    refuses(r"rows\.scales must be .* \[any\]", rows=rows._replace(scales=rows.scales[None]))
    refuses(r"rows\.outer_inv must be None", rows=rows._replace(outer_inv=ranks.row_floats()))
    expanded = ranks.bundle(MXFP8_E4M3, 160, columns=True, expanded=True)
    refuses(r"rows\.values must be contiguous torch\.float8_e4m3fn", rows=expanded)
    refuses(r"columns\.scales must be None, as expanded", columns=expanded._replace(scales=columns.scales))
    half = expanded._replace(values=expanded.values.half())
    refuses(r"columns\.values must be contiguous torch\.bfloat16 \[any, 160\]", columns=half)

    staged_XS = torch.zeros(4, 128, dtype=torch.bfloat16, device=device)
    args = {name: value for name, value in args.items() if name not in ("tokens", "scores", "half")}
    for window, staged, match in (
        ((0, 96), staged_XS, "window must be .* multiples of 128 or at 160"),
        ((32, 128), staged_XS, "window must be"),
        ((128, 128), staged_XS, "ends behind the 160 columns"),
        ((0, 160), staged_XS, "staged_XS must be contiguous bf16 .* from 160 on"),
        ((0, 128), staged_XS.float(), "staged_XS must be contiguous bf16"),
    ):
        with pytest.raises(ValueError, match=match):
            more = {"staged_XS": staged, "staged_start_1": ranks.start_1(), "window": window}
            ops.quantize_received(ranks.plans[0], **args, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("half, scaled", [(0, False), (1, True)], ids=["x", "dy"])
@pytest.mark.parametrize("D", [7168, 2880])
def test_many_rows(device, D, half, scaled):
    ranks = aligned_ranks(device, "zipf(1.0)", W=2, T=700, K=8, L=16, D=D)
    options = {"half": half, "scaled": scaled}
    windows = [align(D // 2, 128), D - align(D // 2, 128)]
    for r in range(2):
        want = run(reference_producers.dispatch_quantize, ranks, r, MXFP8_E4M3, **options)
        assert_same(run(kernels.dispatch_quantize, ranks, r, MXFP8_E4M3, **options), want)
        assert_same(run_received(kernels.quantize_received, ranks, r, MXFP8_E4M3, windows, **options), want)
        options["expanded"] = True
        assert_expanded(ranks, r, run(kernels.dispatch_quantize, ranks, r, MXFP8_E4M3, **options), want)
        found = run_received(kernels.quantize_received, ranks, r, MXFP8_E4M3, windows, **options)
        assert_expanded(ranks, r, found, want)
        options["expanded"] = False
