"""When every launch began, by clocks that its programs leave: no event lies between launches, and graphs replay them.

A launch begins when the one before it has ended (_device.begin). So in the order of the clocks those of the first
launch come first, as many as it has programs, then those of the second; and the first clock of a launch is where the
one before it ended. What other libraries launch leaves none: its time is that of our launch before it.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import _device, _launch
from ._device import begin, is_interpreting
from ._launch import launched

MOST = 1 << 20  # clocks between two clears: 8 MiB


class Clocks:
    """The buffer of a device; one a process, made before the first launch. Kernels are then compiled for this buffer.

    log: name and programs of every launch since it was last emptied, also of those that a graph captures.
    """

    def __init__(self, device: torch.device | str, most: int = MOST):
        """Raises RuntimeError when kernels have been compiled without clocks, or for another buffer."""
        if _launch.Launched.has_compiled or _launch.log is not None:
            raise RuntimeError("clocks come before the first launch of a process, once")
        self._most = most
        self._words = torch.zeros(1 + most, dtype=torch.int64, device=device)
        asm = _device.leave_clock(self._words.data_ptr(), most)
        if is_interpreting():
            from dist_moe._interpreter import register_asm

            register_asm(asm, self._leave)
        _device.LEAVE_CLOCK = tl.constexpr(asm)
        _launch.log = self.log = []

    def _leave(self):
        """One program, interpreted."""
        at = int(self._words[0])
        self._words[0] += 1
        if at < self._most:
            self._words[1 + at] = int(_device.interpreted_clock()[0])
        return _device.interpreted_nothing()

    def clear(self) -> None:
        """Forget all clocks, in the order of the current stream."""
        self._words[:1].zero_()

    def begins(self, programs: Sequence[int]) -> list[int]:
        """Nanoseconds at which each launch since clear() began, given how many programs each had; waits for the device.

        Raises RuntimeError when other launches ran, or more programs than the buffer holds.
        """
        found, wanted = int(self._words[0]), sum(programs)
        if found != wanted or found > self._most:
            raise RuntimeError(f"{found} programs left clocks, the launches have {wanted}, and {self._most} fit")
        clocks = self._words[1 : 1 + found].sort().values.tolist()
        return [clocks[place] for place in itertools.accumulate(programs[:-1], initial=0)] if programs else []


@launched
@triton.jit
def _mark():
    """A launch of one program that does nothing: its clock is where the launch before it ended."""
    begin()


def mark() -> None:
    _mark[(1,)]()
