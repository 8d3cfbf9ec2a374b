"""Forward, dgrad and wgrad of grouped_gemm against the oracle: group sizes, tails, neighbours full of NaN, bits."""

import importlib
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_moe import reference
from dist_moe.config import Bf16GroupedGemmPreset
from dist_moe.kernels_triton import grouped_gemm as gemm
from dist_moe.testing import assert_close

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    edge: str
    rows: tuple[int, ...]  # by expert
    N: int = 96
    K: int = 160


CASES = [
    Case("no rows at all", (0,)),
    Case("one row", (1,)),
    Case("borders inside a tile", (128, 130, 65)),
    Case("under and over 8 rows, first expert empty", (0, 7, 8, 9)),
    Case("all rows in the last expert, L not a power of two", (0, 0, 0, 0, 131)),
    Case("all rows in the first expert, the others empty", (70, 0, 0)),
    Case("more row tiles than a group, the last group not full", (129, 257, 300, 140, 129), 32, 32),
    Case("shortest contraction and width", (3, 66), 32, 32),
    Case("two column tiles, the second of 32", (40, 5), 288, 64),
    Case("contraction of one step and a tail of 32", (64, 63), 160, 96),
    Case("most experts", tuple(2 if e in (0, 77, 511) else 0 for e in range(512)), 32, 32),
]
ids = [case.edge for case in CASES]
CASE = Case("ragged", (5, 70, 0, 130))


def put(rows: torch.Tensor, start: int, after: int = 3, fill: float = NAN) -> tuple[torch.Tensor, torch.Tensor]:
    """(view, start_1): the rows inside a larger buffer that is full of `fill`."""
    view = torch.full((start + len(rows) + after, rows.shape[1]), fill, dtype=rows.dtype, device=rows.device)
    view[start : start + len(rows)] = rows
    return view, torch.tensor([start], device=rows.device)


def randn(*shape: int, scale: float = 1.0, device: torch.device) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16().to(device)


def row_start(rows, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *rows], device=device).cumsum(0).int()


@dataclass
class Problem:
    """Unit-scale operands of all three products; `run` returns the rows or gradients that an op leaves."""

    case: Case
    device: torch.device

    def __post_init__(self):
        case, R = self.case, sum(self.case.rows)
        self.start_P = row_start(case.rows, self.device)
        self.stop = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.x = randn(R, case.K, device=self.device)
        self.dy = randn(R, case.N, device=self.device)
        self.w = randn(len(case.rows), case.N, case.K, scale=case.K**-0.5, device=self.device)

    def rows_op(self, op, kind: str, **options) -> torch.Tensor:
        """Forward or dgrad between buffers of NaN; also checks that the output buffer keeps its other rows."""
        a, width = (self.dy, self.case.K) if kind == "dgrad" else (self.x, self.case.N)
        out, out_start = put(torch.full((len(a), width), 7.0, dtype=torch.bfloat16, device=self.device), 5, fill=7.0)
        op(*put(a, 2), self.w, out, out_start, self.start_P, stop_1=self.stop, **options)
        assert (out[:5] == 7.0).all() and (out[5 + len(a) :] == 7.0).all(), "rows of a neighbour were written"
        return out[5 : 5 + len(a)]

    def wgrad(self, op, out: torch.Tensor, **options) -> torch.Tensor:
        op(*put(self.dy, 3), *put(self.x, 1), self.start_P, out, stop_1=self.stop, **options)
        return out


KINDS = {"forward": "grouped_gemm", "dgrad": "grouped_gemm_dgrad"}  # names of the op, in every module that has it


def both(problem: Problem, kind: str, module=gemm, **options) -> tuple[torch.Tensor, torch.Tensor]:
    op, oracle = (getattr(home, KINDS[kind]) for home in (module, reference))
    return problem.rows_op(op, kind, **options), problem.rows_op(oracle, kind)


def implementation(request, triton: str, gluon: str):
    return importlib.import_module(f"dist_moe.kernels_triton.{triton if request.param == 'triton' else gluon}")


