"""Scratch that reaches into host memory: the same bits, more rows. On a CPU one plain buffer holds all of it."""

import gc
import os
from dataclasses import replace

import pytest
import torch
from benchmarks import host_access

from dist_moe import BlockScaledConfig, RoutingOverflowError, VmmConfig, World, create_context, plan_memory, vmm
from dist_moe.memory_stats import MemoryStats
from dist_moe.path_oracle import FORWARD_ONLY, prepared
from dist_moe.planner import row_pitches, scratch_bytes
from dist_moe.shapes import KEPT_NAMES
from dist_moe.virtual import RankInputs, RankResults, run_virtual

from .path_cases import Case, assert_results_close, assert_results_equal, dense, rows_of, slots_of
from .process_group import ranks
from .rank_calls import forward, on_ranks, run_rank, step

CASES = (
    Case("per route", routing="one_rank", E=8),
    Case("de-duplicated", W=3, T=6, K=4, E=12, routing="one_rank"),
    Case("rows past a tile border", T=70, D=32, F=160, E=8, routing="one_rank"),
)
SHARES = (2 / 3, 1 / 4)  # of the scratch of the fullest rank, what lies on the device
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
IN_SCRATCH = dict(zip(KEPT_NAMES, (("x", "h1", "h2", "h3"), ("x", "h2", "h3"), ("h2", "h3")), strict=True))


def host_backed(case: Case, share: float, **changes) -> dict:
    return {"device_scratch_capacity_factor": share * case.W, "vmm": VmmConfig(case.W)} | changes


def poisoned(context):
    """What no kernel writes is NaN."""
    for rank in context.ranks:
        rank.buffer.fill_(0xFF)
    return context


def there(case: Case, device: str) -> list[RankInputs]:
    return [RankInputs(*(tensor.to(device) for tensor in vars(rank).values())) for rank in case.inputs()]


def run(case: Case, device: str, backend: str, **changes) -> tuple[list[RankResults], list[MemoryStats]]:
    """Results and statistics by rank. Scratch must be written down to its reported peak, and not below."""
    world, inputs = World.virtual(case.W, device), there(case, device)
    with poisoned(create_context(group=world, config=case.config(**changes), backend=backend)) as context:
        results = run_virtual(case.W, context.config, inputs, context=context)
        again = run_virtual(case.W, context.config, inputs, context=context)
        assert_results_equal(results, again)
        stats = [context.memory_stats(rank) for rank in range(case.W)]
        for rank, found in zip(context.ranks, stats, strict=True):
            below = len(rank.buffer) - found.scratch_peak_bytes
            assert (rank.buffer[context.memory_plan.total_activation_bytes : below] == 0xFF).all()
            assert found.rows_max == 0 or (rank.buffer[below : below + 16] != 0xFF).any()
        return results, stats


# Interpreted kernels take ten seconds a case, and place rows by device words that the path's own tests cover: one, in
# which all regions lie in the scratch.
VARIANTS = [("reference", share, case, level) for share in SHARES for case in CASES for level in KEPT_NAMES]
VARIANTS += [("triton", *rest) for _, *rest in VARIANTS if rest[0] == SHARES[1]][: None if DEVICE == "cuda" else 1]


@pytest.mark.parametrize("backend, share, case, level", VARIANTS, ids=str)
def test_the_bits_are_those_of_a_step_that_fits(backend, share, case, level):
    device = "cpu" if backend == "reference" else DEVICE
    slot = slots_of(case)[level]
    wanted, none = run(case, device, backend, **slot)
    found, stats = run(case, device, backend, **host_backed(case, share), **slot)
    assert_results_equal(found, wanted)
    assert_results_close([RankResults(*(t.cpu() for t in vars(r).values())) for r in found], dense(case, case.inputs()))
    assert not any(rank.host_overflow_peak_bytes for rank in none)

    config, rows = case.config(**host_backed(case, share), **slot), max(rows_of(case))
    (fullest,) = [rank for rank in stats if rank.rows_max == rows]
    assert [name for name, count in fullest.layers_kept.items() if count] == [level]
    row = sum(row_pitches(config)[region] for region in IN_SCRATCH[level])
    assert rows * row <= fullest.scratch_peak_bytes <= (rows + 1) * row
    if device == "cpu":  # on a GPU the sections of such small cases are all rounded up
        on_device = plan_memory(config, case.W).device_scratch_bytes
        assert fullest.host_overflow_peak_bytes == max(0, fullest.scratch_peak_bytes - on_device)
        assert fullest.host_overflow_peak_bytes > 0 or share > 0.5 and level != KEPT_NAMES[0]


def _one_rank(rank, group, case, changes):
    with create_context(group=group, config=case.config(**changes), device="cpu", backend="reference") as context:
        return run_rank(case.inputs()[rank], context)


