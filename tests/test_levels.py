"""What the slot keeps of a layer, with other loads on every rank: the same bits at every level."""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dist_moe import World, create_context
from dist_moe.planner import saved_full_bytes, saved_h1_bytes
from dist_moe.shapes import KEPT_NAMES
from dist_moe.virtual import RankInputs, run_virtual

from .path_cases import Case, assert_results_close, assert_results_equal, dense, slots_of
from .process_group import ranks
from .rank_calls import forward, leaves_of, on_ranks, results_of, run_rank, step

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
CASES = (Case("per route", E=8, routing="zipf(1.0)"), Case("de-duplicated", K=4, E=8, routing="zipf(1.0)"))


def there(case: Case, device: str) -> list[RankInputs]:
    return [RankInputs(*(tensor.to(device) for tensor in vars(rank).values())) for rank in case.inputs()]


def kept_by(context) -> list[str]:
    """The levels that this rank's forwards had, without how often."""
    return [name for name, count in context.memory_stats().layers_kept.items() if count]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_virtual_ranks(case, backend):
    device = "cpu" if backend == "reference" else DEVICE
    found = []
    for level, sizes in slots_of(case).items():
        world = World.virtual(case.W, device)
        with create_context(group=world, config=case.config(**sizes), backend=backend) as context:
            found.append(run_virtual(case.W, context.config, there(case, device), context=context))
            assert kept_by(context) == [level]
    assert_results_equal(found[0], found[2])
    assert_results_equal(found[1], found[2])
    cpu = [type(result)(*(tensor.cpu() for tensor in vars(result).values())) for result in found[0]]
    assert_results_close(cpu, dense(case, case.inputs()))


def _levels(rank, group, case, device):
    """This rank's results, which must be the same at every level."""
    inputs, found = there(case, device)[rank], []
    for level, sizes in slots_of(case).items():
        with create_context(group=group, config=case.config(**sizes), device=device) as context:
            found.append(run_rank(inputs, context))
            assert kept_by(context) == [level]
    assert_results_equal(found[:1], found[1:2])
    assert_results_equal(found[:1], found[2:])
    return type(found[0])(*(tensor.cpu() for tensor in vars(found[0]).values()))


def test_processes():
    assert_results_close(on_ranks(2, _levels, CASES[1], "cpu"), dense(CASES[1], CASES[1].inputs()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("K", [2, 8])
def test_gpus(K):
    case = Case("gpus", T=300, D=512, F=384, K=K, E=32, routing="zipf(1.0)")
    assert_results_close(ranks(2, device="cuda").run(_levels, case, "cuda", timeout_s=120), dense(case, case.inputs()))


@pytest.mark.gpu
def test_one_capture_serves_saved_and_recomputed_steps():
    """The slot holds the rows of x and h1 of few tokens, x and h1 of more, x alone of all."""
    names = ("dropped(0.9)", "dropped(0.5)", "uniform")
    cases = [Case(name, W=1, T=256, D=128, F=96, K=4, E=8, routing=name) for name in names]
    kept_rows = [sum(int((inputs.ids_TK >= 0).sum()) for inputs in case.inputs()) for case in cases]
    config = cases[0].config()
    room = saved_h1_bytes(config, kept_rows[1])
    assert saved_full_bytes(config, kept_rows[0]) <= room < saved_full_bytes(config, kept_rows[1])
    sizes = {"activation_slot_bytes": room, "activation_slot_capacity_factor": None}
    sets = [there(case, "cuda")[0] for case in cases]
    wanted = []
    for one in sets:
        with create_context(group=None, config=config) as context:
            wanted.append(run_rank(one, context))
            assert kept_by(context) == [KEPT_NAMES[2]]
    with create_context(group=None, config=cases[0].config(**sizes)) as context:
        static, graph = RankInputs(*(tensor.clone() for tensor in vars(sets[0]).values())), torch.cuda.CUDAGraph()
        run_rank(static, context)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = step(static, context)
        for which in (0, 1, 2, 1, 0):
            for old, new in zip(vars(static).values(), vars(sets[which]).values(), strict=True):
                old.copy_(new)
            context.reset_memory_stats()
            graph.replay()
            assert kept_by(context) == [KEPT_NAMES[2 - which]]
            assert_results_equal([captured], [wanted[which]])


@pytest.mark.gpu
def test_fifty_checkpointed_steps_hold_the_same_memory():
    case = Case("checkpointed", W=1, T=64, D=128, F=96, K=2, E=8)
    (inputs,) = there(case, "cuda")
    with create_context(group=None, config=case.config()) as context:
        wanted = run_rank(inputs, context)

        def checkpointed():
            leaves = leaves_of(inputs, context.config)
            out_TD = checkpoint(
                lambda x_TD: forward(leaves | {"x_TD": x_TD}, inputs.ids_TK, context),
                leaves["x_TD"],
                use_reentrant=False,
            )
            out_TD.backward(inputs.grad_out_TD)
            return results_of(out_TD, leaves)

        assert_results_equal([checkpointed()], [wanted])
        context.reset_memory_stats()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(50):
            assert_results_equal([checkpointed()], [wanted])
        assert torch.cuda.memory_allocated() == before
        assert context.memory_stats().calls == 50 and context.memory_stats().layers_recomputed == 0
