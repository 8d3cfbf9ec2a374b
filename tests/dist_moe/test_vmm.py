"""Sections of a mapping, by hand and against the rule stated once more; ranges, on a driver that keeps the rules."""

import ctypes
import struct
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_moe import Config, VmmConfig, World, create, create_context, plan_memory, vmm
from dist_moe.vmm import Sections, sections

MIB = 2**20


@pytest.mark.parametrize(
    "parts, granularity, expected",
    [
        ((16384, 12288, 12288), 2 * MIB, (2097152, 2097152, 16777216)),  # P1 of the release, 20971520 in all
        ((0, 8192, 8192), 2 * MIB, (0, 2 * MIB, 18 * MIB)),  # inference: no slots
        ((4 * MIB, 2 * MIB, 2 * MIB), 2 * MIB, (4 * MIB, 2 * MIB, 14 * MIB)),
        ((4 * MIB + 1, 2 * MIB, 2 * MIB), 2 * MIB, (6 * MIB, 2 * MIB, 2 * MIB)),  # 10 MiB are not small
        ((1, 1, 1), 64 * 1024, (64 * 1024, 64 * 1024, 20 * MIB - 128 * 1024)),
        ((1, 1, 1), 32 * MIB, (32 * MIB, 32 * MIB, 32 * MIB)),
    ],
)
def test_examples(parts, granularity, expected):
    assert sections(*parts, granularity) == Sections(*expected)


@given(
    slots=st.integers(0, 2**24),
    host=st.integers(1, 2**24),
    device=st.integers(1, 2**24),
    granularity=st.sampled_from([2**12, 2**16, 2**21, 2**22]),
)
def test_every_part_has_its_granules_and_no_total_is_small(slots, host, device, granularity):
    found = sections(slots, host, device, granularity)
    assert all(size % granularity == 0 for size in found)
    assert 0 <= found.device_prefix - slots < granularity and 0 <= found.host - host < granularity
    whole = -(-device // granularity) * granularity
    if found.device_prefix + found.host + whole < 10 * MIB:
        assert sum(found) == 20 * MIB
    else:
        assert found.device_scratch == whole


# Mappings, on a driver that keeps the rules and fails when told to

PARTS = Sections(4 * MIB, 6 * MIB, 8 * MIB)
ON_DEVICE, ON_HOST, ON_NODE = "device", "host", "node"


class FakeDriver:
    """The calls of cuda.bindings.driver that vmm makes, with what they hold; `refuses` (call, n) fails the nth one."""

    CUresult = SimpleNamespace(
        CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"),
        CUDA_ERROR_OUT_OF_MEMORY=SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),
    )
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID="node of the host")
    CUmemLocationType = SimpleNamespace(
        CU_MEM_LOCATION_TYPE_DEVICE=ON_DEVICE,
        CU_MEM_LOCATION_TYPE_HOST=ON_HOST,
        CU_MEM_LOCATION_TYPE_HOST_NUMA=ON_NODE,
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace

    def __init__(self, refuses=(None, None), node=0, base=1 << 40):
        self.refuses, self.node, self.base = refuses, node, base
        self.refusal = self.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.counts, self.ranges, self.handles, self.mapped, self.reachable = Counter(), {}, {}, {}, {}

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments):
            self.counts[name] += 1
            if self.refuses in ((name, self.counts[name]), (name, None)):
                return (self.refusal,)
            value = found(*arguments)
            return (self.CUresult.CUDA_SUCCESS,) if value is None else (self.CUresult.CUDA_SUCCESS, value)

        return call

    def cuDeviceGet(self, ordinal):
        return ordinal

    def cuDeviceGetAttribute(self, attribute, ordinal):
        return self.node

    def cuMemGetAllocationGranularity(self, properties, flag):
        return {ON_DEVICE: 2 * MIB, ON_HOST: 64 * 1024, ON_NODE: 3 * 2**16}[properties.location.type]

    def cuMemAddressReserve(self, num_bytes, alignment, address, flags):
        self.ranges[self.base] = num_bytes
        return self.base

    def cuMemAddressFree(self, address, num_bytes):
        assert self.ranges.pop(address) == num_bytes and not self.mapped

    def cuMemCreate(self, num_bytes, properties, flags):
        assert properties.type == "pinned"
        handle = len(self.handles) + 1
        self.handles[handle] = (num_bytes, properties.location.type, properties.location.id)
        return handle

    def cuMemMap(self, address, num_bytes, offset, handle, flags):
        assert offset == 0 and self.handles[handle][0] == num_bytes
        self.mapped[address] = self.handles[handle]

    def cuMemRelease(self, handle):
        del self.handles[handle]

    def cuMemUnmap(self, address, num_bytes):
        assert self.mapped.pop(address)[0] == num_bytes

    def cuMemSetAccess(self, address, num_bytes, descriptions, count):
        assert sum(size for size, *_ in self.mapped.values()) == num_bytes and count == len(descriptions)
        self.reachable[address] = [(d.location.type, d.location.id, d.flags) for d in descriptions]

    def is_empty(self) -> bool:
        return not (self.ranges or self.handles or self.mapped)


