"""One layer on one rank and on two, at the sizes, with the data and within the bars that dist-moe 0.1.0 states for
itself: every element, the whole tensor's relative error and its cosine, against the layer in plain PyTorch.

The bars of our own tests are of the worst row instead; these show that a program which passed there passes here.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from dist_moe import (
    BlockScaledConfig,
    ExecutionOptions,
    PreparedWeight,
    RMSNormPostprocess,
    create_context,
    plan_memory,
    prepare_block_scaled_weight,
    routed_experts,
)
from dist_moe.path_oracle import FORWARD_ONLY, Case, dense, on_device
from dist_moe.shapes import KEPT_NAMES
from dist_moe.virtual import RankInputs

from .process_group import ranks
from .rank_calls import NAMES
from .test_path import BACKENDS, device_of
from .test_postprocess import dense_with

# Of the gradient of the output in BF16, where 0.1.0 states bars of elements without it. A score gradient is <dy W2, h2>
# here and <h3, dy> there: equally near to the exact one, but each rounds another factor, so that at unit scale sums of
# D terms that nearly cancel differ by up to 0.14 on two ranks, and the bar is 0.03.
SCALE = 1 / 8
FP32, BF16 = torch.float32, torch.bfloat16
MXFP8, MEGA, NVFP4 = BlockScaledConfig(), BlockScaledConfig(pipeline="mega"), BlockScaledConfig("nvfp4")
FIELDS = ("out_TD", "grad_x_TD", "grad_scores_TK", "grad_w13_L2FD", "grad_w2_LDF")


@dataclass(frozen=True)
class Bar:
    """Of elements, None: not looked at; of the tensor, the largest relative error and the least cosine. Those of the
    tensor know no scale, so they are asked of every tensor, also where 0.1.0 states them for another one only."""

    rtol: float | None = None
    atol: float | None = None
    error: float = 1e-2
    cosine: float = 0.995

    def check(self, name: str, out: torch.Tensor, ref: torch.Tensor) -> None:
        out, ref = (tensor.detach().double().cpu().reshape(-1) for tensor in (out, ref))
        error, cosine = (out - ref).norm() / ref.norm(), torch.cosine_similarity(out, ref, 0)
        assert error < self.error and cosine > self.cosine, f"{name}: relative error {error:.4g}, cosine {cosine:.6f}"
        if self.rtol is not None:
            torch.testing.assert_close(out, ref, rtol=self.rtol, atol=self.atol, msg=lambda words: f"{name}: {words}")


def bars(out: Bar, tokens: Bar, weights: Bar | None = None) -> tuple[Bar, ...]:
    """By FIELDS: the output, the gradients of x and scores, those of the weights."""
    return (out, tokens, tokens, weights or tokens, weights or tokens)


BF16_ONE = bars(Bar(2e-2, 2e-2, 5e-3, 0.999), Bar(3e-2, 3e-2, 1e-2, 0.995))
EVEN = bars(Bar(2e-2, 2e-2, 5e-3), Bar(2e-2, 2e-2))
LOOSE = bars(Bar(2e-2, 2e-2), Bar(3e-2, 3e-2))
BF16_TWO = bars(Bar(2e-2, 2e-2, 5e-3, 0.999), Bar(3e-2, 3e-2, 1e-2, 0.995), Bar(3e-2, 1.0, 1.5e-2, 0.995))
MXFP8_WHOLE = bars(*[Bar(error=0.075, cosine=0.9975)] * 2)
MXFP8_TWO = bars(*(Bar(0.05, atol, 0.075, 0.9975) for atol in (0.002, 0.04, 0.025)))
NVFP4_TWO = Bar(0.05, 0.007, 0.29, 0.955)


def assert_within(bars, found, expected) -> None:
    """Both by FIELDS."""
    for bar, name, out, ref in zip(bars, FIELDS, found, expected, strict=True):
        bar.check(name, out, ref)


def values(results) -> list[torch.Tensor]:
    """By FIELDS, of all ranks."""
    return [torch.cat([getattr(rank, name) for rank in results]) for name in FIELDS]


# One rank

ONE = Case("one rank", W=1, T=8, D=256, F=256, K=2, E=4, seed=43)


def one(case: Case = ONE, shift: int = 0) -> RankInputs:
    """Slots go to experts in turn; every expert gets the same number of rows."""
    (rank,) = case.inputs()
    ids = (torch.arange(case.T * case.K).view(case.T, case.K) + shift) % case.E
    return replace(rank, ids_TK=ids, grad_out_TD=rank.grad_out_TD * SCALE)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


class Layer:
    """The leaves of one rank's call: x, scores, W13 and W2 as experts, with a gate axis or flattened."""

    def __init__(self, rank: RankInputs, device, form: str = "experts", dtype: torch.dtype = FP32):
        self.rank, self.dtype = on_device(rank, device), dtype
        x, scores, w13, w2 = (getattr(self.rank, name).clone() for name in NAMES)
        if form == "gate axis":
            w13 = w13.unflatten(1, (2, -1))
        elif form == "flattened":
            w13, w2 = w13.flatten(0, 1), w2.flatten(0, 1)
        self.leaves = [leaf.requires_grad_() for leaf in (x, scores, w13, w2)]
        for weight in self.leaves[2:]:
            weight.grad_dtype = dtype

    def prepare(self, block_scaled) -> list[PreparedWeight]:
        return [prepare_block_scaled_weight(weight, block_scaled) for weight in self.leaves[2:]]

    def forward(self, context, options=None, weights=None, x=None) -> torch.Tensor:
        own_x, scores, *own = self.leaves
        return routed_experts(
            own_x if x is None else x, self.rank.ids_TK, scores, *(weights or own), context, options=options
        )

    def step(self, context, options=None, weights=None) -> list[torch.Tensor]:
        """By FIELDS; the slots are empty afterwards."""
        out_TD = self.forward(context, options, weights)
        out_TD.backward(self.rank.grad_out_TD)
        context.check()
        assert not context.ranks[0].slot_used_NW.any() and not context.ranks[0].slot_layers_N.any()
        return [out_TD.detach().cpu(), *self.grads()]

    def grads(self) -> list[torch.Tensor | None]:
        """What the leaves have, on the CPU, in the shapes of experts."""
        for leaf in self.leaves[2:]:
            assert leaf.grad is None or leaf.grad.shape == leaf.shape and leaf.grad.dtype is self.dtype
        shapes = [getattr(self.rank, name).shape for name in NAMES]
        grads = [None if leaf.grad is None else leaf.grad.detach().cpu() for leaf in self.leaves]
        return [grad if grad is None else grad.view(shape).clone() for grad, shape in zip(grads, shapes, strict=True)]


