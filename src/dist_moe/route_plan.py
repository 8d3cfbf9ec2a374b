"""RoutePlan: what route makes and every later stage reads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutePlan:
    """Row maps of one call on one rank; all tensors on the device, the tables sized by the capacity of R rows.

    Rows are ordered by local expert, then source rank, then token. Example (W = 1, T = 3, K = 2, L = 2): ids
    [[0, 1], [1, -1], [1, 0]] give rows 0: (token 0, k 0), 1: (2, 1) of expert 0, and 2: (0, 1), 3: (1, 0), 4: (2, 0)
    of expert 1, so row_start_P = [0, 2, 5], row_to_slot_R = [0, 5, 1, 2, 4]; the pairs are tokens 0, 1, 2 with
    pair_start_R = [0, 2, 3], pair_rows_R = [0, 2, 3, 4, 1] (slot order inside a pair), pair_output_R = [0, 1, 2].
    With a row alignment of 4 expert 1 begins at row 4: row_start_P = [0, 4, 8], num_rows_L = [2, 3], row_to_slot_R =
    [0, 5, -1, -1, 1, 2, 4, -1] and pair_rows_R = [0, 4, 5, 6, 1]. Without, rows are not padded.

    row_start_P    int32 [L+1]  rows of local expert e begin at row_start[e], and end with their padding at
                                row_start[e+1]; the last word counts all rows
    num_rows_L     int32 [L]    rows of local expert e without padding, which comes last
    rank_rows_W    int64 [W]    rows that every rank holds with padding, the same on all ranks
    num_routes_1   int32 [1]    rows of this rank without padding
    num_pairs_1    int32 [1]    (source rank, token) pairs with a route here
    row_to_slot_R  int32 [R]    row -> (source rank * T_max + token) * K + k, and -1 for a row of padding
    pair_rows_R    int32 [R]    rows pair by pair, inside a pair by k; pair p starts at pair_start_R[p]
    pair_start_R   int32 [R]    by pair; pairs are ordered by source rank, then token
    pair_output_R  int32 [R]    by pair: (source rank * T_max + token) * min(K, W) + number of lower ranks that the
                                token visits: the row of the owner's `outputs` in the de-duplicated scheme
    What lies past the counted rows and pairs is undefined.
    """

    row_start_P: Tensor
    num_rows_L: Tensor
    rank_rows_W: Tensor
    num_routes_1: Tensor
    num_pairs_1: Tensor
    row_to_slot_R: Tensor
    pair_rows_R: Tensor
    pair_start_R: Tensor
    pair_output_R: Tensor

    @classmethod
    def empty(cls, W: int, L: int, capacity_rows: int, device: torch.device) -> "RoutePlan":
        """Tables of undefined words, for W ranks and L local experts."""

        def table(size: int, dtype=torch.int32) -> Tensor:
            return torch.empty((size,), dtype=dtype, device=device)

        starts = (table(L + 1), table(L), table(W, torch.int64), table(1), table(1))
        return cls(*starts, *(table(capacity_rows) for _ in range(4)))

    @property
    def num_local_experts(self) -> int:
        return len(self.row_start_P) - 1

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def counted(self) -> dict[str, Tensor]:
        """The tables by name, up to the rows and pairs that they count; reads the device."""
        num_rows, num_routes, num_pairs = (int(n[-1]) for n in (self.row_start_P, self.num_routes_1, self.num_pairs_1))
        ends = {"row_to_slot_R": num_rows, "pair_rows_R": num_routes}
        ends |= {"pair_start_R": num_pairs, "pair_output_R": num_pairs}
        return {name: getattr(self, name)[: ends.get(name)] for name in self.__dataclass_fields__}
