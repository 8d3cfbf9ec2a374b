"""Products of block-scaled operands against the oracle: formats, group sizes, tails, far scales, bad neighbours."""

from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_moe import reference
from dist_moe import reference_formats as oracle
from dist_moe.formats import E8M0_BIAS, E8M0_NAN, FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from dist_moe.kernels_triton import _scaled as formats
from dist_moe.kernels_triton import _scaled_operands as operands
from dist_moe.kernels_triton import grouped_gemm_scaled as gemm
from dist_moe.kernels_triton._device import is_interpreting
from dist_moe.quantized import Bundle
from dist_moe.shapes import align
from dist_moe.testing import assert_close

# Where a scale or a value is not finite, numpy warns of what is meant to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# Bytes of everything that no result may depend on: NaN as a value and as a scale, in every format that has one.
BAD_VALUE, BAD_SCALE, BAD_OUT = 0x7F, 0xFF, 7.0
FP8 = (MXFP8_E4M3, MXFP8_E5M2)
KINDS = {"forward": FORMATS, "dgrad": FP8, "wgrad": FP8}
EACH = pytest.mark.parametrize(
    ("kind", "format"),
    [pytest.param(kind, format, id=f"{kind}-{format.name}") for kind in KINDS for format in KINDS[kind]],
)
EACH_WAY = pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            config,
            id=f"{config.block_m} rows, {'scaled dot' if config.scaled_dot else 'by hand'}",
            marks=pytest.mark.sm100 if config.scaled_dot and not is_interpreting() else (),
        )
        for config in gemm.CONFIGS.values()
    ],
)
BY_HAND = gemm.CONFIGS[128, False]
OPS = ("grouped_gemm_scaled", "grouped_gemm_scaled_dgrad", "grouped_gemm_scaled_wgrad")


@dataclass(frozen=True)
class Case:
    edge: str
    rows: tuple[int, ...]  # by expert
    N: int = 96
    K: int = 160


CASES = [
    Case("no rows at all", (0,)),
    Case("one row", (1,), 32, 32),
    Case("round an atom", (127, 128, 129), 160, 96),
    Case("first and last expert empty, L not a power of two", (0, 7, 0, 40, 0)),
    Case("two column tiles, the second of 32", (5, 33), 160, 288),
]
FAR = Case("far", (3, 66), 96, 160)
RAGGED = Case("ragged", (5, 70, 0, 130))


def place(part: torch.Tensor, start: int, fill: int) -> torch.Tensor:
    """A buffer of bad bytes, of whole rows of `part`, with `part` from byte `start` on."""
    row = part.shape[1] * part.element_size() if part.dim() == 2 else part.element_size()
    size = align(start + part.numel() * part.element_size(), row)
    buffer = torch.full((size + 5 * row,), fill, dtype=torch.uint8)
    buffer[start : start + part.numel() * part.element_size()] = part.contiguous().view(torch.uint8).flatten()
    return buffer.view(part.dtype).view(-1, *part.shape[1:])


