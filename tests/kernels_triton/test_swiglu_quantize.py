"""swiglu_quantize and swiglu_backward_quantize: the quantisers' bits of the kernels' own FP32, and the oracle's values.

Every buffer begins poisoned and is compared whole, so what must not be written is compared too.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format_cases import assert_same_bits

from dist_moe import formats, reference_formats
from dist_moe import reference_swiglu as oracle
from dist_moe.formats import FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, SCALE_ATOM, padded_scales
from dist_moe.kernels_triton import swiglu_quantize as kernels
from dist_moe.kernels_triton.swiglu import gate_up, gate_up_grads
from dist_moe.kernels_triton.swiglu_backward_quantize import BACKWARD, swiglu_backward_quantize
from dist_moe.kernels_triton.swiglu_quantize import Config
from dist_moe.quantized import Bundle, Quantized
from dist_moe.reference_memory import put_columns, put_rows
from dist_moe.shapes import Activation, align

# Where a row is not finite, numpy warns of what is meant to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN, INF = float("nan"), float("inf")
POISON = 0xAB
PLAIN, CLAMPED = Activation(), Activation("swiglu_clamped", alpha=1.702, limit=1.5)
ACTIVATIONS = pytest.mark.parametrize("activation", [PLAIN, CLAMPED], ids=["plain", "clamped"])
EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
EXPANDED = (MXFP8_E4M3, NVFP4)
# Forward and backward, of the oracle and of the kernels.
BOTH = (
    (oracle.swiglu_quantize, oracle.swiglu_backward_quantize),
    (kernels.swiglu_quantize, swiglu_backward_quantize),
)
EACH_EXPANDED = pytest.mark.parametrize("format", EXPANDED, ids=lambda f: f.name)

CASES = [  # rows by expert, F, edge; the interpreter runs some ten tiles a second
    ((0, 0), 32, "no rows"),
    ((1,), 32, "one row, one block of columns"),
    ((0, 33, 3), 96, "scales that fill atoms, blocks of padding, an empty expert"),
    ((7,), 160, "whole chunks and a tail, scales past an atom"),
]
EACH_CASE = pytest.mark.parametrize("counts, F, edge", CASES, ids=[case[2] for case in CASES])


@triton.jit
def _fp32(h1_ptr, g2_ptr, score_ptr, h2_ptr, g1_ptr, F, alpha, limit, CLAMPED: tl.constexpr):
    """Tiles of 128 rows by 32 columns: FP32 h2 and [d_gate | d_up] by the formulas that the kernels share."""
    rows = tl.program_id(0) * 128 + tl.arange(0, 128)[:, None]
    cols = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    score = tl.load(score_ptr + rows)
    raw_gate = tl.load(h1_ptr + rows * 2 * F + cols).to(tl.float32)
    raw_up = tl.load(h1_ptr + rows * 2 * F + F + cols).to(tl.float32)
    g2 = tl.load(g2_ptr + rows * F + cols).to(tl.float32)
    gate, up, sig = gate_up(raw_gate, raw_up, alpha, limit, CLAMPED)
    d_gate, d_up = gate_up_grads(score * g2, raw_gate, raw_up, gate, up, sig, alpha, limit, CLAMPED)
    tl.store(h2_ptr + rows * F + cols, gate * sig * up)
    tl.store(g1_ptr + rows * 2 * F + cols, d_gate)
    tl.store(g1_ptr + rows * 2 * F + F + cols, d_up)


@dataclass
class Problem:
    """Rows of experts with padding, inside larger buffers: NaN wherever no real row lies, scores of padding included.

    forward and backward give an op poisoned bundles and return them.
    """

    counts: tuple[int, ...]
    F: int
    device: torch.device
    start: int = 3
    h1: torch.Tensor = field(init=False)
    g2: torch.Tensor = field(init=False)

    def __post_init__(self):
        starts = torch.tensor([0, *(align(n, 128) for n in self.counts)]).cumsum(0)
        self.R = int(starts[-1])
        row = torch.arange(self.R)
        expert = torch.bucketize(row, starts[1:], right=True)
        self.real = row - starts[expert] < torch.tensor(self.counts)[expert]
        slots = torch.where(self.real, row + 5, -1)
        self.row_to_slot = torch.cat([slots, torch.full((40,), 7)]).int().to(self.device)
        self.start_P = starts.int().to(self.device)
        self.num_rows_L = torch.tensor(self.counts, dtype=torch.int32, device=self.device)
        self.stop = torch.zeros(1, dtype=torch.int64, device=self.device)
        spread = torch.exp2(torch.randint(-9, 3, (self.R, 1)).float())
        self.h1 = (2 * torch.randn(self.R, 2 * self.F)).bfloat16().to(self.device)
        self.g2 = (spread * torch.randn(self.R, self.F)).bfloat16().to(self.device)
        self.scores = torch.rand(self.R + 4).to(self.device)
        for rows in (self.h1, self.g2, self.scores):
            rows[: self.R][~self.real] = NAN

    def put(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.full((self.start + len(rows) + 4, rows.shape[1]), NAN, dtype=rows.dtype, device=self.device)
        buffer[self.start : self.start + len(rows)] = rows
        return buffer, torch.tensor([self.start], device=self.device)

    def bundle(self, format, width: int, columns: bool = False, expanded: bool = False) -> Bundle:
        """Poisoned; values, scales and outer scales begin at three different places."""

        def poisoned(shape, dtype):
            return torch.full(shape, POISON, dtype=torch.uint8, device=self.device).view(dtype)

        def start(value):
            return torch.tensor([value], device=self.device)

        R = self.R
        if columns and expanded:
            return Bundle(poisoned((R + 9, 2 * width), format.expanded_dtype), start(self.start + 1))
        scales = padded_scales(width, R // 32) if columns else padded_scales(R, width // format.block)
        two_level = format.two_level and not columns
        outer = (poisoned((4 * (R + 9),), torch.float32), start(self.start + 2)) if two_level else (None, None)
        if expanded:
            values = poisoned((R + 9, 2 * align(width, format.expanded_group)), format.expanded_dtype)
            return Bundle(values, start(self.start + 1), None, None, *outer)
        return Bundle(
            poisoned((R + 9, width // format.values_per_byte), format.value_dtype),
            start(self.start + 1),
            poisoned((256 + scales[0] * scales[1] + 64,), format.scale_dtype),
            start(256),
            *outer,
        )

    def forward(self, op, activation, format, expanded=False, **options) -> Bundle:
        rows = self.bundle(format, self.F, expanded=expanded)
        experts = (self.start_P, self.num_rows_L)
        op(*self.put(self.h1), rows, *experts, format=format, activation=activation, stop_1=self.stop, **options)
        return rows

    def backward_bundles(self, format, columns=(True, True), expanded=False) -> dict[str, Bundle | None]:
        how = {"columns": True, "expanded": expanded}
        return {
            "g1_rows": self.bundle(format, 2 * self.F),
            "g1_columns": self.bundle(format, 2 * self.F, **how) if columns[0] else None,
            "h2_columns": self.bundle(format, self.F, **how) if columns[1] else None,
        }

    def backward(self, op, activation, format, columns=(True, True), expanded=False, **options):
        """(g1 by rows, g1 by columns, h2 by columns, score gradients)"""
        bundles = self.backward_bundles(format, columns, expanded)
        score_grads = torch.full_like(self.scores, NAN)
        sources = (*self.put(self.h1), *self.put(self.g2), self.scores, score_grads, self.start_P, self.row_to_slot)
        op(*sources, format=format, **bundles, activation=activation, stop_1=self.stop, **options)
        return *bundles.values(), score_grads

    def fp32(self, activation) -> tuple[torch.Tensor, torch.Tensor]:
        """h2 and g1 of the real rows as the kernels compute them; rows of padding are NaN."""
        h2 = torch.empty(self.R, self.F, device=self.device)
        g1 = torch.empty(self.R, 2 * self.F, device=self.device)
        if self.R:
            sizes = (self.F, activation.alpha, activation.limit)
            options = {"CLAMPED": activation.clamped, "enable_fp_fusion": False}
            _fp32[self.R // 128, self.F // 32](self.h1, self.g2, self.scores, h2, g1, *sizes, **options)
        return h2, g1

    def dequantised(self, bundle: Bundle, format, width: int, columns: bool = False) -> tuple:
        """FP32 values of the real rows, and of all rows of columns, and what a step next to zero is worth in each."""
        first, R = int(bundle.start_1[0]), self.R
        scales = bundle.scales.view(torch.uint8)[int(bundle.scales_start_1[0]) :]
        shape = padded_scales(width, R // 32) if columns else padded_scales(R, width // format.block)
        scales = scales[: shape[0] * shape[1]].view(shape).view(format.scale_dtype)
        outer = None
        if format.two_level:
            outer = bundle.outer_inv[int(bundle.outer_inv_start_1[0]) :][:R]
        values = bundle.values[first : first + R]
        op = reference_formats.dequantize_columns if columns else reference_formats.dequantize_rows
        one = reference_formats.encode(torch.full((R, width), 1.0), format).to(values.device)
        one = one if format.values_per_byte == 1 else one[:, ::2] | one[:, 1::2] << 4
        v, unit = (
            op(Quantized(codes, scales, outer), format=format, blocked=True)
            for codes in (values, one.view(format.value_dtype))
        )
        rows = slice(None) if columns else self.real.to(v.device)
        return v[rows], unit[rows] * 2.0 ** (format.min_exponent - format.mantissa_bits)


def assert_near(problem: Problem, found: Bundle, want: Bundle, format, width: int, columns: bool = False) -> None:
    """Behind exp a value may be rounded to its neighbour, and a block get the neighbour of its scale; few do."""
    (a, step_a), (b, step_b) = (problem.dequantised(x, format, width, columns) for x in (found, want))
    assert a.isfinite().all() and b.isfinite().all()
    gap = (a - b).abs()
    allowed = torch.maximum(a.abs(), b.abs()) * 2.0**-format.mantissa_bits + torch.maximum(step_a, step_b)
    assert (gap <= allowed).all(), f"{int((gap > allowed).sum())} values are off by more than a step"
    differ = int((gap > 1e-6 * b.abs()).sum())
    assert differ <= 2 + a.numel() // 1000, f"{differ} of {a.numel()} values differ"


# ---- the bits ------------------------------------------------------------------------------------------------------


def assert_forward_bits(problem: Problem, activation, format, expanded=False, **options) -> None:
    want = problem.bundle(format, problem.F, expanded=expanded)
    put_rows(want, problem.fp32(activation)[0], problem.real.to(problem.device), format)
    assert_same_bits(problem.forward(kernels.swiglu_quantize, activation, format, expanded, **options), want)


def assert_backward_bits(problem: Problem, activation, format, columns=(True, True), expanded=False, **options) -> None:
    h2, g1 = problem.fp32(activation)
    real = problem.real.to(problem.device)
    want = tuple(problem.backward_bundles(format, columns, expanded).values())
    put_rows(want[0], g1, real, format)
    put_columns(want[1], g1, real, format)
    put_columns(want[2], h2, real, format)
    found = problem.backward(swiglu_backward_quantize, activation, format, columns, expanded, **options)
    for name, a, b in zip(("g1_rows", "g1_columns", "h2_columns"), found, want, strict=False):
        assert (a is None) == (b is None)
        if b is not None:
            assert_same_bits(a, b, name)
    assert found[3][: problem.R][~real].isnan().all() and found[3][problem.R :].isnan().all()


@EACH_CASE
@EACH_EXPANDED
def test_expanded_forward_has_the_bits_of_the_quantiser(counts, F, edge, format, device):
    assert_forward_bits(Problem(counts, F, device), CLAMPED if F == 96 else PLAIN, format, expanded=True)


@EACH_CASE
@EACH_FORMAT
def test_forward_has_the_bits_of_the_quantiser(counts, F, edge, format, device):
    assert_forward_bits(Problem(counts, F, device), CLAMPED if F == 96 else PLAIN, format)


@EACH_CASE
@pytest.mark.parametrize("expanded", [False, True], ids=["codes", "expanded"])
def test_backward_has_the_bits_of_the_quantisers(counts, F, edge, expanded, device):
    format = MXFP8_E5M2 if F == 32 else MXFP8_E4M3
    assert_backward_bits(Problem(counts, F, device), CLAMPED if F == 96 else PLAIN, format, expanded=expanded)


def test_expanded_columns_of_h2_over_g2(device):
    """The bits of where they lie apart; rows of padding become zeros there too."""
    problem = Problem((33, 0, 130), 96, device)
    options = {"format": MXFP8_E4M3, "activation": PLAIN, "stop_1": problem.stop}
    want = problem.backward(swiglu_backward_quantize, PLAIN, MXFP8_E4M3, expanded=True)
    g2, start_1 = problem.put(problem.g2)
    bundles = problem.backward_bundles(MXFP8_E4M3, expanded=True) | {"h2_columns": Bundle(g2, start_1)}
    grads = torch.full_like(problem.scores, NAN)
    sources = (*problem.put(problem.h1), g2, start_1, problem.scores, grads, problem.start_P, problem.row_to_slot)
    swiglu_backward_quantize(*sources, **bundles, **options)
    assert_same_bits(bundles["g1_rows"], want[0])
    assert_same_bits(bundles["g1_columns"], want[1])
    first = int(want[2].start_1[0])
    assert torch.equal(g2[problem.start :][: problem.R], want[2].values[first:][: problem.R]) and g2.any()
    assert g2[: problem.start].isnan().all() and g2[problem.start + problem.R :].isnan().all()
    assert_same_bits([grads], [want[3]])


def test_columns_of_g1_over_g2(device):
    """With one block of columns: the bits of where they lie apart."""
    problem = Problem((33, 0, 130), 32, device)
    want = problem.backward(swiglu_backward_quantize, PLAIN, MXFP8_E4M3)
    over = problem.bundle(MXFP8_E4M3, 64, columns=True)
    g2, start_1 = problem.put(problem.g2)
    g1_columns = over._replace(values=g2.view(MXFP8_E4M3.value_dtype), start_1=start_1)
    rows, h2 = problem.bundle(MXFP8_E4M3, 64), problem.bundle(MXFP8_E4M3, 32, columns=True)
    grads = torch.full_like(problem.scores, NAN)
    sources = (*problem.put(problem.h1), g2, start_1, problem.scores, grads, problem.start_P, problem.row_to_slot)
    bundles = {"g1_rows": rows, "g1_columns": g1_columns, "h2_columns": h2}
    options = {"format": MXFP8_E4M3, "activation": PLAIN, "stop_1": problem.stop}
    swiglu_backward_quantize(*sources, **bundles, **options)
    for found, expected in zip((rows, over, h2), want[:3], strict=True):
        assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    first = int(want[1].start_1[0])
    found, expected = g1_columns.values[problem.start :][: problem.R], want[1].values[first:][: problem.R]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) and found.view(torch.uint8).any()
    assert_same_bits(rows, want[0])
    assert_same_bits(h2, want[2])


@pytest.mark.parametrize(
    "F, config",
    [(160, Config(1, 128, parts=2)), (416, Config(2, 128, parts=2)), (416, Config(1, 128)), (1536, None), (2880, None)],
    ids=["parts with a tail", "rows of two tiles", "rows of four tiles", "whole parts", "a tail in the third part"],
)
def test_outer_scales_are_of_whole_rows(F, config, device):
    assert_forward_bits(spiked((3, 0, 1, 5), F, device), PLAIN, NVFP4, config=config)


@pytest.mark.parametrize(
    "F, config",
    [(768, None), (800, None), (1056, Config(1, 256, parts=2)), (2880, None)],
    ids=["whole parts", "a tail that is no group", "rows of three tiles", "a tail in the third part"],
)
def test_expanded_rows_have_their_outer_scales_too(F, config, device):
    assert_forward_bits(spiked((3, 0, 1, 5), F, device), PLAIN, NVFP4, expanded=True, config=config)


def spiked(counts, F, device) -> Problem:
    """The largest magnitude of a row in each of its parts in turn; one real row in an expert of padding, and none."""
    problem = Problem(counts, F, device)
    for row, col in enumerate(torch.linspace(0, F - 1, int(problem.real.sum())).long()):
        at = int(problem.real.nonzero()[row])
        problem.h1[at, col], problem.h1[at, F + col] = 40.0, 50.0
    return problem


@pytest.mark.parametrize("columns", [(False, False), (True, False), (False, True)], ids=["none", "g1", "h2"])
def test_columns_that_are_not_wanted(columns, device):
    for expanded in (False, True):
        assert_backward_bits(Problem((33,), 32, device), PLAIN, MXFP8_E4M3, columns, expanded)


@settings(max_examples=4)
@given(
    rows=st.integers(0, 128),
    blocks=st.integers(1, 4),
    clamped=st.booleans(),
    format=st.sampled_from(FORMATS),
)
def test_any_size(device, rows, blocks, clamped, format):
    activation, problem = CLAMPED if clamped else PLAIN, Problem((rows,), 32 * blocks, device)
    assert_forward_bits(problem, activation, format, config=Config(32, 128))
    if format in EXPANDED:
        assert_forward_bits(problem, activation, format, expanded=True, config=Config(16, 256))
    if format.values_per_byte == 1:
        assert_backward_bits(problem, activation, format, config=Config(32, 32))


@EACH_FORMAT
def test_what_is_not_finite_stays_in_its_block_or_row(format, device):
    """Rows and columns of a broken block are NaN, as the quantisers make them; nothing else changes."""
    F = format.expanded_group  # the columns behind F that fill a group are NaN with their row
    problem = Problem((36,), F, device)
    problem.h1[2, 5], problem.h1[34, F + 7], problem.h1[35, 40] = NAN, INF, -INF
    assert_forward_bits(problem, PLAIN, format)
    if format in EXPANDED:
        assert_forward_bits(problem, PLAIN, format, expanded=True)
    if format.values_per_byte == 1:
        problem.g2[3, 9] = -INF
        assert_backward_bits(problem, PLAIN, format)
        assert_backward_bits(problem, PLAIN, format, expanded=True)


@pytest.mark.parametrize("format", (MXFP8_E4M3, NVFP4), ids=lambda f: f.name)
def test_equal_bits_for_any_tile_and_number_of_programs(format, device):
    problem = Problem((40,), 96, device)
    first = problem.forward(kernels.swiglu_quantize, PLAIN, format)
    for more in ({"num_sms": 1}, {"config": Config(32, 128)}, {"config": Config(4, 128, parts=2)}):
        assert_same_bits(problem.forward(kernels.swiglu_quantize, PLAIN, format, **more), first)
    if format.values_per_byte == 1:
        first = problem.backward(swiglu_backward_quantize, PLAIN, format)
        other_tile, one_program = (
            problem.backward(swiglu_backward_quantize, PLAIN, format, **more)
            for more in ({"config": Config(32, 32, num_warps=4)}, {"num_sms": 1})
        )
        for a, b, c in zip(first[:3], other_tile, one_program, strict=False):
            assert_same_bits(b, a)
            assert_same_bits(c, a)
        assert_same_bits([one_program[3]], [first[3]])


# ---- the oracle ----------------------------------------------------------------------------------------------------


def assert_near_the_oracle(problem: Problem, activation, format, **options) -> None:
    found = problem.forward(kernels.swiglu_quantize, activation, format, **options)
    assert_near(problem, found, problem.forward(oracle.swiglu_quantize, activation, format), format, problem.F)
    if format.values_per_byte == 2:
        return
    found = problem.backward(swiglu_backward_quantize, activation, format, **options)
    want = problem.backward(oracle.swiglu_backward_quantize, activation, format)
    assert_near(problem, found[0], want[0], format, 2 * problem.F)
    assert_near(problem, found[1], want[1], format, 2 * problem.F, columns=True)
    assert_near(problem, found[2], want[2], format, problem.F, columns=True)
    real = problem.real.to(problem.device)
    h2 = problem.fp32(activation)[0][real]
    bound = (problem.g2[real].float() * h2).abs().sum(dim=1) * 1e-5  # FP32 sums in two orders
    assert ((found[3] - want[3])[: problem.R][real].abs() <= bound).all()
    assert torch.equal(found[3].isnan(), want[3].isnan())


@ACTIVATIONS
@EACH_FORMAT
def test_near_the_oracle(activation, format, device):
    assert_near_the_oracle(Problem((40,), 64, device), activation, format)


def test_fast_math_is_near_the_oracle(device):
    assert_near_the_oracle(Problem((40,), 64, device), CLAMPED, MXFP8_E4M3, fast_math=True)


@ACTIVATIONS
def test_backward_is_the_gradient(activation, device):
    """Autograd of the formula itself, to the precision of e4m3, at, inside and beyond both limits."""
    problem = Problem((50,), 64, device)
    problem.h1[:50, ::7], problem.h1[:50, 1::7] = CLAMPED.limit, -CLAMPED.limit
    h1 = problem.h1[:50].float().requires_grad_()
    gate, up = h1.chunk(2, dim=1)
    if activation.clamped:
        gate = torch.where(gate > CLAMPED.limit, CLAMPED.limit, gate)
        up = torch.where(up.abs() > CLAMPED.limit, up.sign().detach() * CLAMPED.limit, up)
        h2 = gate * torch.sigmoid(CLAMPED.alpha * gate) * (up + 1)
    else:
        h2 = gate * torch.sigmoid(gate) * up
    g2, scores = problem.g2[:50].float(), problem.scores[:50]
    (h2 * g2 * scores[:, None]).sum().backward()
    g1_rows, g1_columns, h2_columns, score_grads = problem.backward(swiglu_backward_quantize, activation, MXFP8_E4M3)
    for bundle, want, width, columns in (
        (g1_rows, h1.grad, 128, False),
        (g1_columns, h1.grad, 128, True),
        (h2_columns, h2.detach(), 64, True),
    ):
        v, step = problem.dequantised(bundle, MXFP8_E4M3, width, columns)
        assert ((v[:50] - want).abs() <= want.abs() * 2.0**-4 * 1.001 + step[:50]).all()
        assert columns is False or not v[50:].any()
    assert torch.allclose(score_grads[:50], (g2 * h2.detach()).sum(dim=1), rtol=1e-4, atol=1e-5)


def test_stop_leaves_without_touching_anything(device):
    problem = Problem((9,), 64, device)
    problem.stop.fill_(1)
    for forward, backward in BOTH:
        found = [problem.forward(forward, PLAIN, NVFP4)]
        *bundles, score_grads = problem.backward(backward, PLAIN, MXFP8_E4M3)
        for bundle in (*found, *bundles):
            assert all((part.view(torch.uint8) == POISON).all() for part in (bundle.values, bundle.scales))
        assert score_grads.isnan().all()


def test_docstring_examples(device):
    problem = Problem((1,), 32, device)
    problem.h1[0, :32], problem.h1[0, 32:] = 20, 3
    problem.g2[0], problem.scores[0] = 2, 0.5

    def first_row(bundle: Bundle, width: int, columns: bool = False):
        """Scale code and first value of every block of 32 columns."""
        scales = bundle.scales.view(torch.uint8)[256:]
        at = [4 * i if columns else i for i in range(width // 32)]  # bytes of the atom
        return [int(scales[i]) for i in at], problem.dequantised(bundle, MXFP8_E4M3, width, columns)[0][
            0, ::32
        ].tolist()

    rows = problem.forward(kernels.swiglu_quantize, PLAIN, MXFP8_E4M3)
    assert first_row(rows, 32) == ([125], [60.0]) and int(rows.values.view(torch.uint8)[problem.start + 1, 0]) == 0x77
    rows = problem.forward(kernels.swiglu_quantize, PLAIN, NVFP4)
    assert float(rows.outer_inv[problem.start + 2]) == pytest.approx(60 / 2688)
    assert rows.scales.view(torch.uint8)[256:258].tolist() == [0x7E, 0x7E]  # 448
    assert int(rows.values.view(torch.uint8)[problem.start + 1, 0]) == 0x77

    g1_rows, g1_columns, h2_columns, score_grads = problem.backward(swiglu_backward_quantize, PLAIN, MXFP8_E4M3)
    assert first_row(g1_rows, 64) == ([120, 123], [3.0, 20.0])
    assert first_row(g1_columns, 64, columns=True) == ([120, 123], [3.0, 20.0])
    assert first_row(h2_columns, 32, columns=True) == ([125], [60.0])
    assert score_grads[0] == 32 * 120


def test_refusals(device):
    problem = Problem((4,), 64, device)
    with pytest.raises(ValueError, match=r"swiglu_quantize: h1_X2F must be contiguous bf16 \[X, 128\]"):
        problem.h1 = problem.h1.float()
        problem.forward(kernels.swiglu_quantize, PLAIN, MXFP8_E4M3)
    for forward, backward in BOTH:
        problem = Problem((4,), 64, device)
        with pytest.raises(ValueError, match="swiglu_backward_quantize: mxfp4 has no blocks along"):
            problem.backward(backward, PLAIN, MXFP4)
        problem.F = 32
        with pytest.raises(ValueError, match=r"rows.values must be contiguous torch.float8_e4m3fn \[any, 64\]"):
            problem.forward(forward, PLAIN, MXFP8_E4M3)
        problem.F = 64
        rows = problem.bundle(NVFP4, 64)._replace(outer_inv=None)
        options = {"format": NVFP4, "activation": PLAIN, "stop_1": problem.stop}
        with pytest.raises(ValueError, match=r"swiglu_quantize: rows.outer_inv must be contiguous torch.float32"):
            forward(*problem.put(problem.h1), rows, problem.start_P, problem.num_rows_L, **options)
        problem.g2 = problem.g2.float()
        with pytest.raises(ValueError, match=r"swiglu_backward_quantize: g2_XF must be contiguous bf16 \[X, 64\]"):
            problem.backward(backward, PLAIN, MXFP8_E4M3)


def test_tiles_lie_in_one_expert_and_in_the_rows_of_an_atom(device):
    assert formats.ROW_ALIGNMENT % 32 == 0 and SCALE_ATOM[0] % 32 == 0
    forward = [
        kernels.pick_forward(F, *how)
        for F in (32, 1536, 2880, 40000)
        for how in itertools.product((False, True), repeat=2)
    ]
    for config in (*forward, BACKWARD):
        assert 32 % config.block_r == 0 and config.block_f % 32 == 0
        assert config is BACKWARD or config.block_f % (32 * SCALE_ATOM[1]) == 0


def test_rows_past_two_to_the_31_elements(device):
    """Offsets of rows that are behind 2^31 elements; on a CPU the memory before them is never touched."""
    problem, far = Problem((5,), 32, device), 2**26 + 1
    want = problem.forward(kernels.swiglu_quantize, PLAIN, MXFP8_E4M3)
    h1 = torch.empty(2**25 + 160, 64, dtype=torch.bfloat16, device=device)
    h1[2**25 + 3 : 2**25 + 3 + problem.R] = problem.h1
    values = torch.empty(far + problem.R, 32, dtype=torch.uint8, device=device)
    start = torch.tensor([2**25 + 3, far], device=device)
    rows = want._replace(values=values.view(torch.float8_e4m3fn), start_1=start[1:])
    experts = (problem.start_P, problem.num_rows_L)
    options = {"format": MXFP8_E4M3, "activation": PLAIN, "stop_1": problem.stop}
    kernels.swiglu_quantize(h1, start[:1], rows, *experts, **options)
    first = int(want.start_1[0])
    assert_same_bits([values[far : far + 5]], [want.values.view(torch.uint8)[first : first + 5]])


@pytest.mark.gpu
@ACTIVATIONS
@EACH_FORMAT
def test_real_sizes(activation, format, device):
    problem = Problem((512, 431, 0, 600, 3000), 2880, device)
    assert_forward_bits(problem, activation, format)
    if format in EXPANDED:
        assert_forward_bits(problem, activation, format, expanded=True)
        assert_forward_bits(spiked((60, 0, 77), 14336, device), activation, format, expanded=True)
    if format.values_per_byte == 1:
        assert_backward_bits(problem, activation, format)
        assert_backward_bits(problem, activation, format, expanded=True)
    assert_near_the_oracle(problem, activation, format)
