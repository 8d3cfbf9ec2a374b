"""World: who sees whose memory, what is agreed on before memory is handed out, what a rank that fails leaves behind."""

import errno
import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.process_group import Died, ranks, run_ranks

from dist_moe import symm
from dist_moe.errors import DistMoEError, PeerAbortedError, PeerTimeoutError, RankMismatchError
from dist_moe.symm import World

REGIONS = {"small": ((3,), torch.int16), "table": ((4, 5), torch.int32), "rows": ((2, 7), torch.bfloat16)}


def on_ranks(fn, *args, **options):
    return ranks(4, interpret=True).run(fn, *args, timeout_s=30, **options)


def files_of_ranks(pids):
    return [path.name for path in Path("/dev/shm").glob("dist_moe-*") if int(path.name.split("-")[1]) in pids]


def tag(sender, receiver):
    return 100 * sender + receiver


def push_tags(regions, rank):
    """Write my tag into row `rank` of every peer's table."""
    for receiver, peer in enumerate(regions["table"].peers):
        peer[rank] = tag(rank, receiver)
    symm.fence()


def check_layout(regions, rank, W):
    start = min(region.own.data_ptr() for region in regions.values())
    for name, (shape, dtype) in REGIONS.items():
        region = regions[name]
        assert region.own.shape == shape and region.own.dtype == dtype
        assert len(region.peers) == W and region.peers[rank] is region.own
        assert region.table_W.tolist() == [peer.data_ptr() for peer in region.peers]
        assert region.table_W.dtype == torch.int64
        assert start % 256 == 0 and (region.own.data_ptr() - start) % 256 == 0


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5])
def test_virtual_ranks_reach_each_other(W):
    world = World.virtual(W)
    assert (world.size, world.local_ranks, world.device.type) == (W, tuple(range(W)), "cpu")
    local = world.allocate({**REGIONS, "table": ((W, 5), torch.int32)})
    assert all((region.own == 0).all() for regions in local.values() for region in regions.values())
    for rank, regions in local.items():
        assert len({region.own.data_ptr() for region in regions.values()}) == len(REGIONS)
        assert regions["rows"].table_W.tolist() == [peer.data_ptr() for peer in regions["rows"].peers]
        push_tags(regions, rank)
    for receiver, regions in local.items():
        assert regions["table"].own[:, 0].tolist() == [tag(sender, receiver) for sender in range(W)]
    assert world.exchange("x") == ["x"] * W


def _reach(_, groups):
    """Each group that this process is in gets a World; in all of them every rank writes to every rank."""
    worlds = [None if group is None else World.from_group(group, timeout_s=20) for group in groups]
    found = []
    live = [(world, world.allocate(REGIONS)) for world in worlds if world is not None]
    for world, local in live:
        (rank,) = world.local_ranks
        check_layout(local[rank], rank, world.size)
        assert all((region.own == 0).all() for region in local[rank].values())
        world.exchange(None)
        push_tags(local[rank], rank)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    for world, local in live:
        world.exchange(None)
        (rank,) = world.local_ranks
        found.append((rank, local[rank]["table"].own[: world.size, 0].tolist()))
        world.close()
        world.close()
    return found


def expected(W, rank):
    return rank, [tag(sender, rank) for sender in range(W)]


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_processes_reach_each_other(W):
    results = on_ranks(_reach, groups=[range(W)])
    assert results == [[expected(W, rank)] if rank < W else [] for rank in range(4)]


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1], [2, 3]],  # global ranks that do not start at 0
        [[0, 1, 2], [1, 2, 3]],  # groups that overlap
        [[0, 1, 2, 3], [0, 1, 2, 3], [3, 1]],  # several groups of the same ranks
    ],
)
def test_ranks_are_those_of_the_group(groups):
    results = on_ranks(_reach, groups=groups)
    for process in range(4):
        mine = [sorted(members) for members in groups if process in members]
        assert results[process] == [expected(len(members), members.index(process)) for members in mine]