@dataclass
class Problem:
    """Operands of all three products with everything beside their real rows spoiled; quantised by the oracle."""

    case: Case
    format: object
    device: torch.device
    expands: bool = False  # rows of forward
    far: bool = False  # blocks whose scales are codes 0, 254 and others; each contributes as much as any
    parts: dict = field(default_factory=dict)

    def __post_init__(self):
        case, format = self.case, self.format
        L, N, K = len(case.rows), case.N, case.K
        starts = torch.tensor([0, *(align(n, 128) for n in case.rows)]).cumsum(0)
        self.start_P, self.rows_L = starts.int(), torch.tensor(case.rows, dtype=torch.int32)
        self.R = int(starts[-1]) + 128  # more rows than are used
        self.real = torch.zeros(self.R, dtype=torch.bool)
        for start, n in zip(starts.tolist(), case.rows, strict=False):
            self.real[start : start + n] = True
        self.stop = torch.zeros(1, dtype=torch.int64, device=self.device)
        x, dy = (torch.randn(self.R, C) * torch.exp2(torch.randint(-3, 4, (self.R, 1))) for C in (K, N))
        w = torch.randn(L, N, K) * K**-0.5
        options = {"format": format, "blocked": True}
        experts = {"row_start_P": self.start_P, "num_rows_L": self.rows_L}
        square = format in FP8
        self.w = oracle.quantize_weights(w, format=format, square=square)
        self.a = oracle.quantize_rows(x, **options)
        if square:
            self.dy = oracle.quantize_rows(dy, **options)
            self.columns = [oracle.quantize_columns(v, **options, **experts) for v in (dy, x)]
        if self.far:
            self._spread()

    def _spread(self) -> None:
        """Scales of neighbouring blocks go to opposite ends; those of the other operand go the other way."""

        def shifted(scales, rows, cols, codes, num_groups=1):
            natural = oracle.from_blocked(scales.view(torch.uint8), rows, cols, num_groups)
            natural = torch.as_tensor(codes, dtype=torch.uint8)[torch.arange(cols) % 4].expand_as(natural)
            scales.view(torch.uint8).copy_(oracle.to_blocked(natural.contiguous()))

        L, N, K, B = len(self.case.rows), self.case.N, self.case.K, self.format.block
        there, back = (0, 254, 120, 9), (254, 0, 134, 245)
        shifted(self.a.scales, self.R, K // B, there)
        shifted(self.w.scales, N, K // B, back, L)
        if self.format in FP8:
            shifted(self.dy.scales, self.R, N // B, there)
            shifted(self.w.transposed_scales, K, N // B, back, L)
            S = int(self.start_P[-1]) // B
            for columns, C, codes in zip(self.columns, (N, K), (there, back), strict=True):
                shifted(columns.scales.view(-1)[: align(C, 128) * S].view(-1, S), C, S, codes)

    def rows_bundle(self, rows) -> Bundle:
        """Inside larger buffers; rows of padding, and what lies around, are bad."""
        values, scales = rows.values.clone(), rows.scales.clone()
        values.view(torch.uint8)[~self.real] = BAD_VALUE
        unreal = (~self.real)[None, :, None].expand(1, self.R, scales.shape[1]).to(torch.uint8)
        scales.view(torch.uint8)[oracle.to_blocked(unreal) == 1] = BAD_SCALE
        outer = ()
        if self.format.two_level:
            outer = torch.where(self.real, rows.outer_inv_R, float("nan"))
            outer = place(outer, 8, BAD_SCALE).to(self.device), torch.tensor([2], device=self.device)
        return Bundle(*self._placed(values, scales), *outer)

    def columns_bundle(self, columns, expanded: bool = False) -> Bundle:
        """Inside larger buffers; what lies around is bad, from the end of the last expert's padding on."""
        end = int(self.start_P[-1])
        if expanded:
            values = oracle.dequantize_columns(columns, format=self.format, blocked=True, rows_end=end)
            values = values.to(self.format.expanded_dtype)
            buffer = place(values, 3 * 2 * values.shape[1], BAD_SCALE).to(self.device)
            assert buffer[:3].isnan().all() and buffer[3 + end :].isnan().all()
            return Bundle(buffer, torch.tensor([3], device=self.device))
        size = columns.scales.shape[0] * end // self.format.block
        return Bundle(*self._placed(columns.values[:end], columns.scales.flatten()[:size]))

    def expanded_bundle(self, rows) -> Bundle:
        """The same, expanded; also bad: what lies behind the last column."""
        scales = oracle.from_blocked(rows.scales.view(torch.uint8), self.R, self.case.K // self.format.block)[0]
        values = oracle.expand_rows(rows._replace(scales=scales), self.format)
        values[~self.real] = float("nan")
        codes = self.rows_bundle(rows)
        values = place(values, codes.start_1.item() * 2 * values.shape[1], BAD_VALUE).to(self.device)
        return codes._replace(values=values, scales=None, scales_start_1=None)

    def _placed(self, values, scales):
        row, byte = 3, 128
        values = place(values, row * values.shape[1] * values.element_size(), BAD_VALUE).to(self.device)
        starts = [torch.tensor([start], device=self.device) for start in (row, byte)]
        return values, starts[0], place(scales.flatten(), byte, BAD_SCALE).to(self.device), starts[1]

    def weight(self, transposed: bool):
        """Values and scales; those of the rows that only fill an atom are bad."""
        rows = self.case.K if transposed else self.case.N
        scales = (self.w.transposed_scales if transposed else self.w.scales).clone()
        bad = torch.ones(len(self.case.rows), align(rows, 128), scales.shape[1], dtype=torch.uint8)
        bad[:, :rows] = 0
        scales.view(torch.uint8)[oracle.to_blocked(bad) == 1] = BAD_SCALE
        return self.w.values.to(self.device), scales.to(self.device)

    def experts(self):
        return self.start_P.to(self.device), self.rows_L.to(self.device)

    def run(self, module, kind: str, out=None, **options) -> torch.Tensor:
        """Real rows of out, or the gradients; also checks that nothing else was written."""
        options |= {"format": self.format, "stop_1": self.stop}
        if kind == "wgrad":
            out = torch.full(self.w.values.shape, float("nan"), device=self.device) if out is None else out
            expanded = options.pop("expanded", False)
            operands = [self.columns_bundle(columns, expanded) for columns in self.columns]
            options.setdefault("accumulate", False)
            module.grouped_gemm_scaled_wgrad(*operands, *self.experts(), out, **options)
            return out
        dgrad = kind == "dgrad"
        width = self.case.K if dgrad else self.case.N
        pitch = width
        if "columns" in options:
            width = options["columns"][1]
            pitch = width + 8
        out = torch.full((self.R + 7, pitch), BAD_OUT, dtype=torch.bfloat16, device=self.device)
        out_start = torch.tensor([5], device=self.device)
        if self.format.two_level:
            options["w_outer_inv_L"] = self.w.outer_inv_G.to(self.device)
        op = module.grouped_gemm_scaled_dgrad if dgrad else module.grouped_gemm_scaled
        bundle = self.expanded_bundle if self.expands and not dgrad else self.rows_bundle
        rows = bundle(self.dy if dgrad else self.a)
        op(rows, *self.weight(dgrad), out, out_start, *self.experts(), **options)
        written = torch.zeros(out.shape, dtype=torch.bool)
        written[5 : 5 + self.R, :width] = self.real[:, None]
        assert (out[~written.to(self.device)] == BAD_OUT).all(), "padding or a neighbour was written"
        return out[written.to(self.device)].view(-1, width)


def both(problem: Problem, kind: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return problem.run(gemm, kind, **options), problem.run(reference, kind)


def assert_equal(out, ref) -> None:
    """Within the bar; rows of zeros on both sides, as of an expert without rows, may be all there is."""
    if ref.any() or out.any():
        assert_close(out, ref, "gemm")


# Against the oracle


@EACH
@pytest.mark.parametrize("case", CASES, ids=[case.edge for case in CASES])
def test_equals_the_oracle(case, kind, format, device):
    assert_equal(*both(Problem(case, format, device), kind))


@EACH
@EACH_WAY
def test_every_way_to_multiply(config, kind, format, device):
    out, ref = both(Problem(RAGGED, format, device), kind, config=config)
    assert_close(out, ref, "gemm")


@settings(max_examples=10)
@given(
    rows=st.tuples(*[st.integers(0, 70)] * 3),
    sizes=st.sampled_from([(32, 96), (96, 32)]),
    kind=st.sampled_from(list(KINDS)),
)
def test_any_group_sizes(device, rows, sizes, kind):
    assert_equal(*both(Problem(Case("drawn", rows, *sizes), MXFP8_E4M3, device), kind))


def test_the_oracle_is_the_product_of_what_the_quantisers_stand_for(device):
    """Independent of how the oracle finds its operands: with whole tensors, and starts of 0."""
    for format in FORMATS:
        problem = Problem(Case("plain", (128, 128)), format, device)
        w = oracle.dequantize_weights(problem.w, format=format)
        a = oracle.dequantize_rows(problem.a, format=format, blocked=True)
        want = torch.cat([a[:128] @ w[0].T, a[128:256] @ w[1].T])
        assert_close(problem.run(reference, "forward").float().cpu(), want.bfloat16().float(), "gemm")
        if format in FP8:
            dy = oracle.dequantize_rows(problem.dy, format=format, blocked=True)
            want = torch.cat([dy[:128] @ w[0], dy[128:256] @ w[1]])
            assert_close(problem.run(reference, "dgrad").float().cpu(), want.bfloat16().float(), "gemm")
            end = {"rows_end": int(problem.start_P[-1])}
            dy, x = (oracle.dequantize_columns(v, format=format, blocked=True, **end) for v in problem.columns)
            want = torch.stack([dy[:128].T @ x[:128], dy[128:256].T @ x[128:256]])
            assert_close(problem.run(reference, "wgrad").cpu(), want, "gemm")


@pytest.mark.parametrize("columns", [(0, 96), (128, 128), (256, 32), (64, 64), (192, 96)], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_windows_of_columns(format, columns, device):
    """The bits of the whole result; what lies right of the window in out is left alone."""
    problem = Problem(Case("window", (5, 33), 288, 96), format, device)
    out = problem.run(gemm, "forward", columns=columns)
    assert_equal(out, problem.run(reference, "forward", columns=columns))
    whole = problem.run(gemm, "forward")
    assert torch.equal(out, whole[:, columns[0] : sum(columns)])


# Weight gradients: what is written


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@EACH_WAY
def test_wgrad_writes_or_adds(config, dtype, accumulate, device):
    problem = Problem(RAGGED, MXFP8_E4M3, device)
    shape = problem.w.values.shape
    before = (torch.randn(shape) if accumulate else torch.full(shape, float("nan"))).to(device, dtype)
    before[2] = -0.0 if accumulate else float("nan")
    out = problem.run(gemm, "wgrad", before.clone(), accumulate=accumulate, config=config)
    ref = problem.run(reference, "wgrad", before.clone(), accumulate=accumulate)
    assert_close(out[[0, 1, 3]], ref[[0, 1, 3]], "gemm")
    untouched = before[2] if accumulate else torch.zeros_like(before[2])
    assert torch.equal(out[2], untouched) and torch.equal(out[2].signbit(), untouched.signbit())


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, RAGGED], ids=[case.edge for case in (*CASES, RAGGED)])
def test_gradients_of_expanded_columns(case, dtype, accumulate, device):
    """Those of the codes and scales that they were: their values are BF16 exactly."""
    problem = Problem(case, MXFP8_E4M3, device)
    before = torch.randn(problem.w.values.shape, device=device).to(dtype)
    options = {"accumulate": accumulate, "expanded": True}
    ref = problem.run(reference, "wgrad", before.clone(), **options)
    assert torch.equal(ref, problem.run(reference, "wgrad", before.clone(), accumulate=accumulate))
    assert_gradients(problem.run(gemm, "wgrad", before.clone(), **options), ref, case)
    problem.stop.fill_(1)
    assert torch.equal(problem.run(gemm, "wgrad", before.clone(), **options), before)


def assert_gradients(out, ref, case: Case) -> None:
    """Within the bar; equal of experts without rows."""
    for e, rows in enumerate(case.rows):
        if rows:
            assert_close(out[e], ref[e], "gemm")
        else:
            assert torch.equal(out[e], ref[e])


def test_one_rounding_when_accumulating(device):
    """Of two rows the FP32 sum is exact, so the bits are those of one rounding; a rounded gradient makes others."""
    problem = Problem(Case("one rounding", (2,), 32, 32), MXFP8_E4M3, device)
    grad = problem.run(reference, "wgrad", torch.zeros(1, 32, 32, device=device))
    before = torch.randn(1, 32, 32, device=device).bfloat16()
    out = problem.run(gemm, "wgrad", before.clone(), accumulate=True)
    assert torch.equal(out, (before.float() + grad).bfloat16())
    assert (out != (before + grad.bfloat16())).any()


# Scales far apart, and NaN


@pytest.mark.parametrize(
    ("kind", "format"), [(k, f) for k in KINDS for f in KINDS[k] if f is not NVFP4], ids=lambda v: getattr(v, "name", v)
)
def test_far_scales(kind, format, device):
    """Codes 0 and 254 meet, and their product is like any other."""
    out, ref = both(Problem(FAR, format, device, far=True), kind, config=BY_HAND)
    assert_close(out, ref, "gemm")


@pytest.mark.sm100
@pytest.mark.parametrize("kind", KINDS)
def test_far_scales_in_tensor_cores(kind, device):
    assert_close(*both(Problem(FAR, MXFP8_E4M3, device, far=True), kind), "gemm")


@pytest.mark.parametrize("accumulate", [False, True])
def test_far_scales_of_weight_gradients(accumulate, device):
    problem = Problem(Case("far", (0, 70), 32, 96), MXFP8_E4M3, device, far=True)
    before = torch.randn(problem.w.values.shape, device=device)
    options = {"accumulate": accumulate}
    assert_close(
        problem.run(gemm, "wgrad", before.clone(), config=BY_HAND, **options),
        problem.run(reference, "wgrad", before.clone(), **options),
        "gemm",
    )


def test_bits_do_not_depend_on_far_scales_beside_them(device):
    """A row of zeros has code 0: it is zeros, and the other rows of its tile keep their bits."""
    problem = Problem(Case("zeros", (29,), 96, 96), MXFP8_E4M3, device)
    clean = problem.run(gemm, "forward", config=BY_HAND)
    x = oracle.dequantize_rows(problem.a, format=MXFP8_E4M3, blocked=True)
    x[4] = 0
    problem.a = oracle.quantize_rows(x, format=MXFP8_E4M3, blocked=True)
    out = problem.run(gemm, "forward", config=BY_HAND)
    others = [r for r in range(29) if r != 4]
    assert torch.equal(out[others], clean[others]) and not out[4].any()


def test_bits_of_gradients_do_not_depend_on_far_scales_beside_them(device):
    """As above in FP32, where the two ways to sum show: a column of zeros in dy and one in x."""
    problem = Problem(Case("zeros", (128,), 96, 96), MXFP8_E4M3, device)
    clean = problem.run(gemm, "wgrad", config=BY_HAND)
    experts = {"row_start_P": problem.start_P, "num_rows_L": problem.rows_L}
    for i, column in enumerate((4, 70)):
        end = int(problem.start_P[-1])
        v = torch.zeros(problem.R, 96)
        v[:end] = oracle.dequantize_columns(problem.columns[i], format=MXFP8_E4M3, blocked=True, rows_end=end)
        v[:, column] = 0
        problem.columns[i] = oracle.quantize_columns(v, format=MXFP8_E4M3, blocked=True, **experts)
    out = problem.run(gemm, "wgrad", config=BY_HAND)
    others = [torch.tensor([c for c in range(96) if c != column]) for column in (4, 70)]
    assert torch.equal(out[0][others[0]][:, others[1]], clean[0][others[0]][:, others[1]])
    assert not out[0, 4].any() and not out[0, :, 70].any()


@EACH
@EACH_WAY
def test_a_bad_block_is_nan_in_its_row_and_column_only(config, kind, format, device):
    """A block whose scale alone is NaN. No value is negative, so that an infinity would not become NaN in the sum."""
    problem = Problem(Case("NaN", (9, 20)), format, device)
    operands = [problem.w, problem.a, *((problem.dy, *problem.columns) if format in FP8 else ())]
    for operand in operands:
        operand.values.view(torch.uint8).bitwise_and_(0x7F if format in FP8 else 0x77)
    clean = problem.run(gemm, kind, config=config)
    scales = {"forward": lambda: problem.a, "dgrad": lambda: problem.dy, "wgrad": lambda: problem.columns[0]}[
        kind
    ]().scales
    raw = scales.view(torch.uint8).view(-1)
    raw[2 * 16 + 1 if kind != "wgrad" else 2 * 16] = 0x7F if format.two_level else E8M0_NAN
    out = problem.run(gemm, kind, config=config)
    bad = out.isnan()
    if kind == "wgrad":  # column 2 of dy, of the first rows: expert 0
        assert bad[0, 2].all() and int(bad.sum()) == bad.shape[2]
    else:
        assert bad[2].all() and int(bad.sum()) == bad.shape[1]
    assert torch.equal(out[~bad], clean[~bad])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_scale_in_a_far_tile(kind, device):
    problem = Problem(Case("far NaN", (9,), 96, 96), MXFP8_E4M3, device, far=True)
    operand = {"forward": problem.a, "dgrad": problem.dy, "wgrad": problem.columns[0]}[kind]
    operand.scales.view(torch.uint8).view(-1)[2 * 16] = E8M0_NAN
    bad = problem.run(gemm, kind, config=BY_HAND).isnan()
    row = bad[0, 2] if kind == "wgrad" else bad[2]
    assert row.all() and int(bad.sum()) == len(row)


# Order, stop, what is refused


@EACH
def test_bits_do_not_depend_on_the_run_or_the_number_of_programs(kind, format, device):
    problem = Problem(RAGGED, format, device)
    first = problem.run(gemm, kind)
    assert torch.equal(first, problem.run(gemm, kind)) and torch.equal(first, problem.run(gemm, kind, num_sms=1))


@pytest.mark.parametrize("kind", KINDS)
def test_stop_leaves_without_touching_anything(kind, device):
    problem = Problem(RAGGED, MXFP8_E4M3, device)
    problem.stop.fill_(1)
    for module in (gemm, reference):
        out = torch.full(problem.w.values.shape, BAD_OUT, device=device)
        assert (problem.run(module, kind, out) == BAD_OUT).all()


def docstring_operands(format, rows, device):
    """rows [384, 32], each of them one number, as rows and as columns, with zeros as starts."""
    x = torch.tensor(rows, dtype=torch.float32)[:, None].expand(384, 32)
    found = oracle.quantize_rows(x, format=format, blocked=True)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Bundle(found.values.to(device), zero, found.scales.to(device).flatten(), zero)


def test_docstring_examples(device):
    rows = [0.0] * 384
    rows[0], rows[128], rows[129] = 1.0, 2.0, 3.0
    a = docstring_operands(MXFP8_E4M3, rows, device)
    w = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 32, 32)
    w = oracle.quantize_weights(w, format=MXFP8_E4M3, square=True)
    start_P, rows_L = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 128, 256], [1, 2]))
    zero = a.start_1
    for op, scales in (
        (gemm.grouped_gemm_scaled, w.scales),
        (gemm.grouped_gemm_scaled_dgrad, w.transposed_scales),
    ):
        out = torch.full((384, 32), BAD_OUT, dtype=torch.bfloat16, device=device)
        op(a, w.values.to(device), scales.to(device), out, zero, start_P, rows_L, format=MXFP8_E4M3, stop_1=zero)
        assert out[[0, 128, 129]].unique(dim=1).flatten().tolist() == [32, 128, 192]
        assert (out[1:128] == BAD_OUT).all() and (out[130:] == BAD_OUT).all()
    start_P, rows_L = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 128, 128, 256], [1, 0, 2]))
    experts = {"row_start_P": start_P.cpu(), "num_rows_L": rows_L.cpu()}
    columns = []
    for v in (torch.tensor(rows)[:, None].expand(384, 32), torch.ones(384, 32)):
        found = oracle.quantize_columns(v, format=MXFP8_E4M3, blocked=True, **experts)
        columns.append(Bundle(found.values.to(device), zero, found.scales.to(device).flatten(), zero))
    for accumulate, want in ((False, [1, 0, 5]), (True, [8, 7, 12])):
        out = torch.full((3, 32, 32), BAD_OUT, device=device)
        options = {"format": MXFP8_E4M3, "accumulate": accumulate, "stop_1": zero}
        gemm.grouped_gemm_scaled_wgrad(*columns, start_P, rows_L, out, **options)
        assert out.flatten(1).unique(dim=1).flatten().tolist() == want


