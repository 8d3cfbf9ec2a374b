"""A backward in two visits of the engine, as zero-bubble schedules make them: for the inputs, then for the weights."""

import gc
import weakref

import pytest
import torch
from tests.fault_cases import Step
from tests.path_cases import Case, assert_results_equal
from tests.pipeline_stages import one_process, select_slots, stages_of
from tests.rank_calls import on_ranks, results_of, run_rank
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from dist_moe import Config, color_activation_slots, create_context, engine, moe, routed_experts
from dist_moe.errors import InvalidExpertIdError, SlotError

T, D, F, K, E = 8, 32, 32, 2, 4
SPLITS = (2, 13)  # torch 2.11 gives its second visit 0 + the gradient: another tensor; 2.12 was not tried


def context_of(depth: int = 1, num_slots: int = 1, device: str = "cpu"):
    config = Config(T, D, F, K, E, depth, num_activation_slots=num_slots, activation_slot_capacity_factor=1.0)
    backend = "reference" if device == "cpu" else None
    return create_context(group=None, config=config, device=device, backend=backend)


@pytest.fixture
def context():
    with context_of() as context:
        yield context


@pytest.fixture
def num_backwards(monkeypatch):
    """How many backwards have run, as a function."""
    runs, backward = [], moe.backward
    monkeypatch.setattr(moe, "backward", lambda *args: [runs.append(1), backward(*args)])
    return lambda: len(runs)


