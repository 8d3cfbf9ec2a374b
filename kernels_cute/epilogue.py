"""How an accumulator leaves tensor memory: rounded, added to what is there, or through SwiGLU and the quantiser.

A thread has one lane of tensor memory, a row of the result or, swapped, a column, and reads 32 columns of it at a time.
Rounding is that of the separate ops: SwiGLU sees gate and up as bf16, and its FP32 results go to the quantiser as they
are.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, pipeline
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op

from dist_moe.formats import E8M0_BIAS, E8M0_NAN, SCALE_ATOM

from . import scale_layout
from .tensor_memory import accumulator_at, after_signal, reads_done
from .tiles import BLOCK_M, SUBTILE, Product, Tile
from .walk import Walk, word

LOG2_E = 1.4426950408889634
MAGNITUDE, INFINITY, NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000  # of FP32 bits
MANTISSA_BITS, SMALLEST = 23, 0x400000  # 2^-127, subnormal


@dsl_user_op
def rounded_reciprocal(x, *, loc=None, ip=None):
    """1 / x, rounded to nearest: a division by 1, of which the DSL makes far more code."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip)]
    options = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Float32(llvm.inline_asm(T.f32(), operands, "rcp.rn.f32 $0, $1;", "=f,f", **options, loc=loc, ip=ip))


def flat(registers):
    """32 registers as a vector."""
    return cute.make_tensor(registers.iterator, cute.make_layout(SUBTILE))