@triton.jit
def _helpers_kernel(num_rows_ptr, row_start_ptr, ends_ptr, tile_ptr, powers_ptr):
    ends_L = operands.row_tile_ends(num_rows_ptr, 3, 2, 4)
    tl.store(ends_ptr + tl.arange(0, 4), ends_L)
    expert, row, row_end = operands.row_tile(ends_L, 3, row_start_ptr, num_rows_ptr, 2)
    tl.store(tile_ptr, expert)
    tl.store(tile_ptr + 1, row)
    tl.store(tile_ptr + 2, row_end)
    codes = tl.arange(0, 256)
    tl.store(powers_ptr + codes, formats.powers(codes.to(tl.uint8)))


def test_helpers(device):
    """The examples of the tile map; and all E8M0 codes."""
    counts, start_P = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([3, 0, 5], [0, 128, 128, 256]))
    ends, tile = (torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 3))
    powers = torch.zeros(256, device=device)
    _helpers_kernel[(1,)](counts, start_P, ends, tile, powers)
    assert ends.tolist() == [2, 2, 5, 5] and tile.tolist() == [2, 130, 133]
    assert powers[:255].cpu().tolist() == [2.0 ** (code - E8M0_BIAS) for code in range(255)] and powers[255].isnan()


def test_what_is_refused(device):
    problem = Problem(RAGGED, MXFP8_E4M3, device)
    rows, columns = problem.rows_bundle(problem.a), problem.columns_bundle(problem.columns[0])
    w, experts = problem.weight(False), problem.experts()
    out = torch.empty(1000, 96, dtype=torch.bfloat16, device=device)
    zero = problem.stop

    def forward(rows=rows, w=w, out=out, experts=experts, format=MXFP8_E4M3, **options):
        for module in (gemm, reference):
            module.grouped_gemm_scaled(rows, *w, out, zero, *experts, format=format, stop_1=zero, **options)

    forward()
    wrong = [
        ({"rows": rows._replace(values=rows.values.view(torch.uint8))}, "a.values must be contiguous torch.float8_e4m"),
        ({"rows": rows._replace(scales=rows.scales.view(-1, 1))}, r"a.scales must be .*\[any\]"),
        ({"rows": rows._replace(outer_inv=out[:, 0].float())}, "a.outer_inv must be None"),
        ({"w": (w[0][:, :40], w[1])}, "w_values_LNK must be"),
        ({"w": (w[0], w[1][:-1])}, r"w_scales must be .*\[512, 8\]"),
        ({"out": out.float()}, r"out must be contiguous bf16 \[any, 96\]"),
        ({"columns": (0, 128)}, "columns must be"),
        ({"columns": (32, 32)}, r"columns must be \(a multiple of 64"),
        ({"experts": (experts[0], experts[1].long())}, "num_rows_L must be contiguous int32"),
        ({"w_outer_inv_L": out[:4, 0].float()}, "w_outer_inv_L must be None"),
        ({"format": NVFP4}, "w_values_LNK must be"),
    ]
    for change, words in wrong:
        with pytest.raises(ValueError, match=words):
            forward(**change)
    for module in (gemm, reference):
        with pytest.raises(ValueError, match="nvfp4 has no blocks along"):
            module.grouped_gemm_scaled_dgrad(rows, *w, out, zero, *experts, format=NVFP4, stop_1=zero)
        options = {"accumulate": False, "stop_1": zero}
        grad = torch.empty(4, 96, 96, dtype=torch.float16, device=device)
        with pytest.raises(ValueError, match="out_LNK must be contiguous bf16 or fp32"):
            module.grouped_gemm_scaled_wgrad(columns, columns, *experts, grad, format=MXFP8_E4M3, **options)
        with pytest.raises(ValueError, match="mxfp4 has no blocks along"):
            module.grouped_gemm_scaled_wgrad(columns, columns, *experts, grad, format=MXFP4, **options)
        expanded = Bundle(torch.zeros(512, 96, dtype=torch.bfloat16, device=device), zero)
        options["format"], grad = MXFP8_E4M3, grad.float()
        with pytest.raises(ValueError, match="dy and x must both be expanded or neither"):
            module.grouped_gemm_scaled_wgrad(expanded, columns, *experts, grad, **options)
        with pytest.raises(ValueError, match=r"dy\.scales must be None, as expanded values hold them"):
            wrong = expanded._replace(scales=columns.scales)
            module.grouped_gemm_scaled_wgrad(wrong, columns, *experts, grad, **options)


