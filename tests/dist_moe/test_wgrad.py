"""Weight gradients that are added in place: which dtype, which owners, once, and nothing before all is checked."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from tests.path_cases import expand_columns
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dist_moe import (
    BlockScaledConfig,
    ExecutionOptions,
    prepare_block_scaled_weight,
    routed_experts,
)
from dist_moe.checks import same_order
from dist_moe.wgrad import wgrad_dtype

IN_PLACE = ExecutionOptions(inplace_wgrad_accum=True)


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


# The dtype


DTYPES = [
    # declared, Config, existing, parameter -> result
    (None, None, None, BF16, BF16),
    (None, None, None, FP32, FP32),
    (BF16, None, None, FP32, BF16),
    (FP32, None, None, BF16, FP32),
    (FP32, FP32, FP32, BF16, FP32),
    (None, FP32, None, BF16, FP32),
    (None, FP32, FP32, BF16, FP32),
    (None, None, FP32, BF16, FP32),
]


@pytest.mark.parametrize("declared, configured, existing, parameter, result", DTYPES)
def test_the_first_dtype_given_is_that_of_the_gradient(declared, configured, existing, parameter, result):
    assert wgrad_dtype("w13", declared, configured, existing, parameter) is result


@pytest.mark.parametrize(
    "dtypes, error, words",
    [
        ((BF16, FP32, None, BF16), RuntimeError, "grad_dtype is bfloat16, Config.wgrad_dtype float32; set owner.grad_"),
        ((BF16, FP32, FP32, BF16), RuntimeError, "Config.wgrad_dtype float32"),
        ((None, FP32, BF16, BF16), RuntimeError, "is to be float32, its owner's .grad is bfloat16"),
        ((FP32, None, BF16, BF16), RuntimeError, "is to be float32, its owner's .grad is bfloat16"),
        ((None, None, None, torch.float16), TypeError, "must be bfloat16 or float32, got float16"),
        ((torch.float64, None, None, BF16), TypeError, "got float64"),
    ],
)
def test_dtypes_that_contradict_are_refused(dtypes, error, words):
    with pytest.raises(error, match=words):
        wgrad_dtype("w13", *dtypes)


def test_a_default_grad_dtype_contradicts_another_one_of_the_config():
    layer = Layer()
    layer.w13.grad_dtype = layer.w2.grad_dtype = BF16  # as a new parameter has it
    with context_of(FP32) as context:
        with pytest.raises(RuntimeError, match="the gradient of w13 conflicts"):
            layer.step(context, IN_PLACE)
        assert layer.grads() == (None, None) and layer.x.grad is None


def test_two_weights_with_different_wgrad_dtypes_are_refused_and_their_grads_stay_none(context):
    layer = Layer()
    layer.w13.grad_dtype, layer.w2.grad_dtype = FP32, BF16
    with pytest.raises(RuntimeError, match="different WGRAD dtypes, float32 of w13, bfloat16 of w2"):
        layer.step(context, IN_PLACE)
    assert layer.grads() == (None, None)
    layer.w2.grad_dtype = FP32
    context.reset()
    assert_equal(layer.step(context, IN_PLACE), functional(context))


# In place


class _Accumulations(TorchDispatchMode):
    """Where the accumulating ops of a region wrote."""

    def __init__(self):
        super().__init__()
        self.pointers = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "backward_accumulate_" in str(op):
            self.pointers.append([args[6].data_ptr(), args[7].data_ptr()])
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("layout", [SHAPES, {"w13": (E * 2 * F, D), "w2": (E * D, F)}], ids=["3d", "flattened"])
def test_a_sum_in_place_is_rounded_once_at_a_stable_address_and_hooks_run_once(dtype, layout, context):
    layer = Layer(grad_dtype=dtype, shapes=layout)
    hooks = []
    for name in NAMES:
        getattr(layer, name).register_post_accumulate_grad_hook(lambda p: hooks.append(p is layer.w13))
    first = [g.clone() for g in layer.step(context, IN_PLACE)]
    assert_equal([g.view(s) for g, s in zip(first, SHAPES.values(), strict=True)], functional(context, dtype))
    assert sorted(hooks) == [False, True]
    pointers = [g.data_ptr() for g in layer.grads()]
    with _Accumulations() as calls:
        second = layer.step(context, IN_PLACE)
    assert sorted(hooks) == [False, False, True, True]
    assert calls.pointers == [pointers] and [g.data_ptr() for g in layer.grads()] == pointers
    grads = [g.view(p.shape) for g, p in zip(functional(context), first, strict=True)]
    assert_equal(second, rounded_sum(first, grads))
    assert not hasattr(layer.w13, "main_grad")


@pytest.mark.parametrize("present", [(), (0,), (1,), (0, 1)])
def test_only_where_both_owners_have_a_gradient_is_it_added_in_place(present, context):
    layer = Layer(grad_dtype=BF16)
    previous = layer.seed_grads(BF16)
    wanted = list(functional(context, BF16))
    for place, name in enumerate(NAMES):
        if place not in present:
            getattr(layer, name).grad = None
        elif len(present) == 1:  # autograd adds what was rounded
            wanted[place] = previous[place] + wanted[place]
        else:
            wanted[place] = rounded_sum(previous[place : place + 1], functional(context)[place : place + 1])[0]
    with _Accumulations() as calls:
        assert_equal(layer.step(context, IN_PLACE), wanted)
    assert len(calls.pointers) == (present == (0, 1))


@pytest.mark.parametrize("frozen", NAMES)
def test_a_frozen_weight_needs_no_owner(frozen, context):
    layer = Layer()
    previous = dict(zip(NAMES, layer.seed_grads(FP32), strict=True))
    getattr(layer, frozen).requires_grad_(False)
    grads = dict(zip(NAMES, layer.step(context, IN_PLACE), strict=True))
    (other,) = set(NAMES) - {frozen}
    assert torch.equal(grads[frozen], previous[frozen])
    wanted = functional(context)[NAMES.index(other)]
    assert torch.equal(grads[other], previous[other] + wanted)


def test_experts_without_rows_keep_what_the_owner_had(context):
    layer = Layer()
    previous = layer.seed_grads(BF16)
    for grad, before in zip(layer.step(context, IN_PLACE), previous, strict=True):
        assert torch.equal(grad[E - 1], before[E - 1]) and before[E - 1].any()
        assert not torch.equal(grad[0], before[0])


def _views(layer):
    """The owners, and views of them in another shape."""
    owners = [torch.nn.Parameter(getattr(layer, name).detach().flatten()) for name in NAMES]
    return owners, {f"{name}_weight": owner.view(SHAPES[name]) for name, owner in zip(NAMES, owners, strict=True)}


def _casts(layer):
    """FP32 owners, and the bf16 weights made of them."""
    owners = [torch.nn.Parameter(getattr(layer, name).detach().float()) for name in NAMES]
    return owners, {f"{name}_weight": owner.bfloat16() for name, owner in zip(NAMES, owners, strict=True)}


@pytest.mark.parametrize("form, explicit", [(_views, False), (_views, True), (_casts, True)])
def test_owners_behind_views_and_casts(form, explicit, context):
    layer = Layer()
    owners, weights = form(layer)
    dtype = owners[0].dtype
    hooks = []
    for owner in owners:
        owner.grad = randn(*owner.shape, seed=9).to(dtype)
        owner.register_post_accumulate_grad_hook(hooks.append)
    previous, pointers = [o.grad.clone() for o in owners], [o.grad.data_ptr() for o in owners]
    options = replace(IN_PLACE, wgrad_parameter_owners=tuple(owners)) if explicit else IN_PLACE
    layer.step(context, options, **weights)
    grads = [g.view(o.shape) for g, o in zip(functional(context), owners, strict=True)]
    assert_equal([o.grad for o in owners], rounded_sum(previous, grads))
    assert [o.grad.data_ptr() for o in owners] == pointers and len(hooks) == 2


def test_prepared_weights_accumulate_into_their_sources():
    with context_of(block_scaled=BlockScaledConfig()) as context:
        layer = Layer()
        previous = layer.seed_grads(FP32)
        ready = {f"{n}_weight": prepare_block_scaled_weight(getattr(layer, n), BlockScaledConfig()) for n in NAMES}
        assert_equal(layer.step(context, IN_PLACE, **ready), rounded_sum(previous, functional(context)))


def _product(layer):
    return {"w13_weight": layer.w13 * 1}


def _detached(layer):
    return {"w2_weight": layer.w2.detach()}


def _part_of_a_stack(layer):
    return {"w13_weight": torch.nn.Parameter(torch.stack([layer.w13.detach()] * 2))[1]}


REFUSED_OWNERS = [
    (_product, None, "w13 must be an autograd leaf, it is made by MulBackward0"),
    (None, lambda layer: (layer.w13 * 1, layer.w2), "w13 must be an autograd leaf"),
    (None, lambda layer: (layer.w13, layer.w2.detach()), r"w2 .* the owner has requires_grad=False .* needs gradients"),
    (_detached, lambda layer: (layer.w13, layer.w2), "w2 .* the weight has requires_grad=False"),
    (_part_of_a_stack, None, r"w13 must hold the whole weight .* the owner \[2, 4, 64, 64\]"),
    (None, lambda layer: (layer.w2, layer.w13), "w13 must hold the whole weight"),
]


@pytest.mark.parametrize("weights, owners, words", REFUSED_OWNERS)
def test_owners_that_cannot_take_the_gradient_are_refused_at_the_call(weights, owners, words, fast):
    layer = Layer()
    options = replace(IN_PLACE, wgrad_parameter_owners=owners and owners(layer))
    weights = weights(layer) if weights else {}
    with pytest.raises(ValueError, match=words):
        layer.forward(fast, options, **weights)
    with torch.no_grad():  # a call without a backward asks for no owner
        layer.forward(fast, options, **weights)


def test_an_existing_gradient_that_cannot_be_added_to_is_refused_and_nothing_is_written(fast):
    layer = Layer()
    w13_grad = layer.seed_grads(BF16)[0]
    layer.w2.grad = randn(E, F, D, seed=1).bfloat16().transpose(1, 2)
    with pytest.raises(RuntimeError, match=r"w2 must be contiguous \[4, 64, 32\]"):
        layer.step(fast, IN_PLACE)
    assert torch.equal(layer.w13.grad, w13_grad) and layer.x.grad is None


def test_a_gradient_at_an_odd_address_is_refused_and_nothing_is_written(context):
    layer = Layer()
    w13_grad = layer.seed_grads(BF16)[0]
    layer.w2.grad = torch.ones(layer.w2.numel() + 1, dtype=BF16)[1:].view(SHAPES["w2"])
    with pytest.raises(ValueError, match="takes the gradient of w2 must start at a multiple of 16 bytes"):
        layer.step(context, IN_PLACE)
    assert torch.equal(layer.w13.grad, w13_grad)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_made_under_inference_mode_is_refused_and_nothing_is_written(name, dtype, context):
    layer = Layer()
    before = layer.seed_grads(dtype)
    with torch.inference_mode():
        getattr(layer, name).grad = getattr(layer, name).grad.clone()
    with pytest.raises(RuntimeError, match=f"the .grad of the owner of {name} was made under inference_mode"):
        layer.step(context, IN_PLACE)
    assert_equal(layer.grads(), before)
    assert layer.x.grad is None
    context.reset()
    out_TD = layer.forward(context, IN_PLACE)
    with torch.inference_mode():  # where torch writes it
        out_TD.backward(layer.grad_TD)
    assert_equal(layer.grads(), rounded_sum(before, functional(context)))


def test_an_owner_outside_of_the_graph_is_not_kept_alive(fast):
    layer = Layer()
    owners = tuple(torch.nn.Parameter(getattr(layer, name).detach().clone()) for name in NAMES)
    refs = [weakref.ref(owner) for owner in owners]
    out_TD = layer.forward(fast, replace(IN_PLACE, wgrad_parameter_owners=owners))
    del owners
    gc.collect()
    assert not any(ref() for ref in refs)
    with pytest.raises(RuntimeError, match="the owner of the gradient of w13 was released before backward"):
        out_TD.backward(layer.grad_TD)


def test_a_fault_leaves_the_accumulators_untouched(context):
    """Found by the device, before the host knows of it, as on a GPU."""
    layer = Layer()
    previous = layer.seed_grads(BF16)
    out_TD = layer.forward(context, IN_PLACE)
    rank = context.ranks[0]
    rank.fault_F[0], rank.stop_1[0] = 1, 1
    out_TD.backward(layer.grad_TD)
    assert layer.x.grad.isnan().all()
    assert_equal(layer.grads(), previous)
    rank.fault_F.zero_(), rank.stop_1.zero_(), rank.host_fault_F.zero_()


# With what else torch does


def _selective():
    def policy(_, op, *args, **kwargs):
        keep = op in (torch.ops.dist_moe.bf16_forward.default, _scaled_forward())
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _scaled_forward():
    return getattr(torch.ops.dist_moe, "block_scaled_forward", None) and torch.ops.dist_moe.block_scaled_forward.default


@pytest.mark.parametrize("how", [{}, {"context_fn": _selective}], ids=["plain", "selective"])
def test_checkpoints_accumulate_the_same_bits_once(how, context):
    layer = Layer()
    previous = layer.seed_grads(BF16)
    out_TD = checkpoint(lambda: layer.forward(context, IN_PLACE) * 1, use_reentrant=False, **how)
    out_TD.backward(layer.grad_TD)
    assert_equal(layer.grads(), rounded_sum(previous, functional(context)))


def test_a_layer_recomputed_from_x_accumulates_the_same_bits(context):
    with context_of(block_scaled=context.config.block_scaled, activation_slot_capacity_factor=None) as small:
        layer = Layer()
        previous = layer.seed_grads(BF16)
        assert_equal(layer.step(small, IN_PLACE), rounded_sum(previous, functional(context)))


@pytest.mark.parametrize("visits", [("x", "w13 w2"), ("x scores", "w13", "w2"), ("w13", "x w2")])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_split_backward_adds_once_in_the_visit_of_the_weights(visits, dtype, context):
    layer = Layer()
    previous = layer.seed_grads(dtype)
    pointers = [g.data_ptr() for g in layer.grads()]
    out_TD = layer.forward(context, IN_PLACE)
    wanted = dict(zip(NAMES, rounded_sum(previous, functional(context)), strict=True))
    now = dict(zip(NAMES, previous, strict=True))
    for names in visits:
        inputs = [getattr(layer, name) for name in names.split()]
        out_TD.backward(layer.grad_TD, inputs=inputs, retain_graph=True)
        now |= {name: wanted[name] for name in names.split() if name in NAMES}
        assert_equal(layer.grads(), now.values())
    assert [g.data_ptr() for g in layer.grads()] == pointers


def test_a_split_backward_attaches_the_first_contribution(context):
    layer = Layer(grad_dtype=BF16)
    out_TD = layer.forward(context, IN_PLACE)
    for names in (("x", "scores"), NAMES):
        out_TD.backward(layer.grad_TD, inputs=[getattr(layer, name) for name in names], retain_graph=True)
    assert_equal(layer.grads(), functional(context, BF16))


def test_gradients_that_are_asked_for_are_returned_and_not_added(context):
    layer = Layer()
    previous = layer.seed_grads(FP32)
    grads = torch.autograd.grad(layer.forward(context, IN_PLACE), [layer.w13, layer.w2], layer.grad_TD)
    assert_equal(grads, functional(context))
    torch.autograd.grad(layer.forward(context, IN_PLACE), [layer.x], layer.grad_TD)
    assert_equal(layer.grads(), previous)


# What would be scrambled or written in the wrong place


def test_a_weight_that_is_no_view_in_memory_order_is_refused(context):
    """A transposed view of its leaf, which a function makes contiguous: the sum would be added transposed."""
    layer = Layer()
    leaf = torch.nn.Parameter(layer.w13.detach().mT.contiguous())
    options = replace(IN_PLACE, weights_preprocess_fn=lambda weight: weight.contiguous())
    with pytest.raises(ValueError, match="memory order and both be contiguous"):
        layer.forward(context, options, w13_weight=leaf.mT)


def test_owners_are_told_by_shapes_that_only_split_dimensions():
    shape = torch.Size((4, 6, 5))
    for same in ((4, 6, 5), (4, 2, 3, 5), (24, 5), (120,)):
        assert same_order(shape, torch.Size(same)) and same_order(torch.Size(same), shape)
    for other in ((4, 5, 6), (6, 4, 5), (4, 6, 4), (30, 4)):
        assert not same_order(shape, torch.Size(other))


def test_an_owner_that_is_not_behind_its_weight_takes_the_gradient(context):
    layer = Layer(grad_dtype=FP32)
    owners = tuple(torch.nn.Parameter(getattr(layer, name).detach().clone()) for name in NAMES)
    for owner in owners:
        owner.grad_dtype, owner.grad = FP32, torch.ones(owner.shape)
    addresses = [owner.grad.data_ptr() for owner in owners]
    layer.step(context, replace(IN_PLACE, wgrad_parameter_owners=owners))
    assert [owner.grad.data_ptr() for owner in owners] == addresses and layer.grads() == (None, None)
    assert_equal([owner.grad for owner in owners], rounded_sum([torch.ones(1)] * 2, functional(context)))


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 0.5


def test_a_view_by_a_function_of_the_callers_is_refused(context):
    """It changes the gradient; what is added in place would pass it by."""
    layer = Layer(grad_dtype=BF16)
    with pytest.raises(ValueError, match="a function of the caller's lies between"):
        layer.forward(context, IN_PLACE, w13_weight=_Halves.apply(layer.w13))


def test_sums_that_share_memory_are_refused_and_nothing_is_written(context):
    layer, flat = Layer(), torch.zeros(SHAPES["w13"]).flatten()
    shared = ExecutionOptions(wgrad_destination_fn=lambda name, shape, *_: (flat[: shape.numel()].view(shape), True))
    weights = ExecutionOptions(wgrad_destination_fn=lambda name, *_: (getattr(layer, name).data, False))
    before = layer.w13.detach().clone()
    for options in (shared, weights):
        with pytest.raises(ValueError, match="share memory"):
            layer.step(context, options)
        context.reset()
    assert not flat.any() and layer.w13.equal(before)


def test_a_destination_is_not_written_for_a_gradient_that_is_returned(context):
    """Of the leaf that the weight is a view of."""
    layer, written = Layer(), {name: torch.zeros(SHAPES[name]) for name in NAMES}
    leaf = torch.nn.Parameter(layer.w13.detach().flatten())
    options = ExecutionOptions(wgrad_destination_fn=lambda name, *_: (written[name], True))
    out_TD = layer.forward(context, options, w13_weight=leaf.view(SHAPES["w13"]))
    (grad,) = torch.autograd.grad(out_TD, [leaf], layer.grad_TD)
    assert not written["w13"].any()
    assert_equal([grad.view(SHAPES["w13"])], [functional(context, BF16)[0]])


# The ops


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_trace_of_a_step_holds_one_accumulating_op_that_mutates_the_gradients(dtype, context):
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x, scores, w13, w2, grad_w13, grad_w2):
        w13, w2 = w13.detach().requires_grad_(), w2.detach().requires_grad_()
        w13.grad_dtype = w2.grad_dtype = dtype
        w13.grad, w2.grad = grad_w13, grad_w2
        x = x.detach().requires_grad_()
        out_TD = routed_experts(x, layer.ids, scores, w13, w2, context, options=IN_PLACE)
        out_TD.backward(layer.grad_TD)
        return x.grad

    layer = Layer()
    grads = layer.seed_grads(dtype)
    given = [t.detach() for t in (layer.x, layer.scores, layer.w13, layer.w2)]
    graph = make_fx(step)(*given, *[g.clone() for g in grads])
    context.reset()
    nodes = [n for n in graph.graph.nodes if "accumulate_" in str(n.target)]
    assert len(nodes) == 1 and nodes[0].is_impure()
    mutated = [argument.name for argument in nodes[0].target._schema.arguments if argument.alias_info is not None]
    assert mutated == ["accumulator_grad_w13", "accumulator_grad_w2"]
    accumulated = [g.clone() for g in grads]
    grad_x_TD = graph(*given, *accumulated)
    assert_equal(accumulated, rounded_sum(grads, functional(context)))
    eager = Layer()
    eager.step(context)
    assert torch.equal(grad_x_TD, eager.x.grad)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("precision", [None, BlockScaledConfig()], ids=["bf16", "mxfp8"])
def test_accumulating_ops_pass_opcheck_and_return_nothing_of_their_arguments(wanted, adds, precision):
    layer = Layer()
    weights = (layer.w13.detach(), layer.w2.detach())
    tokens = (layer.ids, layer.scores.detach(), *weights)
    with context_of(block_scaled=precision, max_moe_layers_per_activation_slot=64) as context:
        namespace, name, more = torch.ops.dist_moe, "bf16", ()
        if precision is not None:
            name, more = "block_scaled", ([],)
        op = getattr(namespace, f"{name}_backward_accumulate_").default
        # test_schema looks for writes by arithmetic that torch does not have for FP8
        for utility in ("test_faketensor",) if precision else ("test_schema", "test_faketensor"):
            context.reset()
            forward = getattr(namespace, f"{name}_forward")
            _, state = forward(layer.x.detach(), *tokens, True, *context.saved.selected, context.name, *more)
            into = [torch.ones_like(w, dtype=FP32) if want else None for w, want in zip(weights, wanted, strict=True)]
            flags = [adds and want for want in wanted]
            arguments = (layer.grad_TD, *tokens, state, *into, *flags, 0, context.name)
            torch.library.opcheck(op, arguments, test_utils=utility)
    written = [argument.name for argument in op._schema.arguments if argument.alias_info is not None]
    assert written == ["accumulator_grad_w13", "accumulator_grad_w2"]
    assert all(value.alias_info is None for value in op._schema.returns)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_accumulation_breaks_the_graph_or_is_refused_by_name_and_evaluation_compiles(fast):
    layer = Layer()
    previous = layer.seed_grads(BF16)
    run = lambda x: layer.forward(fast, IN_PLACE) * x.shape[0]  # noqa: E731
    with pytest.raises(Exception, match=r"torch\.compile: inplace_wgrad_accum"):
        torch.compile(run, backend="eager", fullgraph=True)(layer.x)
    with torch.no_grad():
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(layer.x)
        assert torch.equal(compiled, run(layer.x))
    out_TD = torch.compile(lambda x: layer.forward(fast, IN_PLACE) * 1, backend="aot_eager")(layer.x)
    out_TD.backward(layer.grad_TD)
    assert_equal(layer.grads(), rounded_sum(previous, functional(fast)))
