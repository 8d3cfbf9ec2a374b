"""Named routings and `assert_close`, shared by tests, benchmarks and bug reports.

A routing is a pure function of (num_ranks, T, K, E, seed) that returns one int64 [T_r, K] of expert ids a rank; -1 is
"no expert". Some take a parameter, written in the name: "zipf(1.0)".

    balanced        every expert the same number of routes (to within one)
    uniform         K different experts, all equally likely
    zipf(s)         popularity of the experts as 1, 2^-s, 3^-s, ...; which expert is popular depends on the seed
    hot_expert(p)   a token names one and the same expert with probability p
    hot_rank(r)     one rank receives r times the mean of all ranks, or as near to it as K and L allow
    one_rank        all routes to one rank; slots beyond its L experts are -1
    one_expert      one route a token, all to one expert
    dropped(p)      uniform, each slot -1 with probability p
    duplicates      every token with K > 1 names some expert twice
    empty_ranks     uniform, but ranks 1, 3, 5, ... pass no token
"""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .virtual import RankInputs, RankResults, run_virtual

__all__ = [
    "ROUTINGS",
    "TOLERANCES",
    "RankInputs",
    "RankResults",
    "Tolerance",
    "assert_close",
    "routing",
    "rows_sqnr_db",
    "run_virtual",
]

NO_EXPERT = -1


# Routings. Each function draws the ids [T, K] of one rank.


@dataclass(frozen=True)
class _Draw:
    """What one rank's routing may depend on."""

    rank: int
    num_ranks: int
    T: int
    K: int
    E: int
    seed: int

    @property
    def experts_per_rank(self) -> int:
        return self.E // self.num_ranks

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.rank)

    def expert_order(self) -> Tensor:
        """A permutation of the experts that all ranks share."""
        return torch.randperm(self.E, generator=torch.Generator().manual_seed(self.seed))