def test_processes_use_it_too():
    case = CASES[0]
    wanted, _ = run(case, "cpu", "reference")
    assert_results_equal(on_ranks(case.W, _one_rank, case, host_backed(case, 1 / 4)), wanted)


def test_the_total_factor_is_the_limit_and_the_next_step_is_right():
    case = CASES[0]
    changes = {"device_scratch_capacity_factor": 0.5, "vmm": VmmConfig(1.5)}
    fitting, world = Case("fitting", routing="balanced", E=8), World.virtual(2)
    with create_context(group=world, config=case.config(**changes), backend="reference") as context:
        with pytest.raises(RoutingOverflowError, match=r"needs 32 rows, 24 are available.*factor of 2 .*VmmConfig"):
            run_virtual(2, context.config, case.inputs(), context=context)
        context.reset()
        found = run_virtual(2, context.config, fitting.inputs(), context=context)
    assert_results_equal(found, run(fitting, "cpu", "reference")[0])


def test_inference_scratch_lies_there_too():
    case = Case("serving", routing="one_rank", E=8, slot_factor=None)
    serve = {"inference": True, "num_activation_slots": 0}
    inputs = [RankInputs(*list(vars(rank).values())[:5]) for rank in case.inputs()]
    outs = []
    for changes in (serve, serve | host_backed(case, 1 / 4)):
        with poisoned(create_context(group=World.virtual(2), config=case.config(**changes), backend="reference")) as c:
            outs.append(run_virtual(2, c.config, inputs, context=c))
            plan = c.memory_plan
    assert torch.equal(outs[0][0].out_TD, outs[1][0].out_TD) and torch.equal(outs[0][1].out_TD, outs[1][1].out_TD)
    assert plan.uses_host_scratch and plan == plan_memory(c.config, 2)


@pytest.mark.parametrize("block_scaled", [BlockScaledConfig(), BlockScaledConfig("nvfp4")], ids=lambda how: how.format)
def test_block_scaled_calls_reach_into_it(block_scaled):
    """A training step of MXFP8, and a call of prepared weights of each format: the bits of what fits."""
    case = Case("more rows than their padding", T=512, D=64, F=32, K=1, E=4, routing="one_rank", slot_factor=None)
    for serves in (False, True)[block_scaled.format == "nvfp4" :]:
        found = []
        for changes in ({}, host_backed(case, 1 / 4)):
            config = case.config(block_scaled=block_scaled, **changes | (FORWARD_ONLY if serves else {}))
            inputs = prepared(case.inputs(), config, inference=True) if serves else case.inputs()
            with poisoned(create_context(group=World.virtual(2), config=config, backend="reference")) as context:
                found.append(run_virtual(2, config, inputs, context=context))
                overflow = max(context.memory_stats(rank).host_overflow_peak_bytes for rank in range(2))
                assert (overflow > 0) == bool(changes) == context.memory_plan.uses_host_scratch
        assert_results_equal(*found)
        assert found[0][0].out_TD.any()


# On GPUs


MIB = 2**20
# Device scratch of 29 MiB and host scratch of as much: three sections, none of them small.
REAL = Case("real", W=2, T=512, D=1024, F=768, K=4, E=8, routing="one_rank", slot_factor=None)


