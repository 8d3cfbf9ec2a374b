"""Memories: registered global buffers, a CTA's shared memory, its tensor memory."""

import bisect

import numpy as np

from tests.sm100.decode import NUM_LANES
from tests.sm100.errors import EmulationError
from tests.sm100.ptx import SHARED_BASE

# Generic addresses: global memory is itself; the windows of the other spaces lie above any address of the host.
SHARED_WINDOW = 1 << 56
PARAMETER_WINDOW = 2 << 56

TENSOR_LANES, TENSOR_COLUMNS = 128, 512
POISON = 0xFFFFFFFF  # NaN as float32; each byte NaN as a scale of either kind


class GlobalMemory:
    """The host's own memory, as far as it was registered: an access outside of the buffers is an error.

    Buffers are numpy arrays or torch CPU tensors, used in place, so their addresses serve as device pointers.
    """

    def __init__(self):
        self._starts: list[int] = []
        self._buffers: list[tuple[int, np.ndarray, str, bool]] = []  # end, bytes, name, writable

    def add(self, buffer, name: str, writable: bool = True) -> int:
        """Registers a contiguous buffer and returns its address."""
        if hasattr(buffer, "data_ptr"):  # a torch tensor; numpy knows neither its bf16 nor its 8-bit floats
            import torch

            buffer = buffer.view(torch.uint8).numpy() if buffer.numel() else np.empty(0, np.uint8)
        if not buffer.flags.c_contiguous:
            raise ValueError(f"GlobalMemory.add: {name} must be contiguous")
        start = buffer.__array_interface__["data"][0]
        if buffer.nbytes == 0:
            return start
        index = bisect.bisect(self._starts, start)
        if (index and self._buffers[index - 1][0] > start) or (
            index < len(self._starts) and start + buffer.nbytes > self._starts[index]
        ):
            raise ValueError(f"GlobalMemory.add: {name} overlaps a registered buffer")
        self._starts.insert(index, start)
        self._buffers.insert(index, (start + buffer.nbytes, buffer.reshape(-1).view(np.uint8), name, writable))
        return start

    def window(self, address: int, num_bytes: int, writes: bool = False) -> tuple[np.ndarray, int]:
        """(bytes of the buffer that holds the range, offset of the range in it)."""
        index = bisect.bisect(self._starts, address) - 1
        if index < 0 or self._buffers[index][0] < address + num_bytes:
            near = f"; the nearest buffer below is {self.describe(index)}" if index >= 0 else ""
            raise EmulationError(f"global access out of bounds: {num_bytes} bytes at {address:#x}{near}")
        _, data, name, writable = self._buffers[index]
        if writes and not writable:
            raise EmulationError(f"global write to {name}, which is read only")
        return data, address - self._starts[index]

    def name_at(self, address: int) -> str | None:
        """Name of the buffer that holds an address, if one does."""
        index = bisect.bisect(self._starts, address) - 1
        return self._buffers[index][2] if index >= 0 and address < self._buffers[index][0] else None

    def describe(self, index: int) -> str:
        _, data, name, _ = self._buffers[index]
        return f"{name}, {len(data)} bytes at {self._starts[index]:#x}"

    def load(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """uint8 [lanes, num_bytes]."""
        low, high = int(addresses.min()), int(addresses.max())
        try:
            data, offset = self.window(low, high - low + num_bytes)
        except EmulationError:  # the lanes read several buffers, or one of them is out of bounds
            return np.stack([_piece(*self.window(address, num_bytes), num_bytes) for address in addresses.tolist()])
        return data[(addresses - (low - offset))[:, None] + np.arange(num_bytes)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        num_bytes = values.shape[1]
        low, high = int(addresses.min()), int(addresses.max())
        try:
            data, offset = self.window(low, high - low + num_bytes, writes=True)
        except EmulationError:
            for address, value in zip(addresses.tolist(), values, strict=True):
                _piece(*self.window(address, num_bytes, writes=True), num_bytes)[:] = value
            return
        data[(addresses - (low - offset))[:, None] + np.arange(num_bytes)] = values


def _piece(data: np.ndarray, offset: int, num_bytes: int) -> np.ndarray:
    return data[offset : offset + num_bytes]


class SharedMemory:
    """A CTA's shared memory, poisoned with 0xFF. Addresses are those of the .shared window of PTX.

    `writers` remembers which warp wrote a byte through the generic proxy and has not executed fence.proxy.async since
    (warp + 1; 0 for none): the asynchronous engines must not read such bytes. PTX would also accept the fence of a
    thread that the write was synchronised with; here the writer itself has to fence.
    """

    def __init__(self, num_bytes: int):
        num_bytes = -(-num_bytes // 16) * 16
        self.data = np.full(num_bytes, 0xFF, np.uint8)
        self._chunks = self.data.view(np.uint64).reshape(-1, 2)
        self.writers = np.zeros(num_bytes, np.uint8)
        self._writer_chunks = self.writers.view(np.uint64).reshape(-1, 2)
        self.unfenced: set[int] = set()  # warps
        self.barrier_bytes = np.zeros(num_bytes, bool)
        self._barrier_chunks = self.barrier_bytes.view(np.uint64).reshape(-1, 2)

    def check(self, low: int, high: int) -> None:
        if low < SHARED_BASE or high > len(self.data):
            raise EmulationError(
                f"shared access out of bounds: {low:#x} to {high:#x}, there is {SHARED_BASE:#x} to {len(self.data):#x}"
            )

    def load(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        self.check(int(addresses.min()), int(addresses.max()) + num_bytes)
        return self.data[addresses[:, None] + np.arange(num_bytes)]

    def store(self, addresses: np.ndarray, values: np.ndarray, warp: int) -> None:
        self.check(int(addresses.min()), int(addresses.max()) + values.shape[1])
        index = addresses[:, None] + np.arange(values.shape[1])
        self.check_barriers(index, self.barrier_bytes)
        self.data[index] = values
        self.writers[index] = warp + 1
        self.unfenced.add(warp)

    def write_word(self, address: int, value: int) -> None:
        """What tcgen05.alloc writes."""
        self.check(address, address + 4)
        self.check_barriers(slice(address, address + 4), self.barrier_bytes)
        self.data[address : address + 4] = np.frombuffer(np.uint32(value).tobytes(), np.uint8)

    def read_chunks(self, numbers: np.ndarray) -> np.ndarray:
        """Bytes of 16-byte chunks, for the asynchronous engines."""
        return self._chunks[numbers].view(np.uint8)

    def write_chunks(self, numbers: np.ndarray, values: np.ndarray) -> None:
        self.check_barriers(numbers, self._barrier_chunks)
        if self.unfenced:
            self._writer_chunks[numbers] = 0
        self._chunks[numbers] = values.reshape(-1, 16).view(np.uint64)

    def check_barriers(self, index, marks: np.ndarray) -> None:
        if marks[index].any():
            raise EmulationError("a write to shared memory that holds an mbarrier object")

    def fence(self, warp: int) -> None:
        """fence.proxy.async: what this warp wrote becomes visible to the asynchronous engines."""
        if warp in self.unfenced:
            self.unfenced.remove(warp)
            self.writers[self.writers == warp + 1] = 0

    def check_fenced(self, index) -> None:
        """Whether the asynchronous engines may read these bytes."""
        if self.unfenced and (found := self.writers[index].max()):
            raise EmulationError(
                f"an asynchronous read of shared memory that warp {found - 1} wrote without fence.proxy.async"
            )


class TensorMemory:
    """128 lanes of 512 columns of 32 bits; columns are poison from their allocation on."""

    def __init__(self):
        self.data = np.full((TENSOR_LANES, TENSOR_COLUMNS), POISON, np.uint32)
        self.allocated: dict[int, int] = {}  # columns by the first one
        self.free = np.ones(TENSOR_COLUMNS, bool)
        self.relinquished = False

    def allocate(self, num_columns: int, rng) -> int | None:
        """First column of a place that is free, or None while there is none. PTX does not say which: any."""
        if num_columns not in (32, 64, 128, 256, 512):
            raise EmulationError(f"tcgen05.alloc of {num_columns} columns: a power of two from 32 to 512 is wanted")
        if self.relinquished:
            raise EmulationError("tcgen05.alloc after relinquish_alloc_permit")
        places = [c for c in range(0, TENSOR_COLUMNS - num_columns + 1, 32) if self.free[c : c + num_columns].all()]
        if not places:
            return None
        first = rng.choice(places)
        self.free[first : first + num_columns] = False
        self.data[:, first : first + num_columns] = POISON
        self.allocated[first] = num_columns
        return first

    def release(self, first: int, num_columns: int) -> None:
        if self.allocated.get(first) != num_columns:
            raise EmulationError(f"tcgen05.dealloc of {num_columns} columns at {first}; allocated are {self.allocated}")
        del self.allocated[first]
        self.free[first : first + num_columns] = True

    def columns(self, first: int, num_columns: int) -> np.ndarray:
        """View of allocated columns."""
        if first + num_columns > TENSOR_COLUMNS or self.free[first : first + num_columns].any():
            raise EmulationError(
                f"tensor memory columns {first} to {first + num_columns - 1} are not allocated; "
                f"allocated are {self.allocated}"
            )
        return self.data[:, first : first + num_columns]


def full_width(values: np.ndarray, mask) -> np.ndarray:
    """Rows of the active lanes put back among all 32, zeros elsewhere."""
    if mask is True:
        return values
    result = np.zeros((NUM_LANES, *values.shape[1:]), values.dtype)
    result[mask] = values
    return result
