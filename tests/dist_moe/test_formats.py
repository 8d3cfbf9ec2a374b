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
    packed_row_bytes,
    packed_row_parts,
    padded_scales,
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


@pytest.mark.parametrize("width", [32, 96, 160, 2880, 7168])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_wire_rows_are_whole_16_byte_accesses(format, width):
    values_end, scales_end, outer_end = packed_row_parts(format, width)
    assert packed_row_bytes(format, width) % 16 == 0 and 0 <= packed_row_bytes(format, width) - outer_end < 16
    assert values_end * format.values_per_byte == width and (scales_end - values_end) * format.block == width
    assert not format.two_level or scales_end % 2 == 0  # the FP32 scale is stored as two halves
