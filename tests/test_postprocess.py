"""A callable behind the experts: the path against the dense layer with it, bit for bit where it changes nothing, what
it may return, and what happens when it raises."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dist_moe import BlockScaledConfig, ExecutionOptions, create_context, routed_experts
from dist_moe.dense import dense_moe
from dist_moe.errors import PeerAbortedError, RankMismatchError
from dist_moe.path_oracle import FORWARD_ONLY, Case, forward_only, on_device, prepared
from dist_moe.planner import dedup
from dist_moe.testing import assert_close
from dist_moe.virtual import RankInputs, RankResults, run_virtual

from .path_cases import assert_results_close, assert_results_equal
from .rank_calls import on_ranks
from .test_path import BACKENDS, device_of

CASES = (
    Case("one rank", W=1, T=6, D=64, F=32),
    Case("two ranks per route", D=64, F=32),
    Case("two ranks de-duplicated recomputed", K=4, E=8, D=32, F=64, slot_factor=None),
    Case("three ranks one without tokens", W=3, T=5, D=32, F=32, E=6, routing="empty_ranks"),
    Case("an expert named twice", K=3, E=8, D=32, F=32, routing="duplicates"),
    Case("slots without expert bf16 scores", K=4, E=8, D=32, F=32, routing="dropped(0.4)", scores=torch.bfloat16),
)
MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")


@dataclass
class Normalise:
    """Of rows of any dtype, with a gain that it has captured; counts its runs by whether they had gradients."""

    gain_D: torch.Tensor
    dtype: torch.dtype | None = None

    def __post_init__(self):
        self.runs = []

    def __call__(self, rows_ND: torch.Tensor) -> torch.Tensor:
        self.runs.append(torch.is_grad_enabled())
        h = rows_ND.float()
        out = h * torch.rsqrt(h.square().mean(dim=1, keepdim=True) + 0.1) * self.gain_D
        return out.to(self.dtype or rows_ND.dtype)


def gain_of(D: int, device="cpu") -> torch.Tensor:
    return torch.linspace(0.5, 1.5, D, device=device).requires_grad_()


def dense_with(fn, case: Case, inputs: list[RankInputs]) -> list[RankResults]:
    """The layer over all experts by autograd, with fn between the experts and the scores; FP32 rows."""
    leaves = {
        name: torch.cat([getattr(rank, name) for rank in inputs]).float().requires_grad_()
        for name in ("x_TD", "scores_TK", "w13_L2FD", "w2_LDF")
    }
    x, scores, w13, w2 = leaves.values()
    ids = torch.cat([rank.ids_TK for rank in inputs])
    ones = torch.ones(len(ids), 1)
    slots = [dense_moe(x, ids[:, k : k + 1], ones, w13, w2, case.config().activation_fn) for k in range(case.K)]
    rows = torch.stack(slots, dim=1)
    post = fn(rows.reshape(-1, case.D)).float().view(rows.shape)
    out = (torch.where((ids < 0)[..., None], 0.0, post) * scores[..., None]).sum(dim=1)
    out.backward(torch.cat([rank.grad_out_TD for rank in inputs]).float())
    sizes = [len(rank.x_TD) for rank in inputs]
    parts = (out.detach().bfloat16().split(sizes), x.grad.bfloat16().split(sizes))
    parts += (scores.grad.to(case.scores).split(sizes), w13.grad.chunk(case.W), w2.grad.chunk(case.W))
    return [RankResults(*part) for part in zip(*parts, strict=True)]


def assert_close_by_route(results: list[RankResults], expected: list[RankResults]) -> None:
    """assert_results_close, but of W13 the gradient of an expert counts as one row: the gradients of the routes are
    rounded to BF16 before the product with W2, from which single elements come out that nearly cancel, and with few
    tokens an expert such an element is a row. One row lost of the 64 or more of an expert is 18 dB."""
    assert_results_close(
        *([replace(rank, grad_w13_L2FD=rank.grad_w13_L2FD.flatten(1)) for rank in side] for side in (results, expected))
    )


def run_with(fn, case: Case, inputs: list[RankInputs], backend: str, **changes) -> list[RankResults]:
    device = device_of(backend)
    options = None if fn is None else [ExecutionOptions(experts_output_postprocess=fn)] * case.W
    there = [on_device(rank, device) for rank in inputs]
    found = run_virtual(
        case.W, case.config(route_outputs=True, **changes), there, device=device, backend=backend, options=options
    )
    return [on_device(result, "cpu") for result in found]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_dense_layer(case, backend):
    """Forward, all gradients, and that of what the callable has captured, which all ranks share here."""
    inputs, device = case.inputs(), device_of(backend)
    fn, wanted = Normalise(gain_of(case.D, device)), Normalise(gain_of(case.D))
    results = run_with(fn, case, inputs, backend)
    assert_close_by_route(results, dense_with(wanted, case, inputs))
    assert_close(fn.gain_D.grad.cpu()[None], wanted.gain_D.grad[None], "path_grads")
    assert fn.runs == [False] * case.W + [True] * case.W


def test_the_dense_layer_sees_where_the_scores_are():
    """Behind the scores, the same callable is another layer."""
    case = CASES[1]
    inputs = case.inputs()
    scaled = [replace(rank, scores_TK=torch.ones_like(rank.scores_TK)) for rank in inputs]
    with pytest.raises(AssertionError, match="worst"):
        wrong = run_with(Normalise(gain_of(case.D)), case, scaled, "reference")
        assert_close_by_route(wrong, dense_with(Normalise(gain_of(case.D)), case, inputs))


def powers_of_two(case: Case) -> list[RankInputs]:
    """Scores that round nothing, wherever they are multiplied."""
    scores = 2.0 ** -torch.arange(1, case.K + 1)
    return [replace(rank, scores_TK=scores.expand(len(rank.x_TD), -1).to(case.scores)) for rank in case.inputs()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_scaled", [None, MXFP8], ids=["bf16", "mxfp8"])
def test_a_callable_that_changes_nothing_changes_no_bit(block_scaled, backend):
    """Against the plain call of the per-route scheme; but the score gradients, which come from other products."""
    case = Case("two ranks per route", T=5, D=64, F=32)
    assert not dedup(case.config(), case.W)
    inputs = powers_of_two(case)
    plain, found = (run_with(fn, case, inputs, backend, block_scaled=block_scaled) for fn in (None, lambda rows: rows))
    scores = [torch.cat([result.grad_scores_TK for result in side]).view(1, -1) for side in (found, plain)]
    assert_close(*scores, "path_grads" if block_scaled is None else "scaled_path_grads")
    assert_results_equal(*([replace(r, grad_scores_TK=None) for r in side] for side in (found, plain)))


@pytest.mark.parametrize("block_scaled", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("D", [64, 160])  # 160: block-scaled, W2 goes in passes over columns
def test_inference_changes_no_bit_either(block_scaled, D, monkeypatch):
    monkeypatch.setattr("dist_moe.planner.ONE_PASS_BYTES", 0)
    case = Case("two ranks per route", T=5, D=D, F=32)
    inputs, config = case.inputs(), case.config(block_scaled=block_scaled, route_outputs=True, **FORWARD_ONLY)
    if block_scaled is not None:
        inputs = prepared(inputs, config, inference=True)
    inputs = forward_only(inputs)
    changes = {"block_scaled": block_scaled, **FORWARD_ONLY}
    plain, found, half = (
        run_with(fn, case, inputs, "reference", **changes) for fn in (None, lambda rows: rows, lambda rows: rows * 0.5)
    )
    assert_results_equal(found, plain)
    assert_results_equal(half, [replace(rank, out_TD=rank.out_TD * 0.5) for rank in plain])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_another_dtype_are_added_in_fp32(dtype):
    case = CASES[1]
    inputs = case.inputs()
    fn, wanted = Normalise(gain_of(case.D), dtype), Normalise(gain_of(case.D), torch.float32)
    assert_close_by_route(run_with(fn, case, inputs, "reference"), dense_with(wanted, case, inputs))


def test_a_callable_may_mix_rows():
    """It gets all slots of the rank at once, token by token; here every token loses the mean of its slots."""
    case = Case("two ranks per route", D=32, F=32, K=2)
    inputs = case.inputs()

    def centred(rows_ND):
        rows_TKD = rows_ND.view(-1, case.K, rows_ND.shape[1])
        return (rows_TKD - rows_TKD.mean(dim=1, keepdim=True)).view(rows_ND.shape).contiguous()

    # What nearly cancels keeps the rounding of its gradients to bf16: the bar of the outputs, and all rows together.
    results, expected = run_with(centred, case, inputs, "reference"), dense_with(centred, case, inputs)
    for name in RankResults.__dataclass_fields__:
        out, ref = (torch.cat([getattr(rank, name) for rank in side]).view(1, -1) for side in (results, expected))
        assert_close(out, ref, "path_grads")


def test_slots_without_an_expert_are_zeros_and_reach_nothing():
    case = Case("slots", W=1, D=32, F=32, K=4, E=8, routing="dropped(0.4)")
    (rank,) = case.inputs()
    seen = []

    def inverse(rows_ND):
        seen.append(rows_ND.clone())
        return 1 / rows_ND  # infinite for the zeros

    (result,) = run_with(inverse, case, [rank], "reference")
    dead = (rank.ids_TK < 0).view(-1)
    assert dead.any() and not seen[0][dead].any() and seen[0][~dead].all()
    assert result.out_TD.isfinite().all() and result.grad_scores_TK.isfinite().all()
    assert not result.grad_scores_TK.view(-1)[dead].any() and result.grad_scores_TK.view(-1)[~dead].all()


# One rank through the public call


@pytest.fixture
def context():
    case = Case("one rank", W=1, T=6, D=32, F=32)
    with create_context(
        group=None, config=case.config(route_outputs=True), device="cpu", backend="reference"
    ) as context:
        context.case = case
        yield context


def call(context, fn, x_TD=None):
    (rank,) = context.case.inputs()
    x_TD = rank.x_TD if x_TD is None else x_TD
    options = ExecutionOptions(experts_output_postprocess=fn)
    return routed_experts(x_TD, rank.ids_TK, rank.scores_TK, rank.w13_L2FD, rank.w2_LDF, context, options=options)


def leaf(context):
    return context.case.inputs()[0].x_TD.requires_grad_()


REFUSED = (
    (TypeError, "must return a tensor, got NoneType", lambda rows: None),
    (ValueError, r"preserve route shape \[12, 32\], got \[6, 64\]", lambda rows: rows.view(6, 64)),
    (ValueError, "must stay on the device cpu, got meta", lambda rows: rows.to("meta")),
    (ValueError, "contiguous rows, got strides", lambda rows: rows.T.contiguous().T),
    (TypeError, "float16, bfloat16, or float32, got torch.float64", lambda rows: rows.double()),
    (ValueError, "must not change its argument in place", lambda rows: rows.mul_(0.5)),
    (ZeroDivisionError, "division", lambda rows: 1 // 0),
)


@pytest.mark.parametrize("error, words, fn", REFUSED, ids=[row[1].split(",")[0] for row in REFUSED])
def test_refused_returns(error, words, fn, context):
    with pytest.raises(error, match=words):
        call(context, fn)
    assert call(context, torch.neg).any()  # the context works on


def test_a_dtype_that_changes_between_the_runs_is_refused(context):
    dtypes = iter((torch.float32, torch.bfloat16))
    out = call(context, lambda rows: rows.to(next(dtypes)), leaf(context))
    with pytest.raises(ValueError, match=r"changed dtype: it returned torch\.float32 in forward and torch\.bf"):
        out.sum().backward()


def test_random_numbers_are_those_of_the_first_run(context):
    masks = []

    def dropped(rows_ND):
        masks.append(torch.rand(rows_ND.shape) < 0.5)
        return rows_ND * masks[-1]

    out = call(context, dropped, leaf(context))
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(*masks) and torch.equal(torch.get_rng_state(), state)


def test_without_gradients_it_runs_once(context):
    fn = Normalise(gain_of(32))
    outs = [call(context, fn, leaf(context))]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outs.append(call(context, fn))
    outs[0].sum().backward()
    assert fn.runs == [False, False, False, True] and all(torch.equal(outs[0], out) for out in outs)


def test_a_checkpoint_gives_the_same_bits(context):
    grads = []
    for run in (call, lambda *args: checkpoint(call, *args, use_reentrant=False)):
        x, fn = leaf(context), Normalise(gain_of(32))
        run(context, fn, x).square().sum().backward()
        grads.append((x.grad, fn.gain_D.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_tracing_is_refused(context):
    with pytest.raises(RuntimeError, match="require eager execution"):
        make_fx(lambda x_TD: call(context, torch.neg, x_TD))(leaf(context).detach())


# Ranks as processes


def _step(rank, group, case, fns):
    with create_context(
        group=group, config=case.config(route_outputs=True), device="cpu", peer_timeout_s=30
    ) as context:
        inputs = case.inputs()[rank]
        x_TD = inputs.x_TD.clone().requires_grad_()
        options = ExecutionOptions(experts_output_postprocess=fns[rank])
        tensors = (x_TD, inputs.ids_TK, inputs.scores_TK, inputs.w13_L2FD, inputs.w2_LDF)
        try:
            out_TD = routed_experts(*tensors, context, options=options)
            out_TD.backward(inputs.grad_out_TD)
            context.check()
        except Exception as error:
            return error
        return out_TD.detach(), x_TD.grad


def _raises_in_backward(rows_ND):
    if torch.is_grad_enabled():
        raise ZeroDivisionError("of the callable")
    return rows_ND * 2


def test_ranks_as_processes_give_the_bits_of_virtual_ones():
    case = CASES[2]
    found = on_ranks(2, _step, case, (torch.neg, torch.neg))
    expected = run_with(torch.neg, case, case.inputs(), "triton")
    for (out_TD, grad_x_TD), rank in zip(found, expected, strict=True):
        assert torch.equal(out_TD, rank.out_TD) and torch.equal(grad_x_TD, rank.grad_x_TD)


def test_one_rank_without_the_callable_is_a_mismatch():
    for error in on_ranks(2, _step, CASES[1], (torch.neg, None)):
        assert isinstance(error, RankMismatchError) and "forward with a postprocess" in str(error), error


def test_a_callable_that_raises_in_backward_ends_the_step_of_all_ranks():
    first, second = on_ranks(2, _step, CASES[1], (_raises_in_backward, torch.neg))
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, PeerAbortedError) and "of the callable" in str(second)