BACKENDS = ["triton", pytest.param("gluon", marks=pytest.mark.sm90)]


@pytest.fixture(params=BACKENDS)
def module(request):
    """Every implementation of grouped_gemm and grouped_gemm_dgrad that runs here."""
    return implementation(request, "grouped_gemm", "grouped_gemm_hopper")


@pytest.fixture(params=BACKENDS)
def wgrad(request):
    """Every implementation of grouped_gemm_wgrad that runs here."""
    return implementation(request, "grouped_gemm", "wgrad_hopper").grouped_gemm_wgrad


# Rows times weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rows_equal_the_oracle(case, kind, module, device):
    assert_close(*both(Problem(case, device), kind, module), "gemm")


# Rows of an expert on both sides of every border between the tiles of grouped_gemm_hopper: boxes, tails, whole tiles.
BORDERS = (0, 1, 32, 33, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 224, 225, 256, 257, 288, 289, 320, 321, 544, 545)


@pytest.mark.sm90
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_that_fit_have_the_bits_of_others_at_every_border(kind, device):
    hopper = importlib.import_module("dist_moe.kernels_triton.grouped_gemm_hopper")
    problem = Problem(Case("borders", BORDERS, N=288, K=352), device)
    out, ref = both(problem, kind, hopper)
    assert_close(out, ref, "gemm")
    assert torch.equal(out, problem.rows_op(getattr(gemm, KINDS[kind]), kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", gemm.CONFIGS.values(), ids=str)
def test_every_tile(config, kind, device):
    assert_close(*both(Problem(CASE, device), kind, config=config), "gemm")


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_another_expert_stays_there(kind, module, device):
    """Weights and rows of expert 1 are NaN: tails of contraction, columns and rows reach into them."""
    problem = Problem(Case("tails everywhere", (5, 70, 9), N=96, K=96), device)
    out, ref = both(problem, kind, module)
    for operand in (problem.w[1:2], problem.x[5:75], problem.dy[5:75]):
        operand.fill_(NAN)
    poisoned = problem.rows_op(getattr(module, KINDS[kind]), kind)
    assert poisoned[5:75].isnan().all()
    others = [*range(5), *range(75, 84)]
    assert torch.equal(poisoned[others], out[others])
    assert_close(poisoned[others], ref[others], "gemm")


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_run_or_the_number_of_programs(kind, module, device):
    problem = Problem(CASE, device)
    op = getattr(module, KINDS[kind])
    first = problem.rows_op(op, kind)
    assert torch.equal(first, problem.rows_op(op, kind))
    assert torch.equal(first, problem.rows_op(op, kind, num_sms=1))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_place(kind, module, device):
    """The experts in another order: every row keeps its bits."""
    problem, order = Problem(CASE, device), [3, 0, 2, 1]
    moved = Problem(Case("permuted", tuple(CASE.rows[e] for e in order)), device)
    segments = [range(int(problem.start_P[e]), int(problem.start_P[e + 1])) for e in order]
    rows = torch.tensor([r for segment in segments for r in segment], device=device)
    moved.w, moved.x, moved.dy = problem.w[order].contiguous(), problem.x[rows], problem.dy[rows]
    op = getattr(module, KINDS[kind])
    assert torch.equal(moved.rows_op(op, kind), problem.rows_op(op, kind)[rows])


def test_views_of_one_buffer(module, device):
    """Operands and results at other rows and of other widths of the same memory, as in the activation buffer."""
    problem = Problem(Case("one buffer", (3, 30), N=96, K=32), device)
    buffer = torch.full((96 * 200,), NAN, dtype=torch.bfloat16, device=device)
    buffer.view(-1, 32)[7 : 7 + 33] = problem.x
    starts = torch.tensor([7, 100], device=device)
    rest = buffer.view(-1, 96)[:100].clone()
    module.grouped_gemm(
        buffer.view(-1, 32),
        starts[:1],
        problem.w,
        buffer.view(-1, 96),
        starts[1:],
        problem.start_P,
        stop_1=problem.stop,
    )
    assert_close(buffer.view(-1, 96)[100:133], problem.rows_op(reference.grouped_gemm, "forward"), "gemm")
    assert torch.equal(buffer.view(-1, 96)[:100].nan_to_num(), rest.nan_to_num())
    assert buffer.view(-1, 96)[133:].isnan().all()


@pytest.mark.parametrize("by_start", [True, False], ids=["start of the stage", "row of the stage"])
def test_rows_past_two_to_the_31_elements(by_start, module, device):
    """Offsets of rows that are behind 2^31 elements; on a CPU the memory before them is never touched."""
    problem, start = Problem(Case("far", (2, 3), N=32, K=32), device), 2**26 + 3
    a, out = (torch.empty(2**26 + 16, 32, dtype=torch.bfloat16, device=device) for _ in range(2))
    a[start : start + 5] = problem.x
    out[start:] = 7.0
    start_1 = torch.tensor([start if by_start else 3], device=device)
    start_P = problem.start_P + (0 if by_start else 2**26)
    module.grouped_gemm(a, start_1, problem.w, out, start_1, start_P, stop_1=problem.stop)
    assert_close(out[start : start + 5], problem.rows_op(reference.grouped_gemm, "forward"), "gemm")
    assert (out[start + 5 :] == 7.0).all()


@settings(max_examples=40)
@given(rows=st.tuples(*[st.integers(0, 70)] * 5), N=st.sampled_from([32, 96]), kind=st.sampled_from(sorted(KINDS)))
def test_any_group_sizes(device, rows, N, kind):
    problem = Problem(Case("drawn", rows, N=N, K=32), device)
    assert_close(*both(problem, kind, config=gemm.CONFIGS[64, 128]), "gemm")
    out, ref = (
        problem.wgrad(op, torch.full_like(problem.w, NAN), accumulate=False)
        for op in (gemm.grouped_gemm_wgrad, reference.grouped_gemm_wgrad)
    )
    if sum(rows):
        assert_close(out, ref, "gemm")


# Weight gradients


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_wgrad_equals_the_oracle(case, dtype, accumulate, wgrad, device):
    problem = Problem(case, device)
    before = (
        torch.randn(problem.w.shape).to(device, dtype) if accumulate else torch.full_like(problem.w, NAN, dtype=dtype)
    )
    out, ref = (
        problem.wgrad(op, before.clone(), accumulate=accumulate) for op in (wgrad, reference.grouped_gemm_wgrad)
    )
    empty = torch.tensor(case.rows, device=device) == 0
    assert torch.equal(out[empty], before[empty] if accumulate else torch.zeros_like(before[empty]))
    assert_close(out[~empty], ref[~empty], "gemm")


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("config", gemm.CONFIGS.values(), ids=str)
def test_wgrad_every_tile(config, accumulate, device):
    problem = Problem(CASE, device)
    out, ref = (
        problem.wgrad(op, torch.ones(problem.w.shape, device=device), accumulate=accumulate, **options)
        for op, options in ((gemm.grouped_gemm_wgrad, {"config": config}), (reference.grouped_gemm_wgrad, {}))
    )
    assert_close(out[[0, 1, 3]], ref[[0, 1, 3]], "gemm")
    assert (out[2] == (1.0 if accumulate else 0.0)).all()


def test_wgrad_nan_of_another_expert_stays_there(wgrad, device):
    """The last step over expert 0's rows reads those of expert 1: neither operand may let them in."""
    problem = Problem(Case("tails", (5, 70, 9)), device)
    clean = problem.wgrad(wgrad, torch.empty_like(problem.w), accumulate=False)
    for poisoned in ("x", "dy"):
        dirty = Problem(problem.case, device)
        dirty.x, dirty.dy = problem.x.clone(), problem.dy.clone()
        getattr(dirty, poisoned)[5:75] = NAN
        out = dirty.wgrad(wgrad, torch.empty_like(problem.w), accumulate=False)
        assert torch.equal(out[[0, 2]], clean[[0, 2]]) and out[1].isnan().all()


def test_wgrad_equal_bits(wgrad, device):
    problem = Problem(CASE, device)
    first, again, one = (
        problem.wgrad(wgrad, torch.empty_like(problem.w), accumulate=False, num_sms=num_sms)
        for num_sms in (None, None, 1)
    )
    assert torch.equal(first, again) and torch.equal(first, one)


# All three


@pytest.mark.parametrize("kind", KINDS)
def test_stop_leaves_without_touching_anything(kind, module, wgrad, device):
    problem = Problem(CASE, device)
    problem.stop.fill_(1)
    problem.start_P.fill_(2**30)  # what it would read is garbage then
    assert (problem.rows_op(getattr(module, KINDS[kind]), kind) == 7.0).all()
    for accumulate in (False, True):
        out = torch.full_like(problem.w, 7.0)
        assert (problem.wgrad(wgrad, out, accumulate=accumulate) == 7.0).all()


def test_docstring_examples(module, wgrad, device):
    start_P = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    rows = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, device=device)[:, None].expand(3, 32).contiguous()
    w = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device)[:, None, None].expand(2, 32, 32).contiguous()
    zero, stop = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    for op in (module.grouped_gemm, module.grouped_gemm_dgrad):
        out = torch.empty_like(rows)
        op(rows, zero, w, out, zero, start_P, stop_1=stop)
        assert out.unique(dim=1).flatten().tolist() == [32, 128, 192]
    start_P = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=device)
    for accumulate, want in ((False, [1, 0, 5]), (True, [8, 7, 12])):
        out = torch.full((3, 32, 32), 7.0, device=device)
        wgrad(rows, zero, torch.ones_like(rows), zero, start_P, out, accumulate=accumulate, stop_1=stop)
        assert out.flatten(1).unique(dim=1).flatten().tolist() == want


