"""Blocked order: against the DSL's own layout algebra, against the quantisers' oracle, and back."""

import pytest
import torch

from dist_moe.formats import padded_scales
from dist_moe.kernels_cute import scale_layout
from dist_moe.reference_formats import to_blocked

SHAPES = [(128, 4), (1, 1), (129, 5), (256, 8), (2880, 90), (384, 3), (97, 180), (512, 64)]
EACH = pytest.mark.parametrize(("rows", "columns"), SHAPES)


def indices(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")


def atoms_wide(columns: int) -> int:
    return padded_scales(1, columns)[1] // scale_layout.COLUMNS


@EACH
def test_place_is_the_exact_inverse_on_every_byte(rows, columns):
    padded_rows, padded_columns = padded_scales(rows, columns)
    row, column = indices(padded_rows, padded_columns)
    byte = scale_layout.offset(row, column, atoms_wide(columns))
    assert byte.flatten().sort().values.equal(torch.arange(padded_rows * padded_columns))
    for found, want in zip(scale_layout.place(byte, atoms_wide(columns)), (row, column), strict=True):
        assert found.equal(want)


@EACH
def test_the_quantisers_store_scales_there(rows, columns):
    natural = torch.randint(0, 256, (1, rows, columns), dtype=torch.uint8)
    blocked = to_blocked(natural).flatten()
    row, column = indices(rows, columns)
    assert blocked[scale_layout.offset(row, column, atoms_wide(columns))].equal(natural[0])


@pytest.mark.cute
@pytest.mark.parametrize("block", [16, 32])
@EACH
def test_the_dsl_reads_scales_there(rows, columns, block):
    """The layout that the DSL gives the tensor cores, evaluated by its own compiled code on the CPU."""
    from cutlass.cute.runtime import from_dlpack

    from .layout_probe import fill

    found = torch.empty(rows, columns, dtype=torch.int32)
    fill(from_dlpack(found), rows, columns, block)
    row, column = indices(rows, columns)
    assert found.equal(scale_layout.offset(row, column, atoms_wide(columns)).int())