def _distinct(log_weight_TE: Tensor, K: int, generator: torch.Generator) -> Tensor:
    """K different experts a token, drawn one after another by weight (Gumbel's top-k)."""
    noise = torch.rand(log_weight_TE.shape, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    return (log_weight_TE - torch.log(-torch.log(noise))).topk(K, dim=1).indices


def _uniform(draw: _Draw) -> Tensor:
    return _distinct(torch.zeros(draw.T, draw.E), draw.K, draw.generator())


def _balanced(draw: _Draw) -> Tensor:
    first = draw.rank * draw.T * draw.K
    return draw.expert_order()[torch.arange(first, first + draw.T * draw.K) % draw.E].view(draw.T, draw.K)


def _zipf(draw: _Draw, s: float) -> Tensor:
    popularity = -s * torch.log(torch.arange(1, draw.E + 1, dtype=torch.float64))
    return draw.expert_order()[_distinct(popularity.expand(draw.T, -1), draw.K, draw.generator())]


def _hot_expert(draw: _Draw, p: float) -> Tensor:
    """The hot expert is as likely as p says, in any slot; the other slots are uniform over the others."""
    generator, hot = draw.generator(), draw.seed % draw.E
    named = torch.rand(draw.T, generator=generator) < p
    log_weight_TE = torch.zeros(draw.T, draw.E)
    log_weight_TE[:, hot] = torch.where(named, math.inf, -math.inf)
    if draw.K == draw.E:  # no token can leave it out
        log_weight_TE[:, hot] = 0.0
    ids = _distinct(log_weight_TE, draw.K, generator)
    return torch.gather(ids, 1, _distinct(torch.zeros(draw.T, draw.K), draw.K, generator))


def _hot_rank(draw: _Draw, ratio: float) -> Tensor:
    """A token has ratio * K / W slots on the hot rank on average, at most K and L, and at most E - L elsewhere."""
    L, K, generator = draw.experts_per_rank, draw.K, draw.generator()
    hot = draw.seed % draw.num_ranks
    mean = min(max(ratio * K / draw.num_ranks, K - (draw.E - L)), K, L)
    here_T1 = (math.floor(mean) + (torch.rand(draw.T, generator=generator) < mean % 1.0).long())[:, None]
    own = torch.arange(draw.E) // L == hot
    log_weight_TE = torch.zeros(draw.T, draw.E)
    inside = _distinct(log_weight_TE.masked_fill(~own, -math.inf), min(K, L), generator)
    outside = _distinct(log_weight_TE.masked_fill(own, -math.inf), min(K, draw.E - L), generator)
    both = torch.cat([inside, outside], dim=1)
    k = torch.arange(K).expand(draw.T, K)
    ids = torch.gather(both, 1, torch.where(k < here_T1, k, k - here_T1 + inside.shape[1]))
    return torch.gather(ids, 1, _distinct(torch.zeros(draw.T, K), K, generator))


def _one_rank(draw: _Draw) -> Tensor:
    L, ids = draw.experts_per_rank, torch.full((draw.T, draw.K), NO_EXPERT)
    used = min(draw.K, L)
    ids[:, :used] = _distinct(torch.zeros(draw.T, L), used, draw.generator()) + draw.seed % draw.num_ranks * L
    return ids


def _one_expert(draw: _Draw) -> Tensor:
    ids = torch.full((draw.T, draw.K), NO_EXPERT)
    ids[:, draw.seed % draw.K] = draw.seed % draw.E
    return ids


def _dropped(draw: _Draw, p: float) -> Tensor:
    keep = torch.rand(draw.T, draw.K, generator=draw.generator()) >= p
    return torch.where(keep, _uniform(draw), NO_EXPERT)


def _duplicates(draw: _Draw) -> Tensor:
    """K - 1 experts a token can name, and K slots: by the pigeonhole one is named twice."""
    pool = _distinct(torch.zeros(draw.T, draw.E), min(max(1, draw.K - 1), draw.E), draw.generator())
    pick = torch.randint(pool.shape[1], (draw.T, draw.K), generator=draw.generator())
    return torch.gather(pool, 1, pick)


def _empty_ranks(draw: _Draw) -> Tensor:
    return _uniform(draw)[: 0 if draw.rank % 2 else draw.T]


_ROUTINGS = {
    "balanced": _balanced,
    "uniform": _uniform,
    "zipf": _zipf,
    "hot_expert": _hot_expert,
    "hot_rank": _hot_rank,
    "one_rank": _one_rank,
    "one_expert": _one_expert,
    "dropped": _dropped,
    "duplicates": _duplicates,
    "empty_ranks": _empty_ranks,
}
_WITH_PARAMETER = ("zipf", "hot_expert", "hot_rank", "dropped")

# One of each, for tests and benchmarks that go through all of them.
ROUTINGS = (
    "balanced",
    "uniform",
    "zipf(1.0)",
    "hot_expert(0.5)",
    "hot_rank(1.5)",
    "one_rank",
    "one_expert",
    "dropped(0.3)",
    "duplicates",
    "empty_ranks",
)


def routing(name: str, *, num_ranks: int, T: int, K: int, E: int, seed: int = 0) -> list[Tensor]:
    """Expert ids of every rank for a routing by name, e.g. "uniform" or "zipf(1.0)".

    Returns: for each rank int64 [T_r, K], T_r = T except in empty_ranks.
    Raises:  ValueError for an unknown name, a parameter that is missing, not wanted or out of range, K > E, or E not a
             multiple of num_ranks.
    """
    match = re.fullmatch(r"(\w+)(?:\(([^()]+)\))?", name)
    if match is None or match[1] not in _ROUTINGS:
        raise ValueError(f"unknown routing {name!r}; known are {', '.join(ROUTINGS)}")
    if (match[1] in _WITH_PARAMETER) != (match[2] is not None):
        raise ValueError(f"routing {name!r}: {match[1]} takes {'one number' if match[2] is None else 'no parameter'}")
    parameters = () if match[2] is None else (float(match[2]),)
    if match[1] in ("hot_expert", "dropped") and not 0.0 <= parameters[0] <= 1.0:
        raise ValueError(f"routing {name!r}: the parameter is a probability")
    if K > E or E % num_ranks:
        raise ValueError(f"routing: K={K} different experts of E={E} on {num_ranks} ranks are not possible")
    return [_ROUTINGS[match[1]](_Draw(rank, num_ranks, T, K, E, seed), *parameters) for rank in range(num_ranks)]


# Tolerances


@dataclass(frozen=True)
class Tolerance:
    """How near a result must be, row by row (a row is the last dimension). No field set: equal bits, also of zeros."""

    rows_db: float | None = None  # lowest SQNR of a row, 20 log10(|ref| / |ref - out|)
    ulps: int = 0  # units in the last place of the output's dtype
    share: float = 1.0  # of the values, and two more, may differ at all


TOLERANCES = {
    "moved": Tolerance(),  # data, ids, counts, maps, quantised bytes
    "combine": Tolerance(),  # FP32 inside, the oracle in the same order
    "swiglu": Tolerance(ulps=1),  # behind exp
    "gemm": Tolerance(rows_db=50.0),  # one BF16 GEMM
    # Quantised behind exp: a value may be rounded to its neighbour, and a block get the neighbour of its scale.
    "quantized": Tolerance(rows_db=15.0, share=1e-3),
    "path": Tolerance(rows_db=44.0),  # the whole BF16 path
    # Its gradients against exact ones: dy @ W2, grad_h1, the row's gradient and the sum are each rounded to BF16, and a
    # row that nearly cancels keeps their errors; 40.7 is the worst row of 380 cases on the CPU (tests/path_cases.py).
    "path_grads": Tolerance(rows_db=38.0),
    # Kernels of block-scaled paths, against operands that the oracles quantised. FP32 sums in another order send a
    # value at a rounding border to its neighbour, 1/16 away in e4m3, and a gradient row of few terms feels one: 18.1 dB
    # was the worst row on an H200 (dW13 of one token), and outputs passed 30 dB there (tests/test_path_scaled.py,
    # 2026-11-30, 0ff79da). The reference, which rounds as the oracles do, is held to "path" and "path_grads".
    "scaled_path": Tolerance(rows_db=28.0),
    "scaled_path_grads": Tolerance(rows_db=15.0),
}


def rows_sqnr_db(out: Tensor, ref: Tensor) -> Tensor:
    """SQNR of every row; +inf where out equals ref, -inf where ref is zero and out is not."""
    error = (ref.double() - out.double()).norm(dim=-1)
    signal = ref.double().norm(dim=-1)
    return torch.where(error == 0, math.inf, 20 * torch.log10(signal / error))


def _bits_in_order(x: Tensor) -> Tensor:
    """The bits as int64 in the order of the values; neighbours, also -0.0 and +0.0, are one apart."""
    bits = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).to(torch.int64)
    magnitude = 2 ** (8 * x.element_size() - 1) - 1
    return torch.where(bits < 0, ~(bits & magnitude), bits) if x.is_floating_point() else bits