def test_the_bar_sees_faults(device):
    problem = Problem(Case("two experts", (20, 20)), MXFP8_E4M3, device)
    ref = problem.run(reference, "forward")
    dropped = ref.clone()
    dropped[7] = 0
    problem.a.scales.view(torch.uint8).view(-1)[3 * 16] += 1  # one block of row 3 twice as large
    for wrong in (torch.zeros_like(ref), dropped, problem.run(reference, "forward")):
        with pytest.raises(AssertionError, match="miss the bar"):
            assert_close(wrong, ref, "gemm")


def test_choice_of_the_tile():
    assert gemm.pick_config("forward", scaled_dot=False) is gemm.CONFIGS[128, False]
    assert gemm.pick_config("dgrad", scaled_dot=False, rows_per_expert=64) is gemm.CONFIGS[64, False]
    assert gemm.pick_config("forward", scaled_dot=True, rows_per_expert=64) is gemm.CONFIGS[128, True]
    assert gemm.pick_config("wgrad", scaled_dot=False, rows_per_expert=64) is gemm.CONFIGS[128, False]


# On sm_90, in Gluon


HOPPER_CASES = [
    *CASES,
    RAGGED,
    Case("two tiles of rows and of columns, 5 steps", (300, 129), 288, 544),
]


def hopper_configs() -> list:
    from dist_moe.kernels_triton import scaled_hopper

    return [
        (scaled_hopper.Config(rows, num_stages=4), square) for rows in (16, 32, 64, 128) for square in (True, False)
    ]