@pytest.fixture
def no_gpu(monkeypatch):
    """Nothing to wait for, and no cache."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def a_range(api, parts=PARTS):
    return vmm._Range(parts, vmm._Driver(torch.device("cuda", 1), api))


@pytest.mark.parametrize("node, host", [(3, (ON_NODE, 3)), (-1, (ON_HOST, 0))])
def test_a_range_is_device_host_device_and_goes_with_its_last_user(no_gpu, node, host):
    api = FakeDriver(node=node)
    made = a_range(api)
    assert made.address == api.base
    assert api.mapped == {
        api.base: (4 * MIB, ON_DEVICE, 1),
        api.base + 4 * MIB: (6 * MIB, *host),
        api.base + 10 * MIB: (8 * MIB, ON_DEVICE, 1),
    }
    assert api.reachable == {api.base: [(ON_DEVICE, 1, "rw")]} and not api.handles
    del made
    assert api.is_empty()


def test_no_slots_no_prefix(no_gpu):
    api = FakeDriver()
    made = a_range(api, PARTS._replace(device_prefix=0))
    assert list(api.mapped.values()) == [(6 * MIB, ON_NODE, 0), (8 * MIB, ON_DEVICE, 1)]
    del made
    assert api.is_empty()


REFUSED = [("cuMemAddressReserve", 1), ("cuMemSetAccess", 1), ("cuMemCreate", None)]
REFUSED += [(call, n) for call in ("cuMemMap", "cuMemRelease") for n in (1, 2, 3)]


@pytest.mark.parametrize("refuses", REFUSED, ids=str)
def test_what_fails_leaves_nothing_behind(no_gpu, refuses):
    api = FakeDriver(refuses)
    with pytest.raises(RuntimeError) as caught:
        a_range(api)
    assert not api.ranges and not api.mapped and (refuses[0] == "cuMemRelease" or not api.handles)
    if refuses[0] == "cuMemCreate":
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert str(caught.value).startswith("no room for the device_prefix of 4.000 MiB")
    else:
        assert str(caught.value) == f"{refuses[0]} failed with CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_memory_that_torch_holds_without_need_is_given_back_first(no_gpu, nth):
    api = FakeDriver(("cuMemCreate", nth))
    made = a_range(api)
    assert len(api.mapped) == 3 and api.counts["cuMemCreate"] == 4
    del made
    assert api.is_empty()


def test_an_unmap_that_fails_is_said_and_what_is_left_goes_later(no_gpu, caplog):
    api = FakeDriver(("cuMemUnmap", 2))
    made = a_range(api)
    del made
    assert "could not be unmapped yet" in caplog.text and "cuMemUnmap failed" in caplog.text
    assert sorted(api.mapped) == [api.base, api.base + 4 * MIB] and api.ranges
    vmm.unmap_what_waits()
    assert api.is_empty() and api.counts["cuMemUnmap"] == 4


def test_nothing_is_unmapped_while_a_graph_is_captured(no_gpu, monkeypatch):
    api = FakeDriver()
    made = a_range(api)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del made
        assert len(api.mapped) == 3
    vmm.unmap_what_waits()
    assert api.is_empty()


def test_a_refusal_that_is_not_for_want_of_memory_is_not_tried_again(no_gpu, monkeypatch):
    api = FakeDriver(("cuMemCreate", 1))
    monkeypatch.setattr(api, "refusal", SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(RuntimeError, match="cuMemCreate failed with CUDA_ERROR_INVALID_VALUE"):
        a_range(api)
    assert api.counts["cuMemCreate"] == 1 and api.is_empty()


# Tensors over foreign memory


def test_a_tensor_holds_the_owner_of_its_memory():
    class Owner:
        pass

    memory, owner = (ctypes.c_uint8 * 64)(), Owner()
    tensor = vmm.tensor_over(ctypes.addressof(memory), 64, torch.device("cpu"), owner=owner)
    there = weakref.ref(owner)
    del owner
    view = tensor[32:].view(torch.float32)
    view.fill_(1.0)
    del tensor
    assert bytes(memory)[32:36] == struct.pack("<f", 1.0) and not any(bytes(memory)[:32])
    assert there() is not None
    del view
    assert there() is None and not vmm._held


def test_a_process_ends_well_with_such_a_tensor():
    code = (
        "import ctypes, torch; from dist_moe import vmm; memory = (ctypes.c_uint8 * 64)();"
        "t = vmm.tensor_over(ctypes.addressof(memory), 64, torch.device('cpu'), owner=memory); torch.kept = t"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# The whole


def test_the_granularity_serves_both_kinds_of_memory(monkeypatch):
    monkeypatch.setattr(vmm, "_open", lambda device: vmm._Driver(torch.device(device), FakeDriver()))
    assert vmm.granularity_bytes("cuda:0") == 6 * MIB  # of 2 MiB and 192 KiB
    config = Config(4096, 512, 512, 2, 4, 1, vmm=VmmConfig(2.0))
    assert plan_memory(config, 2, device="cuda:0") == plan_memory(config, 2, vmm_granularity_bytes=6 * MIB)
    assert plan_memory(config, 2, device="cpu") == plan_memory(config, 2)


def test_without_cuda_or_cuda_python_it_is_said(monkeypatch):
    config = Config(4096, 512, 512, 2, 4, 1, vmm=VmmConfig(2.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA is not available here"):
        plan_memory(config, 2, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match=r"VmmConfig needs cuda-python: pip install 'dist-moe-triton\[vmm\]'"):
        plan_memory(config, 2, device="cuda:0")


@dataclass
class Mappings:
    """Stand-ins for mapped buffers, on a CPU: how many were made, and which of them somebody still holds."""

    refuses: int = -1
    made: list = field(default_factory=list)

    def map_buffer(self, parts, device):
        if len(self.made) == self.refuses:
            raise torch.OutOfMemoryError("no room for the host section")
        tensor = torch.empty(sum(parts), dtype=torch.uint8)
        self.made.append(weakref.ref(tensor))
        return tensor

    @property
    def held(self) -> int:
        return sum(ref() is not None for ref in self.made)


@pytest.fixture
def mapped(monkeypatch):
    """Contexts on the CPU whose plan has sections, as on a GPU."""
    mappings = Mappings()
    monkeypatch.setattr(create, "plan_memory", lambda *args, **how: plan_memory(*args, vmm_granularity_bytes=4096))
    monkeypatch.setattr(vmm, "map_buffer", mappings.map_buffer)
    return mappings


def open_mapped(prefetch: bool):
    config = Config(8, 64, 64, 2, 8, 1, 0.5, vmm=VmmConfig(2.0, prefetch))
    return create_context(group=World.virtual(2), config=config, backend="reference")


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_context_maps_a_buffer_a_rank_and_closing_lets_go(mapped, prefetch):
    with open_mapped(prefetch) as opened:
        sizes = [rank.buffer.numel() for rank in opened.ranks]
        assert sizes == [opened.memory_plan.total_virtual_bytes] * 2 and mapped.held == len(mapped.made) == 2
    assert mapped.held == 0


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_rank_whose_mapping_fails_leaves_none_of_the_others(mapped, prefetch):
    mapped.refuses = 1
    with pytest.raises(torch.OutOfMemoryError, match="host section"):
        open_mapped(prefetch)
    assert len(mapped.made) == 1 and mapped.held == 0


@pytest.mark.parametrize("prefetch, most", [(True, 2), (False, 0)])
def test_mappings_go_when_the_symmetric_regions_cannot_be_made(mapped, monkeypatch, prefetch, most):
    def no_room(self, regions):
        raise MemoryError("no room for symmetric regions")

    monkeypatch.setattr(World, "allocate", no_room)
    try:
        open_mapped(prefetch)
    except MemoryError:
        assert len(mapped.made) <= most and mapped.held == 0  # while the error is handled, too
    else:
        raise AssertionError("no error")
