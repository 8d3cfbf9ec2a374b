"""routed_experts: what it takes, what it refuses and in which order, and the custom ops beneath it."""

import copy
import functools
import gc
import itertools
import pickle
import re
import warnings
import weakref

import pytest
import torch
from tests.path_cases import Case, assert_results_close, dense
from tests.rank_calls import forward, leaves_of, memory_of, on_ranks, results_of

from dist_moe import (
    BlockScaledConfig,
    Config,
    ExecutionOptions,
    RMSNormPostprocess,
    create_context,
    ops,
    prepare_block_scaled_weight,
    routed_experts,
)
from dist_moe.dense import dense_moe
from dist_moe.testing import assert_close

T, D, F, K, E = 8, 64, 96, 2, 4


def config(**changes) -> Config:
    fields = {"max_moe_layers_per_activation_slot": 1, "activation_slot_capacity_factor": 1.0}
    return Config(T, D, F, K, E, **fields | changes)


@pytest.fixture(params=["reference", "triton"])
def context(request, device):
    """The reference on the CPU, the kernels where the tests run them."""
    device = device if request.param == "triton" else torch.device("cpu")
    with create_context(group=None, config=config(), device=device, backend=request.param) as context, device:
        yield context


@pytest.fixture
def fast():
    with create_context(group=None, config=config(), device="cpu", backend="reference") as context:
        yield context


def inputs(**changes) -> dict:
    """The same values on every device; on the default one, which the context fixture sets."""
    with torch.device("cpu"):
        g = torch.Generator().manual_seed(0)
        fields = {
            "x_TD": torch.randn(T, D, generator=g).bfloat16(),
            "topk_expert_ids_TK": torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)]),
            "topk_scores_TK": torch.rand(T, K, generator=g),
            "w13_weight": (torch.randn(E, 2 * F, D, generator=g) * D**-0.5).bfloat16(),
            "w2_weight": (torch.randn(E, D, F, generator=g) * F**-0.5).bfloat16(),
        }
    return {name: value.to(torch.get_default_device()) for name, value in fields.items()} | changes


def call(context, options=None, **changes):
    return routed_experts(**inputs(**changes), context=context, options=options)


