"""An activation buffer whose scratch reaches over into pinned host memory: one address range, mapped piece by piece.

    device prefix: all slots | pinned host overflow | hot device scratch

Scratch is used from its high end, so a call takes the hot device section first, the host next and, in inference, what
is left of the prefix last. Every section is a whole number of the driver's granules. Kernels see one range of plain
device addresses, which stays where it is; what lies on the host crosses the bus at every access.

The driver is reached through cuda-python (the extra `vmm`), imported when the first buffer is mapped.
"""

import contextlib
import importlib.util
import logging
import math
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .memory_plan import format_bytes
from .shapes import align

logger = logging.getLogger(__name__)

# The rule of small totals is the reference release's, whose range goes through PyTorch's caching allocator: a request
# below 10 MiB becomes a block of 20 MiB there. Plans of both give the same sizes.
SMALL_TOTAL_BYTES, SMALL_BLOCK_BYTES = 10 * 2**20, 20 * 2**20


class Sections(NamedTuple):
    """Bytes of the three sections, in address order."""

    device_prefix: int
    host: int
    device_scratch: int


def sections(slots_bytes: int, host_scratch_bytes: int, device_scratch_bytes: int, granularity_bytes: int) -> Sections:
    """Each part in whole granules; a small total becomes one block, by growing the device scratch.

    Example (granules of 2 MiB): 1 byte of each part makes 2, 2 and 16 MiB, for 6 MiB are below 10.
    """
    found = Sections(*(align(n, granularity_bytes) for n in (slots_bytes, host_scratch_bytes, device_scratch_bytes)))
    if sum(found) < SMALL_TOTAL_BYTES:
        found = found._replace(device_scratch=found.device_scratch + SMALL_BLOCK_BYTES - sum(found))
    return found


def missing() -> str | None:
    """Why this process cannot map host memory, whatever the device; None: it can."""
    for module, package in (("cuda", "cuda-python"), ("numpy", "numpy")):  # torch reads the array interface with numpy
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed; pip install 'dist-moe-triton[vmm]'"
    return None


def granularity_bytes(device: torch.device | str) -> int:
    """What every section is a multiple of: the driver's granule, for the device's memory and the host's alike.

    Raises:  RuntimeError without cuda-python or a CUDA device.
    """
    driver = _open(torch.device(device))
    return math.lcm(*(driver.granularity(location) for location in (driver.on_device, driver.on_host)))


def map_buffer(parts: Sections, device: torch.device | str) -> Tensor:
    """A uint8 tensor over a new range, device | host | device; the range goes with the last tensor that views it.

    torch's allocator does not know of these bytes: torch.cuda.mem_get_info() shows them, memory_allocated() does not.
    Nothing is left behind by a mapping that fails.
    Raises:  torch.OutOfMemoryError naming the section that did not fit; RuntimeError without cuda-python, and for any
             other refusal of the driver.
    """
    device = torch.device(device)
    return torch.as_tensor(_Range(parts, _open(device)), device=device)


class _Range:
    """Addresses and what is mapped there, undone in reverse when nothing refers to it any more."""

    def __init__(self, parts: Sections, driver: "_Driver"):
        total = sum(parts)
        locations = (driver.on_device, driver.on_host, driver.on_device)
        with contextlib.ExitStack() as undo:
            base = driver.reserve(total)
            undo.callback(driver.free_addresses, base, total)
            address = base
            for name, num_bytes, location in zip(Sections._fields, parts, locations, strict=True):
                if num_bytes:
                    driver.map(address, num_bytes, location, f"{name} of {format_bytes(num_bytes)}")
                    undo.callback(driver.unmap, address, num_bytes)
                address += num_bytes
            driver.allow_access(base, total)
            end = weakref.finalize(self, _unmap, driver.device, undo.pop_all().close)
        end.atexit = False  # the driver may be gone by then, and the process takes all of it along
        self.__cuda_array_interface__ = {"version": 3, "shape": (total,), "typestr": "|u1", "data": (base, False)}


def _unmap(device: torch.device, undo) -> None:
    try:
        torch.cuda.synchronize(device)  # no kernel may still use it
        undo()
    except Exception:
        logger.exception("an activation buffer on %s could not be unmapped; its memory stays taken", device)


def _open(device: torch.device) -> "_Driver":
    if problem := missing():
        raise RuntimeError(f"VmmConfig cannot be used: {problem}")
    from cuda.bindings import driver

    # Makes the device's context, also that of a new thread.
    return _Driver(torch.empty(1, device=device).device, driver)


class _Driver:
    """The driver's calls for one device, as functions that raise. Sizes in bytes, addresses as whole numbers."""

    def __init__(self, device: torch.device, api):
        self.device, self._api = device, api
        kinds, attributes = api.CUmemLocationType, api.CUdevice_attribute
        self.on_device = self._location(kinds.CU_MEM_LOCATION_TYPE_DEVICE, device.index)
        ordinal = self._call("cuDeviceGet", device.index)
        node = self._call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, ordinal)
        near = node >= 0  # the host's memory next to the device; -1 where the system knows no such thing
        kind = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA if near else kinds.CU_MEM_LOCATION_TYPE_HOST
        self.on_host = self._location(kind, node if near else 0)

    def granularity(self, location) -> int:
        flags = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties(location), flags))

    def reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, location, what: str) -> None:
        """New memory at an address; unmap() frees it."""
        try:
            handle = self._create(num_bytes, location)
        except DriverError as error:
            if error.status != self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            raise torch.OutOfMemoryError(f"no room for the {what} of an activation buffer on {self.device}") from error
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # it lives on for as long as it is mapped

    def _create(self, num_bytes: int, location):
        try:
            return self._call("cuMemCreate", num_bytes, self._properties(location), 0)
        except DriverError:
            torch.cuda.empty_cache()  # what torch holds without need is there for the second try
            return self._call("cuMemCreate", num_bytes, self._properties(location), 0)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def allow_access(self, address: int, num_bytes: int) -> None:
        access = self._api.CUmemAccessDesc()
        access.location = self.on_device
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, num_bytes, [access], 1)

    def _location(self, kind, number: int):
        location = self._api.CUmemLocation()
        location.type, location.id = kind, number
        return location

    def _properties(self, location):
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = location
        return properties

    def _call(self, name: str, *arguments):
        status, *values = getattr(self._api, name)(*arguments)
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise DriverError(name, status)
        return values[0] if values else None


class DriverError(RuntimeError):
    """A call of the driver that was refused."""

    def __init__(self, name: str, status):
        super().__init__(f"{name} failed with {status.name}")
        self.status = status
