"""The path over ranks as processes, through the public API: within the bars, and bit for bit what virtual ranks give.

Ranks share memory here and meet at the signals; virtual ranks run the same stages in one process. Equal bits mean that
nothing of a result depends on which rank is how fast.
"""

from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from dist_moe import create_context
from dist_moe.virtual import RankInputs, RankResults, run_virtual

from .path_cases import CASES, Case, assert_results_close, assert_results_equal, dense
from .process_group import ranks
from .rank_calls import forward, leaves_of, on_ranks, results_of, run_rank

POOL = 4
TRITON_CASES = (
    Case("two ranks per route", T=4, D=32, F=32),
    Case("two ranks de-duplicated", T=4, D=32, F=32, K=4, E=8, slot_factor=None),
    Case("three ranks a rank without tokens", W=3, T=4, D=32, F=32, routing="empty_ranks", E=6),
    Case("eight ranks de-duplicated", W=8, T=2, D=32, F=32, K=8, E=16),
)
SMALL = {W: Case(f"{W} ranks", W=W, T=6, D=32, F=32, K=2, E=2 * W) for W in (2, 3, 4)}


def join(group, case: Case, backend: str = "reference", **changes):
    config = case.config(**changes)
    return create_context(group=group, config=config, device="cpu", backend=backend, peer_timeout_s=60)


def virtual(case: Case, inputs=None, backend: str = "reference") -> list[RankResults]:
    """In a rank's process, so that its products are computed by as many threads."""
    return run_virtual(case.W, case.config(), inputs or case.inputs(), backend=backend)


def assert_same_as_virtual(results: list[RankResults], case: Case, inputs=None) -> None:
    (expected,) = ranks(POOL, interpret=True).run(_virtual_of_rank_0, case, inputs)[:1]
    assert_results_equal(results, expected)
    assert_results_close(results, dense(case, inputs or case.inputs()))


def _virtual_of_rank_0(rank, group, case, inputs):
    return virtual(case, inputs) if rank == 0 else None


# ---- the cases


def _run_case(rank, group, case, backend):
    with join(group, case, backend) as context:
        results = run_rank(case.inputs()[rank], context)
    return results, virtual(case, backend=backend) if rank == 0 else None


@pytest.mark.parametrize(
    "case, backend",
    [(case, "reference") for case in CASES if case.W > 1] + [(case, "triton") for case in TRITON_CASES],
    ids=str,
)
def test_case(case, backend):
    results, expected = zip(*on_ranks(case.W, _run_case, case, backend), strict=True)
    assert_results_equal(results, expected[0])
    assert_results_close(results, dense(case, case.inputs()))


ONE_RANK = [case for case in CASES if case.W == 1]


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_one_rank_without_a_group(case):
    with join(None, case) as context:
        assert_results_equal([run_rank(case.inputs()[0], context)], virtual(case))


def _alone(rank, groups):
    if groups[0] is None:
        return None
    results = []
    for case in ONE_RANK:
        with join(groups[0], case) as context:
            assert context.world.size == 1
            results.append(([run_rank(case.inputs()[0], context)], virtual(case)))
    return results


def test_a_group_of_one_rank():
    for results, expected in ranks(POOL, interpret=True).run(_alone, groups=[[2]])[2]:
        assert_results_equal(results, expected)


# ---- groups


def _tagged(rank, groups, case):
    """Inputs by rank of the group, which is not that of the job."""
    own = next((group for group in groups if group is not None), None)
    if own is None:
        return None
    with join(own, case) as context:
        group_rank = dist.get_rank(own)
        return group_rank, run_rank(case.inputs()[group_rank], context)


@pytest.mark.parametrize("members", [[2, 3], [3, 1], [1, 2, 3]], ids=str)
def test_ranks_are_those_of_the_group(members):
    case = SMALL[len(members)]
    results = ranks(POOL, interpret=True).run(_tagged, case, groups=[members])
    assert [result is not None for result in results] == [rank in members for rank in range(POOL)]
    by_rank = dict(result for result in results if result is not None)
    assert_same_as_virtual([by_rank[rank] for rank in range(case.W)], case)


