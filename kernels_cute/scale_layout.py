"""Where a scale lies in blocked order, as the tensor cores of sm_100 read it, and which scale lies where.

An atom is 128 rows by 4 columns of scales in 512 bytes; atoms of a row of atoms are neighbours. Works on ints and on
integer tensors alike, and on the numbers of a kernel. tests prove it against the DSL's own layout algebra.
Source of the order: "Scale Factor A Layout" of tcgen05.mma in the PTX ISA.
"""

from dist_moe.formats import SCALE_ATOM

from .tiles import ATOM_BYTES

ROWS, COLUMNS = SCALE_ATOM
LANES = 32  # rows of an atom that are 16 bytes apart
QUARTERS = ROWS // LANES


def offset(row, column, atoms_wide):
    """Byte of the scale at (row, column) in a matrix whose rows have that many atoms."""
    atom = row // ROWS * atoms_wide + column // COLUMNS
    return atom * ATOM_BYTES + row % LANES * (QUARTERS * COLUMNS) + row % ROWS // LANES * COLUMNS + column % COLUMNS


def place(byte, atoms_wide):
    """(row, column) of the scale at a byte; the inverse of offset."""
    atom, inside = byte // ATOM_BYTES, byte % ATOM_BYTES
    lane, quarter = inside // (QUARTERS * COLUMNS), inside // COLUMNS % QUARTERS
    row = atom // atoms_wide * ROWS + quarter * LANES + lane
    return row, atom % atoms_wide * COLUMNS + inside % COLUMNS
