"""Hypothesis strategies for shapes and routings.

Everything is drawn element by element, never from a seed, so that a failing example shrinks to few ranks, tokens and
slots. Sizes are small; what happens at large ones is a matter of the parametrised tests.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

NUM_RANKS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Routing:
    """What all ranks pass in one call: per rank int64 ids [T, K] and FP32 scores [T, K]; T may differ."""

    num_ranks: int
    num_experts: int
    top_k: int
    num_tokens_max: int
    ids: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    def __repr__(self) -> str:
        sizes = f"W={self.num_ranks}, E={self.num_experts}, K={self.top_k}, T_max={self.num_tokens_max}"
        return f"Routing({sizes}, ids={[i.tolist() for i in self.ids]}, scores={[s.tolist() for s in self.scores]})"


def _matrix(data: list, T: int, K: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(data, dtype=dtype).view(T, K)


@st.composite
def id_rows(draw, num_experts: int, top_k: int, *, invalid: bool = False) -> list[int]:
    """Ids of one token: experts, with repetitions, and negative numbers; with `invalid` also ids >= num_experts."""
    values = st.integers(-2, num_experts - 1)
    if invalid:
        values = values | st.sampled_from([num_experts, 2**15, 2**16, 2**31, 2**32 + 1, -(2**31), -(2**32), 2**62])
    return draw(st.lists(values, min_size=top_k, max_size=top_k))


@st.composite
def routings(draw, *, num_ranks=NUM_RANKS, max_tokens: int = 5, max_experts: int = 4, invalid: bool = False) -> Routing:
    """Any routing of up to max_tokens tokens a rank to up to max_experts experts a rank; scores are small integers."""
    W = draw(st.sampled_from(num_ranks))
    E = W * draw(st.integers(1, max_experts))
    K = draw(st.integers(1, min(E, 6)))
    T_max = draw(st.integers(1, max_tokens))
    ids, scores = [], []
    for _ in range(W):
        T = draw(st.integers(0, T_max))
        rows = draw(st.lists(id_rows(E, K, invalid=invalid), min_size=T, max_size=T))
        ids.append(_matrix(rows, T, K, torch.int64))
        flat = draw(st.lists(st.integers(-2, 3), min_size=T * K, max_size=T * K))
        scores.append(_matrix(flat, T, K, torch.float32))
    return Routing(W, E, K, T_max, tuple(ids), tuple(scores))
