"""What the kernels that move rows share: the tile, the grid, and how row maps and address tables are read."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dist_moe.shapes import cdiv, next_power_of_2

from ._device import is_interpreting, num_programs

PROGRAMS_PER_SM = 2


@dataclass(frozen=True)
class RowTile:
    """A program moves `rows` rows at a time, `block_d` elements of each: so much is in flight to a peer."""

    rows: int
    block_d: int
    num_warps: int = 8
    programs_per_sm: int = PROGRAMS_PER_SM

    @property
    def options(self) -> dict[str, int]:
        """Of the compiler. It may use the registers of its share of an SM: left alone, that of Triton 3.9 takes fewer
        and spills. 255 is what a thread can have."""
        return {"num_warps": self.num_warps, "maxnreg": min(65536 // (self.programs_per_sm * self.num_warps * 32), 255)}

    @property
    def unroll(self) -> int:
        """How many rows of a pair are on their way together: of a smaller tile more have registers."""
        return 3 if self.rows * self.block_d > 2048 else 4


@functools.cache
def pick_row_tile(hidden_dim: int, most_rows: int | None = None, programs: int = 0) -> RowTile:
    """16 KB in flight a program: 8 rows by 2 KB, or more of shorter rows; blocks of 1024 waste little on odd widths.

    most_rows: of balanced ranks, or pairs, that move in a full call. Where so few leave some of the programs without
    any, as in decode, tiles have fewer rows, and at last fewer columns: what a program does there is to wait for
    memory, one access after another.
    """
    block_d = min(1024, next_power_of_2(hidden_dim))
    rows = min(8192 // block_d, 64)
    if most_rows is None or cdiv(most_rows, rows) * cdiv(hidden_dim, block_d) >= programs:
        return RowTile(rows, block_d)
    while rows > 1 and cdiv(most_rows, rows) * cdiv(hidden_dim, block_d) < programs:
        rows //= 2
    while block_d > 256 and most_rows * cdiv(hidden_dim, block_d) < programs:
        block_d //= 2
    return RowTile(rows, block_d, num_warps=min(max(rows * block_d // 256, 1), 8))  # 16 bytes a thread and row


def few_rows(device: torch.device, most_rows: int, num_sms: int | None) -> dict[str, int]:
    """What pick_row_tile takes of a grid that row_grid makes of its tile."""
    return {"most_rows": most_rows, "programs": row_programs(device, PROGRAMS_PER_SM, num_sms)}


def row_grid(device: torch.device, tile: RowTile, num_sms: int | None = None) -> tuple[int]:
    """Programs of a persistent grid; a limit on SMs holds for programs."""
    return (row_programs(device, tile.programs_per_sm, num_sms),)


def row_programs(device: torch.device, per_sm: int, num_sms: int | None) -> int:
    return num_programs(device, num_sms) * (1 if num_sms is not None or is_interpreting() else per_sm)


def column_window(columns: tuple[int, int] | None, D: int, rows_XD: torch.Tensor) -> tuple[int, int]:
    """First of the D columns of the tokens that move, and how many; all without a window. Rows start 64 bytes apart."""
    first, width = (0, D) if columns is None else columns
    pitch = rows_XD.shape[1]
    assert first % 32 == width % 32 == D % 32 == pitch % 32 == 0, (first, width, D, pitch)
    assert first + width <= D and width <= pitch and rows_XD.is_contiguous(), (first, width, D, pitch)
    return first, width


@triton.jit
def peer_pointers(table_ptr, rank, offset, mask, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Addresses of element `offset` of the region of `rank`; ALIGNMENT bytes is what makes accesses wide.

    The hint must follow the cast: on the integer it has no effect, and every access would be one element wide.
    """
    base = tl.load(table_ptr + rank, mask=mask, other=0).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(base + offset, [ALIGNMENT])


@triton.jit
def num_parts(num_blocks, sources):
    """Parts of at least 8 blocks for `spread`, at most one a source: short parts would leave turns without a block."""
    return tl.minimum(tl.maximum(tl.cdiv(num_blocks, 8), 1), sources)


@triton.jit
def spread(turn, num_blocks, parts):
    """The block of a turn, 0 <= turn < parts * cdiv(num_blocks, parts): one of every part, then the next of every part.

    Consecutive blocks are of one source rank. Taken in order, all ranks would read from rank 0 first and then from rank
    1, each over the link of that one rank. Blocks past the last come out for parts that are shorter than the others.
    Example: 5 blocks in 2 parts -> 0 3 1 4 2 5.
    """
    return turn % parts * tl.cdiv(num_blocks, parts) + turn // parts