@triton.jit
def _tile_map_kernel(row_start_ptr, ends_ptr, tile_ptr, place_ptr):
    ends_L = gemm._row_tile_ends(row_start_ptr, 3, 2, 4)
    tl.store(ends_ptr + tl.arange(0, 4), ends_L)
    expert, row, row_end = gemm._row_tile(ends_L, 3, row_start_ptr, 2)
    tl.store(tile_ptr, expert)
    tl.store(tile_ptr + 1, row)
    tl.store(tile_ptr + 2, row_end)
    for tile in range(6):
        tile_m, tile_n = gemm._tile_place(tile, 3, 2, 2)
        tl.store(place_ptr + tile, tile_m * 10 + tile_n)


def test_tile_map_examples(device):
    start_P = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    ends, tile, place = (torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 3, 6))
    _tile_map_kernel[(1,)](start_P, ends, tile, place)
    assert ends.tolist() == [2, 2, 5, 5]
    assert tile.tolist() == [2, 5, 8]
    assert place.tolist() == [0, 10, 1, 11, 20, 21]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bar_sees_faults(kind, device):
    problem = Problem(Case("two experts", (20, 20)), device)
    ref = problem.rows_op(getattr(reference, KINDS[kind]), kind)
    dropped, swapped = ref.clone(), Problem(problem.case, device)
    dropped[7] = 0
    swapped.x, swapped.dy, swapped.w = problem.x, problem.dy, problem.w.flip(0)
    for wrong in (torch.zeros_like(ref), dropped, swapped.rows_op(getattr(reference, KINDS[kind]), kind)):
        with pytest.raises(AssertionError, match="miss the bar"):
            assert_close(wrong, ref, "gemm")