LAYOUTS = {
    "expert-major": ((E, 2 * F, D), (E, D, F)),
    "gate axis": ((E, 2, F, D), (E, D, F)),
    "flattened": ((E * 2 * F, D), (E * D, F)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wgrad_dtype", [None, torch.float32])
def test_weight_layouts_and_gradients_in_them(layout, wgrad_dtype):
    with create_context(
        group=None, config=config(wgrad_dtype=wgrad_dtype), device="cpu", backend="reference"
    ) as context:
        given = inputs()
        w13, w2 = (
            torch.nn.Parameter(given[name].view(shape))
            for name, shape in zip(("w13_weight", "w2_weight"), LAYOUTS[layout], strict=True)
        )
        w13.grad_dtype = w2.grad_dtype = wgrad_dtype or torch.bfloat16
        x, scores = given["x_TD"].requires_grad_(), given["topk_scores_TK"].requires_grad_()
        out = call(context, x_TD=x, topk_scores_TK=scores, w13_weight=w13, w2_weight=w2)
        grad = torch.randn(T, D).bfloat16()
        out.backward(grad)

        dense13, dense2 = (p.detach().float().requires_grad_() for p in (given["w13_weight"], given["w2_weight"]))
        x2, s2 = x.detach().requires_grad_(), scores.detach().requires_grad_()
        expected = dense_moe(x2, given["topk_expert_ids_TK"], s2, dense13, dense2)
        expected.backward(grad)
        assert_close(out, expected, "path")
        assert_close(x.grad, x2.grad, "path_grads")
        assert_close(scores.grad.view(1, -1), s2.grad.view(1, -1), "path_grads")
        for parameter, dense in ((w13, dense13), (w2, dense2)):
            assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == (wgrad_dtype or torch.bfloat16)
            assert_close(parameter.grad.view(dense.shape).float(), dense.grad, "path_grads")


def test_views_are_honoured(context):
    given = inputs()
    expected = call(context)
    wide_x = torch.full((T, D + 32), float("nan")).bfloat16()
    wide_x[:, :D] = given["x_TD"]
    wide_ids = torch.full((T, K + 3), 99)
    wide_ids[:, :K] = given["topk_expert_ids_TK"]
    tall = torch.full((K, T), float("nan"))
    tall.T.copy_(given["topk_scores_TK"])
    out = call(context, x_TD=wide_x[:, :D], topk_expert_ids_TK=wide_ids[:, :K], topk_scores_TK=tall.T)
    assert torch.equal(out, expected)
    odd = torch.full((T, D + 1), float("nan")).bfloat16()  # rows at odd addresses
    odd[:, 1:] = given["x_TD"]
    assert torch.equal(call(context, x_TD=odd[:, 1:]), expected)
    assert torch.equal(call(context, topk_expert_ids_TK=given["topk_expert_ids_TK"].int()), expected)


def test_a_gradient_that_is_a_view_is_honoured(context):
    """sum() hands backward an expanded gradient with strides 0."""
    x = inputs()["x_TD"].requires_grad_()
    call(context, x_TD=x).float().sum().backward()
    expanded, x.grad = x.grad, None
    call(context, x_TD=x).backward(torch.ones(T, D).bfloat16())
    assert torch.equal(expanded, x.grad)
    x.grad = None
    call(context, x_TD=x).backward(torch.ones(D, T).bfloat16().T)
    assert torch.equal(expanded, x.grad)


@pytest.mark.parametrize("wants", ["x_TD", "topk_scores_TK", "w13_weight", "w2_weight"])
def test_each_gradient_alone(wants, context):
    """What needs no gradient gets none, and the one that does has the bits it has among the others."""
    everything = {
        name: value.requires_grad_() if value.is_floating_point() else value for name, value in inputs().items()
    }
    grad = torch.randn(T, D).bfloat16()
    call(context, **everything).backward(grad)
    alone = inputs()
    alone[wants].requires_grad_()
    call(context, **alone).backward(grad)
    assert torch.equal(alone[wants].grad, everything[wants].grad)
    assert all(value.grad is None for name, value in alone.items() if name != wants)


@pytest.mark.parametrize("tokens", [0, 1, 3, 7, 8])
def test_fewer_tokens_than_the_maximum(tokens, context):
    given = inputs()
    x = given["x_TD"][:tokens].requires_grad_()
    out = call(
        context,
        x_TD=x,
        topk_expert_ids_TK=given["topk_expert_ids_TK"][:tokens],
        topk_scores_TK=given["topk_scores_TK"][:tokens],
    )
    assert torch.equal(out, call(context)[:tokens])
    out.float().sum().backward()
    assert x.grad.shape == (tokens, D)


def test_no_expert_gives_exact_zeros_and_no_gradient(context):
    given = inputs()
    ids = given["topk_expert_ids_TK"].clone()
    ids[2], ids[5, 1] = -1, -(2**40)
    scores = given["topk_scores_TK"].requires_grad_()
    x = given["x_TD"].requires_grad_()
    out = call(context, x_TD=x, topk_expert_ids_TK=ids, topk_scores_TK=scores)
    out.float().square().sum().backward()
    assert not out[2].any() and not x.grad[2].any() and not scores.grad[2].any() and scores.grad[5, 1] == 0
    assert out[3].any() and x.grad[5].any() and scores.grad[5, 0] != 0


def test_an_expert_named_twice_counts_once_with_both_scores(context):
    ids = torch.tensor([[1, 1]] * T)
    scores = inputs()["topk_scores_TK"].requires_grad_()
    out = call(context, topk_expert_ids_TK=ids, topk_scores_TK=scores)
    out.float().sum().backward()
    once = torch.stack([scores.detach().sum(1), torch.zeros(T)], 1).requires_grad_()
    single = call(context, topk_expert_ids_TK=torch.tensor([[1, -1]] * T), topk_scores_TK=once)
    single.float().sum().backward()
    assert torch.equal(out, single)
    assert torch.equal(scores.grad, once.grad[:, :1].expand(T, K))


def test_outputs_are_fresh_and_inputs_untouched(context):
    given = inputs()
    before = {name: value.clone() for name, value in given.items()}
    first = call(context, **given)
    copy = first.clone()
    call(context, x_TD=torch.randn(T, D).bfloat16())
    assert torch.equal(first, copy)
    assert all(torch.equal(value, before[name]) for name, value in given.items())


def test_evaluation_between_forward_and_backward(context):
    x = inputs()["x_TD"].requires_grad_()
    out = call(context, x_TD=x)
    out.float().sum().backward()
    wanted, x.grad = x.grad, None
    out = call(context, x_TD=x)
    with torch.no_grad():
        call(context, x_TD=torch.randn(T, D).bfloat16())
    with torch.inference_mode():
        call(context)
    out.float().sum().backward()
    assert torch.equal(x.grad, wanted)


# What is refused. Each row breaks one rule; the order of the rows is the order of the checks.

REFUSED = [
    (TypeError, "options must be an ExecutionOptions", {"options": "fast"}),
    (TypeError, "x_TD must be a tensor", {"x_TD": [[1.0]]}),
    (
        ValueError,
        "swiglu_clip_stats_out_3 is on meta",
        {"options": ExecutionOptions(swiglu_clip_stats_out_3=torch.zeros(3, device="meta"))},
    ),
    (ValueError, r"x_TD must be \[T, 64\], got \[8, 32\]", {"x_TD": torch.zeros(T, 32).bfloat16()}),
    (ValueError, r"x_TD must be \[T, 64\]", {"x_TD": torch.zeros(1, T, D).bfloat16()}),
    (ValueError, "9 tokens.*must equal or be less", {"x_TD": torch.zeros(T + 1, D).bfloat16()}),
    (ValueError, r"topk_expert_ids_TK must be \[8, 2\]", {"topk_expert_ids_TK": torch.zeros(T, 3, dtype=torch.long)}),
    (ValueError, r"topk_scores_TK must be \[8, 2\]", {"topk_scores_TK": torch.zeros(T - 1, K)}),
    (ValueError, r"\[E, 2, F, D\]", {"w13_weight": torch.zeros(E, 3, F, D).bfloat16()}),
    (ValueError, "incompatible expert-weight layouts", {"w13_weight": torch.zeros(E * 2 * F, D).bfloat16()}),
    (ValueError, r"w13_weight must be \[4, 192, 64\] \(L = 4", {"w13_weight": torch.zeros(E, F, D).bfloat16()}),
    (ValueError, r"w2_weight must be \[4, 64, 96\]", {"w2_weight": torch.zeros(E, F, D).bfloat16()}),
    (TypeError, "x_TD must be bfloat16, got float16", {"x_TD": torch.zeros(T, D).half()}),
    (TypeError, "x_TD must be bfloat16, got float64", {"x_TD": torch.zeros(T, D).double()}),
    (TypeError, "w13_weight must be bfloat16, got float32", {"w13_weight": torch.zeros(E, 2 * F, D)}),
    (TypeError, "w2_weight must be bfloat16, got float8", {"w2_weight": torch.zeros(E, D, F).to(torch.float8_e4m3fn)}),
    (TypeError, "topk_expert_ids_TK must be int32 or int64", {"topk_expert_ids_TK": torch.zeros(T, K).short()}),
    (TypeError, "topk_expert_ids_TK must be int32 or int64", {"topk_expert_ids_TK": torch.zeros(T, K)}),
    (TypeError, "topk_scores_TK must be bfloat16 or float32", {"topk_scores_TK": torch.zeros(T, K).half()}),
    (ValueError, "topk_scores_TK is on meta", {"topk_scores_TK": torch.zeros(T, K, device="meta")}),
    (ValueError, "x_TD must have unit stride along D", {"x_TD": torch.zeros(D, T).bfloat16().T}),
    (ValueError, "w13_weight must be contiguous", {"w13_weight": torch.zeros(E, D, 2 * F).bfloat16().transpose(1, 2)}),
    (ValueError, "w2_weight must be contiguous", {"w2_weight": torch.zeros(E, D, 2 * F).bfloat16()[..., ::2]}),
]

MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
SERVING = {"inference": True, "activation_slot_capacity_factor": None, "num_activation_slots": 0}
PRECISIONS = {  # what the context has, and whether its weights are prepared
    "bf16": ({}, False),
    "mxfp8": ({"block_scaled": MXFP8}, False),
    "mxfp8-prepared": ({"block_scaled": MXFP8}, True),
    "nvfp4-prepared": ({"block_scaled": NVFP4, **SERVING}, True),
}
WEIGHTS = ("w13_weight", "w2_weight")


def refused_in(precision: str) -> list[tuple]:
    """The rows whose weights can be what this precision takes."""
    _, prepares = PRECISIONS[precision]
    fits = lambda w: w.dim() == 3 and w.dtype is torch.bfloat16 and w.is_contiguous()  # noqa: E731
    return [row for row in REFUSED if not prepares or all(fits(row[2][name]) for name in WEIGHTS if name in row[2])]


def in_two_ways(first: tuple, second: tuple) -> bool:
    """Whether one argument would have to be wrong in two ways."""
    return bool(first[2].keys() & second[2].keys()) or first[1].startswith("9 tokens") or "meta" in first[1] + second[1]


@functools.cache
def ready(precision: str) -> dict:
    """The weights of inputs() as that precision takes them."""
    return {name: as_taken(inputs()[name], precision) for name in WEIGHTS}


def as_taken(weight: torch.Tensor, precision: str):
    changes, prepares = PRECISIONS[precision]
    return prepare_block_scaled_weight(weight, changes["block_scaled"]) if prepares else weight


@pytest.fixture
def call_in(precision):
    """call() in a context of that precision, with weights as it takes them."""
    how = config(**PRECISIONS[precision][0])
    with create_context(group=None, config=how, device="cpu", backend="reference") as context:

        def call_in(**changes):
            weights = {name: as_taken(value, precision) for name, value in changes.items() if name in WEIGHTS}
            return call(context, **ready(precision) | changes | weights)

        yield call_in


@pytest.mark.parametrize(
    "precision, error, words, broken",
    [
        pytest.param(precision, *row, id=re.sub(r"\W+", "-", f"{precision} {row[1]}"))
        for precision in PRECISIONS
        for row in refused_in(precision)
    ],
)
def test_refused_arguments(precision, error, words, broken, call_in):
    with pytest.raises(error, match=words):
        call_in(**broken)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_context_works_on_after_refusals(precision, call_in):
    for error, words, broken in refused_in(precision):
        with pytest.raises(error, match=words):
            call_in(**broken)
    assert call_in().any()


@pytest.mark.parametrize(
    "precision, first, second",
    [
        (precision, first, second)
        for precision in PRECISIONS
        for first, second in zip(refused_in(precision), refused_in(precision)[2:], strict=False)
        if not in_two_ways(first, second)
    ],
)
def test_the_first_broken_rule_is_reported(precision, first, second, call_in):
    with pytest.raises(first[0], match=first[1]):
        call_in(**second[2] | first[2])


def test_an_object_that_is_no_context_is_refused():
    with pytest.raises(TypeError, match="context must be a Context"):
        call("context")


def test_options_that_ask_for_nothing_change_nothing(fast):
    assert torch.equal(call(fast, options=ExecutionOptions()), call(fast))


@pytest.mark.parametrize(
    "post, words",
    [
        (RMSNormPostprocess(0.0, torch.float32, torch.bfloat16), "eps must be finite and positive"),
        (RMSNormPostprocess(1e-6, torch.float32, torch.float32), "output_dtype must be that of x_TD"),
        (RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, gain_center=1.0), "gain_center needs a weight"),
        (RMSNormPostprocess(1e-6, torch.float16, torch.bfloat16), "norm_output_dtype must be float32 or bfloat16"),
        (
            RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, weight=torch.ones(D).bfloat16(), use_kahan=True),
            "exclude each other",
        ),
        (
            RMSNormPostprocess(1e-6, torch.float32, torch.bfloat16, weight=torch.ones(D)),
            r"weight must be contiguous \[64",
        ),
    ],
)
def test_a_bad_rmsnorm_is_refused(post, words, fast):
    with pytest.raises(ValueError, match=words):
        call(fast, options=ExecutionOptions(experts_output_postprocess=post))


