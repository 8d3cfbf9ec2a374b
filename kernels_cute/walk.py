"""Which tiles a program computes: every p-th of (expert, tile of columns, tile of rows), counted on the device.

Tiles of rows come first, as they read the same weights. A walk is (lane_first, lane_end, end, chunk): 32 experts at a
time, one a lane, whose tiles run from lane_first to lane_end; `end` is where those of the chunk before `chunk` end. It
costs a load, a scan and a vote for 32 experts, and no memory.
"""

from cutlass import Int32, const_expr, cute

from .tiles import Product, Tile

LANES = 32


class Walk:
    """Of one product with one tile."""

    def __init__(self, product: Product, tile: Tile):
        self.wgrad, self.out_rows = product.op == "wgrad", tile.out_rows
        self.out_columns = tile.out_columns // 2 if product.op == "swiglu" else tile.out_columns

    @cute.jit
    def start(self, tables, sizes):
        """The walk before its first tile. Nothing is on it when the stop word is set."""
        _, _, stop = tables
        rows, width, L = sizes
        end, chunk = Int32(0), Int32(0)
        if const_expr(self.wgrad):
            end = L * cute.ceil_div(rows, self.out_rows) * cute.ceil_div(width, self.out_columns)
        if word(stop) != 0:
            end, chunk = Int32(0), cute.ceil_div(L, LANES)
        return Int32(0), Int32(0), end, chunk

    @cute.jit
    def advance(self, tile, walk, tables, sizes):
        """On to the chunk that holds the tile; past the last one the tile is not below `end`."""
        lane_first, lane_end, end, chunk = walk
        if const_expr(not self.wgrad):
            _, num_rows, _ = tables
            _, width, L = sizes
            columns = cute.ceil_div(width, self.out_columns)
            lane = cute.arch.lane_idx()
            while tile >= end and chunk * LANES < L:
                expert = chunk * LANES + lane
                tiles = Int32(0)
                if expert < L:
                    tiles = cute.ceil_div(word(num_rows + expert), self.out_rows) * columns
                upto = tiles
                for distance in (1, 2, 4, 8, 16):
                    other = cute.arch.shuffle_sync_up(upto, distance)
                    if lane >= distance:
                        upto += other
                lane_end = end + upto
                lane_first = lane_end - tiles
                end = cute.arch.shuffle_sync(lane_end, LANES - 1)
                chunk += 1
        return lane_first, lane_end, end, chunk

    @cute.jit
    def place(self, tile, walk, tables, sizes):
        """Of a tile: expert, first row and column, the expert's first row and its number of rows.

        The row counts from the expert's first, of wgrad the row of its gradient; the column from the first one that is
        computed.
        """
        row_start, num_rows, _ = tables
        rows, width, _ = sizes
        lane_first, lane_end, _, chunk = walk
        if const_expr(self.wgrad):
            per_expert = cute.ceil_div(rows, self.out_rows) * cute.ceil_div(width, self.out_columns)
            expert, inside = tile // per_expert, tile % per_expert
        else:
            lane = cute.arch.popc(cute.arch.vote_ballot_sync(lane_end <= tile))
            expert, inside = (chunk - 1) * LANES + lane, tile - cute.arch.shuffle_sync(lane_first, lane)
        count = word(num_rows + expert)
        if const_expr(not self.wgrad):
            rows = count
        down = cute.ceil_div(rows, self.out_rows)
        row, column = inside % down * self.out_rows, inside // down * self.out_columns
        return expert, row, column, word(row_start + expert), count


def word(pointer):
    """The one word at a pointer."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
