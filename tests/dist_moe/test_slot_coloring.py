"""color_activation_slots: the worked example, brute force, errors, torch's schedules, and a Context that runs by it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline_stages import one_process, select_slots, stages_of
from torch.distributed.pipelining import schedules

from dist_moe import (
    BlockScaledConfig,
    Config,
    World,
    color_activation_slots,
    create_context,
    plan_memory,
    routed_experts,
)
from dist_moe.errors import SlotError

INTERLEAVED = "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3".split()  # rank 0 of 2
BREADTH_FIRST = "0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0".split()
GUIDE = Config(4096, 4096, 14336, 8, 128, 1)  # a layer keeps 32 MiB at the least


def live(actions, key, stages=(0, 2)) -> list[int]:
    """How many keys are held after each action (stage, kind, microbatch), from their first one to before their last."""
    keys = [key(int(stage), int(microbatch)) if int(stage) in stages else None for stage, _, microbatch in actions]
    return [len({*keys[:after]} & {*keys[after:]} - {None}) for after in range(1, len(keys) + 1)]


# The worked example


def test_the_worked_example():
    assert [live(INTERLEAVED, lambda s, m: m)[:9], live(INTERLEAVED, lambda s, m: (s, m))[:9]] == [
        [1, 2, 2, 2, 3, 3, 4, 4, 4],
        [1, 2, 3, 4, 5, 4, 5, 4, 5],
    ]
    coloring = color_activation_slots(INTERLEAVED, 3, layer_bytes=10)
    assert (coloring.microbatch_bytes, coloring.stage_microbatch_bytes) == (4 * 6 * 10, 5 * 3 * 10)
    assert (coloring.granularity, coloring.num_activation_slots) == ("stage_microbatch", 5)
    assert coloring.max_moe_layers_per_activation_slot == 3
    first = {(0, 0): 0, (0, 1): 1, (2, 0): 2, (2, 1): 3, (0, 2): 4, (0, 3): 2, (2, 2): 3}
    assert coloring.slots == first | {(2, 3): 0}  # 0B0 frees 0
    assert coloring.selection(2, 2) == (3, 3)


def test_a_slot_for_all_stages_of_a_microbatch_where_that_is_cheaper():
    coloring = color_activation_slots(INTERLEAVED, {0: 1, 2: 5}, layer_bytes=10)
    assert (coloring.microbatch_bytes, coloring.stage_microbatch_bytes) == (4 * 6 * 10, 5 * 5 * 10)
    assert (coloring.granularity, coloring.num_activation_slots) == ("microbatch", 4)
    assert coloring.slots == {(stage, microbatch): microbatch for stage in (0, 2) for microbatch in range(4)}
    assert {coloring.selection(stage, 1) for stage in (0, 2)} == {(1, 6)}  # all that the slot will hold


def test_each_stage_asks_for_its_own_layers_in_a_slot_of_its_own():
    coloring = color_activation_slots(INTERLEAVED, {0: 2, 2: 1})
    assert coloring.granularity == "stage_microbatch" and coloring.max_moe_layers_per_activation_slot == 2
    assert (coloring.selection(0, 1), coloring.selection(2, 1)) == ((1, 2), (3, 1))


def test_the_guide_figure():
    """Of three local stages only the second has MoE layers, 13 of them; a microbatch is alive longer than its part."""
    actions = "0F0 0F1 2F0 2F1 4F0 4F1 0F2 4B0 0F3 4B1 2F2 2B0 2F3 2B1 4F2 0B0 4F3 0B1 4B2 4B3 2B2 2B3 0B2 0B3".split()
    coloring = color_activation_slots(actions, {0: 0, 2: 13, 4: 0}, config=GUIDE, ep_size=16)
    assert (coloring.microbatch_bytes, coloring.stage_microbatch_bytes) == (1744830464, 1308622848)
    assert (coloring.granularity, coloring.num_activation_slots) == ("stage_microbatch", 3)
    config = replace(
        GUIDE,
        num_activation_slots=coloring.num_activation_slots,
        max_moe_layers_per_activation_slot=coloring.max_moe_layers_per_activation_slot,
    )
    plan = plan_memory(config, 16)
    assert (plan.activation_slot_bytes, plan.total_activation_bytes) == (436207616, 1308622848)
    with pytest.raises(ValueError, match="no activation slot for stage 0, microbatch 1; slots are for stages 2 and"):
        coloring.selection(0, 1)


@pytest.mark.parametrize(
    "block_scaled, device", [(None, None), (BlockScaledConfig(), None), (BlockScaledConfig(), "sm_90")]
)
def test_bytes_follow_the_policy_of_the_config_and_the_device(block_scaled, device):
    config = replace(GUIDE, activation_slot_capacity_factor=0.5, block_scaled=block_scaled)
    coloring = color_activation_slots(INTERLEAVED, {0: 2, 2: 1}, config=config, ep_size=16, device=device)
    for num_slots, depth, num_bytes in ((4, 3, coloring.microbatch_bytes), (5, 2, coloring.stage_microbatch_bytes)):
        sized = replace(config, num_activation_slots=num_slots, max_moe_layers_per_activation_slot=depth)
        assert num_bytes == plan_memory(sized, 16, device=device).total_activation_bytes
    plans = [plan_memory(config, 16, device=where) for where in (device, None)]
    assert (plans[0].total_activation_bytes > plans[1].total_activation_bytes) == (device is not None)


def test_a_split_backward_holds_its_slot_until_the_weights():
    coloring = color_activation_slots("0F0 0I0 0F1 0I1 0W0 0W1 0F2 0B2".split(), 1)
    assert coloring.slots == {(0, 0): 0, (0, 1): 1, (0, 2): 0}


@pytest.mark.parametrize(
    "actions", ["0F0 2F0 0B0 2B0", "0F0 2F0 2I0 0I0 0W0 2W0", "0F0 2F0 2I0 0B0 2W0"], ids=["B", "W", "B within I, W"]
)
def test_stages_share_a_slot_only_where_their_backwards_nest(actions):
    coloring = color_activation_slots(actions.split(), 1)
    assert coloring.microbatch_bytes == coloring.stage_microbatch_bytes
    assert coloring.granularity == "stage_microbatch"
    assert color_activation_slots("0F0 2F0 2I0 0I0 2W0 0W0".split(), 1).granularity == "microbatch"


# Brute force


@st.composite
def drawn_schedules(draw):
    """Actions of up to three stages and four microbatches in any legal order, and MoE layers of the stages."""
    stages = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    like_a_pipeline = draw(st.booleans())
    lines = []  # actions that follow each other
    for microbatch in range(draw(st.integers(1, 4))):
        backwards = {stage: draw(st.sampled_from(["B", "IW"])) for stage in stages}
        line = [f"{stage}F{microbatch}" for stage in stages]
        line += [f"{stage}{kind}{microbatch}" for stage in reversed(stages) for kind in backwards[stage]]
        lines += [line] if like_a_pipeline else [[a for a in line if a[0] == str(stage)] for stage in stages]
    actions = []
    while lines:
        line = draw(st.sampled_from(lines))
        actions.append(line.pop(0))
        lines = [line for line in lines if line]
    layers = draw(st.lists(st.integers(0, 4), min_size=len(stages), max_size=len(stages)).filter(any))
    return actions, dict(zip(stages, layers, strict=True))


@given(drawn_schedules())
def test_as_many_slots_as_are_ever_held_and_always_the_lowest_free_one(drawn):
    actions, layers = drawn
    with_layers = {stage for stage, number in layers.items() if number}
    peak = {
        "microbatch": max(live(actions, lambda s, m: m, set(layers))),
        "stage_microbatch": max(live(actions, lambda s, m: (s, m), with_layers)),
    }
    coloring = color_activation_slots(actions, layers, layer_bytes=7)
    assert coloring.microbatch_bytes == 7 * peak["microbatch"] * sum(layers.values())
    assert coloring.stage_microbatch_bytes == 7 * peak["stage_microbatch"] * max(layers.values())
    assert coloring.num_activation_slots == peak[coloring.granularity]

    if coloring.granularity == "microbatch":
        assert coloring.microbatch_bytes <= coloring.stage_microbatch_bytes
    free, held = set(range(100)), {}
    for place, (stage, kind, microbatch) in enumerate(actions):
        key = microbatch if coloring.granularity == "microbatch" else (int(stage), int(microbatch))
        if coloring.granularity == "stage_microbatch" and int(stage) not in with_layers:
            continue
        if kind == "F" and key not in held:
            held[key] = min(free)
            free.remove(held[key])
        if int(stage) in with_layers:
            assert coloring.selection(int(stage), int(microbatch))[0] == held[key]
        rest = [a for a in actions[place + 1 :] if a[2] == microbatch]
        if not [a for a in rest if coloring.granularity == "microbatch" or a[0] == stage]:
            free.add(held.pop(key))
    assert not held


# What an action may look like, and what is refused


def test_forms_of_actions():
    plain = color_activation_slots(INTERLEAVED, 1)
    tuples = [(int(action[0]), action[1], int(action[2])) for action in INTERLEAVED]
    assert color_activation_slots(tuples, {0: 1, 2: 1}) == plain
    words = {"F": "FORWARD", "B": "FULL_BACKWARD"}
    assert color_activation_slots(((s, words[kind], m) for s, kind, m in tuples), 1) == plain
    noise = ["0UNSHARD", "0SEND_F1", " 2RECV_B0 ", "2RESHARD", "2REDUCE_GRAD", "", None, (0, "UNSHARD", None)]
    assert color_activation_slots([a for action in INTERLEAVED for a in (*noise, action)], 1) == plain
    composite = [*INTERLEAVED[:7], "(2B1;2F2)OVERLAP_F_B", *INTERLEAVED[9:]]
    assert color_activation_slots(composite, 1) == plain


@pytest.mark.parametrize(
    "actions, layers, words",
    [
        ("0F0 0F0 0B0", 1, "action 0F0 comes twice"),
        ("0F0 0B0 0F0", 1, "action 0F0 comes twice"),
        ("0F0 0B0 0B0", 1, "action 0B0 comes twice"),
        ("0F0 0I0 0B0", 1, "0B0 is a second backward beside 0I0"),
        ("0F0 0B0 0W0", 1, "0W0 is a second backward beside 0B0"),
        ("0F0 0W0", 1, "0W0 has no 0I0 before it"),
        ("0F0 0B0 0B1", 1, "0B1 has no forward 0F1 before it"),
        ("0B0 0F0", 1, "0B0 has no forward 0F0"),
        ("0F0 0F1 0B0", 1, r"stage 0, microbatch 1 has no backward 0B1 \(or 0I1, 0W1\)"),
        ("0F0 0I0", 1, "stage 0, microbatch 0 has no backward 0W0"),
        ("0F0 0B0 2F0 2B0", {0: 1}, "action 2F0 is of stage 2, moe_layers has stages 0"),
        ("0F0 0B0", {0: 1, 2: 1}, "run stages 0, moe_layers has stages 0, 2"),
        ("0F0 0F1 2F0 2B0 0B0 0B1", 1, "stage 2 does not run microbatches 1"),
        ("", 1, "run stages none"),
        ("0F", 1, "'F', None. is no action"),
        ("0X0", 1, "'X', 0. is no action"),
        ("F0", 1, "'F0' is no action"),
        ("(0F0;0Q0)OVERLAP_F_B", 1, "'Q', 0. is no action"),
        ("0F0 0B0", 0, "no local stage has MoE layers"),
        ("0F0 0B0", {0: -1}, "must not be negative"),
    ],
)
def test_what_is_no_schedule(actions, layers, words):
    with pytest.raises(ValueError, match=f"^color_activation_slots: .*{words}"):
        color_activation_slots(actions.split(), layers)


@pytest.mark.parametrize("action", [(0, "F", -1), (-1, "F", 0), (0, "F"), 0])
def test_what_is_no_action(action):
    with pytest.raises(ValueError, match="is no action of a schedule; pass one rank's list"):
        color_activation_slots([action], 1)


def test_arguments():
    actions = ["0F0", "0B0"]
    for sizes, words in (
        ({"config": GUIDE}, "config and ep_size together"),
        ({"config": GUIDE, "ep_size": 2, "layer_bytes": 1}, "pass one of"),
        ({"layer_bytes": 0}, "must be positive"),
        ({"config": replace(GUIDE, inference=True), "ep_size": 2}, "for inference"),
        ({"config": replace(GUIDE, activation_slot_bytes=2**30), "ep_size": 2}, "activation_slot_capacity_factor"),
    ):
        with pytest.raises(ValueError, match=words):
            color_activation_slots(actions, 1, **sizes)
    for bad in ({"moe_layers": 1.0}, {"moe_layers": {0: True}}, {"layer_bytes": 1.0}, {"config": 1, "ep_size": 2}):
        with pytest.raises(TypeError, match="color_activation_slots"):
            color_activation_slots(**{"actions": actions, "moe_layers": 1} | bad)
    with pytest.raises(TypeError, match="a stage must be an int"):
        color_activation_slots([(0.0, "F", 0)], 1)


# The schedules of torch


def schedule_of(name: str, num_ranks: int, num_stages: int, num_microbatches: int):
    """A schedule as torch makes it, of stages that are only numbers."""
    flags = dict.fromkeys(("is_first", "is_last", "has_backward"), False)
    sizes = {"num_stages": num_ranks * num_stages, "group_size": num_ranks, "group_rank": 0}
    stage = SimpleNamespace(**sizes, **flags, device="cpu", submod=None)
    kind = schedules.get_schedule_class(name)
    one_stage = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stage if one_stage else [stage] * num_stages, num_microbatches, lambda: 0)


@pytest.mark.parametrize(
    "name, num_stages",
    [
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2),
        ("InterleavedZeroBubble", 3),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 4), (2, 8), (3, 6), (4, 8)])
def test_torch_schedules_of_several_stages(name, num_stages, num_ranks, num_microbatches):
    schedule = schedule_of(name, num_ranks, num_stages, num_microbatches)
    for rank in range(num_ranks):
        actions = schedule.pipeline_order[rank]
        flat = [part for a in actions if a is not None for part in (getattr(a, "sub_actions", None) or (a,))]
        stages = sorted({a.stage_index for a in flat})
        assert len(stages) == num_stages and {a.microbatch_index for a in flat} == set(range(num_microbatches))
        for layers in (dict.fromkeys(stages, 1), {s: 1 + 7 * (s == stages[0]) for s in stages}):
            coloring = color_activation_slots(actions, layers)
            triples = [(a.stage_index, a.computation_type, a.microbatch_index) for a in flat]
            assert coloring.microbatch_bytes == max(live(triples, lambda s, m: m, stages)) * sum(layers.values())
            pairs = max(live(triples, lambda s, m: (s, m), stages))
            assert coloring.stage_microbatch_bytes == pairs * max(layers.values())
            assert (coloring.granularity == "microbatch") == (
                coloring.microbatch_bytes <= coloring.stage_microbatch_bytes
            )
            assert color_activation_slots(map(str, filter(None, actions)), layers) == coloring
            assert color_activation_slots(triples, layers) == coloring
            assert color_activation_slots(schedule.pipeline_order_with_comms[rank], layers) == coloring


def test_the_worked_example_is_what_torch_runs():
    actions = schedule_of("Interleaved1F1B", 2, 2, 4).pipeline_order[0]
    assert [str(action) for action in actions if action is not None] == INTERLEAVED


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_torch_schedules_of_one_stage(name):
    order = schedule_of(name, 4, 1, 6)._get_pipeline_order()
    for rank in range(3):  # torch 2.13 misnumbers the forwards of the last rank of 1F1B
        coloring = color_activation_slots(order[rank], 2)
        assert coloring.num_activation_slots == (6 if name == "GPipe" else 4 - rank)


# With a Context

T, D, F, K, E = 4, 32, 32, 2, 4


def context_of(**slots):
    sizes = {"activation_slot_capacity_factor": 0.5, "device_scratch_capacity_factor": 1.0}
    return create_context(group=World.virtual(1), config=Config(T, D, F, K, E, **sizes, **slots), backend="reference")


class Layer(torch.nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.router, self.w13, self.w2 = (
            torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.2).to(dtype))
            for shape, dtype in (((D, E), torch.float32), ((E, 2 * F, D), torch.bfloat16), ((E, D, F), torch.bfloat16))
        )
        self.context = None

    def forward(self, x_TD):
        scores_TK, ids_TK = (x_TD.float() @ self.router).softmax(dim=1).topk(K, dim=1)
        return x_TD + routed_experts(x_TD, ids_TK, scores_TK, self.w13, self.w2, self.context)


LAYERS = {0: 2, 2: 1}


def train(actions: list[str], select, context) -> list[torch.Tensor]:
    """Run stages 0 and 2 in the schedule's order, as if stage 1 returned its input; gradients of all that has one."""
    stages = {s: torch.nn.Sequential(*(Layer(10 * s + i) for i in range(n))) for s, n in LAYERS.items()}
    for layer in (layer for stage in stages.values() for layer in stage):
        layer.context = context
    inputs, outputs = {}, {}
    for stage, kind, microbatch in actions:
        stage, microbatch = int(stage), int(microbatch)
        if kind == "F":
            context.select_activation_slot(*select(stage, microbatch))
            generator = torch.Generator().manual_seed(microbatch)
            x_TD = outputs[0, microbatch].detach() if stage else torch.randn(T, D, generator=generator).bfloat16()
            inputs[stage, microbatch] = x_TD.requires_grad_()
            outputs[stage, microbatch] = stages[stage](x_TD)
        else:
            y_TD = outputs[stage, microbatch]
            y_TD.backward(torch.ones_like(y_TD) if stage else inputs[2, microbatch].grad)
    context.check()
    assert not context.ranks[0].slot_used_NW.any() and not context.ranks[0].slot_layers_N.any()
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    return [leaf.grad for leaf in (*inputs.values(), *parameters)]