# Choice of the tile, and what is refused


def test_presets_choose_the_tile():
    want = {"1cta1mma_bm64_bn128": (64, 128), "1cta1mma_bm64_bn256": (64, 256), "1cta1mma_bm128_bn128": (128, 128)}
    for preset in Bf16GroupedGemmPreset.__args__:
        for kind in KINDS:
            config = gemm.pick_config(kind, 4096, 7168, preset=preset)
            assert (config.block_m, config.block_n) == want.get(preset, (128, 256))


@pytest.mark.parametrize(
    "kind, N, K, rows, want",
    [
        ("forward", 4096, 7168, None, (128, 256)),
        ("forward", 4096, 7168, 64, (64, 128)),  # decode
        ("forward", 4096, 7168, 65, (128, 256)),
        ("dgrad", 4096, 384, None, (128, 128)),  # 256 would pad a third
        ("forward", 2880, 2880, None, (128, 256)),  # pads 6%
        ("forward", 64, 7168, None, (128, 64)),
        ("wgrad", 64, 4096, None, (128, 256)),
    ],
)
def test_pick_config(kind, N, K, rows, want):
    assert gemm.pick_config(kind, N, K, rows) == gemm.CONFIGS[want]


def test_refusals(device):
    problem = Problem(Case("bad", (4,), N=32, K=32), device)
    start, P, stop = torch.zeros(1, dtype=torch.int64, device=device), problem.start_P, problem.stop
    out = torch.empty_like(problem.dy)
    with pytest.raises(ValueError, match="grouped_gemm: a_XK must be contiguous bf16"):
        gemm.grouped_gemm(problem.x.float(), start, problem.w, out, start, P, stop_1=stop)
    with pytest.raises(ValueError, match="grouped_gemm_dgrad: out_XK must be contiguous bf16"):
        gemm.grouped_gemm_dgrad(problem.dy, start, problem.w, out[:, :16], start, P, stop_1=stop)
    with pytest.raises(ValueError, match="multiples of 32"):
        gemm.grouped_gemm(problem.x, start, problem.w[:, :24], out, start, P, stop_1=stop)
    with pytest.raises(ValueError, match="grouped_gemm_wgrad: out_LNK"):
        gemm.grouped_gemm_wgrad(problem.dy, start, problem.x, start, P, problem.w.half(), accumulate=False, stop_1=stop)
    huge = torch.empty(2**31, 32, dtype=torch.bfloat16, device="meta")
    with pytest.raises(AssertionError, match="TMA coordinate"):
        gemm.grouped_gemm(huge, start, problem.w, out, start, P, stop_1=stop)


