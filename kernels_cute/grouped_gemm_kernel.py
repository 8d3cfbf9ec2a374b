"""Grouped GEMM on block-scaled operands for the tensor cores of sm_100, in CuTe DSL. Not executed on hardware.

    forward  out[r] = bf16(x[r] @ w[e].T)            dgrad  out[r] = bf16(x[r] @ w[e])
    wgrad    out[e] = round(x_e.T @ w_e), or added   swiglu h2[r] = quantise(act(bf16(x[r] @ w[e].T)))

r runs over the real rows of each local expert e: num_rows_L[e] from row_start_P[e], a multiple of 128. x is the operand
along the rows of the result, w the one along its columns; of wgrad x is dy and w is x, both blocks of rows. NVFP4
multiplies the sum by the inverse outer scale of the row, then by that of the expert.

One program an SM, six warps:

    load      TMA brings values and scales of both operands into a ring of stages
    multiply  copies a stage's scales to tensor memory and issues the block-scaled multiplications
    epilogue  four warps, a lane of tensor memory each thread, bring an accumulator to memory

Every role walks the same tiles: program p takes tiles p, p + programs, ... of (expert, row tile, column tile), counted
on the device. A ring of mbarriers lies between the first two; between the others two accumulators take turns. They may
overlap in `Tile.overlap` columns; the epilogue reads those first and then lets the next tile begin, which is right for
both: by then it has read all of the accumulator before.

Operands need one TMA descriptor each, whatever the experts' rows: places that only the device knows are coordinates.
Scales are 512-byte atoms that begin at any multiple of 128 bytes, so their descriptor has rows of 128 bytes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32, Int64, const_expr, cute, memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from .epilogue import Epilogue
from .load import Load
from .multiply import Multiply
from .tiles import EPILOGUE_WARPS, SCALE_UNIT, WARPS, Product, Tile
from .walk import Walk

ONE = tcgen05.CtaGroup.ONE
MULTIPLY_WARP, LOAD_WARP = EPILOGUE_WARPS, EPILOGUE_WARPS + 1
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS
VALUE_TYPES = {
    "mxfp8_e4m3": cutlass.Float8E4M3FN,
    "mxfp8_e5m2": cutlass.Float8E5M2,
    "mxfp4": cutlass.Float4E2M1FN,
    "nvfp4": cutlass.Float4E2M1FN,
}


class GroupedGemm:
    """One product with one tile; calling it launches the kernel."""

    def __init__(self, product: Product, tile: Tile):
        self.product, self.tile = product, tile
        self.values = VALUE_TYPES[product.format.name]
        self.scales = cutlass.Float8E4M3FN if product.format.two_level else cutlass.Float8E8M0FNU
        self.out = Float32 if product.out_bits == 32 else cutlass.BFloat16
        x_major = OperandMajorMode.MN if product.op == "wgrad" else OperandMajorMode.K
        w_major = OperandMajorMode.MN if product.op in ("dgrad", "wgrad") else OperandMajorMode.K
        self.majors = (w_major, x_major) if tile.swap_ab else (x_major, w_major)
        self.mnk = (tile.block_m, tile.block_n, tile.block_k)
        self.walk = Walk(product, tile)
        self.loads = Load(product, tile, self.walk)
        self.multiply = Multiply(product, tile, self.walk, self.scales)
        self.epilogue = Epilogue(product, tile, self.walk, self.out)
        self.box_mnk = (tile.block_m, self.loads.n_rows, tile.block_k)

    @cute.jit
    def __call__(
        self,
        x_values: cute.Pointer,
        x_scales: cute.Pointer,
        x_start: cute.Pointer,
        x_scales_start: cute.Pointer,
        w_values: cute.Pointer,
        w_scales: cute.Pointer,
        w_start: cute.Pointer,
        w_scales_start: cute.Pointer,
        out: cute.Pointer,
        out_start: cute.Pointer,
        row_start: cute.Pointer,
        num_rows: cute.Pointer,
        stop: cute.Pointer,
        x_outer: cute.Pointer,
        x_outer_start: cute.Pointer,
        w_outer: cute.Pointer,
        h2_values: cute.Pointer,
        h2_start: cute.Pointer,
        h2_scales: cute.Pointer,
        h2_scales_start: cute.Pointer,
        alpha: Float32,
        limit: Float32,
        x_rows: Int32,
        x_units: Int32,
        w_rows: Int32,
        w_units: Int32,
        contraction: Int32,
        all_columns: Int32,
        first_column: Int32,
        width: Int32,
        out_stride: Int32,
        L: Int32,
        programs: Int32,
        stream: cuda.CUstream,
    ):
        """Launch on a stream.

        Args:   x_values, w_values, x_scales, w_scales: of whole buffers; the words at *_start say where the call's
                rows, and bytes of scales, begin (of weights: not read).  x_rows, w_rows: rows of the buffers.
                x_units, w_units: 128 bytes of scales.  contraction: values that are summed over; of wgrad the rows of
                the result.  all_columns: of the result, of which width from first_column on are computed.
                out_stride: of a row of the result.  x_outer ...: read for two-level formats only.
        """
        contraction, all_columns = cute.assume(contraction, 32), cute.assume(all_columns, 32)
        deep, broad = Int64(contraction), Int64(all_columns)
        if const_expr(self.product.op == "wgrad"):  # both are rows, which are summed over
            x = cute.make_tensor(x_values, cute.make_layout((contraction, x_rows, 1), stride=(1, deep, Int64(0))))
            w = cute.make_tensor(w_values, cute.make_layout((all_columns, w_rows, 1), stride=(1, broad, Int64(0))))
        else:
            x = cute.make_tensor(x_values, cute.make_layout((x_rows, contraction, 1), stride=(deep, 1, Int64(0))))
            stride = (1, broad) if const_expr(self.product.op == "dgrad") else (deep, 1)
            w_layout = cute.make_layout((all_columns, contraction, L), stride=(*stride, broad * deep))
            w = cute.make_tensor(w_values, w_layout)
        xs = cute.make_tensor(x_scales, cute.make_layout((SCALE_UNIT // 2, x_units), stride=(1, SCALE_UNIT // 2)))
        ws = cute.make_tensor(w_scales, cute.make_layout((SCALE_UNIT // 2, w_units), stride=(1, SCALE_UNIT // 2)))
        m, n, ms, ns = (w, x, ws, xs) if const_expr(self.tile.swap_ab) else (x, w, xs, ws)

        mma, box_mma = self._mma(self.mnk), self._mma(self.box_mnk)
        m_smem = blackwell.make_smem_layout_a(mma, self.mnk, self.values, self.tile.stages)
        boxes = self.tile.stages * self.loads.n_boxes
        box_smem = blackwell.make_smem_layout_b(box_mma, self.box_mnk, self.values, boxes)
        load, cta = cpasync.CopyBulkTensorTileG2SOp(ONE), (1, 1, 1, 1)
        m_tma, m_places = cute.nvgpu.make_tiled_tma_atom_A(load, m, self._stage(m_smem), self.mnk, mma, cta)
        n_tma, n_places = cute.nvgpu.make_tiled_tma_atom_B(load, n, self._stage(box_smem), self.box_mnk, box_mma, cta)
        atoms = self.loads.atoms_shape()
        ms_tma, ms_places = cpasync.make_tiled_tma_atom(load, ms, cute.make_layout(atoms), atoms)
        ns_tma, ns_places = cpasync.make_tiled_tma_atom(load, ns, cute.make_layout(atoms), atoms)
        tables = (x_start, x_scales_start, w_start, w_scales_start, out_start, row_start, num_rows, stop)
        self.kernel(
            mma, box_mma, m_tma, m_places, n_tma, n_places, ms_tma, ms_places, ns_tma, ns_places,
            *tables, out, x_outer, x_outer_start, w_outer,
            h2_values, h2_start, h2_scales, h2_scales_start, alpha, limit,
            contraction, all_columns, first_column, width, out_stride, L,
        ).launch(
            grid=[programs, 1, 1], block=[32 * WARPS, 1, 1], cluster=[1, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    def _mma(self, mnk):
        types = (self.values, self.values, *self.majors, self.scales, self.product.format.block)
        return blackwell.make_blockscaled_trivial_tiled_mma(*types, ONE, mnk[:2])

    @staticmethod
    def _stage(layout):
        return cute.slice_(layout, (None, None, None, 0))

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        box_mma: cute.TiledMma,
        m_tma: cute.CopyAtom,
        m_places: cute.Tensor,
        n_tma: cute.CopyAtom,
        n_places: cute.Tensor,
        ms_tma: cute.CopyAtom,
        ms_places: cute.Tensor,
        ns_tma: cute.CopyAtom,
        ns_places: cute.Tensor,
        x_start: cute.Pointer,
        x_scales_start: cute.Pointer,
        w_start: cute.Pointer,
        w_scales_start: cute.Pointer,
        out_start: cute.Pointer,
        row_start: cute.Pointer,
        num_rows: cute.Pointer,
        stop: cute.Pointer,
        out: cute.Pointer,
        x_outer: cute.Pointer,
        x_outer_start: cute.Pointer,
        w_outer: cute.Pointer,
        h2_values: cute.Pointer,
        h2_start: cute.Pointer,
        h2_scales: cute.Pointer,
        h2_scales_start: cute.Pointer,
        alpha: Float32,
        limit: Float32,
        contraction: Int32,
        all_columns: Int32,
        first_column: Int32,
        width: Int32,
        out_stride: Int32,
        L: Int32,
    ):
        tile = self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for descriptor in (m_tma, n_tma, ms_tma, ns_tma):
                cpasync.prefetch_descriptor(descriptor)

        m_smem = blackwell.make_smem_layout_a(mma, self.mnk, self.values, tile.stages)
        n_smem = blackwell.make_smem_layout_b(mma, self.mnk, self.values, tile.stages)
        ms_smem = blockscaled.make_smem_layout_sfa(mma, self.mnk, self.product.format.block, tile.stages)
        ns_smem = blockscaled.make_smem_layout_sfb(mma, self.mnk, self.product.format.block, tile.stages)

        @cute.struct
        class Shared:
            ring: cute.struct.MemRange[Int64, 2 * tile.stages]
            turns: cute.struct.MemRange[Int64, 2]
            tensor_memory: Int32
            m: cute.struct.Align[cute.struct.MemRange[self.values, cute.cosize(m_smem.outer)], 1024]
            n: cute.struct.Align[cute.struct.MemRange[self.values, cute.cosize(n_smem.outer)], 1024]
            ms: cute.struct.Align[cute.struct.MemRange[self.scales, cute.cosize(ms_smem)], 1024]
            ns: cute.struct.Align[cute.struct.MemRange[self.scales, cute.cosize(ns_smem)], 1024]

        shared, self.shared_bytes = memory.SmemAllocator().allocate(Shared), Shared.size_in_bytes()
        threads = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)  # noqa: E731
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=shared.ring.data_ptr(),
            num_stages=tile.stages,
            producer_group=threads(1),
            consumer_group=threads(1),
            tx_count=tile.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        turns = pipeline.PipelineUmmaAsync.create(
            barrier_storage=shared.turns.data_ptr(),
            num_stages=1,
            producer_group=threads(1),
            consumer_group=threads(EPILOGUE_THREADS),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        tensor_memory = memory.TmemAllocator(
            shared.tensor_memory.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=EPILOGUE_THREADS + 32),
            allocator_warp_id=0,
        )

        m_shared = shared.m.get_tensor(m_smem.outer, swizzle=m_smem.inner)
        n_shared = shared.n.get_tensor(n_smem.outer, swizzle=n_smem.inner)
        ms_shared, ns_shared = shared.ms.get_tensor(ms_smem), shared.ns.get_tensor(ns_smem)
        sizes, tables = (contraction, width, L), (row_start, num_rows, stop)

        if warp == LOAD_WARP:
            boxes = tile.stages * self.loads.n_boxes
            box_smem = blackwell.make_smem_layout_b(box_mma, self.box_mnk, self.values, boxes)
            n_boxes = shared.n.get_tensor(box_smem.outer, swizzle=box_smem.inner)
            ms_units = self.loads.atoms_at(shared.ms.data_ptr(), tile.stages)
            ns_units = self.loads.atoms_at(shared.ns.data_ptr(), tile.stages * tile.atom_rows_n)
            self.loads.fill(
                ring, (mma.get_slice(0).partition_A, m_tma, m_places, m_shared),
                (box_mma.get_slice(0).partition_B, n_tma, n_places, n_boxes),
                (ms_tma, ms_places, ms_units), (ns_tma, ns_places, ns_units),
                (x_start, x_scales_start, w_start, w_scales_start), tables, sizes, all_columns, first_column,
            )  # fmt: skip
        if warp == MULTIPLY_WARP:
            tensor_memory.wait_for_alloc()
            base = tensor_memory.retrieve_ptr(Float32)
            values, scales = (m_shared, n_shared), (ms_shared, ns_shared)
            self.multiply.run(ring, turns, mma, base, values, scales, tables, sizes)
        if warp < EPILOGUE_WARPS:
            tensor_memory.allocate(tile.tensor_columns)
            tensor_memory.wait_for_alloc()
            base = tensor_memory.retrieve_ptr(Float32)
            result, outer = (out, out_start, out_stride), (x_outer, x_outer_start, w_outer)
            h2 = (h2_values, h2_start, h2_scales, h2_scales_start, alpha, limit)
            self.epilogue.store(turns, self.multiply.accumulator(mma), base, result, outer, h2, tables, sizes)
            tensor_memory.relinquish_alloc_permit()
            pipeline.NamedBarrier(barrier_id=2, num_threads=EPILOGUE_THREADS).arrive_and_wait()
            tensor_memory.free(base)