def randn(*shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Layer(torch.nn.Module):
    """Norm, router, experts and a residual. Expert weights are leaves, or one comes as a view and one as a cast."""

    def __init__(self, context, seed: int, *, views=False, detached_router=False, run=lambda fn, *args: fn(*args)):
        super().__init__()
        w13, w2 = randn(E, 2 * F, D, seed=seed) * 0.2, randn(E, D, F, seed=seed + 1) * 0.2
        self.norm = torch.nn.Parameter(1 + randn(D, seed=seed) * 0.1)
        self.router = torch.nn.Parameter(randn(D, E, seed=seed + 2).float())
        self.w13, self.w2 = (torch.nn.Parameter(w) for w in ((w13.flatten(), w2.float()) if views else (w13, w2)))
        self.context, self.detached_router, self.run = context, detached_router, run

    def forward(self, x_TD):
        normed_TD = torch.nn.functional.rms_norm(x_TD, (D,), self.norm)
        routed_TD = normed_TD.detach() if self.detached_router else normed_TD
        scores_TK, ids_TK = (routed_TD.float() @ self.router).softmax(dim=1).topk(K, dim=1)
        weights = self.w13.view(E, 2 * F, D), self.w2.bfloat16()
        return x_TD + self.run(routed_experts, normed_TD, ids_TK, scores_TK, *weights, self.context)


def gradients(stage, x_TD) -> list[torch.Tensor]:
    """Of the input and all parameters, which lose them."""
    grads = [leaf.grad for leaf in (x_TD, *stage.parameters())]
    for leaf in (x_TD, *stage.parameters()):
        leaf.grad = None
    return grads


def assert_equal(grads, others) -> None:
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


@pytest.mark.torch(SPLITS)
@pytest.mark.parametrize("form", [{}, {"views": True}, {"detached_router": True}], ids=["leaves", "views", "detached"])
def test_a_stage_split_as_torch_does_it(form, num_backwards):
    with context_of(depth=2) as context:
        stage = torch.nn.Sequential(Layer(context, 0, **form), Layer(context, 10, **form))
        x_TD, grad_TD = randn(T, D, seed=20).requires_grad_(), randn(T, D, seed=21)
        stage(x_TD).backward(grad_TD)
        whole = gradients(stage, x_TD)
        for step in range(1, 4):
            _, groups = stage_backward_input([stage(x_TD)], [grad_TD], [x_TD], stage.parameters())
            assert all(p.grad is None for p in stage.parameters())
            assert num_backwards() == 2 + 2 * step and not context.ranks[0].slot_layers_N.any()
            stage_backward_weight(stage.parameters(), groups)
            assert num_backwards() == 2 + 2 * step
            assert_equal(gradients(stage, x_TD), whole)


@pytest.mark.torch(SPLITS)
def test_a_frozen_weight(context):
    layer, x_TD, grad_TD = Layer(context, 0), randn(T, D, seed=20).requires_grad_(), randn(T, D, seed=21)
    layer(x_TD).backward(grad_TD)
    wanted = gradients(layer, x_TD)
    layer.w13.requires_grad_(False)
    wanted[3] = None
    out_TD = layer(x_TD)
    node = next(node for node, _ in out_TD.grad_fn.next_functions if hasattr(node, "kept"))
    _, groups = stage_backward_input([out_TD], [grad_TD], [x_TD], layer.parameters())
    assert len(node.kept.grads) == 1
    trained = [p for p in layer.parameters() if p.requires_grad]
    stage_backward_weight(iter(trained), groups)
    grads = gradients(layer, x_TD)
    assert grads.pop(3) is wanted.pop(3) is None
    assert_equal(grads, wanted)


@pytest.mark.torch(SPLITS)
@pytest.mark.parametrize("kind", [schedules.ScheduleInterleavedZeroBubble, schedules.ScheduleZBVZeroBubble])
@one_process()
def test_a_step_of_a_zero_bubble_schedule(kind):
    """Stages of one process by torch's runtime; gradients are those of one microbatch after the other."""
    num_stages = 2 if kind is schedules.ScheduleZBVZeroBubble else 3
    modules = [torch.nn.Sequential(*(Layer(None, 9 * s + i) for i in range(2 - s % 2))) for s in range(num_stages)]
    stages = stages_of(modules, T, D)
    schedule = kind(stages, 4, lambda out, target: (out * target).sum(), scale_grads=False)
    order = [action for action in schedule.pipeline_order[0] if action is not None]
    coloring = color_activation_slots(order, {s: len(module) for s, module in enumerate(modules)})
    x, target = randn(4 * T, D, seed=20), randn(4 * T, D, seed=21)
    whole = torch.nn.Sequential(*modules)
    num_layers = sum(map(len, modules))
    with context_of(num_layers, coloring.num_activation_slots) as context:
        for layer in (layer for module in modules for layer in module):
            layer.context = context
        select_slots(stages, context, coloring)
        for _ in range(2):
            whole.zero_grad()
            schedule.step(x, target=target)
            context.check()
            assert not context.ranks[0].slot_layers_N.any()
        grads = [p.grad.clone() for p in whole.parameters()]
        whole.zero_grad()
        context.select_activation_slot(0, num_layers)
        for x_TD, target_TD in zip(x.split(T), target.split(T), strict=True):
            (whole(x_TD) * target_TD).sum().backward()
        assert {"I", "W"} <= {str(action)[1] for action in order}
        assert_equal(grads, [p.grad for p in whole.parameters()])


# The visits one by one


class Visits:
    """A forward of leaves, and what one visit of its backward gives."""

    def __init__(self, context):
        self.context, device = context, context.device
        ids_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device)
        shapes = {"x": (T, D), "scores": (T, K), "w13": (E, 2 * F, D), "w2": (E, D, F)}
        self.leaves = {
            name: randn(*shape, seed=n).to(device).requires_grad_() for n, (name, shape) in enumerate(shapes.items())
        }
        x_TD, scores_TK, w13, w2 = self.leaves.values()
        self.grad_TD = randn(T, D, seed=9).to(device)
        routed_experts(x_TD, ids_TK, scores_TK, w13, w2, context).backward(self.grad_TD)
        self.whole = {name: leaf.grad.clone() for name, leaf in self.leaves.items()}
        self.out_TD = routed_experts(x_TD, ids_TK, scores_TK, w13, w2, context)

    def visit(self, *names, grad_TD=None, retain_graph=True, **options):
        grad_TD = self.grad_TD if grad_TD is None else grad_TD
        leaves = [self.leaves[name] for name in names]
        return torch.autograd.grad(self.out_TD, leaves, grad_TD, retain_graph=retain_graph, **options)

    def assert_gives(self, *names, **options):
        assert_equal(self.visit(*names, **options), [self.whole[name] for name in names])

    def assert_gives_none_of(self, *names, **options):
        with pytest.raises(SlotError, match="it had its backward"):
            self.visit(*names, **options)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def visits(request):
    with context_of(device=request.param) as context:
        yield Visits(context)