# Sizes of real models, compiled only

REAL = [
    Case("DeepSeek-V3, few experts", (512, 431, 0, 600), 4096, 7168),
    Case("gpt-oss, width not a multiple of a tile", (500, 37, 129), 5760, 2880),
    Case("Qwen3-30B W2, short contraction", tuple(1024 + 7 * e for e in range(-8, 8)), 2048, 768),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=[case.edge for case in REAL])
def test_real_sizes(case, wgrad, device):
    problem = Problem(case, device)
    for kind in KINDS:
        assert_close(*both(problem, kind), "gemm")
        assert_close(*both(problem, kind, rows_per_expert=64), "gemm")
    out, ref = (
        problem.wgrad(op, torch.empty(problem.w.shape, device=device), accumulate=False)
        for op in (wgrad, reference.grouped_gemm_wgrad)
    )
    assert_close(out, ref, "gemm")


@pytest.mark.gpu
def test_wgrad_past_two_to_the_31_elements(wgrad, device):
    problem = Problem(Case("far", (0,) * 128 + (3,), N=32, K=32), device)
    dy, x = problem.dy.repeat(1, 128), problem.x.repeat(1, 128)
    zero, out = problem.stop, torch.zeros(129, 4096, 4096, dtype=torch.bfloat16, device=device)
    wgrad(dy, zero, x, zero, problem.start_P, out, accumulate=True, stop_1=zero)
    assert_close(out[128], (dy.float().T @ x.float()).bfloat16(), "gemm")
    assert not out[:128].any()