def _two_worlds(rank, group):
    first, second = (World.from_group(group, timeout_s=20) for _ in range(2))
    a, b, c = (world.allocate(REGIONS)[rank]["table"] for world in (first, first, second))
    first.exchange(None)
    for value, region in ((1, a), (2, b), (3, c)):
        for peer in region.peers:
            peer[rank] = value
    first.exchange(None)
    first.close()
    second.exchange(None)
    assert [set(region.own.flatten().tolist()) for region in (a, b, c)] == [{1}, {2}, {3}]
    with pytest.raises(DistMoEError, match="closed"):
        first.allocate(REGIONS)
    with pytest.raises(DistMoEError, match="closed"):
        first.exchange(None)
    return os.getpid()


def test_worlds_of_one_group_are_independent():
    assert files_of_ranks(on_ranks(_two_worlds)) == []


def _outlive_the_group(rank, group):
    world = World.from_group(group, timeout_s=20)
    regions = world.allocate(REGIONS)[rank]
    world.exchange(None)
    dist.destroy_process_group()
    push_tags(regions, rank)
    world.close()
    world.close()
    own = regions["table"].own
    while int(own[3 - rank, 0]) != tag(3 - rank, rank):  # memory lives on: the last rank to write may have left
        time.sleep(0.001)

    def mapped():
        return Path("/proc/self/maps").read_text().count("dist_moe-")

    assert mapped() == 4
    del regions, own
    gc.collect()
    return mapped()


def test_memory_outlives_world_and_group_and_goes_with_the_last_region():
    assert run_ranks(4, _outlive_the_group, interpret=True) == [0] * 4


def _allocate_badly(rank, group, how):
    """What allocate raises here when rank 1 (of 3 or 4) is out of order, and all process ids."""
    world = World.from_group(group, timeout_s=5)
    pids = world.exchange(os.getpid())
    regions = dict(REGIONS)
    patch = pytest.MonkeyPatch()
    if rank == 1:
        if how == "full":

            def no_space(fd, offset, length):
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "posix_fallocate", no_space)
        elif how == "unmappable":
            patch.setattr(symm.mmap, "mmap", lambda fd, size: 1 / 0)
        elif how == "dies":
            patch.setattr(symm, "_map_file", lambda path, size: os._exit(3))
        elif how == "bad shape":
            regions["rows"] = (("seven",), torch.int16)
        elif how == "other shape":
            regions["rows"] = ((2, 8), torch.bfloat16)
        elif how == "region missing":
            del regions["rows"]
    try:
        world.allocate(regions)
    except Exception as error:
        return type(error), str(error), pids
    finally:
        patch.undo()
    return None, "", pids


@pytest.mark.parametrize(
    "how, own_error, words",
    [
        ("full", DistMoEError, "/dev/shm has no room for 4096 bytes"),
        ("unmappable", ZeroDivisionError, "division by zero"),
        ("bad shape", ValueError, "seven"),
    ],
)
def test_a_failure_on_one_rank_is_a_failure_on_all(how, own_error, words):
    results = on_ranks(_allocate_badly, how)
    for rank, (error, message, _) in enumerate(results):
        assert error is (own_error if rank == 1 else PeerAbortedError)
        assert words in message
        assert rank == 1 or f"rank 1 failed: {own_error.__name__}" in message
    assert files_of_ranks(results[0][2]) == []


def _ask_for_too_much(rank, group):
    world = World.from_group(group, timeout_s=20)
    with pytest.raises(DistMoEError, match=r"/dev/shm has no room for \d+ bytes .*--shm-size"):
        world.allocate({"huge": ((2**50,), torch.uint8)})
    world.allocate(REGIONS)  # the World is as good as before
    return os.getpid()


def test_more_than_the_shared_memory_is_an_error_and_no_signal():
    assert files_of_ranks(on_ranks(_ask_for_too_much)) == []


@pytest.mark.parametrize(
    "how, words",
    [
        ("other shape", "rank 1 asks for other regions than rank 0: rows [2, 8] torch.bfloat16; rank 0: rows [2, 7]"),
        ("region missing", "no further region; rank 0: rows [2, 7] torch.bfloat16"),
    ],
)
def test_different_regions_are_refused_on_all_ranks(how, words):
    for error, message, _ in on_ranks(_allocate_badly, how):
        assert error is RankMismatchError and words in message