@pytest.mark.parametrize("first, second", [("x scores", "w13 w2"), ("x", "scores w13 w2"), ("w2 w13", "x scores")])
def test_the_second_visit_gives_what_the_first_left(first, second, visits, num_backwards):
    visits.assert_gives(*first.split())
    visits.assert_gives(*second.split())
    assert num_backwards() == 1
    visits.assert_gives_none_of("x")
    assert num_backwards() == 1


def test_a_visit_for_each_input(visits):
    for name in visits.leaves:
        visits.assert_gives(name)
    visits.assert_gives_none_of("w2")


def test_gradients_accumulate_in_leaves(visits):
    for names in (("x", "scores"), ("w13", "w2")):
        leaves = [visits.leaves[name] for name in names]
        visits.out_TD.backward(visits.grad_TD, inputs=leaves, retain_graph=True)
    assert_equal([leaf.grad for leaf in visits.leaves.values()], [2 * grad for grad in visits.whole.values()])


def test_a_whole_backward_is_the_only_one(visits):
    visits.assert_gives(*visits.leaves)
    assert visits.out_TD.grad_fn.kept is None
    for names in (["x"], ["w13", "w2"], visits.leaves):
        visits.assert_gives_none_of(*names)


def test_what_was_handed_out_is_not_handed_out_again(visits):
    """Silence would lose the gradient of all that lies before x."""
    visits.assert_gives("x")
    visits.assert_gives_none_of("x", "w13")


@pytest.mark.parametrize("change", [lambda grad: grad.clone(), lambda grad: grad.mul_(2), torch.zeros_like])
def test_gradients_are_kept_for_one_gradient_of_the_output(change, visits):
    visits.assert_gives("x")
    visits.assert_gives_none_of("w13", grad_TD=change(visits.grad_TD))


def test_a_reset_forgets_them(visits):
    visits.assert_gives("x")
    visits.context.reset()
    with pytest.raises(SlotError, match="the context was reset"):
        visits.visit("w13")


def test_a_fault_in_between_is_raised_first(visits):
    visits.assert_gives("x")
    x_TD, *others = visits.leaves.values()
    with torch.no_grad():
        routed_experts(x_TD, torch.full((T, K), E, device=x_TD.device), *others, visits.context)
    if x_TD.is_cuda:
        torch.cuda.synchronize()  # the fault is on the host then
    with pytest.raises(InvalidExpertIdError):
        visits.visit("w13")


def test_weights_changed_in_between(visits):
    """An optimizer step: the gradients are of the weights that the first visit saw."""
    visits.assert_gives("x", "scores")
    with torch.no_grad():
        visits.leaves["w13"].zero_()
    visits.assert_gives("w13", "w2")


@pytest.mark.parametrize("options", [{"retain_graph": False}, {"create_graph": True}], ids=str)
def test_nothing_is_kept_for_a_visit_that_cannot_come_or_cannot_be_kept(options, visits):
    (grad_x_TD,) = visits.visit("x", **options)
    assert torch.equal(grad_x_TD, visits.whole["x"])
    assert visits.out_TD.grad_fn.kept is None


def test_a_torch_that_does_not_tell_has_one_visit(visits, monkeypatch):
    monkeypatch.setattr(engine, "_executes", lambda node: True)
    visits.assert_gives("x")
    visits.assert_gives_none_of("w13")