@pytest.mark.parametrize("actions", [INTERLEAVED, BREADTH_FIRST], ids=["stage_microbatch", "microbatch"])
def test_a_context_runs_by_the_coloring(actions, request):
    coloring = color_activation_slots(actions, LAYERS)
    assert coloring.granularity == request.node.callspec.id
    num_slots, depth = coloring.num_activation_slots, coloring.max_moe_layers_per_activation_slot
    with context_of(num_activation_slots=num_slots, max_moe_layers_per_activation_slot=depth) as context:
        grads = train(actions, coloring.selection, context)
    with context_of(num_activation_slots=4, max_moe_layers_per_activation_slot=3) as context:
        one_slot_a_microbatch = train(actions, lambda stage, microbatch: (microbatch, 3), context)
    assert all(torch.equal(a, b) for a, b in zip(grads, one_slot_a_microbatch, strict=True))

    def folded(stage, microbatch):
        slot, layers = coloring.selection(stage, microbatch)
        return slot % (num_slots - 1), layers

    for select, error in ((coloring.selection, ValueError), (folded, SlotError)):
        fewer = {"num_activation_slots": num_slots - 1, "max_moe_layers_per_activation_slot": depth}
        with pytest.raises(error), context_of(**fewer) as context:
            train(actions, select, context)