def context_of(case: Case, backend: str, **changes):
    config = case.config(**changes)
    return create_context(group=None, config=config, device=device_of(backend), backend=backend)


def step(case: Case, rank: RankInputs, backend: str, options=None, form: str = "experts", **changes):
    """By FIELDS."""
    with context_of(case, backend, **changes) as context:
        return Layer(rank, device_of(backend), form).step(context, options)


def test_weights_with_a_gate_axis(backend):
    case, slot = replace(ONE, seed=29), {"activation_slot_bytes": 64 * 2**20, "activation_slot_capacity_factor": None}
    found = step(case, one(case), backend, form="gate axis", **slot)
    assert_within(BF16_ONE, found, values(dense(case, [one(case)])))


SIX = replace(ONE, K=6, E=8)
CLAMPED = replace(ONE, activation="swiglu_clamped", limit=5.0)  # with alpha 1.5


@pytest.mark.parametrize(
    "case, bars", [(ONE, BF16_ONE), (SIX, EVEN), (CLAMPED, LOOSE)], ids=["plain", "six", "clamped"]
)
def test_one_layer(case, bars, backend):
    assert case.config().swiglu_alpha == 1.5
    assert_within(bars, step(case, one(case), backend), values(dense(case, [one(case)])))


def test_two_layers_in_one_slot(backend):
    """The first one's output is the second one's input; both keep everything."""
    first, second = one(), one(replace(ONE, seed=44), shift=1)
    config = ONE.config(max_moe_layers_per_activation_slot=2)
    slot = {"activation_slot_capacity_factor": None, "max_moe_layers_per_activation_slot": 2}
    slot["activation_slot_bytes"] = plan_memory(config, 1).maximum_useful_activation_slot_bytes
    layers = [Layer(rank, device_of(backend)) for rank in (first, second)]
    with context_of(ONE, backend, **slot) as context:
        middle = layers[0].forward(context)
        middle.retain_grad()
        out = layers[1].forward(context, x=middle)
        out.backward(layers[1].rank.grad_out_TD)
        context.check()
        assert not context.ranks[0].slot_used_NW.any() and context.memory_stats().layers_kept[KEPT_NAMES[-1]] == 2
    ref_middle = values(dense(ONE, [first]))[0]
    expected_second = values(dense(ONE, [replace(second, x_TD=ref_middle)]))
    expected_first = values(dense(ONE, [replace(first, grad_out_TD=expected_second[1])]))
    found = [out, middle.grad, *layers[1].grads()[1:]]
    assert_within(EVEN, found, expected_second)
    assert_within(EVEN, [middle, *layers[0].grads()], expected_first)


