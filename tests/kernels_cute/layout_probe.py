"""Code that the DSL compiles for the CPU; it has to be in a file."""

import cutlass
from cutlass import cute
from cutlass.utils.blockscaled_layout import tile_atom_to_shape_SF


@cute.jit
def fill(places: cute.Tensor, rows: cutlass.Int32, columns: cutlass.Int32, block: cutlass.Constexpr):
    """places[r, c] = the byte at which the DSL's layout has the scale of row r and of values block * c, ..."""
    layout = tile_atom_to_shape_SF((rows, columns * block, 1), block)
    for row in range(rows):
        for column in range(columns):
            places[row, column] = cutlass.Int32(cute.crd2idx((row, column * block, 0), layout))