def test_inference_contexts_take_no_gradients():
    serve = config(inference=True, activation_slot_capacity_factor=None, num_activation_slots=0)
    with create_context(group=None, config=serve, device="cpu", backend="reference") as context:
        x = inputs()["x_TD"].requires_grad_()
        with pytest.raises(RuntimeError, match="inference contexts do not support autograd"):
            call(context, x_TD=x)
        with torch.no_grad():
            assert torch.equal(call(context, x_TD=x), call(context))


# The custom ops


def op_arguments(context, save: bool, **changes) -> tuple:
    return (*inputs(**changes).values(), save, *context.saved.selected, context.name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("save", [False, True])
def test_forward_op_passes_opcheck(save, layout):
    deep = config(max_moe_layers_per_activation_slot=64)  # opcheck runs forwards whose backward never comes
    with create_context(group=None, config=deep, device="cpu", backend="reference") as context:
        given = inputs()
        weights = {
            name: given[name].view(shape).requires_grad_(save)
            for name, shape in zip(("w13_weight", "w2_weight"), LAYOUTS[layout], strict=True)
        }
        x, scores = given["x_TD"].requires_grad_(save), given["topk_scores_TK"].requires_grad_(save)
        torch.library.opcheck(ops.bf16_forward, op_arguments(context, save, x_TD=x, topk_scores_TK=scores, **weights))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("scores_dtype", [torch.float32, torch.bfloat16])
def test_forward_op_of_fewer_tokens_and_other_dtypes_passes_opcheck(tokens, scores_dtype):
    deep = config(max_moe_layers_per_activation_slot=64)
    with create_context(group=None, config=deep, device="cpu", backend="reference") as context:
        given = inputs()
        few = {
            "x_TD": given["x_TD"][:tokens].requires_grad_(),
            "topk_expert_ids_TK": given["topk_expert_ids_TK"][:tokens].int(),
            "topk_scores_TK": given["topk_scores_TK"][:tokens].to(scores_dtype).requires_grad_(),
        }
        torch.library.opcheck(ops.bf16_forward, op_arguments(context, True, **few))


@pytest.mark.parametrize("save", [False, True])
def test_forward_op_by_route_and_counting_passes_opcheck(save):
    deep = config(max_moe_layers_per_activation_slot=64, route_outputs=True)
    with create_context(group=None, config=deep, device="cpu", backend="reference") as context:
        x = inputs()["x_TD"].requires_grad_(save)
        torch.library.opcheck(ops.bf16_forward, (*op_arguments(context, save, x_TD=x), True, 1.0))


NUMBERS = [1e-6, 1.0, 0.0, 0.0, 1.0]  # of a norm that keeps 1 / rms


@pytest.mark.parametrize("save", [False, True])
def test_ops_with_a_norm_pass_opcheck(save):
    deep = config(max_moe_layers_per_activation_slot=64, route_outputs=True)
    with create_context(group=None, config=deep, device="cpu", backend="reference") as context:
        weight = torch.rand(D).bfloat16().requires_grad_(save)
        torch.library.opcheck(ops.bf16_forward, (*op_arguments(context, save), False, None, weight, NUMBERS))
        for utility in ("test_schema", "test_faketensor") if save else ():
            context.reset()
            weight = weight.detach()
            with torch.no_grad():
                _, state = ops.bf16_forward(*op_arguments(context, True), False, None, weight, NUMBERS)
            given = (*list(inputs().values())[1:], state, True, True, torch.float32, 0, context.name)
            arguments = (torch.randn(T, D).bfloat16(), *given, weight, NUMBERS, True)
            torch.library.opcheck(ops.bf16_backward, arguments, test_utils=utility)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_backward_op_passes_opcheck(needs):
    """Its state is used up by the first run, so each utility gets a forward of its own."""
    deep = config(max_moe_layers_per_activation_slot=64, route_outputs=True)
    with create_context(group=None, config=deep, device="cpu", backend="reference") as context:
        for utility, shape in itertools.product(("test_schema", "test_faketensor"), ((T, D), (T, K, D))):
            context.reset()
            with torch.no_grad():
                _, state = ops.bf16_forward(*op_arguments(context, True), len(shape) == 3)
            given = list(inputs().values())
            arguments = (torch.randn(shape).bfloat16(), *given[1:], state, *needs, torch.float32, 0, context.name)
            torch.library.opcheck(ops.bf16_backward, arguments, test_utils=utility)


def test_ops_mutate_nothing_and_return_nothing_of_their_arguments():
    for op in (ops.bf16_forward, ops.bf16_backward):
        assert not op._schema.is_mutable
        assert all(value.alias_info is None for value in [*op._schema.arguments, *op._schema.returns])


def test_nothing_that_ops_return_lies_in_the_contexts_memory(context):
    with torch.no_grad():
        out, state = ops.bf16_forward(*op_arguments(context, True))
        given = (*list(inputs().values())[1:], state, True, True, torch.float32, 0, context.name)
        grads = ops.bf16_backward(torch.randn(T, D).bfloat16(), *given)
    places = [t.untyped_storage().data_ptr() for t in (out, *state, *grads) if t.numel()]
    assert len(places) == len(set(places)) > 5 and not memory_of(context) & set(places)


def test_fakes_have_the_shapes_of_the_real_thing(fast):
    from torch._subclasses.fake_tensor import FakeTensorMode

    out, state = ops.bf16_forward(*op_arguments(fast, True))
    fast.reset()
    with FakeTensorMode() as mode:
        fake_inputs = {name: mode.from_tensor(value) for name, value in inputs().items()}
        fake_out, fake_state = ops.bf16_forward(*fake_inputs.values(), True, *fast.saved.selected, fast.name)
    for real, fake in zip([out, *state], [fake_out, *fake_state], strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_an_op_of_a_closed_context_says_so():
    with create_context(group=None, config=config(), device="cpu", backend="reference") as context:
        arguments = op_arguments(context, False)
    with pytest.raises(RuntimeError, match="is not live"):
        ops.bf16_forward(*arguments)
    with pytest.raises(RuntimeError, match="is closed"):
        call(context)


def test_saved_state_is_x_and_h1_and_small_tables():
    """For backward: x_RD and h1 in the slot, and returned tables of at most 16 bytes a row of capacity, 8 bytes a
    (local expert, rank), and one fixed record of scalars."""
    with create_context(group=None, config=config(), device="cpu", backend="reference") as context:
        _, state = ops.bf16_forward(*op_arguments(context, True))
        plan, rows, L, W = context.memory_plan, context.path.capacity_rows, E, 1
        scalars = 16 * 8  # counts and the place record
        saved = sum(tensor.numel() * tensor.element_size() for tensor in state)
        assert saved <= 16 * rows + 8 * L * W + scalars
        used = context.ranks[0].slot_used_NW[0, 0].item()
        assert used <= (rows + 1) * (2 * D + 4 * F) + 127 and used <= plan.activation_slot_bytes


def test_what_a_forward_made_dies_with_its_output(fast):
    """No cycle holds its state until a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        out = call(fast, x_TD=inputs()["x_TD"].requires_grad_())
        state = [weakref.ref(tensor) for tensor in out.grad_fn.saved_tensors if tensor is not None]
        node = weakref.ref(out.grad_fn)
        out.sum().backward()
        del out
        assert node() is None and not any(ref() for ref in state)
    finally:
        gc.enable()


def test_hooks_of_any_callable_are_taken(fast):
    """save_on_cpu and the like: the pack function need not be a plain one."""
    x = inputs()["x_TD"].requires_grad_()
    pack = functools.partial(lambda _, tensor: tensor.clone(), None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(fast, x_TD=x)
    out.float().sum().backward()
    assert x.grad.any()


def test_a_weight_at_an_odd_address_is_refused_by_name(context):
    flat = torch.zeros(inputs()["w13_weight"].numel() + 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="w13_weight must start at a multiple of 16 bytes"):
        call(context, w13_weight=flat[1:].view(E, 2 * F, D))
    assert call(context).any()


def test_a_module_with_a_context_can_be_copied_but_not_pickled(fast):
    module = torch.nn.Linear(2, 2)
    module.context = fast
    assert copy.deepcopy(module).context is fast
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(fast)


def test_a_context_made_under_inference_mode_trains_outside_of_it():
    with torch.inference_mode():
        context = create_context(group=None, config=config(), device="cpu", backend="reference")
    with context:
        x = inputs()["x_TD"].requires_grad_()
        call(context, x_TD=x).float().sum().backward()
        context.reset()
        assert x.grad.any()


class _Cut(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def _cut_on_rank_0(rank, group, case):
    inputs = case.inputs()[rank]
    with create_context(group=group, config=case.config(), device="cpu", backend="reference") as context:
        leaves = leaves_of(inputs, context.config)
        out_TD = forward(leaves, inputs.ids_TK, context)
        if rank == 0:
            _Cut.apply(out_TD).sum().backward()
        else:
            out_TD.backward(inputs.grad_out_TD)
        context.check()
        return results_of(out_TD, leaves)


def test_a_rank_without_a_gradient_of_the_output_joins_the_backward_with_zeros():
    case = Case("cut")
    inputs = case.inputs()
    inputs[0].grad_out_TD.zero_()
    assert_results_close(on_ranks(2, _cut_on_rank_0, case), dense(case, inputs))


def test_vmap_is_refused(fast):
    x_TD, *others = inputs().values()
    with pytest.raises(NotImplementedError, match=r"torch.vmap: it is a call of all ranks"):
        torch.vmap(lambda x_TD: routed_experts(x_TD, *others, fast))(x_TD[None])


def test_dynamo_compiles_nothing_inside_of_the_op(fast):
    """Called in a frame that Dynamo leaves to Python, because it breaks inside a context manager."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    @functools.partial(torch.compile, backend="aot_eager")
    def broken(*given):
        with warnings.catch_warnings():
            print(end="")
            return ops.bf16_forward(*given)[0]

    clear_compilation_metrics()
    given = op_arguments(fast, True, x_TD=inputs()["x_TD"].requires_grad_())
    out_TD = broken(*given)
    ours = {metrics.co_filename for metrics in get_compilation_metrics() if "/dist_moe/" in (metrics.co_filename or "")}
    assert ours <= {__file__}
    out_TD.float().sum().backward()
    assert given[0].grad.any()