@one_process()
def test_a_step_of_torch_pipelining_runs_by_the_coloring():
    """Two stages and three microbatches by torch's runtime; gradients are those of one microbatch after the other."""
    modules = [torch.nn.Sequential(Layer(0), Layer(1)), torch.nn.Sequential(Layer(2))]
    stages = stages_of(modules, T, D)
    schedule = schedules.ScheduleLoopedBFS(stages, 3, lambda out, target: (out * target).sum(), scale_grads=False)
    coloring = color_activation_slots(schedule.pipeline_order[0], {0: 2, 1: 1})
    x, target = torch.randn(2, 3 * T, D).bfloat16()
    parameters = [p for module in modules for p in module.parameters()]

    num_slots, depth = coloring.num_activation_slots, coloring.max_moe_layers_per_activation_slot
    with context_of(num_activation_slots=num_slots, max_moe_layers_per_activation_slot=depth) as context:
        for layer in (layer for module in modules for layer in module):
            layer.context = context
        select_slots(stages, context, coloring)
        schedule.step(x, target=target)
        context.check()
        grads = [p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        context.select_activation_slot(0, depth)
        for x_TD, target_TD in reversed(list(zip(x.split(T), target.split(T), strict=True))):
            (modules[1](modules[0](x_TD)) * target_TD).sum().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, parameters, strict=True))


@pytest.mark.parametrize("actions", ["0F0 0B0", 5, None])
def test_what_is_no_list_is_refused_by_name(actions):
    with pytest.raises(TypeError, match="color_activation_slots: actions must be a list"):
        color_activation_slots(actions, 1)
