"""The warp that issues the block-scaled multiplications of sm_100.

Scales reach the tensor cores through tensor memory: a copy that is issued before the multiplications which read it,
and carried out in that order. Steps of 32 bytes that lie beyond the contraction are left out. The last one that is not
is multiplied whole: values beyond the contraction are zeros there, of wgrad by its rows of padding, and scales beyond
are finite, as the quantisers write them.
"""

import cutlass
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from dist_moe.formats import SCALE_ATOM

from .tensor_memory import accumulator_at, after_signal
from .tiles import Product, Tile
from .walk import Walk

LANES = 32  # rows of an operand whose scales have a column of tensor memory
STEPS = 4  # multiplications of a stage


class Multiply:
    """Of one product with one tile."""

    def __init__(self, product: Product, tile: Tile, walk: Walk, scale_type):
        self.wgrad, self.block = product.op == "wgrad", product.format.block
        self.tile, self.walk, self.scale_type = tile, walk, scale_type
        self.mnk = (tile.block_m, tile.block_n, tile.block_k)

    def accumulator(self, mma):
        """Layout of an accumulator in tensor memory."""
        return mma.make_fragment_C(mma.partition_shape_C(self.mnk[:2])).layout

    @cute.jit
    def run(self, ring, turns, mma, base, values, scales, tables, sizes):
        """Multiply what is in the ring, tile after tile, into accumulators by turns.

        base: of tensor memory.  values, scales: stages of the sides of M and of N.
        """
        m, n = mma.make_fragment_A(values[0]), mma.make_fragment_B(values[1])
        ms_base = base + (self.tile.accumulator_shift + self.tile.block_n)
        ns_base = ms_base + self.tile.scale_columns[0]
        stages = [cute.slice_(side.layout, (None, None, None, 0)) for side in scales]
        ms_layout = blockscaled.make_tmem_layout_sfa(mma, self.mnk, self.block, stages[0])
        ns_layout = blockscaled.make_tmem_layout_sfb(mma, self.mnk, self.block, stages[1])
        ms, ns = self.scales_at(ms_base, ms_layout), self.scales_at(ns_base, ns_layout)
        ms_copy, ms_from, ms_to = self.scale_copy(scales[0], ms)
        ns_copy, ns_from, ns_to = self.scale_copy(scales[1], ns)
        step, _, _ = cute.arch.grid_dim()
        tile, _, _ = cute.arch.block_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages)
        turn_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        turn = Int32(0)
        walk = self.walk.advance(tile, self.walk.start(tables, sizes), tables, sizes)
        while tile < walk[2]:
            _, row, _, _, count = self.walk.place(tile, walk, tables, sizes)
            depth = count if const_expr(self.wgrad) else sizes[0]
            if depth > 0:
                turns.producer_acquire(turn_state)
                after_signal()
                sums = cute.make_tensor(accumulator_at(base, turn, self.tile), self.accumulator(mma))
                # A narrow tile of rows may begin inside its atoms.
                inside = row % SCALE_ATOM[0] // LANES if const_expr(self.tile.swap_ab) else 0
                ns_here = self.scales_at(ns_base + inside, ns_layout)
                for k in cutlass.range(cute.ceil_div(depth, self.tile.block_k), unroll=self.tile.unroll):
                    ring.consumer_wait(state)
                    stage = (None, None, None, None, state.index)
                    cute.copy(ms_copy, ms_from[stage], ms_to)
                    cute.copy(ns_copy, ns_from[stage], ns_to)
                    for i in cutlass.range_constexpr(STEPS):
                        if k * self.tile.block_k + i * self.tile.instruction_k < depth:
                            mma.set(tcgen05.Field.ACCUMULATE, k + i != 0)
                            part, scale = (None, None, i, state.index), (None, None, i)
                            cute.gemm(mma, sums, [m[part], ms[scale]], [n[part], ns_here[scale]], sums)
                    ring.consumer_release(state)
                    state.advance()
                turns.producer_commit(turn_state)
                turn_state.advance()
                turn = 1 - turn
            tile += step
            walk = self.walk.advance(tile, walk, tables, sizes)
        turns.producer_tail(turn_state)

    def scales_at(self, column, layout):
        return cute.make_tensor(cute.recast_ptr(column, dtype=self.scale_type), layout)

    def scale_copy(self, shared, tensor_memory):
        """A copy of one stage's scales to tensor memory: how, from where by stage, to where."""
        shared, tensor_memory = cute.filter_zeros(shared), cute.filter_zeros(tensor_memory)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), self.scale_type)
        copy = tcgen05.make_s2t_copy(atom, tensor_memory)
        mine = copy.get_slice(0)
        return copy, tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(shared)), mine.partition_D(tensor_memory)