def test_disjoint_groups_run_side_by_side():
    results = ranks(POOL, interpret=True).run(_tagged, SMALL[2], groups=[[0, 2], [1, 3]])
    for members in ((0, 2), (1, 3)):
        assert_same_as_virtual([results[rank][1] for rank in members], SMALL[2])


def _two_groups(rank, groups, case):
    """Alternately, so that each context meets the signals of the other's calls, were they shared."""
    contexts = [join(group, case) if group is not None else None for group in groups]
    results = [[], []]
    for seed in range(3):
        for which, (group, context) in enumerate(zip(groups, contexts, strict=True)):
            if context is not None:
                inputs = replace(case, seed=10 * which + seed).inputs()[dist.get_rank(group)]
                results[which].append((dist.get_rank(group), run_rank(inputs, context)))
    return results


def test_overlapping_groups_used_alternately():
    case = SMALL[3]
    results = ranks(POOL, interpret=True).run(_two_groups, case, groups=[[0, 1, 2], [1, 2, 3]])
    for which in range(2):
        for step in range(3):
            by_rank = dict(result[which][step] for result in results if result[which])
            assert_same_as_virtual([by_rank[rank] for rank in range(3)], replace(case, seed=10 * which + step))


def _two_contexts(rank, group, cases):
    contexts = [join(group, case) for case in cases]
    results = [[] for _ in cases]
    for seed in range(2):
        steps = []
        for case, context in zip(cases, contexts, strict=True):
            inputs = replace(case, seed=seed).inputs()[rank]
            leaves = leaves_of(inputs, context.config)
            steps.append((inputs, leaves, forward(leaves, inputs.ids_TK, context)))
        for kept, (inputs, leaves, out_TD) in zip(results, steps, strict=True):
            out_TD.backward(inputs.grad_out_TD)
            kept.append(results_of(out_TD, leaves))
    for context in contexts:
        context.check()
    return results


@pytest.mark.parametrize(
    "other", [SMALL[2], Case("other", T=3, D=64, F=32, K=4, E=8)], ids=["same shape", "other shape"]
)
def test_two_contexts_on_one_group(other):
    cases = (SMALL[2], other)
    results = on_ranks(2, _two_contexts, cases)
    for which, case in enumerate(cases):
        for seed in range(2):
            assert_same_as_virtual([rank[which][seed] for rank in results], replace(case, seed=seed))


# ---- steps


def _saved_and_recomputed(rank, group, case):
    results = []
    for factor in (1.0, None):
        with join(group, replace(case, slot_factor=factor)) as context:
            results += [run_rank(case.inputs()[rank], context) for _ in range(2)]
    return results


@pytest.mark.parametrize("case", [SMALL[3], Case("de-duplicated", K=4, E=8, routing="zipf(1.0)")], ids=str)
def test_saved_recomputed_and_repeated_have_equal_bits(case):
    results = on_ranks(case.W, _saved_and_recomputed, case)
    for other in range(1, 4):
        assert_results_equal([rank[0] for rank in results], [rank[other] for rank in results])


def _three_layers(rank, group, case, how):
    """The output of a layer is the x of the next; gradients of the first x, and of all weights and scores summed."""
    factor = {"saved": 1.0, "the first saved": 0.4, "recomputed": None}.get(how, 1.0)
    depth = 1 if how == "checkpoints" else 3
    case = replace(case, slot_factor=factor)
    with join(group, case, max_moe_layers_per_activation_slot=depth) as context:
        inputs = case.inputs()[rank]
        leaves = leaves_of(inputs, context.config)

        def layer(x_TD):
            return forward(leaves | {"x_TD": x_TD}, inputs.ids_TK, context)

        def layers(x_TD):
            return layer(layer(layer(x_TD)))

        if how == "checkpoints":
            out_TD = leaves["x_TD"]
            for _ in range(3):
                out_TD = checkpoint(layer, out_TD, use_reentrant=False)
        elif how == "one checkpoint":
            out_TD = checkpoint(layers, leaves["x_TD"], use_reentrant=False)
        else:
            out_TD = layers(leaves["x_TD"])
        out_TD.backward(inputs.grad_out_TD)
        context.check()
        assert not context.ranks[0].slot_used_NW.any() and not context.ranks[0].slot_layers_N.any()
        return results_of(out_TD, leaves)