@pytest.mark.sm90
@pytest.mark.parametrize("case", HOPPER_CASES, ids=[case.edge for case in HOPPER_CASES])
def test_hopper_equals_the_oracle(case, device):
    from dist_moe.kernels_triton import scaled_hopper

    problem = Problem(case, MXFP8_E4M3, device)
    ref = problem.run(reference, "forward")
    for config, square in hopper_configs():
        out = problem.run(scaled_hopper, "forward", config=config, square=square)
        assert_equal(out, ref)
        assert torch.equal(out, problem.run(scaled_hopper, "forward", config=config, square=square, num_sms=1))
    out = problem.run(scaled_hopper, "dgrad")
    assert_equal(out, problem.run(reference, "dgrad"))
    assert torch.equal(out, problem.run(scaled_hopper, "dgrad", num_sms=1))


@pytest.mark.sm90
def test_hopper_windows_and_bits(device):
    """A window has the bits of the whole, and rows keep theirs beside a NaN and a row of zeros, in any tile."""
    from dist_moe.kernels_triton import scaled_hopper

    problem = Problem(Case("window", (5, 133), 288, 544), MXFP8_E4M3, device)
    for config, square in hopper_configs():
        options = {"config": config, "square": square}
        whole = problem.run(scaled_hopper, "forward", **options)
        for columns in ((0, 96), (128, 160), (256, 32)):
            out = problem.run(scaled_hopper, "forward", columns=columns, **options)
            assert torch.equal(out, whole[:, columns[0] : sum(columns)])
        problem.stop.fill_(1)
        assert (problem.run(scaled_hopper, "forward", **options) == BAD_OUT).all()
        problem.stop.zero_()