class Tally:
    """The driver, and the bytes that were made and unmapped through it."""

    def __init__(self, api):
        self.api, self.made, self.unmapped, self.refuses_from = api, [], 0, None

    def __getattr__(self, name):
        return getattr(self.api, name)

    def cuMemCreate(self, num_bytes, properties, flags):
        if len(self.made) + 1 == self.refuses_from:
            return (self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        kind = properties.location.type
        self.made.append((num_bytes, kind == self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE))
        return self.api.cuMemCreate(num_bytes, properties, flags)

    def cuMemUnmap(self, address, num_bytes):
        self.unmapped += num_bytes
        return self.api.cuMemUnmap(address, num_bytes)


def requested_bytes() -> int:
    """Of torch's allocator, in tensors that are still used: without what it rounds up, and without garbage."""
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.fixture
def tally(monkeypatch) -> Tally:
    from cuda.bindings import driver

    counting = Tally(driver)
    monkeypatch.setattr(vmm, "_open", lambda device: vmm._Driver(torch.empty(1, device=device).device, counting))
    return counting


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetched", "not prefetched"])
@pytest.mark.parametrize("share", SHARES)
def test_ranges_of_a_gpu_hold_what_their_plan_says(share, prefetch, tally):
    wanted, _ = run(REAL, "cuda", "triton")
    changes = host_backed(REAL, share, vmm=VmmConfig(2.0, prefetch=prefetch))
    found, stats = run(REAL, "cuda", "triton", **changes)
    assert_results_equal(found, wanted)

    config = REAL.config(**changes)
    plan = plan_memory(config, 2, device="cuda")
    assert plan.vmm_granularity_bytes >= 4096 and plan.vmm_host_section_bytes >= plan.host_scratch_bytes > MIB
    beyond = scratch_bytes(config, 2 * REAL.T * REAL.K) - plan.vmm_device_scratch_section_bytes
    on_host = max(rank.host_overflow_peak_bytes for rank in stats)
    assert MIB < beyond - scratch_bytes(config, 0) <= on_host <= beyond <= plan.vmm_host_section_bytes
    parts = [(plan.vmm_device_prefix_bytes, True), (plan.vmm_host_section_bytes, False)]
    parts.append((plan.vmm_device_scratch_section_bytes, True))
    assert tally.made == 2 * parts and tally.unmapped == 2 * plan.total_virtual_bytes  # two ranks

    contexts = [create_context(group=World.virtual(2, "cuda"), config=config) for _ in range(2)]  # four ranges at once
    for context in contexts:
        assert context.memory_plan == plan and context.activation_buffer.numel() == plan.total_virtual_bytes
        assert_results_equal(run_virtual(2, config, there(REAL, "cuda"), context=context), wanted)
        context.close()
    assert tally.unmapped == 6 * plan.total_virtual_bytes and len(tally.made) == 18


@pytest.mark.gpu
def test_a_context_takes_what_its_plan_says():
    config = REAL.config()
    plan = plan_memory(config, 2)
    planned = 2 * (plan.total_device_buffer_bytes + sum(size for _, size in plan.symmetric_bytes))
    run(REAL, "cuda", "triton")
    before = requested_bytes()
    with create_context(group=World.virtual(2, "cuda"), config=config) as context:
        taken = requested_bytes() - before
        assert context.memory_plan == plan
        assert planned <= taken <= planned + 2 * 32 * 1024  # words, and where regions start
    del context
    assert requested_bytes() == before


@pytest.mark.gpu
def test_a_captured_step_serves_routing_of_either_size():
    """The range stays where it is, so a graph captured on rows that fit the device replays with rows that do not."""
    case = Case("graph", W=1, T=512, D=1024, F=768, K=4, E=8, slot_factor=None)
    factors = {"device_scratch_capacity_factor": 0.25, "vmm": VmmConfig(1.0)}
    few, many = replace(case, routing="dropped(0.9)"), case
    inputs = [there(one, "cuda")[0] for one in (few, many)]
    with poisoned(create_context(group=None, config=case.config(**factors))) as context:
        wanted = [run_rank(one, context) for one in inputs]
        static, graph = RankInputs(*(tensor.clone() for tensor in vars(inputs[0]).values())), torch.cuda.CUDAGraph()
        address = context.activation_buffer.data_ptr()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = step(static, context)
        for one, expected in [*zip(inputs, wanted, strict=True)] * 2:
            for old, new in zip(vars(static).values(), vars(one).values(), strict=True):
                old.copy_(new)
            graph.replay()
            context.check()
            assert_results_equal([captured], [expected])
        assert context.activation_buffer.data_ptr() == address
        assert context.memory_stats().host_overflow_peak_bytes > 0


@pytest.mark.gpu
def test_every_access_of_the_path_reaches_host_memory():
    assert host_access.main() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetched", "not prefetched"])
def test_a_section_without_room_leaves_nothing_behind(prefetch, tally):
    """The host section of the second rank, when all of the first and a section of its own are there."""
    before, tally.refuses_from = requested_bytes(), 5
    config = REAL.config(**host_backed(REAL, 1 / 4, vmm=VmmConfig(2.0, prefetch)))
    with pytest.raises(torch.OutOfMemoryError, match=r"no room for the host of .*MiB"):
        create_context(group=World.virtual(2, "cuda"), config=config)
    assert requested_bytes() == before
    assert len(tally.made) == 4 and tally.unmapped == sum(size for size, _ in tally.made)


def _between_gpus(rank, group, case, share):
    """This rank's bytes of host memory; its results must be the same with and without, training and serving."""
    inputs = RankInputs(*(tensor.cuda() for tensor in vars(case.inputs()[rank]).values()))
    trained, served = [], []
    for changes in ({}, host_backed(case, share)):
        with poisoned(create_context(group=group, config=case.config(**changes), peer_timeout_s=60)) as context:
            trained.append(run_rank(inputs, context))
        serve = {"inference": True, "num_activation_slots": 0}  # its range begins with host memory
        with poisoned(create_context(group=group, config=case.config(**changes, **serve))) as context, torch.no_grad():
            served.append(forward(vars(inputs), inputs.ids_TK, context))
            context.check()
            assert context.activation_buffer.device == inputs.x_TD.device
    assert_results_equal(trained[:1], trained[1:])
    assert torch.equal(served[0], served[1]) and torch.equal(served[0], trained[0].out_TD)
    return context.memory_plan.vmm_host_section_bytes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", SHARES)
def test_two_gpus_give_the_same_bits(share):
    on_host = ranks(2, device="cuda").run(_between_gpus, REAL, share, timeout_s=120)
    assert min(on_host) > MIB
