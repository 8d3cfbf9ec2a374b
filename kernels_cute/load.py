"""The warp that brings values and scales of both operands into the ring of stages, by TMA.

Each operand has one descriptor for its values and one for its scales, over its whole buffer. Where rows begin is known
on the device alone, and enters as a coordinate. What lies beyond a buffer, or beyond the columns of a weight, comes as
zeros; scales beyond their matrix belong to rows or columns that are not stored, or to steps that are not multiplied.
"""

import cutlass
from cutlass import Int16, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from dist_moe.formats import SCALE_ATOM

from .tiles import ATOM_BYTES, SCALE_UNIT, Product, Tile
from .walk import Walk, word

ATOM_ROWS, ATOM_COLUMNS = SCALE_ATOM
ATOM_UNITS = ATOM_BYTES // SCALE_UNIT


class Load:
    """Of one product with one tile."""

    def __init__(self, product: Product, tile: Tile, walk: Walk):
        self.wgrad, self.tile, self.walk, self.block = product.op == "wgrad", tile, walk, product.format.block
        self.n_boxes = 2 if product.op == "swiglu" else 1  # gate and up lie F rows apart
        self.m_rows, self.n_rows = tile.block_m, tile.block_n // self.n_boxes

    def atoms_shape(self) -> tuple[int, int]:
        """Of the scales of 128 rows in a stage, as their descriptor has them: 16-bit words of a unit, units."""
        return SCALE_UNIT // 2, self.tile.atoms * ATOM_UNITS

    def atoms_at(self, shared, count):
        """Shared memory from a pointer on as the scales of `count` times 128 rows."""
        shape, words = self.atoms_shape(), self.tile.atoms * ATOM_BYTES // 2
        layout = cute.append(cute.make_layout(shape), cute.make_layout(count, stride=words))
        return cute.make_tensor(cute.recast_ptr(shared, dtype=Int16), layout)

    @cute.jit
    def fill(self, ring, m, n, ms, ns, starts, tables, sizes, all_columns, first_column):
        """Load the stages of this program's tiles.

        m, n: of the values of a side how the multiplication partitions it, copy, places, stages; ms, ns: of its scales
        copy, places, stages.
        """
        step, _, _ = cute.arch.grid_dim()
        tile, _, _ = cute.arch.block_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages)
        firsts, atoms_deep, atom_rows = self.begin(starts, tables, sizes, all_columns)
        walk = self.walk.advance(tile, self.walk.start(tables, sizes), tables, sizes)
        while tile < walk[2]:
            place = self.walk.place(tile, walk, tables, sizes)
            x, w = self.operands(place, firsts, atoms_deep, atom_rows, first_column)
            depth = place[4] if const_expr(self.wgrad) else sizes[0]
            (m_place, m_unit), (n_place, n_unit) = (w, x) if const_expr(self.tile.swap_ab) else (x, w)
            m_to, m_from = self.box(m, m_place, self.m_rows)
            n_boxes = [self.box(n, n_place, self.n_rows)]
            units_apart = ATOM_UNITS * atoms_deep
            if const_expr(self.n_boxes == 2):
                n_boxes.append(self.box(n, (n_place[0] + all_columns // 2, *n_place[1:]), self.n_rows))
                units_apart *= atom_rows // 2
            for k in cutlass.range(cute.ceil_div(depth, self.tile.block_k), unroll=self.tile.unroll):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(m[1], m_from[None, k], m_to[None, state.index], tma_bar_ptr=full)
                for i, (n_to, n_from) in enumerate(n_boxes):
                    stage = state.index * self.n_boxes + i
                    cute.copy(n[1], n_from[None, k], n_to[None, stage], tma_bar_ptr=full)
                units = k * self.atoms_shape()[1]
                self.scales(ms, m_unit + units, state.index, full)
                for i in cutlass.range_constexpr(self.tile.atom_rows_n):
                    stage = state.index * self.tile.atom_rows_n + i
                    self.scales(ns, n_unit + units + i * units_apart, stage, full)
                state.advance()
            tile += step
            walk = self.walk.advance(tile, walk, tables, sizes)
        ring.producer_tail(state)

    @cute.jit
    def begin(self, starts, tables, sizes, all_columns):
        """First rows and first units of scales; how many atoms they are deep and those of a weight tall."""
        x_start, x_scales_start, w_start, w_scales_start = starts
        row_start, _, _ = tables
        contraction, _, L = sizes
        w_first, w_unit = Int32(0), Int32(0)
        if const_expr(self.wgrad):
            w_first, w_unit = Int32(word(w_start)), Int32(word(w_scales_start) // SCALE_UNIT)
            contraction = word(row_start + L)
        firsts = (Int32(word(x_start)), Int32(word(x_scales_start) // SCALE_UNIT), w_first, w_unit)
        atoms_deep = cute.ceil_div(contraction, ATOM_COLUMNS * self.block)
        return firsts, atoms_deep, cute.ceil_div(all_columns, ATOM_ROWS)

    @cute.jit
    def operands(self, place, firsts, atoms_deep, atom_rows, first_column):
        """Of both operands of a tile where their values begin, and their scales."""
        expert, row, column, row_start, _ = place
        x_first, x_unit, w_first, w_unit = firsts
        column += first_column
        x_place, w_place = (x_first + row_start + row, 0, 0), (column, 0, expert)
        x_atom = (row_start + row) // ATOM_ROWS * atoms_deep
        w_atom = (expert * atom_rows + column // ATOM_ROWS) * atoms_deep
        if const_expr(self.wgrad):  # the expert's rows are what is summed over
            x_place, w_place = (row, x_first + row_start, 0), (column, w_first + row_start, 0)
            before = row_start // ATOM_ROWS
            x_atom, w_atom = row // ATOM_ROWS * atoms_deep + before, column // ATOM_ROWS * atoms_deep + before
        return (x_place, x_unit + ATOM_UNITS * x_atom), (w_place, w_unit + ATOM_UNITS * w_atom)

    @cute.jit
    def box(self, side, place, rows):
        """What TMA copies to, by stage, and from, by step of the contraction, beginning at a place of the operand."""
        partition, copy, places, stages = side
        tiles = cute.local_tile(cute.domain_offset(place, places), (rows, self.tile.block_k), (0, None, 0))
        return self.parts(copy, cute.group_modes(stages, 0, 3), cute.group_modes(partition(tiles), 0, 3))

    @cute.jit
    def scales(self, side, unit, stage, full):
        """Load the scales of 128 rows that begin at a unit."""
        copy, places, stages = side
        atoms = cute.local_tile(cute.domain_offset((0, unit), places), self.atoms_shape(), (0, 0))
        to, source = self.parts(copy, cute.group_modes(stages, 0, 2), cute.group_modes(atoms, 0, 2))
        cute.copy(copy, source, to[None, stage], tma_bar_ptr=full)

    def parts(self, copy, to, source):
        return cpasync.tma_partition(copy, 0, cute.make_layout(1), to, source)