def test_a_rank_that_dies_half_way_leaves_no_file():
    results = run_ranks(3, _allocate_badly, "dies", timeout_s=30, interpret=True, may_die=[1])
    assert results[1] == Died(3)
    assert [results[rank][0] for rank in (0, 2)] == [PeerTimeoutError] * 2
    assert files_of_ranks(results[0][2]) == []


def _come_late(rank, group):
    world = World.from_group(group, timeout_s=0.5)
    start = time.monotonic()
    if rank == 0:
        time.sleep(2)
        return None
    with pytest.raises(PeerTimeoutError, match=r"not all 2 ranks of the group answered within 0.5 s"):
        world.exchange(rank)
    return time.monotonic() - start


def test_exchange_has_a_deadline():
    _, waited_s = run_ranks(2, _come_late, timeout_s=20, interpret=True)
    assert 0.5 <= waited_s < 1.9


def _exchange_sizes(rank, group):
    world = World.from_group(group, timeout_s=20)
    assert [len(text) for text in world.exchange("x" * 10**rank)] == [10**r for r in range(world.size)]
    return world.together("count", lambda: rank * 2)


def test_exchange_carries_objects_of_any_size():
    assert on_ranks(_exchange_sizes) == [[0, 2, 4, 6]] * 4


def _pretend_place(rank, group, place):
    real = symm._this_host()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(symm, "_this_host", lambda: place)
        with pytest.raises(ValueError, match=r"all ranks must run on one host.*rank 2 on") as error:
            World.from_group(group, timeout_s=20)
    return real[0] in str(error.value) and place[0] in str(error.value)


@pytest.mark.parametrize("place", [("elsewhere", "boot"), (symm._this_host()[0], "another boot")])
def test_several_hosts_are_refused(place):
    assert on_ranks(_pretend_place, place) == [True] * 4


def _outsider(rank, group):
    part = dist.new_group([0, 1])
    if rank < 2:
        return World.from_group(part, timeout_s=20).local_ranks
    with pytest.raises(ValueError, match="not a member"):
        World.from_group(part, timeout_s=20)
    return None


def test_a_process_outside_the_group_is_refused():
    assert on_ranks(_outsider) == [(0,), (1,), None, None]


def test_emulated_peers_are_this_ranks_memory():
    world = World.emulated(4, 2)
    assert world.emulated and (world.size, world.local_ranks) == (4, (2,))
    regions = world.allocate(REGIONS)[2]
    check_layout(regions, 2, 4)
    assert len(set(regions["rows"].table_W.tolist())) == 1
    assert world.exchange(7) == [7] * 4


def test_the_fake_backend_is_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(ValueError, match=r"World\.emulated"):
            World.from_group(device="cpu", timeout_s=1)
    finally:
        dist.destroy_process_group()


def test_bad_ranks_and_sizes():
    with pytest.raises(ValueError, match="at least 1"):
        World.virtual(0)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        World.emulated(4, 4)
    with pytest.raises(RuntimeError, match="broken"):
        World.virtual(2).together("step", lambda: (_ for _ in ()).throw(RuntimeError("broken")))


def _reach_over_nvlink(rank, group):
    (found,) = _reach(rank, (group,))
    world = World.from_group(group, timeout_s=60)
    regions = world.allocate(REGIONS)[rank]
    assert world.device == torch.device("cuda", rank) and regions["rows"].own.device == world.device
    world.exchange(None)
    world.close()
    del world
    gc.collect()
    push_tags(regions, rank)  # the peers' memory stays mapped without the World
    torch.cuda.synchronize()
    dist.barrier(group)
    return found, regions["table"].own[: dist.get_world_size(group), 0].tolist()


@pytest.mark.ranks(n=2)
def test_gpus_reach_each_other():
    results = run_ranks(2, _reach_over_nvlink, device="cuda", timeout_s=120)
    assert results == [(expected(2, rank), expected(2, rank)[1]) for rank in range(2)]