@triton.jit
def column_shares(num_turns, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Items that share the columns of a block of rows, and columns of each: one item takes all of them, unless that
    leaves programs without an item.

    Example: 3 turns of 7168 columns by 1024 are 2 items each for 8 programs, of 4096 columns, and 1 for 5 programs.
    """
    NUM_CHUNKS: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    idle = tl.num_programs(0) // tl.maximum(num_turns, 1)
    chunks = tl.cdiv(NUM_CHUNKS, tl.minimum(tl.maximum(idle, 1), NUM_CHUNKS))
    return tl.cdiv(NUM_CHUNKS, chunks), chunks * BLOCK_D


@triton.jit
def row_items(num_rows, sources, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """What an item of a launch that moves rows, or pairs, is read from: blocks of ROWS rows, parts of them (num_parts),
    items that share the columns of a block, and columns of each."""
    num_blocks = tl.cdiv(num_rows, ROWS)
    parts = num_parts(num_blocks, sources)
    shares, columns = column_shares(parts * tl.cdiv(num_blocks, parts), WIDTH, BLOCK_D)
    return num_blocks, parts, shares, columns


@triton.jit
def num_row_items(num_blocks, parts, shares):
    """Example: 5 blocks in 2 parts by 3 shares are 18 items, of which 3 have no block."""
    return parts * tl.cdiv(num_blocks, parts) * shares


@triton.jit
def row_item(item, num_blocks, parts, shares, columns):
    """Block and first column of an item: share item % shares of turn item // shares (spread)."""
    return spread(item // shares, num_blocks, parts), item % shares * columns


@triton.jit
def pull_pair_scores(
    first,
    count,
    src,
    num_slots,
    pair_rows_ptr,
    row_to_slot_ptr,
    scores_table_ptr,
    row_scores_ptr,
    K2: tl.constexpr,
):
    """Pull the scores of all routes of pairs of source ranks src at once, to the rows of this rank.

    Any thread of the program may read them afterwards. Programs that share the columns of a block write the same.
    """
    k = tl.arange(0, K2)[None, :]
    here = k < count[:, None]
    row = tl.load(pair_rows_ptr + first[:, None] + k, mask=here, other=0)
    own_slot = tl.load(row_to_slot_ptr + row, mask=here, other=0) - (src * num_slots)[:, None]
    scores_ptrs = peer_pointers(scores_table_ptr, src, 0, count > 0, tl.float32, 4)
    score = tl.load(scores_ptrs[:, None] + own_slot, mask=here, other=0.0)
    tl.store(row_scores_ptr + row, score, mask=here)
    tl.debug_barrier()


@triton.jit
def pair_block(pair, num_pairs, num_routes, pair_start_ptr):
    """First entry in pair_rows_R and number of rows of each pair; 0 rows past the last pair.

    Example: pair_start = [0, 2, 3], num_pairs = 3, num_routes = 5: pairs 0..3 have first 0, 2, 3, 0 and count 2, 1,
    2, 0.
    """
    in_use = pair < num_pairs
    first = tl.load(pair_start_ptr + pair, mask=in_use, other=0)
    end = tl.load(pair_start_ptr + pair + 1, mask=pair + 1 < num_pairs, other=num_routes)
    return first, tl.where(in_use, end - first, 0)


@triton.jit
def pair_item(block, num_pairs, num_routes, pair_start_ptr, pair_output_ptr, PAIRS: tl.constexpr):
    """Of the pairs of a block: which there are, pair_block of them, the most rows of one, and their output rows."""
    pair = block * PAIRS + tl.arange(0, PAIRS)
    in_use = pair < num_pairs
    first, count = pair_block(pair, num_pairs, num_routes, pair_start_ptr)
    most = tl.max(count, axis=0)
    return in_use, first, count, most, tl.load(pair_output_ptr + pair, mask=in_use, other=0)


@triton.jit
def pair_rows_and_scores(first, count, i, pair_rows_ptr, row_scores_ptr, UNROLL: tl.constexpr):
    """Rows i, ..., i + UNROLL - 1 of every pair, 0 where it has fewer, and their scores, 0.0 likewise, or none without
    row_scores_ptr. No load waits for another pair's or row's."""
    rows, scores = (), ()
    for j in tl.static_range(UNROLL):
        rows += (tl.load(pair_rows_ptr + first + i + j, mask=i + j < count, other=0),)
    if row_scores_ptr is not None:
        for j in tl.static_range(UNROLL):
            scores += (tl.load(row_scores_ptr + rows[j], mask=i + j < count, other=0.0),)
    return rows, scores