def test_a_layer_in_the_second_slot(backend):
    layer = Layer(one(), device_of(backend))
    with context_of(ONE, backend, num_activation_slots=2) as context:
        context.select_activation_slot(1, 1)
        out = layer.forward(context)
        used = context.ranks[0].slot_used_NW.clone()
        assert used[1].any() and not used[0].any()
        out.backward(layer.rank.grad_out_TD)
        context.check()
        assert not context.ranks[0].slot_used_NW.any()
    assert_within(LOOSE, [out, *layer.grads()], values(dense(ONE, [one()])))


def test_rows_of_score_zero_are_zeros_and_the_others_a_call_of_fewer_tokens(backend):
    rank = one()
    rank.scores_TK[4:] = 0.0
    fewer = replace(rank, **{name: getattr(rank, name)[:4] for name in ("x_TD", "ids_TK", "scores_TK", "grad_out_TD")})
    out, *_ = step(ONE, rank, backend)
    Bar(2e-2, 2e-2).check("out_TD", out[:4], values(dense(ONE, [fewer]))[0])
    assert not out[4:].any()


NORM = RMSNormPostprocess(1e-6, FP32, BF16, require_bitwise=False, recompute_rstd=True)


def unit_rms(rows_ND: torch.Tensor) -> torch.Tensor:
    return rows_ND * torch.rsqrt(rows_ND.square().mean(dim=1, keepdim=True) + NORM.eps)


def test_rmsnorm_behind_the_experts(backend):
    found = step(ONE, one(), backend, ExecutionOptions(experts_output_postprocess=NORM), route_outputs=True)
    assert_within(LOOSE, found, values(dense_with(unit_rms, ONE, [one()])))


def test_a_callable_with_a_learned_scale(backend):
    scale = torch.linspace(0.5, 1.5, ONE.D, device=device_of(backend)).requires_grad_()
    wanted = torch.linspace(0.5, 1.5, ONE.D).requires_grad_()
    options = ExecutionOptions(experts_output_postprocess=lambda rows: rows.float() * scale)
    found = step(ONE, one(), backend, options, route_outputs=True)
    assert_within(LOOSE, found, values(dense_with(lambda rows: rows * wanted, ONE, [one()])))
    Bar(3e-2, 3e-2).check("scale", scale.grad, wanted.grad)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of sigmoid(-256)