def test_kept_gradients_die_when_handed_out_and_with_the_graph(context):
    gc.collect()
    gc.disable()
    try:
        for second_visit in (True, False):
            visits = Visits(context)
            node = visits.out_TD.grad_fn
            visits.visit("x", "scores")
            kept = [weakref.ref(grad) for grad in node.kept.grads.values()]
            assert len(kept) == 2 and all(ref() is not None for ref in kept)
            if second_visit:
                visits.visit("w13", "w2", retain_graph=False)
                assert not any(ref() for ref in kept) and node.kept is None
            node = weakref.ref(node)
            del visits
            assert node() is None and not any(ref() for ref in kept)
    finally:
        gc.enable()


@pytest.mark.torch(SPLITS)
def test_a_checkpoint_around_the_call_alone(context, num_backwards):
    recompute = lambda fn, *args: checkpoint(fn, *args, use_reentrant=False)  # noqa: E731
    grads = []
    for run in (None, recompute):
        layer = Layer(context, 0, **({"run": run} if run else {}))
        x_TD, grad_TD = randn(T, D, seed=20).requires_grad_(), randn(T, D, seed=21)
        for _ in range(2):
            gradients(layer, x_TD)
            _, groups = stage_backward_input([layer(x_TD)], [grad_TD], [x_TD], layer.parameters())
            stage_backward_weight(layer.parameters(), groups)
            assert not context.ranks[0].slot_layers_N.any()
        grads.append(gradients(layer, x_TD))
    assert_equal(*grads)
    assert num_backwards() == 4


def test_a_checkpoint_around_more_parameters_is_a_slot_error(context):
    """Each of them recomputes the whole region in its W, and of the MoE layer no backward follows."""
    layer, x_TD, grad_TD = Layer(context, 0), randn(T, D, seed=20).requires_grad_(), randn(T, D, seed=21)
    out_TD = checkpoint(layer, x_TD, use_reentrant=False)
    _, groups = stage_backward_input([out_TD], [grad_TD], [x_TD], layer.parameters())
    with pytest.raises(SlotError, match="already holds 1 layers"):
        stage_backward_weight(layer.parameters(), groups)


@pytest.mark.torch(SPLITS)
def test_experts_of_two_layers_of_a_stage_are_a_slot_error():
    """Their W leads through the second layer to the first, so it asks for the second one's x again."""
    with context_of(depth=2) as context:
        stage = torch.nn.Sequential(Layer(context, 0), Layer(context, 10))
        stage[1].w13 = stage[0].w13
        x_TD, grad_TD = randn(T, D, seed=20).requires_grad_(), randn(T, D, seed=21)
        _, groups = stage_backward_input([stage(x_TD)], [grad_TD], [x_TD], stage.parameters())
        with pytest.raises(SlotError, match="it had its backward"):
            stage_backward_weight(stage.parameters(), groups)


# Ranks


def _split(rank, group, case):
    """Both ranks visit for x, then one of them alone for the weights."""
    config = case.config()
    with create_context(group=group, config=config, device="cpu", backend="reference", peer_timeout_s=30) as context:
        whole = run_rank(case.inputs()[rank], context)
        step = Step(rank, context, case)
        out_TD = step.forward()
        inputs, weights = [[step.leaves[n] for n in names] for names in (("x_TD", "scores_TK"), ("w13_L2FD", "w2_LDF"))]
        step.backward(out_TD, inputs=inputs, retain_graph=True)
        if rank == 1:
            step.backward(out_TD, inputs=weights)
        context.check()
        return whole, results_of(out_TD, step.leaves)


def test_the_second_visit_meets_no_peer():
    case = Case("2 ranks", W=2, T=4, D=32, F=32, K=2, E=4, routing="balanced")
    (whole_0, split_0), (whole_1, split_1) = on_ranks(2, _split, case)
    assert_results_equal([split_1], [whole_1])
    assert split_0.grad_w13_L2FD is split_0.grad_w2_LDF is None
    assert torch.equal(split_0.grad_x_TD, whole_0.grad_x_TD)