class Epilogue:
    """The role of the four epilogue warps, of one product with one tile."""

    def __init__(self, product: Product, tile: Tile, walk: Walk, out_type):
        self.product, self.tile, self.walk, self.out_type = product, tile, walk, out_type
        self.pieces = tile.block_n // SUBTILE // (2 if product.op == "swiglu" else 1)

    @cute.jit
    def store(self, turns, layout, base, result, outer, h2, tables, sizes):
        """Bring the accumulators of this program's tiles to memory.

        base: of tensor memory, with the layout of an accumulator.  result: pointer, first row, stride.
        outer: inverse scales of rows, where they begin, and of experts.  h2: values, first row, scales, first byte,
        alpha, limit.
        """
        wgrad, swiglu = const_expr(self.product.op == "wgrad"), const_expr(self.product.op == "swiglu")
        overlap = self.tile.overlap // SUBTILE
        rows, width, _ = sizes
        _, out_start, _ = result
        row_outers, row_outers_start, expert_outers = outer
        thread, _, _ = cute.arch.thread_idx()
        step, _, _ = cute.arch.grid_dim()
        tile, _, _ = cute.arch.block_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        turn = Int32(0)
        walk = self.walk.advance(tile, self.walk.start(tables, sizes), tables, sizes)
        while tile < walk[2]:
            expert, row, column, row_start, count = self.walk.place(tile, walk, tables, sizes)
            if const_expr(wgrad):
                rows_left, first_row = rows - row, Int64(expert) * rows + row
            else:
                rows_left, first_row = count - row, word(out_start) + row_start + row
            full = count > 0
            if full:
                turns.consumer_wait(state)
                after_signal()
                if const_expr(overlap == 0):
                    turns.consumer_release(state)
            if const_expr(wgrad and self.product.accumulate):
                rows_left = rows_left if full else Int32(0)
            outers, atom_word = (row_outers, expert_outers), Uint32(0)
            if const_expr(self.product.format.two_level):
                outers = (row_outers + (word(row_outers_start) + row_start + row), expert_outers + expert)
            copy, pieces = self.reader(layout, accumulator_at(base, turn, self.tile), thread)
            sums = self.registers(copy, thread)
            for i in cutlass.range(self.pieces, unroll=1):
                piece = i if turn == 1 else self.pieces - 1 - i
                sums.fill(0.0)
                ups = self.registers(copy, thread)
                if full:
                    cute.copy(copy, pieces[None, None, None, 0, piece], sums)
                    if const_expr(swiglu):
                        cute.copy(copy, pieces[None, None, None, 0, self.pieces + piece], ups)
                    reads_done()
                    if const_expr(overlap > 0):
                        if i == overlap - 1:
                            turns.consumer_release(state)
                if const_expr(swiglu):
                    place = (row_start + row + thread, thread < rows_left, column, piece, width)
                    atom_word |= self.put_h2(flat(sums), flat(ups), result, h2, place)
                elif const_expr(self.tile.swap_ab):
                    place = (first_row + piece * SUBTILE, rows_left - piece * SUBTILE, column + thread, width)
                    self.put_column(flat(sums), result, (outers[0] + piece * SUBTILE, outers[1]), place)
                else:
                    place = (first_row, rows_left, column + piece * SUBTILE, width)
                    self.put_row(flat(sums), result, outers, place, thread)
            if const_expr(swiglu):
                if thread < rows_left:
                    self.put_scales(atom_word, h2, row_start + row + thread, column, width)
            if full:
                state.advance()
                turn = 1 - turn
            tile += step
            walk = self.walk.advance(tile, walk, tables, sizes)

    def reader(self, layout, base, thread):
        """How a thread reads 32 columns, and the accumulator at column `base` in pieces of so many."""
        pieces = cute.flat_divide(cute.make_tensor(base, layout)[(None, None), 0, 0], (BLOCK_M, SUBTILE))
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        copy = tcgen05.make_tmem_copy(atom, pieces[None, None, 0, 0])
        return copy, copy.get_slice(thread).partition_S(pieces)

    def registers(self, copy, thread):
        piece = cute.make_identity_tensor((BLOCK_M, SUBTILE))
        return cute.make_rmem_tensor(copy.get_slice(thread).partition_D(piece).shape, Float32)

    @cute.jit
    def put_row(self, sums, result, outers, place, thread):
        """32 columns of row `thread` of the tile: times the outer scales, added to what is there, rounded once."""
        first_row, rows_left, column, width = place
        out, _, stride = result
        of_row, of_expert = outers
        if thread < rows_left and column < width:
            at = (first_row + thread) * stride + column
            there = cute.make_tensor(out + cute.assume(at, SUBTILE), cute.make_layout(SUBTILE))
            rounded = cute.make_rmem_tensor(SUBTILE, self.out_type)
            values = sums.load()
            if const_expr(self.product.format.two_level):
                values = values * word(of_row + thread) * word(of_expert)
            if const_expr(self.product.accumulate):
                cute.autovec_copy(there, rounded)
                values = values + rounded.load().to(Float32)
            rounded.store(values.to(self.out_type))
            cute.autovec_copy(rounded, there)

    @cute.jit
    def put_column(self, sums, result, outers, place):
        """32 rows of one column; the lanes of a warp have neighbouring columns."""
        first_row, rows_left, column, width = place
        out, _, stride = result
        of_row, of_expert = outers
        if column < width:
            there = out + (first_row * stride + column)
            for i in cutlass.range_constexpr(SUBTILE):
                if i < rows_left:
                    value = sums[i]
                    if const_expr(self.product.format.two_level):
                        value = value * word(of_row + i) * word(of_expert)
                    cute.make_tensor(there + i * Int64(stride), cute.make_layout(1))[0] = value.to(self.out_type)

    # ---- SwiGLU and its quantiser -----------------------------------------------------------------------------------

    @cute.jit
    def put_h2(self, gates, ups, result, h2, place):
        """32 columns of gate and up of a row: kept as bf16 when training, and quantised h2, which is one block.

        Returns the code of the block's scale, in its byte of the four of this tile's atom.
        """
        row, real, column, piece, F = place
        out, out_start, stride = result
        h2_values, h2_start, _, _, alpha, limit = h2
        at = column + piece * SUBTILE
        gate, up = gates.load().to(self.out_type), ups.load().to(self.out_type)
        if const_expr(self.product.stores_h1):
            if real:
                for half, first in ((gate, at), (up, at + F)):
                    offset = (word(out_start) + row) * stride + first
                    self.put_block(half, out + cute.assume(offset, SUBTILE))
        values = cute.make_rmem_tensor(SUBTILE, Float32)
        values.store(self.act(gate.to(Float32), up.to(Float32), alpha, limit))
        bits, amax = cute.recast_tensor(values, Int32), Int32(0)
        for i in cutlass.range_constexpr(SUBTILE):
            magnitude = bits[i] & MAGNITUDE
            amax = magnitude if magnitude > amax else amax
        code, factor = self.block_scale(amax)
        if real:
            offset = (word(h2_start) + row) * F + at
            codes = (values.load() * factor).to(h2_values.value_type)
            self.put_block(codes, h2_values + cute.assume(offset, SUBTILE))
        return Uint32(code) << Uint32(8 * piece)

    @cute.jit
    def put_block(self, values, there):
        block = cute.make_rmem_tensor(SUBTILE, values.dtype)
        block.store(values)
        cute.autovec_copy(block, cute.make_tensor(there, cute.make_layout(SUBTILE)))

    @cute.jit
    def act(self, gate, up, alpha, limit):
        """FP32 act(gate, up): gate * sigmoid * up. Selects, as a minimum may drop a NaN."""
        slope = gate
        if const_expr(self.product.clamped):
            gate = cute.where(gate > limit, limit, gate)
            up = cute.where(up > limit, limit, cute.where(up < -limit, -limit, up)) + 1.0
            slope = gate * alpha
        below = cute.make_rmem_tensor(SUBTILE, Float32)
        below.store(cute.math.exp2((0.0 - slope) * LOG2_E, fastmath=True) + 1.0)
        for i in cutlass.range_constexpr(SUBTILE):
            if const_expr(self.product.fast_math):
                below[i] = cute.arch.rcp_approx(below[i])
            else:
                below[i] = rounded_reciprocal(below[i])
        return gate * below.load() * up

    @cute.jit
    def block_scale(self, amax):
        """Code of an E8M0 scale, rounded up, of a block whose largest magnitude has these bits, and its inverse."""
        m = (amax.bitcast(Float32) * self.product.format.reciprocal_of_largest).bitcast(Int32)
        code = (m + ((1 << MANTISSA_BITS) - 1)) >> MANTISSA_BITS
        if m <= SMALLEST:
            code = Int32(0)
        factor = (2 * E8M0_BIAS - code) << MANTISSA_BITS
        if amax >= INFINITY:
            code, factor = Int32(E8M0_NAN), Int32(NAN)
        return code, factor.bitcast(Float32)

    @cute.jit
    def put_scales(self, atom_word, h2, row, column, F):
        """The four scales of a row of this tile, which are neighbours in their atom."""
        _, _, scales, scales_start, _, _ = h2
        atoms_wide = cute.ceil_div(F // SUBTILE, SCALE_ATOM[1])
        byte = word(scales_start) + scale_layout.offset(Int64(row), column // SUBTILE, atoms_wide)
        there = cute.recast_ptr(scales + byte, dtype=Uint32)
        cute.make_tensor(there, cute.make_layout(1))[0] = atom_word