def test_clip_counts_at_limit_zero(backend):
    """x of ones and minus ones, gate weights 1, up weights -1: gates clip in half of the rows, ups in all."""
    rank = one()
    rank.x_TD[::2], rank.x_TD[1::2] = 1.0, -1.0
    rank.w13_L2FD[:, : ONE.F], rank.w13_L2FD[:, ONE.F :] = 1.0, -1.0
    stats = torch.full((3,), -1.0, device=device_of(backend))
    options = ExecutionOptions(swiglu_clip_stats_out_3=stats, swiglu_clip_limit=0.0)
    plain, counted = step(ONE, rank, backend), step(ONE, rank, backend, options)
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))
    n = ONE.T * ONE.K * ONE.F
    assert stats.tolist() == [n / 2, n, n]


@pytest.mark.parametrize("block_scaled", [MXFP8, MEGA], ids=lambda how: how.pipeline)
def test_mxfp8_inference_of_dynamic_and_of_prepared_weights(block_scaled):
    rank = one()
    weights = (rank.w13_L2FD, rank.w2_LDF)
    ready = [prepare_block_scaled_weight(weight, block_scaled, inference=True) for weight in weights]
    with context_of(ONE, "reference", block_scaled=block_scaled, **FORWARD_ONLY) as context, torch.no_grad():
        dynamic, prepared = (
            routed_experts(rank.x_TD, rank.ids_TK, rank.scores_TK, *given, context) for given in (weights, ready)
        )
        context.check()
    assert torch.equal(dynamic, prepared)
    Bar(error=0.075, cosine=0.9975).check("out_TD", prepared, values(dense(ONE, [rank]))[0])


