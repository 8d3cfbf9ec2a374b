"""_rows: the order in which blocks of rows are taken, and who takes which of their columns."""

import pytest
import torch
import triton
import triton.language as tl

from dist_moe.kernels_triton._rows import RowTile, column_shares, num_parts, pick_row_tile, spread


@triton.jit
def _turns(out_ptr, num_blocks, sources):
    parts = num_parts(num_blocks, sources)
    count = parts * tl.cdiv(num_blocks, parts)
    tl.store(out_ptr, count)
    tl.store(out_ptr + 1, parts)
    for turn in range(count):
        tl.store(out_ptr + 2 + turn, spread(turn, num_blocks, parts))


def turns(num_blocks: int, sources: int, device) -> tuple[int, list[int]]:
    out = torch.zeros(2 * num_blocks + 16, dtype=torch.int32, device=device)
    _turns[(1,)](out, num_blocks, sources)
    count, parts, *blocks = out.tolist()
    return parts, blocks[:count]


@pytest.mark.parametrize("sources", [1, 2, 3, 8, 64])
def test_every_block_has_one_turn(sources, device):
    for num_blocks in (0, 1, 7, 8, 9, 16, 17, 31, 100, 129):
        parts, blocks = turns(num_blocks, sources, device)
        assert sorted(block for block in blocks if block < num_blocks) == list(range(num_blocks))
        assert parts == min(max(-(-num_blocks // 8), 1), sources) and len(blocks) - num_blocks < parts


def test_sources_are_taken_in_turn(device):
    """4 sources of 16 blocks each: any 4 turns in a row are of 4 sources."""
    _, blocks = turns(64, 4, device)
    assert all(sorted(block // 16 for block in blocks[i : i + 4]) == [0, 1, 2, 3] for i in range(61))


@triton.jit
def _spread_two(out_ptr):
    for turn in range(6):
        tl.store(out_ptr + turn, spread(turn, 5, 2))


def test_example(device):
    out = torch.zeros(6, dtype=torch.int32, device=device)
    _spread_two[(1,)](out)
    assert out.tolist() == [0, 3, 1, 4, 2, 5]


@triton.jit
def _shares(out_ptr, num_turns, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    shares, columns = column_shares(num_turns, WIDTH, BLOCK_D)
    tl.store(out_ptr, shares)
    tl.store(out_ptr + 1, columns)


@pytest.mark.parametrize("programs", [1, 5, 8, 100])
@pytest.mark.parametrize("width", [32, 1024, 2880, 7168])
def test_shares_hold_all_columns_and_give_programs_work(width, programs, device):
    for num_turns in (0, 1, 3, 50, 1000):
        out = torch.zeros(2, dtype=torch.int32, device=device)
        _shares[(programs,)](out, num_turns, width, 1024)
        shares, columns = out.tolist()
        assert columns % 1024 == 0 and (shares - 1) * columns < width <= shares * columns
        assert shares == 1 or shares * num_turns <= programs
        if width == 7168 and num_turns == 3:
            assert (shares, columns) == {1: (1, 7168), 5: (1, 7168), 8: (2, 4096), 100: (7, 1024)}[programs]


@pytest.mark.parametrize(
    "hidden_dim, most_rows, programs, wanted",
    [
        (7168, None, 264, RowTile(8, 1024)),
        (7168, 8192, 264, RowTile(8, 1024)),
        (2048, 128, 264, RowTile(1, 512, num_warps=2)),
        (7168, 128, 264, RowTile(2, 1024)),
        (7168, 16, 264, RowTile(1, 256, num_warps=1)),
        (32, 10, 264, RowTile(1, 32, num_warps=1)),
        (7168, 16, 1, RowTile(8, 1024)),
        (7168, 0, 264, RowTile(1, 256, num_warps=1)),
    ],
)
def test_tiles_of_few_rows_leave_few_programs_idle(hidden_dim, most_rows, programs, wanted):
    assert pick_row_tile(hidden_dim, most_rows, programs) == wanted