@pytest.mark.parametrize("W", [2, 3])
def test_layers_in_one_slot_however_their_state_is_kept(W):
    saved = on_ranks(W, _three_layers, SMALL[W], "saved")
    for how in ("the first saved", "recomputed", "one checkpoint", "checkpoints"):
        assert_results_equal(saved, on_ranks(W, _three_layers, SMALL[W], how))


def _two_slots(rank, group, case):
    """Two microbatches of two layers each, first in, first out: each in a slot of its own."""
    with join(group, case, num_activation_slots=2, max_moe_layers_per_activation_slot=2) as context:
        leaves, outs = [], []
        for seed in range(2):
            inputs = replace(case, seed=seed).inputs()[rank]
            leaves.append(leaves_of(inputs, context.config))
            outs.append(leaves[seed]["x_TD"])
        for _ in range(2):
            for seed in range(2):
                context.select_activation_slot(seed, 2)
                ids_TK = replace(case, seed=seed).inputs()[rank].ids_TK
                outs[seed] = forward(leaves[seed] | {"x_TD": outs[seed]}, ids_TK, context)
        for seed in range(2):
            outs[seed].backward(replace(case, seed=seed).inputs()[rank].grad_out_TD)
        context.check()
        interleaved = [results_of(out, leaf) for out, leaf in zip(outs, leaves, strict=True)]

        one_by_one = []
        for seed in range(2):
            inputs = replace(case, seed=seed).inputs()[rank]
            leaf = leaves_of(inputs, context.config)
            context.select_activation_slot(0, 2)
            out_TD = forward(leaf | {"x_TD": forward(leaf, inputs.ids_TK, context)}, inputs.ids_TK, context)
            out_TD.backward(inputs.grad_out_TD)
            one_by_one.append(results_of(out_TD, leaf))
        return interleaved, one_by_one


def test_two_slots_alive_at_once():
    results = on_ranks(2, _two_slots, SMALL[2])
    for seed in range(2):
        assert_results_equal([rank[0][seed] for rank in results], [rank[1][seed] for rank in results])


SIZES = ((8, 8, 8), (1, 0, 5), (0, 0, 0), (8, 3, 1), (0, 7, 0), (8, 8, 8))
PER_TOKEN = ("x_TD", "ids_TK", "scores_TK", "grad_out_TD")


def cut(case: Case, sizes) -> list[RankInputs]:
    return [
        RankInputs(*(t[:size] if name in PER_TOKEN else t for name, t in vars(rank).items()))
        for rank, size in zip(case.inputs(), sizes, strict=True)
    ]


def _sizes(rank, group, cases):
    with join(group, cases[0]) as context:
        return [run_rank(cut(case, sizes)[rank], context) for case, sizes in zip(cases, SIZES, strict=True)]


@pytest.mark.parametrize("K", [2, 4], ids=["per route", "de-duplicated"])
def test_every_call_and_rank_passes_another_number_of_tokens(K):
    routings = ("uniform", "one_rank", "uniform", "dropped(0.5)", "duplicates", "one_expert")
    shape = Case("sizes", W=3, T=8, D=32, F=32, K=K, E=12)
    cases = [replace(shape, seed=seed, routing=name) for seed, name in enumerate(routings)]
    results = on_ranks(3, _sizes, cases)
    for step, (case, sizes) in enumerate(zip(cases, SIZES, strict=True)):
        now = [rank[step] for rank in results]
        assert [len(result.out_TD) for result in now] == list(sizes)
        if sum(sizes):
            assert_same_as_virtual(now, case, cut(case, sizes))
        else:
            assert all(not result.grad_w13_L2FD.any() and not result.grad_w2_LDF.any() for result in now)