def test_fewer_tokens_with_prepared_weights_have_the_bits_they_have_among_more():
    with context_of(ONE, "reference", block_scaled=MXFP8, **FORWARD_ONLY) as context, torch.no_grad():
        rank = one()
        weights = [prepare_block_scaled_weight(w, MXFP8, inference=True) for w in (rank.w13_L2FD, rank.w2_LDF)]
        tokens = (rank.x_TD, rank.ids_TK, rank.scores_TK)
        whole, part = (routed_experts(*(t[:n] for t in tokens), *weights, context) for n in (ONE.T, ONE.T // 2))
        context.check()
    assert part.any() and torch.equal(part, whole[: ONE.T // 2])


# Two ranks, as processes: every token has an expert on each

PAIR = Case("two ranks", W=2, T=128, D=1024, F=1024, K=2, E=4, slot_factor=None)
PLACES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.ranks(2))])


@cache
def pair(scaled: bool = False) -> list[RankInputs]:
    """scaled: x of a block-scaled call, a tenth of unit scale."""
    inputs = []
    for number, rank in enumerate(PAIR.inputs()):
        first = (torch.arange(PAIR.T) + number * PAIR.T) % PAIR.E
        ids = torch.stack([first, (first + 2) % PAIR.E], dim=1)
        scale_x, scale_grad = (0.1, 1.0) if scaled else (1.0, SCALE)
        x_TD, grad_TD = (rank.x_TD * scale_x).bfloat16(), (rank.grad_out_TD * scale_grad).bfloat16()
        inputs.append(replace(rank, x_TD=x_TD, ids_TK=ids, grad_out_TD=grad_TD))
    return inputs


def on_pair(device: str, fn, *args) -> list:
    """By rank what fn(rank, group, device, *args) returned; on the CPU, of the reference."""
    return ranks(2, device=device).run(fn, device, *args, timeout_s=200)


def both(found: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def join(group, device: str, **changes):
    return create_context(group=group, config=PAIR.config(**changes), device=device, peer_timeout_s=60)


@cache
def wanted(scaled: bool = False, clamped: bool = False) -> list[torch.Tensor]:
    case = replace(PAIR, activation="swiglu_clamped", limit=5.0) if clamped else PAIR
    return values(dense(case, pair(scaled)))


@cache
def wanted_behind_norm(scaled: bool = False) -> list[torch.Tensor]:
    return values(dense_with(unit_rms, PAIR, pair(scaled)))


def _train(rank, group, device, form, ready, changes):
    """Two steps on one context, which agree to the bit."""
    block_scaled, found = changes.get("block_scaled"), []
    with join(group, device, **changes) as context:
        for _ in range(2):
            layer = Layer(pair(block_scaled is not None)[rank], device, form)
            found.append(layer.step(context, weights=layer.prepare(block_scaled) if ready else None))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return found[0]


CLAMPING = {"activation": "swiglu_clamped", "swiglu_limit": 5.0}  # and alpha 1.5
TRAINED = {  # form, prepared weights, changes of the Config
    "bf16": ("experts", False, {}, BF16_TWO),
    "bf16 flattened": ("flattened", False, {}, BF16_TWO),
    "mxfp8": ("experts", False, {"block_scaled": MXFP8}, MXFP8_TWO),
    "mxfp8 mega": ("experts", False, {"block_scaled": MEGA}, MXFP8_TWO),
    "mxfp8 prepared": ("experts", True, {"block_scaled": MXFP8}, MXFP8_TWO),
    "mxfp8 clamped": ("experts", False, {"block_scaled": MXFP8, **CLAMPING}, MXFP8_WHOLE),
    "mxfp8 clamped mega": ("experts", False, {"block_scaled": MEGA, **CLAMPING}, MXFP8_WHOLE),
}


@PLACES
@pytest.mark.parametrize("what", TRAINED)
def test_training_twice_on_two_ranks(what, device):
    *how, changes, bars = TRAINED[what]
    found = both(on_pair(device, _train, *how, changes))
    assert_within(bars, found, wanted("block_scaled" in changes, "activation" in changes))


def _serve(rank, group, device, block_scaled):
    own = on_device(pair(True)[rank], device)
    ready = [prepare_block_scaled_weight(w, block_scaled, inference=True) for w in (own.w13_L2FD, own.w2_LDF)]
    with join(group, device, block_scaled=block_scaled, **FORWARD_ONLY) as context, torch.no_grad():
        out_TD = routed_experts(own.x_TD, own.ids_TK, own.scores_TK, *ready, context)
        context.check()
        return [out_TD.cpu()]


@PLACES
def test_serving_in_nvfp4_on_two_ranks(device):
    NVFP4_TWO.check("out_TD", both(on_pair(device, _serve, NVFP4))[0], wanted(True)[0])


def _accumulate(rank, group, device, form, block_scaled, dtype):
    """Results of two equal steps in place; what must hold of hooks and addresses does."""
    layer = Layer(pair(block_scaled is not None)[rank], device, form, dtype)
    options, hooks, weights = ExecutionOptions(inplace_wgrad_accum=True), [], layer.leaves[2:]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(hooks.append)
    with join(group, device, block_scaled=block_scaled, wgrad_dtype=None) as context:
        found, pointers = [], []
        for num_steps in (1, 2):
            for leaf in layer.leaves[:2]:
                leaf.grad = None
            found.append(layer.step(context, options, block_scaled and layer.prepare(block_scaled)))
            pointers.append([weight.grad.data_ptr() for weight in weights])
            assert len(hooks) == 2 * num_steps
    assert pointers[0] == pointers[1] and not any(hasattr(weight, "main_grad") for weight in weights)
    assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3], strict=True))
    return found


ACCUMULATED = {  # form, format of the prepared weights
    "bf16": ("flattened", None, BF16_TWO),
    "mxfp8": ("experts", MXFP8, MXFP8_TWO),
    "mxfp8 mega": ("experts", MEGA, MXFP8_TWO),
}


@PLACES
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("what", ACCUMULATED)
def test_accumulating_in_place_on_two_ranks(what, dtype, device):
    form, block_scaled, bars = ACCUMULATED[what]
    found = on_pair(device, _accumulate, form, block_scaled, dtype)
    first, second = (both([rank[step] for rank in found]) for step in (0, 1))
    assert_within(bars, first, wanted(block_scaled is not None))
    for once, twice in zip(first[3:], second[3:], strict=True):
        torch.testing.assert_close(twice.float(), 2 * once.float(), rtol=5e-2, atol=2e-2)