def expanded_problem(case: Case, format, device) -> Problem:
    """Weights whose blocks lie along K, as those of inference do, and rows that are expanded."""
    problem = Problem(case, format, device)
    problem.expands = True
    if format in FP8:
        w = torch.randn(len(case.rows), case.N, case.K) * case.K**-0.5
        problem.w = oracle.quantize_weights(w, format=format, square=False)
    return problem


EACH_EXPANDED = pytest.mark.parametrize("format", (MXFP8_E4M3, NVFP4), ids=lambda f: f.name)


@EACH_EXPANDED
def test_expanded_rows_are_the_same_to_the_oracle(format, device):
    problem = expanded_problem(RAGGED, format, device)
    out = problem.run(reference, "forward")
    problem.expands = False
    assert torch.equal(out, problem.run(reference, "forward"))
    with pytest.raises(ValueError, match="values must be contiguous"):
        problem.expands = True
        problem.run(gemm, "forward")


@pytest.mark.sm90
@EACH_EXPANDED
@pytest.mark.parametrize("case", HOPPER_CASES, ids=[case.edge for case in HOPPER_CASES])
def test_hopper_expanded_equals_the_oracle(case, format, device):
    """Every tile gives the same bits, of whole results and of windows, again and again."""
    from dist_moe.kernels_triton import expanded_hopper

    problem = expanded_problem(case, format, device)
    ref = problem.run(reference, "forward")
    whole = problem.run(expanded_hopper, "forward")
    assert_equal(whole, ref)
    for config in expanded_hopper.CONFIGS[format].values():
        for num_sms in (None, 1, None, None):
            out = problem.run(expanded_hopper, "forward", config=config, num_sms=num_sms)
            assert torch.equal(out, whole)
        for columns in ((0, 32), (128, 32), (case.N // 128 * 128, case.N % 128)):
            if 0 < columns[1] and sum(columns) <= case.N:
                out = problem.run(expanded_hopper, "forward", columns=columns, config=config)
                assert torch.equal(out, whole[:, columns[0] : sum(columns)])
    problem.stop.fill_(1)
    assert (problem.run(expanded_hopper, "forward") == BAD_OUT).all()
    problem.expands = False
    with pytest.raises(ValueError, match="rows must be expanded"):
        problem.run(expanded_hopper, "forward")


@pytest.mark.sm90
def test_hopper_expanded_nan_and_codes_of_e2m1(device):
    """A NaN scale spoils its row alone; every pair of a code and a scale has its exact value."""
    from dist_moe.kernels_triton import expanded_hopper

    problem = expanded_problem(Case("NaN", (9, 20), 96, 544), NVFP4, device)
    clean = problem.run(expanded_hopper, "forward")
    problem.a.scales.view(torch.uint8).view(-1)[2 * 16 + 1] = 0x7F
    out = problem.run(expanded_hopper, "forward")
    bad = out.isnan()
    assert bad[2].all() and int(bad.sum()) == bad.shape[1]
    assert torch.equal(out[~bad], clean[~bad])
    # Row r of a picks block r with a code, column c of w has scale c in each block: one product an output.
    problem = expanded_problem(Case("codes", (16,), 128, 256), NVFP4, device)
    values = torch.zeros(problem.R, 256, dtype=torch.uint8)
    values[torch.arange(16), torch.arange(16) * 16 + torch.arange(16)] = 2  # 1.0
    problem.a.values.view(torch.uint8).copy_(values[:, ::2] | values[:, 1::2] << 4)
    codes = (torch.arange(256) % 16).to(torch.uint8)  # value k % 16 in column k
    problem.w.values.view(torch.uint8).copy_((codes[::2] | codes[1::2] << 4).expand(1, 128, 128))
    scales = torch.arange(128, dtype=torch.uint8)[None, :, None].expand(1, 128, 16).contiguous()
    scales[:, 127] = 0
    problem.w.scales.view(torch.uint8).copy_(oracle.to_blocked(scales))
    problem.w.outer_inv_G.fill_(1.0)
    problem.a.outer_inv_R.fill_(1.0)
    out = problem.run(expanded_hopper, "forward")
    assert torch.equal(out, problem.run(reference, "forward").to(out))


@pytest.mark.sm90
def test_hopper_expanded_codes_of_e4m3(device):
    """Every code of a weight, times scales from 2^-127 to 2^119, has its exact value, rounded to BF16 where that is
    subnormal, whatever the scales of other rows are: a warp takes another way where one of its own is above 2^7."""
    from dist_moe.kernels_triton import expanded_hopper

    problem = expanded_problem(Case("codes", (128,), 256, 128), MXFP8_E4M3, device)
    picks = torch.zeros(problem.R, 128, dtype=torch.uint8)
    picks[torch.arange(128), torch.arange(128)] = 0x38  # 1.0: row r of a picks column r of the weights
    problem.a.values.view(torch.uint8).copy_(picks)
    problem.a.scales.view(torch.uint8).fill_(127)
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 128).clone()  # row n of the weights has code n
    codes[(codes & 0x7F) == 0x7F] = 0  # not NaN
    problem.w.values.view(torch.uint8).copy_(codes[None])
    scales = (0, 1, 9, 100, 127, 134, 135, 200, 246)
    near, mixed = [[scale for scale in scales if scale <= most] for most in (134, 254)]
    for by_row in (*([scale] for scale in scales), near, mixed):
        natural = torch.tensor(by_row, dtype=torch.uint8)[torch.arange(256) // 3 % len(by_row)]
        natural = natural[None, :, None].expand(1, 256, 4).contiguous()
        problem.w.scales.view(torch.uint8).copy_(oracle.to_blocked(natural))
        out = problem.run(expanded_hopper, "forward")
        assert torch.equal(out, problem.run(reference, "forward").to(out)), by_row
    natural[:, 100] = 255  # NaN: that column of the result alone, whatever its neighbours in the warp
    problem.w.scales.view(torch.uint8).copy_(oracle.to_blocked(natural))
    spoiled = problem.run(expanded_hopper, "forward")
    kept = torch.arange(256, device=device) != 100
    assert torch.equal(spoiled[:, kept], out[:, kept]) and spoiled[:, 100].isnan().all()


@pytest.mark.sm90
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", HOPPER_CASES, ids=[case.edge for case in HOPPER_CASES])
def test_hopper_gradients_equal_the_oracle(case, dtype, accumulate, device):
    from dist_moe.kernels_triton import wgrad_hopper

    problem = Problem(case, MXFP8_E4M3, device)
    before = torch.randn(problem.w.values.shape, device=device).to(dtype)
    options = {"accumulate": accumulate, "expanded": True}
    ref = problem.run(reference, "wgrad", before.clone(), **options)
    for num_sms in (None, 1):
        out = problem.run(wgrad_hopper, "wgrad", before.clone(), num_sms=num_sms, **options)
        assert_gradients(out, ref, case)
    problem.stop.fill_(1)
    assert torch.equal(problem.run(wgrad_hopper, "wgrad", before.clone(), **options), before)
    with pytest.raises(ValueError, match="columns must be expanded here"):
        problem.run(wgrad_hopper, "wgrad", before.clone(), accumulate=accumulate)


def test_choice_of_the_tile_on_hopper():
    from dist_moe.kernels_triton.scaled_hopper import pick_config

    rows = [pick_config(True, n).rows for n in (1, 16, 17, 33, 64, 65, None)]
    assert rows == [16, 16, 32, 64, 64, 128, 128]
    assert [pick_config(False, n).rows for n in (16, 65, None)] == [16, 64, 64]


def test_choice_of_the_expanded_tile_on_hopper():
    from dist_moe.kernels_triton.expanded_hopper import pick_config

    rows = (1, 8, 9, 16, 22, 23, 36, 37, 49, 64, 70, None)
    for format, up_to_64 in ((NVFP4, [48, 48, 64, 64]), (MXFP8_E4M3, [64, 64, 64, 64])):
        configs = [pick_config(format, n) for n in rows]
        assert [c.rows + c.tail for c in configs] == [16, 16, 16, 32, 32, *up_to_64, 80, 96, 128]


# Sizes of real models, compiled only

REAL = [
    Case("DeepSeek-V3, few experts", (512, 431, 0, 600), 4096, 7168),
    Case("gpt-oss, width not a multiple of a tile", (500, 37, 129), 5760, 2880),
]


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("case", REAL, ids=[case.edge for case in REAL])
def test_real_sizes(case, kind, format, device):
    assert_equal(*both(Problem(case, format, device), kind))
    if kind != "wgrad":
        assert_equal(*both(Problem(case, format, device), kind, rows_per_expert=64))
