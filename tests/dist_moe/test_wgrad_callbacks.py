"""Weight gradients into tensors of a callback's, through a callback, and of weights that a callback makes."""

import gc
import weakref

import pytest
import torch
from tests.path_cases import expand_columns
from tests.transformer_block import inferred
from tests.wgrad_layer import (
    BF16,
    FP32,
    NAMES,
    PRECISIONS,
    SHAPES,
    D,
    E,
    F,
    Layer,
    assert_equal,
    context_of,
    functional,
    randn,
    rounded_sum,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dist_moe import BlockScaledConfig, ExecutionOptions, moe, prepare_block_scaled_weight


@pytest.fixture(params=PRECISIONS.values(), ids=PRECISIONS)
def context(request, monkeypatch):
    block_scaled, expanded = request.param
    expand_columns(monkeypatch, expanded)
    with context_of(block_scaled=block_scaled) as context:
        yield context


@pytest.fixture
def fast():
    with context_of() as context:
        yield context


class Buffers:
    """One flat buffer for both gradients, as trainers keep it, and the callback that hands out its parts."""

    def __init__(self, dtype=FP32, accumulate=(True, True), fill=None):
        self.flat = randn(sum(torch.Size(shape).numel() for shape in SHAPES.values()), seed=5).to(dtype)
        if fill is not None:
            self.flat.fill_(fill)
        sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
        parts = zip(self.flat.split(sizes), SHAPES.values(), strict=True)
        self.parts = dict(zip(NAMES, (part.view(shape) for part, shape in parts), strict=True))
        self.before = [part.clone() for part in self.parts.values()]
        self.accumulate, self.asked = dict(zip(NAMES, accumulate, strict=True)), []
        self.options = ExecutionOptions(wgrad_destination_fn=self)

    def __call__(self, name, shape, dtype, device):
        self.asked.append((name, tuple(shape), dtype, device.type))
        return self.parts[name].view(shape), self.accumulate[name]

    def wanted(self, context):
        """What they must hold after one backward."""
        grads, sums = functional(context), rounded_sum(self.before, functional(context))
        return [
            both if adds else grad.to(both.dtype)
            for grad, both, adds in zip(grads, sums, self.accumulate.values(), strict=True)
        ]


# wgrad_destination_fn


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("accumulate", [(True, True), (False, False), (True, False)])
def test_a_destination_is_overwritten_or_added_to_and_autograd_gets_nothing(dtype, accumulate, context):
    layer, buffers = Layer(), Buffers(dtype, accumulate)
    assert layer.step(context, buffers.options) == (None, None)
    assert_equal(buffers.parts.values(), buffers.wanted(context))
    assert buffers.asked == [(name, SHAPES[name], BF16, "cpu") for name in NAMES]
    plain = Layer()
    plain.step(context)
    assert torch.equal(layer.x.grad, plain.x.grad) and torch.equal(layer.scores.grad, plain.scores.grad)


def test_a_destination_is_asked_for_in_the_dtype_of_the_config_and_the_shape_of_the_weight():
    flattened = {"w13": (E * 2 * F, D), "w2": (E * D, F)}
    with context_of(FP32) as context:
        layer, buffers = Layer(shapes=flattened), Buffers()
        layer.step(context, buffers.options)
        assert buffers.asked == [(name, flattened[name], FP32, "cpu") for name in NAMES]
        assert_equal(buffers.parts.values(), buffers.wanted(context))


def test_experts_without_rows_are_overwritten_with_zeros_and_keep_their_sums(context):
    """Whatever was there: an old NaN neither survives an overwrite nor spreads."""
    layer, buffers = Layer(), Buffers(accumulate=(False, False), fill=float("nan"))
    layer.step(context, buffers.options)
    assert all(not part[E - 1].any() and part.isfinite().all() for part in buffers.parts.values())
    layer, buffers = Layer(), Buffers(accumulate=(True, True))
    layer.step(context, buffers.options)
    for part, before in zip(buffers.parts.values(), buffers.before, strict=True):
        assert torch.equal(part[E - 1], before[E - 1]) and before[E - 1].any()


def test_a_frozen_weight_is_not_asked_for(context):
    layer, buffers = Layer(), Buffers()
    layer.w13.requires_grad_(False)
    layer.step(context, buffers.options)
    assert [asked[0] for asked in buffers.asked] == ["w2"]
    assert_equal(buffers.parts.values(), [buffers.before[0], buffers.wanted(context)[1]])


@pytest.mark.parametrize(
    "answer, error, words",
    [
        (lambda part: part, TypeError, r"for w2 must return \(Tensor, bool\), got Tensor"),
        (lambda part: [part, True], TypeError, r"must return \(Tensor, bool\), got list"),
        (lambda part: (part, 1), TypeError, r"must return \(Tensor, bool\), got \['Tensor', 'int'\]"),
        (lambda part: (None, True), TypeError, r"must return \(Tensor, bool\), got \['NoneType', 'bool'\]"),
        (lambda part: (part.half(), True), TypeError, "bfloat16 or float32, got float16"),
        (lambda part: (part[1:], True), RuntimeError, r"requested shape \[4, 64, 32\] on cpu, got \[3, 64, 32\]"),
        (lambda part: (part.mT.contiguous().mT, True), RuntimeError, "contiguous tensor of the requested shape"),
        (lambda part: (part.to("meta"), True), RuntimeError, "on cpu, got .* on meta"),
        (lambda part: (inferred(part), True), RuntimeError, "can be written: this one was made under inference_mode"),
        (lambda part: 1 / 0, ZeroDivisionError, "division"),
        (
            lambda part: (torch.zeros(part.numel() + 1)[1:].view(part.shape), True),
            ValueError,
            "what takes the gradient of w2 must start at a multiple of 16 bytes",
        ),
    ],
)
def test_a_bad_destination_is_refused_before_anything_is_written(answer, error, words, fast, monkeypatch):
    layer, buffers, runs = Layer(), Buffers(), []
    monkeypatch.setattr(moe, "backward", lambda *args: runs.append(args))
    fn = lambda name, *asked: buffers(name, *asked) if name == "w13" else answer(buffers.parts[name])  # noqa: E731
    with pytest.raises(error, match=words):
        layer.step(fast, ExecutionOptions(wgrad_destination_fn=fn))
    assert_equal(buffers.parts.values(), buffers.before)
    assert not runs and layer.x.grad is None


@pytest.mark.parametrize("visits", [("x", "w13 w2"), ("x scores", "w13", "w2"), ("w13", "x w2")])
@pytest.mark.parametrize("accumulate", [(True, True), (False, False)])
def test_a_split_backward_writes_once_in_the_visit_of_the_weights(visits, accumulate, context):
    layer, buffers = Layer(), Buffers(BF16, accumulate)
    out_TD = layer.forward(context, buffers.options)
    now = dict(zip(NAMES, buffers.before, strict=True))
    wanted = dict(zip(NAMES, buffers.wanted(context), strict=True))
    for names in visits:
        inputs = [getattr(layer, name) for name in names.split()]
        out_TD.backward(layer.grad_TD, inputs=inputs, retain_graph=True)
        now |= {name: wanted[name] for name in names.split() if name in NAMES}
        assert_equal(buffers.parts.values(), now.values())
    assert sorted(asked[0] for asked in buffers.asked) == ["w13", "w2"] and layer.grads() == (None, None)


def test_a_destination_made_under_inference_mode_is_refused_before_either_visit_writes(fast):
    layer, buffers = Layer(), Buffers(BF16)
    buffers.parts["w2"] = inferred(buffers.parts["w2"])
    out_TD = layer.forward(fast, buffers.options)
    out_TD.backward(layer.grad_TD, inputs=[layer.x], retain_graph=True)
    with pytest.raises(RuntimeError, match="wgrad_destination_fn for w2 must return a tensor that can be written"):
        out_TD.backward(layer.grad_TD, inputs=[layer.w13, layer.w2])
    assert_equal(buffers.parts.values(), buffers.before)


def test_a_checkpoint_writes_once(context):
    layer, buffers = Layer(), Buffers(BF16)
    out_TD = checkpoint(lambda: layer.forward(context, buffers.options), use_reentrant=False)
    out_TD.backward(layer.grad_TD)
    assert_equal(buffers.parts.values(), buffers.wanted(context))


def test_after_a_fault_what_is_overwritten_is_nan_and_sums_are_untouched(context):
    """Found by the device, before the host knows of it, as on a GPU."""
    layer, buffers = Layer(), Buffers(accumulate=(True, False))
    out_TD = layer.forward(context, buffers.options)
    rank = context.ranks[0]
    rank.fault_F[0] = rank.stop_1[0] = 1
    out_TD.backward(layer.grad_TD)
    assert torch.equal(buffers.parts["w13"], buffers.before[0]) and buffers.parts["w2"].isnan().all()
    for word in (rank.fault_F, rank.stop_1, rank.host_fault_F):
        word.zero_()


def test_a_fault_between_the_visits_of_a_split_backward_adds_nothing(context):
    layer, buffers = Layer(), Buffers()
    out_TD = layer.forward(context, buffers.options)
    rank = context.ranks[0]
    rank.fault_F[0] = rank.stop_1[0] = 1
    out_TD.backward(layer.grad_TD, inputs=[layer.x], retain_graph=True)
    rank.host_fault_F.zero_()  # not arrived yet
    out_TD.backward(layer.grad_TD, inputs=[layer.w13, layer.w2])
    assert_equal(buffers.parts.values(), buffers.before)
    for word in (rank.fault_F, rank.stop_1, rank.host_fault_F):
        word.zero_()


def test_gradients_that_are_asked_for_are_returned_and_not_written(context):
    layer, buffers = Layer(), Buffers()
    grads = torch.autograd.grad(layer.forward(context, buffers.options), [layer.w13, layer.w2], layer.grad_TD)
    assert_equal(grads, functional(context, BF16))
    assert_equal(buffers.parts.values(), buffers.before)
    assert not buffers.asked


# wgrad_postprocess_fn


def test_gradients_go_through_the_callback_in_the_order_in_which_they_are_made(context):
    layer, seen = Layer(), []

    def halve_w2_take_w13(name, grad):
        seen.append((name, grad.clone()))
        return grad * 0.5 if name == "w2" else None

    grads = layer.step(context, ExecutionOptions(wgrad_postprocess_fn=halve_w2_take_w13))
    wanted = functional(context, BF16)
    assert [name for name, _ in seen] == ["w2", "w13"]
    assert_equal([grad for _, grad in seen], wanted[::-1])
    assert grads[0] is None and torch.equal(grads[1], wanted[1] * 0.5)


def test_a_split_backward_calls_back_in_the_visit_of_the_weight(context):
    layer, seen = Layer(), []
    options = ExecutionOptions(wgrad_postprocess_fn=lambda name, grad: [seen.append(name), -grad][1])
    out_TD = layer.forward(context, options)
    for names, wanted in ((["x"], []), (["w13"], ["w13"]), (["w2"], ["w13", "w2"])):
        out_TD.backward(layer.grad_TD, inputs=[getattr(layer, name) for name in names], retain_graph=True)
        assert seen == wanted
    assert_equal(layer.grads(), [-grad for grad in functional(context, BF16)])


@pytest.mark.parametrize(
    "answer, error, words",
    [
        (lambda grad: 3, TypeError, "must return a tensor or None for w2, got int"),
        (lambda grad: grad[0], ValueError, r"must keep the shape \[4, 64, 32\] of w2, got \[64, 32\]"),
    ],
)
def test_what_the_callback_returns_must_be_a_gradient(answer, error, words, fast):
    layer = Layer()
    with pytest.raises(error, match=words):
        layer.step(fast, ExecutionOptions(wgrad_postprocess_fn=lambda name, grad: answer(grad)))
    assert layer.grads() == (None, None)


# weights_preprocess_fn


class Halves:
    """Makes bf16 weights of compact ones, which hold them halved in FP32 and flattened. Forgets what it makes."""

    def __init__(self):
        self.made, self.alive = [], []
        self.shape_of = {torch.Size(shape).numel(): shape for shape in SHAPES.values()}

    def __call__(self, compact):
        assert not torch.is_grad_enabled() or not compact.requires_grad
        weight = (compact * 2).bfloat16().view(self.shape_of[compact.numel()])
        self.made.append("w13" if weight.shape == SHAPES["w13"] else "w2")
        self.alive.append(weakref.ref(weight.untyped_storage()))
        return weight

    @staticmethod
    def compact(layer):
        weights = {f"{name}_weight": getattr(layer, name).detach().float().flatten() / 2 for name in NAMES}
        return {name: weight.requires_grad_() for name, weight in weights.items()}


def test_made_weights_are_made_again_in_backward_and_only_compact_ones_are_kept(context):
    layer, plain, halves = Layer(), Layer(), Halves()
    plain.step(context)
    compact = halves.compact(layer)
    out_TD = layer.forward(context, ExecutionOptions(weights_preprocess_fn=halves), **compact)
    gc.collect()
    assert halves.made == ["w13", "w2"] and not any(ref() for ref in halves.alive)
    kept = {t.dtype for t in out_TD.grad_fn.saved_tensors if t is not None and t.numel()}
    assert kept <= {FP32, torch.int32, torch.int64}  # neither bf16 weights nor quantised ones
    out_TD.backward(layer.grad_TD)
    assert halves.made == ["w13", "w2"] * 2
    assert torch.equal(layer.x.grad, plain.x.grad) and layer.x.grad.any()
    wanted = [grad.float().flatten() for grad in functional(context, BF16)]  # autograd's cast to the weight's dtype
    assert_equal([weight.grad for weight in compact.values()], wanted)


def test_flattened_weights_that_are_cloned_get_flattened_gradients(context):
    flattened = {"w13": (E * 2 * F, D), "w2": (E * D, F)}
    layer = Layer(shapes=flattened)
    grads = layer.step(context, ExecutionOptions(weights_preprocess_fn=torch.clone))
    wanted = zip(functional(context, BF16), flattened.values(), strict=True)
    assert_equal(grads, [grad.view(shape) for grad, shape in wanted])


def test_made_weights_accumulate_in_place_into_the_compact_ones(context):
    layer, halves = Layer(), Halves()
    compact = halves.compact(layer)
    for weight in compact.values():
        weight.grad = randn(*weight.shape, seed=4)
    before = [weight.grad.clone() for weight in compact.values()]
    layer.step(context, ExecutionOptions(weights_preprocess_fn=halves, inplace_wgrad_accum=True), **compact)
    wanted = rounded_sum(before, [grad.flatten() for grad in functional(context)])
    assert_equal([weight.grad for weight in compact.values()], wanted)


def test_made_weights_with_a_destination_and_a_checkpoint(context):
    layer, halves, buffers = Layer(), Halves(), Buffers(accumulate=(False, True))
    compact = halves.compact(layer)
    options = ExecutionOptions(weights_preprocess_fn=halves, wgrad_destination_fn=buffers)
    out_TD = checkpoint(lambda: layer.forward(context, options, **compact), use_reentrant=False)
    out_TD.backward(layer.grad_TD)
    assert_equal(buffers.parts.values(), buffers.wanted(context))
    assert halves.made == ["w13", "w2"] * 3 and all(weight.grad is None for weight in compact.values())


def test_evaluation_with_made_weights_gives_the_same_output(context):
    layer, halves = Layer(), Halves()
    with torch.no_grad():
        out_TD = layer.forward(context, ExecutionOptions(weights_preprocess_fn=halves), **halves.compact(layer))
        assert torch.equal(out_TD, layer.forward(context)) and halves.made == ["w13", "w2"]


@pytest.mark.parametrize(
    "answer, error, words",
    [
        (lambda w: None, TypeError, r"weights_preprocess_fn\(w13_weight\) must be a tensor, got NoneType"),
        (lambda w: w.float(), TypeError, r"weights_preprocess_fn\(w13_weight\) must be bfloat16, got float32"),
        (lambda w: w[:1], ValueError, r"shape \[1, 64, 64\], so its gradient has none for .* \[4, 64, 64\]"),
        (lambda w: w.flatten(), ValueError, "incompatible expert-weight layouts"),
        (lambda w: w.to("meta"), ValueError, "is on meta"),
        (lambda w: w.mT.contiguous().mT, ValueError, "must be contiguous"),
    ],
)
def test_made_weights_obey_the_rules_of_weights(answer, error, words, fast):
    layer = Layer()
    for grad in (True, False):
        if not grad and "gradient" in words:
            continue
        with torch.set_grad_enabled(grad), pytest.raises(error, match=words):
            layer.forward(fast, ExecutionOptions(weights_preprocess_fn=answer))
    assert layer.forward(fast).any()


def test_prepared_weights_are_not_made_of_others():
    with context_of(block_scaled=BlockScaledConfig()) as context:
        layer = Layer()
        ready = {f"{n}_weight": prepare_block_scaled_weight(getattr(layer, n), BlockScaledConfig()) for n in NAMES}
        with pytest.raises(ValueError, match="prepared weights have no use for it"):
            layer.forward(context, ExecutionOptions(weights_preprocess_fn=torch.clone), **ready)


@pytest.mark.parametrize(
    "options",
    [
        ExecutionOptions(weights_preprocess_fn=torch.clone),
        ExecutionOptions(wgrad_postprocess_fn=lambda name, grad: grad),
        ExecutionOptions(wgrad_destination_fn=lambda *asked: None),
    ],
)
def test_callbacks_in_a_trace_are_refused(options, fast):
    layer = Layer()
    with pytest.raises(RuntimeError, match="require eager execution"):
        make_fx(lambda x: layer.forward(fast, options))(layer.x.detach())
    assert layer.forward(fast, options).any()


def test_made_weights_that_share_memory_are_refused(context):
    """As of a function that fills one buffer for both."""
    layer, buffer = Layer(), torch.empty(SHAPES["w13"], dtype=BF16).flatten()
    made = ExecutionOptions(weights_preprocess_fn=lambda w: buffer[: w.numel()].view(w.shape).copy_(w))
    with pytest.raises(ValueError, match="share memory; each needs its own"):
        layer.forward(context, made)


@pytest.mark.parametrize("wrong", [lambda grad: grad.to(torch.int32), lambda grad: grad.to("meta")])
def test_a_callback_that_returns_no_gradient_is_told_so(wrong, context):
    layer = Layer()
    options = ExecutionOptions(wgrad_postprocess_fn=lambda name, grad: wrong(grad))
    with pytest.raises(ValueError, match="must return floating-point values on cpu for w2"):
        layer.step(context, options)
    context.reset()
