"""The sections of a mapping, by hand and against the rule stated once more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
