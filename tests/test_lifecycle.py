"""The life of a Context: made, used for long, closed or not, at the end of its group and of its process."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dist_moe
from dist_moe import Context, create_context, plan_memory, routed_experts
from dist_moe import context as context_module
from dist_moe.virtual import run_virtual

from .path_cases import Case, assert_results_close, assert_results_equal, dense
from .process_group import ROOT
from .rank_calls import forward, leaves_of, on_ranks, run_rank

ONE = Case("one rank", W=1, T=4, D=32, F=32)
TWO = Case("two ranks", W=2, T=4, D=32, F=32)


def make(group=None, case=ONE, name=None, **changes) -> Context:
    return create_context(
        group=group, config=case.config(**changes), device="cpu", backend="reference", peer_timeout_s=30, name=name
    )


def shared_memory_files(pid) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"dist_moe-{pid}-*")]


# ---- what it is


def test_a_context_says_what_it_is():
    with make(name="layer 7") as context:
        assert (context.num_local_input_tokens, context.hidden_dim, context.top_k) == (4, 32, 2)
        assert context.context_id == context.name == "layer 7"
        assert context.group is None and context.config == ONE.config() and context.device == torch.device("cpu")
        assert context.memory_plan == plan_memory(ONE.config(), 1)
        assert context.activation_buffer.numel() == context.memory_plan.total_device_buffer_bytes
        assert set(context.buffers) >= {"tokens", "outputs", "signals"}
        assert "layer 7" in repr(context) and "closed" not in repr(context)


def test_it_is_made_by_create_context_alone():
    for arguments in ({}, {"build": object(), "group": None}):
        with pytest.raises(TypeError, match=r"use create_context\(\)"):
            Context(**arguments)


def test_select_activation_slot_says_what_it_takes():
    with make(num_activation_slots=2, max_moe_layers_per_activation_slot=3) as context:
        assert context.saved.selected == (0, 3)
        context.select_activation_slot(1, 2)
        assert context.saved.selected == (1, 2)
        for slot in (-1, 2):
            with pytest.raises(ValueError, match="activation slot must be in"):
                context.select_activation_slot(slot, 1)
        for depth in (0, 4):
            with pytest.raises(ValueError, match="num_moe_layers"):
                context.select_activation_slot(0, depth)
        for wrong in (1.0, "0", True, None):
            with pytest.raises(TypeError, match="activation_slot"):
                context.select_activation_slot(wrong, 1)
        assert context.saved.selected == (1, 2)
        context.reset()
        assert context.saved.selected == (0, 3)
    with make(inference=True, activation_slot_capacity_factor=None, num_activation_slots=0) as context:
        context.select_activation_slot(17, 0)  # nothing to choose from


# ---- its end


def _uses(context):
    return (
        lambda: context.num_local_input_tokens,
        lambda: context.hidden_dim,
        lambda: context.top_k,
        lambda: context.context_id,
        lambda: context.buffers,
        lambda: context.activation_buffer,
        context.check,
        context.reset,
        lambda: context.select_activation_slot(0, 1),
        context.__enter__,
        lambda: run_rank(ONE.inputs()[0], context),
    )


def test_after_close_every_use_says_so():
    context = make()
    leaves = leaves_of(ONE.inputs()[0], context.config)
    out = forward(leaves, ONE.inputs()[0].ids_TK, context)
    context.close()
    context.close()
    for use in _uses(context):
        with pytest.raises(RuntimeError, match="is closed"):
            use()
    with pytest.raises(RuntimeError, match="is not live"):
        out.sum().backward()
    assert "closed" in repr(context)


def test_with_closes_also_after_an_exception():
    with pytest.raises(KeyError, match="mine"), make() as context:
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="is closed"):
        context.check()


def test_names_belong_to_live_contexts():
    context = make(name="one name")
    with pytest.raises(ValueError, match="'one name' is that of a live context"):
        make(name="one name")
    context.close()
    context = make(name="one name")
    run_rank(ONE.inputs()[0], context)
    del context  # dropped, not closed
    gc.collect()
    assert "one name" not in context_module.live
    make(name="one name").close()


def test_a_dropped_context_gives_its_memory_back_without_the_collector():
    gc.disable()
    try:
        context = make()
        run_rank(ONE.inputs()[0], context)
        buffer = torch.utils.weak.WeakTensorKeyDictionary({context.activation_buffer: 1})
        del context
        assert len(buffer) == 0
    finally:
        gc.enable()


def _close_around_the_group(rank, group, case):
    """One context closed before the group is destroyed, one used and closed after that, one never."""
    first, second, third = (make(group, case) for _ in range(3))
    inputs = case.inputs()[rank]
    results = [run_rank(inputs, context) for context in (first, second, third)]
    first.close()
    dist.barrier(group)
    dist.destroy_process_group()
    results.append(run_rank(inputs, second))  # ranks meet in shared memory, not in the group
    second.close()
    second.close()
    results.append(run_rank(inputs, third))
    del third
    return results, shared_memory_files(os.getpid())


def test_close_before_and_after_the_group_is_destroyed():
    outcomes = on_ranks(2, _close_around_the_group, TWO)
    assert all(not left for _, left in outcomes)
    for step in range(5):
        assert_results_close([results[step] for results, _ in outcomes], dense(TWO, TWO.inputs()))


def _closed_context_and_its_group(rank, group, case):
    """A group of its own, destroyed while the closed Context is still held: whether it is gone."""
    own = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
    context = make(own, case)
    run_rank(case.inputs()[rank], context)
    context.close()
    alive = weakref.ref(own)
    dist.barrier(own)
    dist.destroy_process_group(own)
    del own
    return alive() is None and context.group is None


def test_a_closed_context_holds_its_group_no_longer():
    """The threads of a group that outlives the interpreter's end abort the process."""
    assert on_ranks(2, _closed_context_and_its_group, TWO) == [True, True]


