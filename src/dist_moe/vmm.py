"""An activation buffer whose scratch reaches over into pinned host memory: one address range, mapped piece by piece.

    device prefix: all slots | pinned host overflow | hot device scratch

Scratch is used from its high end, so a call takes the hot device section first and the host next. Every section is a
whole number of the driver's granules. Kernels see one range of plain device addresses, which stays where it is; what
lies on the host crosses the bus at every access.

The driver is reached through cuda-python (the extra `vmm`), imported when the first buffer is mapped.
"""

import ctypes
import logging
import math
import weakref
from collections.abc import Callable
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


def granularity_bytes(device: torch.device | str) -> int:
    """What every section is a multiple of: the driver's granule, for the device's memory and the host's alike.

    Raises:  RuntimeError without cuda-python or a CUDA device.
    """
    driver = _open(device)
    return math.lcm(*(driver.granularity(location) for location in (driver.on_device, driver.on_host)))


def map_buffer(parts: Sections, device: torch.device | str) -> Tensor:
    """A uint8 tensor over a new range, device | host | device; the range goes with the last tensor that views it.

    torch's allocator does not know of these bytes: torch.cuda.mem_get_info() shows them, memory_allocated() does not.
    Nothing is left behind by a mapping that fails.
    Raises:  torch.OutOfMemoryError naming the section that did not fit; RuntimeError without cuda-python, and for any
             other refusal of the driver.
    """
    driver = _open(device)
    unmap_what_waits()
    mapped = _Range(parts, driver)
    return tensor_over(mapped.address, sum(parts), driver.device, owner=mapped)


class _Range:
    """Addresses and what is mapped there, undone in reverse when nothing refers to it any more."""

    def __init__(self, parts: Sections, driver: "_Driver"):
        total, undo = sum(parts), []
        locations = (driver.on_device, driver.on_host, driver.on_device)
        try:
            self.address = driver.reserve(total, undo)
            start = self.address
            for name, num_bytes, location in zip(Sections._fields, parts, locations, strict=True):
                if num_bytes:
                    driver.map(start, num_bytes, location, f"{name} of {format_bytes(num_bytes)}", undo)
                start += num_bytes
            driver.allow_access(self.address, total)
        except BaseException:
            _unmap_later(driver.device, undo)
            raise
        end = weakref.finalize(self, _unmap_later, driver.device, undo)
        end.atexit = False  # the driver may be gone by then, and the process takes all of it along


_waiting: list[tuple[torch.device, list[Callable[[], None]]]] = []


def _unmap_later(device: torch.device, undo: list[Callable[[], None]]) -> None:
    _waiting.append((device, undo))
    unmap_what_waits()


def unmap_what_waits() -> None:
    """Give back what nothing refers to any more. What cannot go, as while a graph is captured, waits for the next."""
    if torch.cuda.is_current_stream_capturing():
        return
    still = []
    while _waiting:
        device, undo = _waiting.pop()  # of threads and nested finalizers one alone has it
        try:
            torch.cuda.synchronize(device)  # no kernel may still use it
            while undo:
                undo[-1]()
                undo.pop()
        except Exception:
            logger.exception("an activation buffer on %s could not be unmapped yet; its memory stays taken", device)
            still.append((device, undo))
    _waiting.extend(still)


class _DLManagedTensor(ctypes.Structure):
    """Of DLPack before version 1: a DLTensor, then two fields of its keeper."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1
_held: dict[int, tuple] = {}  # by address of a DLManagedTensor: itself, its shape and its owner


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _let_go(address, held=_held):
    del held[address]


ctypes.pythonapi.Py_IncRef(ctypes.py_object(_let_go))  # tensors may go after this module


def tensor_over(address: int, num_bytes: int, device: torch.device, *, owner: object) -> Tensor:
    """A uint8 tensor of memory that torch did not allocate, without a copy; it keeps `owner` alive.

    By DLPack, which says the device: the array interface of CUDA leaves it to the driver, for which memory of the host
    belongs to none.
    """
    shape = (ctypes.c_int64 * 1)(num_bytes)
    managed = _DLManagedTensor(
        data=address,
        device_type=_DLPACK_DEVICES[device.type],
        device_id=device.index or 0,
        ndim=1,
        code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        deleter=ctypes.cast(_let_go, ctypes.c_void_p),
    )
    _held[ctypes.addressof(managed)] = (managed, shape, owner)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor = torch.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
    assert tensor.data_ptr() == address and tensor.device == device, (tensor.data_ptr(), address, tensor.device, device)
    return tensor


def _open(device: torch.device | str) -> "_Driver":
    if not torch.cuda.is_available():
        raise RuntimeError("VmmConfig maps memory for a CUDA device, and CUDA is not available here")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            f"VmmConfig needs cuda-python: pip install 'dist-moe-triton[vmm]', or leave Config.vmm unset ({error})"
        ) from error
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

    def reserve(self, num_bytes: int, undo: list[Callable[[], None]]) -> int:
        address = int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        undo.append(lambda: self._call("cuMemAddressFree", address, num_bytes))
        return address

    def map(self, address: int, num_bytes: int, location, what: str, undo: list[Callable[[], None]]) -> None:
        """New memory at an address, which goes when it is unmapped."""
        try:
            handle = self._create(num_bytes, location)
        except DriverError as error:
            if error.status != self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            raise torch.OutOfMemoryError(f"no room for the {what} of an activation buffer on {self.device}") from error
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
            undo.append(lambda: self._call("cuMemUnmap", address, num_bytes))
        finally:
            self._call("cuMemRelease", handle)  # it lives on for as long as it is mapped

    def _create(self, num_bytes: int, location):
        try:
            return self._call("cuMemCreate", num_bytes, self._properties(location), 0)
        except DriverError as error:
            if error.status != self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            torch.cuda.empty_cache()  # what torch holds without need is there for the second try
            return self._call("cuMemCreate", num_bytes, self._properties(location), 0)

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
