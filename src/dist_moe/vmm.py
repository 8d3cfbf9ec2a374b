"""The physical layout of an activation buffer whose scratch reaches over into pinned host memory.

    device prefix: all slots | pinned host overflow | hot device scratch

Scratch is used from its high end, so a call takes the hot device section first, the host next and, in inference, what
is left of the prefix last. Every section is a whole number of the driver's granules.
"""

from typing import NamedTuple

from .shapes import align

# The caching allocator of PyTorch rounds a request below 10 MiB up to a block of 20 MiB, and the range is handed to
# torch through a pool of that allocator.
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
