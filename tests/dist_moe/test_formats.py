"""Format records: derived constants, and one alignment for planner, quantisers and layouts."""

import pytest
import torch

from dist_moe import planner
from dist_moe.config import DIM_MULTIPLE, BlockScaledFormat
from dist_moe.formats import (
    FORMATS,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    ROW_ALIGNMENT,
    SCALE_ATOM,
    by_name,
    expanded_order,
    packed_row_bytes,
    packed_row_parts,
    padded_scales,
    row_pitch,
)


def test_a_configuration_can_name_two_of_them():
    assert by_name(BlockScaledFormat.MXFP8_E4M3) is by_name("mxfp8_e4m3") is MXFP8_E4M3
    assert by_name(BlockScaledFormat.NVFP4) is NVFP4
    for name in ("mxfp8_e5m2", "mxfp4", "bf16"):
        with pytest.raises(ValueError, match=name):
            by_name(name)


@pytest.mark.parametrize(
    "format, largest_code", [(MXFP8_E4M3, 0x7E), (MXFP8_E5M2, 0x7B), (MXFP4, 0x7), (NVFP4, 0x7)], ids=lambda v: str(v)
)
def test_largest_code_and_reciprocal(format, largest_code):
    assert format.largest_code == largest_code
    reciprocal = torch.tensor(1.0) / torch.tensor(format.largest)
    assert format.reciprocal_of_largest == reciprocal.item()
    assert reciprocal * format.largest == 1.0  # so that amax = largest * 2^k has the scale 2^k


def test_itemsizes_and_blocks():
    for format in FORMATS:
        assert format.value_dtype.itemsize == format.scale_dtype.itemsize == 1
        assert DIM_MULTIPLE % format.block == 0 and ROW_ALIGNMENT % format.block == 0


@pytest.mark.parametrize(
    "rows, padded", [(0, 0), (1, 128), (7, 128), (8, 128), (9, 128), (127, 128), (128, 128), (129, 256)]
)
def test_groups_of_any_size_are_padded_by_one_constant(rows, padded):
    assert padded_scales(rows, 4)[0] == padded
    assert planner.ROW_ALIGNMENT is ROW_ALIGNMENT and SCALE_ATOM[0] == ROW_ALIGNMENT
    assert planner.SCALE_ATOM is SCALE_ATOM and planner.by_name is by_name


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_expanded_rows_are_whole_groups_of_128_bytes_of_codes(format):
    group = format.expanded_group
    order = expanded_order(format)
    assert sorted(order) == list(range(group)) and group // format.values_per_byte == 128
    # Positions 2 a, 2 a + 1 and those 8 apart are of thread a of four: 32 consecutive bytes of codes.
    thread = torch.tensor(order).view(-1, 4, 2).transpose(0, 1).flatten(1).sort(dim=1).values
    assert torch.equal(thread.flatten(), torch.arange(group))
    assert row_pitch(format, 2 * group - 32, expanded=True) == 4 * group
    assert row_pitch(format, 64) == 64 // format.values_per_byte


def test_examples_of_the_order():
    """Positions by their formulas, and codes that a thread has in consecutive registers."""
    assert expanded_order(MXFP8_E4M3)[:10] == [0, 2, 32, 34, 64, 66, 96, 98, 1, 3]
    assert expanded_order(MXFP8_E4M3)[32 * 3 + 16 + 8 + 2 * 2 + 1] == 4 * (8 * 2 + 2 * 3 + 1) + 1 + 2
    assert expanded_order(NVFP4)[128 + 64 + 32 + 8 * 3 + 2 * 2 + 1] == 8 * (8 * 2 + 4 + 2 + 1) + 3 + 4


def test_expanded_values_are_exact():
    """A code of a block and its scale have 4 + 1 and 2 + 4 bits of mantissa."""
    e4m3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    e4m3 = e4m3[e4m3.isfinite()]
    products = e4m3[:, None] * torch.tensor([2.0**-117, 1.0, 2.0**118])
    assert torch.equal(products.to(MXFP8_E4M3.expanded_dtype).float(), products)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    products = e2m1[:, None] * e4m3[e4m3 >= 2.0**-9]
    assert torch.equal(products.to(NVFP4.expanded_dtype).float(), products)


@pytest.mark.parametrize("width", [32, 96, 160, 2880, 7168])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_wire_rows_are_whole_16_byte_accesses(format, width):
    values_end, scales_end, outer_end = packed_row_parts(format, width)
    assert packed_row_bytes(format, width) % 16 == 0 and 0 <= packed_row_bytes(format, width) - outer_end < 16
    assert values_end * format.values_per_byte == width and (scales_end - values_end) * format.block == width
    assert not format.two_level or scales_end % 2 == 0  # the FP32 scale is stored as two halves