def _one_closes_early(rank, group, case):
    """Closing is local: rank 0 is gone while rank 1 still reads what it needs."""
    context = make(group, case)
    result = run_rank(case.inputs()[rank], context)
    if rank == 1:
        time.sleep(0.3)
        context.check()
        context.reset()
    context.close()
    return result


def test_close_waits_for_nobody():
    assert_results_close(on_ranks(2, _one_closes_early, TWO), dense(TWO, TWO.inputs()))


SCRIPT = """
    import sys
    import torch.distributed as dist
    from dist_moe import create_context
    from tests.path_cases import Case
    from tests.rank_calls import run_rank

    rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    case = Case("end of a process", W=2, T=4, D=32, F=32)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    context = create_context(group=None, config=case.config(), backend="reference", peer_timeout_s=20)
    run_rank(case.inputs()[rank], context)
    print("stepped", flush=True)
    if how == "raise" and rank == 1:
        raise KeyError("no such sample")
"""


@pytest.mark.parametrize("how, codes", [("end", [0, 0]), ("raise", [0, 1])])
def test_a_process_ends_without_close_as_if_there_were_no_context(how, codes, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store", how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == codes, printed
    assert all(out == "stepped\n" for out, _ in printed)
    assert ("KeyError: 'no such sample'" in printed[1][1]) == (how == "raise")
    assert not any(shared_memory_files(process.pid) for process in processes)


# ---- for long


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ROUTINGS = ("uniform", "zipf(1.0)", "one_rank", "dropped(0.3)", "one_expert", "duplicates")


def _many_calls(rank, group, case, num_calls):
    """Each call another T and routing; every third is without gradients. Growth of memory after the first third."""
    with make(group, case) as context:
        start = None
        for call in range(num_calls):
            inputs = replace(case, routing=ROUTINGS[call % len(ROUTINGS)], seed=call).inputs()[rank]
            T = (call * 37 + rank * 11) % (case.T + 1)
            leaves = leaves_of(inputs, context.config) | {"x_TD": inputs.x_TD[:T], "scores_TK": inputs.scores_TK[:T]}
            if call % 3 == 2:
                with torch.no_grad():
                    forward(leaves, inputs.ids_TK[:T], context)
            else:
                forward(leaves, inputs.ids_TK[:T], context).backward(inputs.grad_out_TD[:T])
            if call == num_calls // 3:
                gc.collect()
                start = _resident_bytes()
        context.check()
        gc.collect()
        return _resident_bytes() - start, shared_memory_files(os.getpid())


def test_300_calls_leave_nothing_behind():
    """An output kept of each call would be 6 MB; without, 0.5 to 1.6 were seen on the CPU."""
    case = Case("many calls", T=64, D=512, F=32, K=2, E=4)
    for growth, left in on_ranks(2, _many_calls, case, 300):
        assert growth < 4 * 2**20 and not left


def test_50_contexts_leave_nothing_behind():
    for growth, left in on_ranks(2, _many_contexts, replace(TWO, D=256, T=64)):
        assert growth < 4 * 2**20 and not left


def _many_contexts(rank, group, case):
    inputs, start = case.inputs()[rank], None
    for number in range(50):
        context = make(group, case)
        run_rank(inputs, context)
        if number % 2:
            context.close()
        if number == 16:
            start = _resident_bytes()
    return _resident_bytes() - start, shared_memory_files(os.getpid())


def _many_checkpoints(rank, group, case):
    """Two layers, each under a checkpoint; growth of memory after the first third of 50 steps."""
    with make(group, case, max_moe_layers_per_activation_slot=1) as context:
        inputs, start = case.inputs()[rank], None
        for step in range(50):
            leaves = leaves_of(inputs, context.config)
            for _ in range(2):
                leaves["x_TD"] = checkpoint(forward, leaves.copy(), inputs.ids_TK, context, use_reentrant=False)
            leaves["x_TD"].backward(inputs.grad_out_TD)
            if step == 16:
                gc.collect()
                start = _resident_bytes()
        context.check()
        gc.collect()
        return _resident_bytes() - start


def test_50_checkpointed_steps_leave_nothing_behind():
    """The inputs of the layers, kept of each step, would be 17 MB; without, it goes up and down by 5."""
    for growth in on_ranks(2, _many_checkpoints, Case("many checkpoints", T=256, D=512, F=64, K=2, E=4)):
        assert growth < 8 * 2**20, growth


def test_two_threads_take_turns():
    case = replace(ONE, T=32)
    with make(case=case) as context:
        inputs = [replace(case, seed=seed).inputs()[0] for seed in range(2)]
        with torch.no_grad():
            expected = [
                routed_experts(i.x_TD, i.ids_TK, i.scores_TK, i.w13_L2FD, i.w2_LDF, context).clone() for i in inputs
            ]
        wrong, start = [], threading.Barrier(2)

        @torch.no_grad()
        def work(which):
            i = inputs[which]
            start.wait()
            for _ in range(60):
                out = routed_experts(i.x_TD, i.ids_TK, i.scores_TK, i.w13_L2FD, i.w2_LDF, context)
                wrong.append(not torch.equal(out, expected[which]))

        threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(wrong) == 120 and not any(wrong)


# ---- peers that are not there


@pytest.fixture
def fake_group():
    """fake_group(W): rank 0 of a default group in which nobody else is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    yield lambda W, backend="fake": dist.init_process_group(backend, rank=0, world_size=W, store=FakeStore())
    dist.destroy_process_group()


def test_the_fake_backend_with_one_rank_computes(fake_group):
    fake_group(1)
    with make() as context:
        result = run_rank(ONE.inputs()[0], context)
    assert_results_equal([result], run_virtual(1, ONE.config(), ONE.inputs(), backend="reference"))


@pytest.mark.parametrize("W", [2, 4, 8])
def test_the_fake_backend_with_more_builds_what_a_real_rank_does(W, fake_group):
    fake_group(W)
    config = replace(ONE, E=8).config()
    with create_context(group=None, config=config, device="cpu", backend="reference") as context:
        assert context.memory_plan == plan_memory(config, W) and context.experts_per_rank == 8 // W
        inputs = Case("all", W=W, T=4, D=32, F=32, E=8, routing="balanced").inputs()[0]
        leaves = leaves_of(inputs, config)
        start = time.monotonic()
        out = forward(leaves, inputs.ids_TK, context)
        out.backward(inputs.grad_out_TD)
        context.check()
        context.reset()
        assert time.monotonic() - start < 10  # nobody is waited for
        assert out.shape == (4, 32) and leaves["w13_L2FD"].grad.shape == (8 // W, 64, 32)


@pytest.mark.parametrize("block_scaled", [None, dist_moe.BlockScaledConfig()], ids=["bf16", "mxfp8"])
def test_a_fake_pair_has_the_plan_of_a_pair(block_scaled, fake_group):
    fake_group(2)
    config = dist_moe.Config(128, 128, 128, 2, 4, 2, block_scaled=block_scaled)
    with create_context(group=None, config=config, device="cpu", backend="reference") as context:
        assert context.memory_plan == plan_memory(config, 2)
        assert context.activation_buffer.numel() == context.memory_plan.total_device_buffer_bytes


def test_peers_are_emulated_under_any_backend_that_is_told_so(fake_group):
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    if "custom_fake" not in dist.Backend.backend_list:
        dist.Backend.register_backend("custom_fake", _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    fake_group(2, "custom_fake")
    with create_context(group=None, config=TWO.config(), device="cpu", emulate_peer_buffers=True) as context:
        assert context.world.emulated and context.memory_plan == plan_memory(TWO.config(), 2)
        for region in context.buffers.values():
            own = region.own.data_ptr()
            assert region.table_W.tolist() == [own, own]


def test_emulated_peers_by_name(fake_group):
    fake_group(1)
    for emulate in (True, None):
        config = ONE.config()
        with create_context(group=None, config=config, device="cpu", emulate_peer_buffers=emulate) as context:
            assert context.world.emulated
    with pytest.raises(TypeError, match="emulate_peer_buffers must be a bool"):
        create_context(group=None, config=config, device="cpu", emulate_peer_buffers=1)


def test_experts_that_do_not_divide():
    with pytest.raises(ValueError, match="num_experts must be divisible"):
        create_context(group=dist_moe.World.virtual(3), config=ONE.config(num_experts=4))


def test_a_vmm_config_without_effect_is_said(caplog):
    config = ONE.config(vmm=dist_moe.VmmConfig(total_scratch_capacity_factor=1.0))
    with create_context(group=None, config=config, device="cpu", backend="reference"):
        assert "VmmConfig has no effect" in caplog.text