def _destinations(rank, group, device, block_scaled, dtype):
    """The FP32 gradients by autograd, and what a callback's tensors hold, written over and then added to."""
    inputs = pair(block_scaled is not None)[rank]
    with join(group, device, block_scaled=block_scaled) as context:
        grads = Layer(inputs, device).step(context)[3:]
        tensors = [torch.full_like(grad, 7.0, dtype=dtype, device=device) for grad in grads]
        held = dict(zip(("w13", "w2"), tensors, strict=True))
        found = []
        for accumulate in (False, True):
            options = ExecutionOptions(wgrad_destination_fn=lambda name, *_, adds=accumulate: (held[name], adds))
            assert Layer(inputs, device).step(context, options)[3:] == [None, None]
            found.append([tensor.cpu().clone() for tensor in held.values()])
    return grads, found


@PLACES
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("block_scaled", [None, MXFP8], ids=["bf16", "mxfp8"])
def test_destinations_of_the_caller_on_two_ranks(block_scaled, dtype, device):
    for grads, (over, added) in on_pair(device, _destinations, block_scaled, dtype):
        for grad, once, twice in zip(grads, over, added, strict=True):
            assert grad.any() and torch.equal(once, grad.to(dtype))
            assert torch.equal(twice, (once.float() + grad).to(dtype))


def _callbacks(rank, group, device):
    """A step as it is, and one whose weights a callback gives, whose rows are halved, and whose gradients are seen."""
    seen, given = [], []
    options = ExecutionOptions(
        weights_preprocess_fn=lambda weight: given.append(weight.shape) or weight.clone(),
        experts_output_postprocess=lambda rows: rows * 0.5,
        wgrad_postprocess_fn=lambda name, grad: seen.append(name) or grad,
    )
    with join(group, device, route_outputs=True) as context:
        plain, halved = (Layer(pair()[rank], device).step(context, asked) for asked in (None, options))
    assert sorted(seen) == ["w13", "w2"] and len(given) == 4
    return plain, halved


@PLACES
def test_callbacks_on_two_ranks(device):
    found = on_pair(device, _callbacks)
    plain, halved = (both([rank[which] for rank in found]) for which in (0, 1))
    assert torch.equal(halved[0], plain[0] * 0.5)
    assert_within(BF16_TWO, halved, [tensor * 0.5 for tensor in wanted()])


def _norm(rank, group, device, block_scaled, in_place):
    options = ExecutionOptions(experts_output_postprocess=NORM, inplace_wgrad_accum=in_place)
    with join(group, device, block_scaled=block_scaled, wgrad_dtype=None, route_outputs=True) as context:
        return Layer(pair(block_scaled is not None)[rank], device, dtype=BF16).step(context, options)


@PLACES
@pytest.mark.parametrize(
    "block_scaled, in_place, bars",
    [(None, False, BF16_TWO), (None, True, BF16_TWO), (MXFP8, False, MXFP8_WHOLE), (MEGA, False, MXFP8_WHOLE)],
    ids=["bf16", "bf16-in-place", "mxfp8", "mxfp8-mega"],
)
def test_rmsnorm_on_two_ranks(block_scaled, in_place, bars, device):
    found = both(on_pair(device, _norm, block_scaled, in_place))
    assert_within(bars, found, wanted_behind_norm(block_scaled is not None))


def _clip_stats(rank, group, device):
    stats = torch.full((3,), -1.0, device=device)
    with join(group, device) as context:
        Layer(pair()[rank], device).step(context, ExecutionOptions(swiglu_clip_stats_out_3=stats))
    return stats.tolist()


@PLACES
def test_every_element_is_counted_on_two_ranks(device):
    for _, _, elements in on_pair(device, _clip_stats):
        assert elements == PAIR.T * PAIR.K * PAIR.F