def assert_close(out: Tensor, ref: Tensor, what: str) -> float:
    """Compare with the bar named `what` (TOLERANCES), row by row. Two equal rows of zeros pass every bar.

    Returns the worst row's SQNR in dB, or, where the bar counts ULP, the most of them. Raises AssertionError, with the
    worst row, the coordinates of its worst element and both values, when a row misses the bar; and for another shape or
    dtype, for a value that is not finite on either side, and for a reference that is zero everywhere, which nothing can
    be compared with.
    """
    bar = TOLERANCES[what]
    out, ref = out.detach().cpu(), ref.detach().cpu()
    if out.shape != ref.shape or out.dtype != ref.dtype:
        raise AssertionError(
            f"{what}: got {out.dtype} {list(out.shape)}, the reference is {ref.dtype} {list(ref.shape)}"
        )
    if out.numel() == 0:
        return 0.0 if bar.rows_db is None else math.inf
    out, ref = torch.atleast_1d(out), torch.atleast_1d(ref)
    for name, value in (("the result", out), ("the reference", ref)):
        if len(broken := (~torch.isfinite(value.double())).nonzero()):
            at = tuple(broken[0].tolist())
            raise AssertionError(f"{what}: {name} is {value[at].item()} at {at}; {len(broken)} values are not finite")
    if not ref.double().any():
        raise AssertionError(f"{what}: the reference is zero everywhere, which nothing can be compared with")

    if (differ := int((out != ref).sum())) > 2 + bar.share * out.numel():
        raise AssertionError(f"{what}: {differ} of {out.numel()} values differ, two and {bar.share:g} of all may")
    if bar.rows_db is None:
        gap, allowed, unit = (_bits_in_order(out) - _bits_in_order(ref)).abs(), bar.ulps, "ULP"
        error = gap.amax(dim=-1)
    else:
        gap, allowed, unit = (out.double() - ref.double()).abs(), -bar.rows_db, "dB of the row"
        error = -rows_sqnr_db(out, ref)
    if not (bad := error > allowed).any():
        return error.max().item() if bar.rows_db is None else -error.max().item()
    row = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    at = (*row, int(gap[row].argmax()))
    raise AssertionError(
        f"{what}: the worst row, {row}, is off by {error[row].item():.4g} {unit}, allowed is {allowed:g}; at {at} got "
        f"{out[at].item():.8g}, want {ref[at].item():.8g}; {int(bad.sum())} of {bad.numel()} rows miss the bar"
    )
