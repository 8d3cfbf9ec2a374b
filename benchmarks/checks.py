"""Nothing is timed that is wrong: results against the oracle, row by row, on the very inputs that are timed."""

import math

import torch
from torch import Tensor

from dist_moe import testing
from dist_moe.dense import dense_moe
from dist_moe.testing import Tolerance
from dist_moe.virtual import RankResults

from .launch import Job, Miss
from .shapes import Inputs, Shape

CHUNK = 2**25  # elements compared at a time: double precision copies stay small
BF16_ULP = 2.0**-7  # of a value, at most
ORACLE_TOKENS = 64  # of each rank, all of whose experts are computed

PATH, PATH_GRADS = testing.TOLERANCES["path"], testing.TOLERANCES["path_grads"]
# The baseline rounds more often (silu, scores and every gradient between in BF16), which shows most in rows of a weight
# gradient that nearly cancel; a wrong row has 0 dB.
BASELINE_SLACK_DB = 12.0


def worst_row_db(out: Tensor, ref: Tensor) -> float:
    """The lowest SQNR of a row, on the device; -inf where a value is NaN."""
    out, ref = out.detach().reshape(-1, out.shape[-1]), ref.detach().reshape(-1, ref.shape[-1])
    step = max(1, CHUNK // out.shape[1])
    worst = torch.tensor(math.inf, dtype=torch.float64, device=out.device)
    for a, b in zip(out.split(step), ref.split(step), strict=True):
        db = testing.rows_sqnr_db(a, b).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        worst = torch.minimum(worst, db.min())
    return worst.item()


def require(what: str, out: Tensor, ref: Tensor, bar: Tolerance) -> float:
    """The worst row in dB. Raises Miss below the bar, and for a reference that is zero or not finite."""
    if out.shape != ref.shape:
        raise Miss(f"{what}: got {list(out.shape)}, the reference is {list(ref.shape)}")
    if out.numel() == 0:
        return math.inf
    if ref.is_floating_point() and not (ref.any() and ref.isfinite().all()):
        raise Miss(f"{what}: the reference is zero everywhere, or not finite")
    db = worst_row_db(out, ref)
    if bar.rows_db is not None:
        passed, wanted = db >= bar.rows_db, f"{bar.rows_db:g} dB"
    elif bar.ulps:
        passed = bool(((out.float() - ref.float()).abs() <= bar.ulps * BF16_ULP * ref.float().abs()).all())
        wanted = f"{bar.ulps} ULP"
    else:
        passed, wanted = torch.equal(out, ref), "equal bits"
    if not passed:
        raise Miss(f"{what}: the worst row has {db:.1f} dB against the oracle, wanted is {wanted}")
    return db


class PathOracle:
    """The dense layer on a few tokens of every rank, and the weight gradients of two experts a rank.

    Tokens are picked evenly. A rank computes what its own experts add to them, one expert at a time in FP32, and the
    ranks add up. A weight gradient needs all tokens of its expert: the fullest and the emptiest are checked.
    """

    def __init__(self, job: Job, shape: Shape, inputs: Inputs, *, backward: bool):
        self._job, self._inputs = job, inputs
        T = len(inputs.ranks[0].x_TD)
        num = min(T, ORACLE_TOKENS)
        self._picked = torch.linspace(0, T - 1, num, device=job.device).long()
        self._L = shape.E // job.W
        x, ids, scores, grad_out = self._gather(self._picked)
        x, scores = x.float().requires_grad_(backward), scores.requires_grad_(backward)
        out = torch.zeros_like(x, requires_grad=False)
        for e, w13, w2 in self._experts():
            with torch.set_grad_enabled(backward):
                part = dense_moe(x, torch.where(ids == e, 0, -1), scores, w13[None], w2[None])
            if backward and part.requires_grad:
                part.backward(grad_out.float())
            out += part.detach()
        self._out = job.add_up(out)
        if backward:
            self._grad_x, self._grad_scores = job.add_up(x.grad), job.add_up(scores.grad)
            self._weight_grads = self._grads_of_weights()

    def _gather(self, tokens) -> list[Tensor]:
        """x, ids, scores and grad_out of these tokens of all ranks."""
        ranks = self._inputs.ranks
        names = ("x_TD", "ids_TK", "scores_TK", "grad_out_TD")
        return [self._job.gather_rows([getattr(r, name).detach()[tokens] for r in ranks]) for name in names]

    def _experts(self):
        """Global number and weights of every expert that lives here."""
        for r, rank in zip(self._inputs.ranks, self._job.local_ranks, strict=True):
            for i in range(self._L):
                yield rank * self._L + i, r.w13_L2FD[i].detach(), r.w2_LDF[i].detach()

    def _grads_of_weights(self) -> list[tuple[int, int, Tensor, Tensor]]:
        """(place among the local ranks, local expert, dW13, dW2) of the checked experts."""
        x, ids, scores, grad_out = self._gather(slice(None))
        rows_E = torch.bincount(ids[ids >= 0], minlength=self._L * self._job.W)
        grads = []
        for i, (r, rank) in enumerate(zip(self._inputs.ranks, self._job.local_ranks, strict=True)):
            rows = rows_E[rank * self._L : (rank + 1) * self._L].tolist()
            used = [e for e in range(self._L) if rows[e]]
            for e in {max(used, key=rows.__getitem__), min(used, key=rows.__getitem__)} if used else ():
                here = (ids == rank * self._L + e).any(dim=1)
                local = torch.where(ids[here] == rank * self._L + e, 0, -1)
                w13, w2 = (w[e : e + 1].detach().float().requires_grad_() for w in (r.w13_L2FD, r.w2_LDF))
                dense_moe(x[here].float(), local, scores[here], w13, w2).backward(grad_out[here].float())
                grads.append((i, e, w13.grad[0], w2.grad[0]))
        return grads

    def check(self, who: str, results: list[RankResults], slack_db: float = 0.0) -> float:
        """The worst row of all that is compared, in dB. Raises Miss."""
        out_bar, grad_bar = (Tolerance(rows_db=bar.rows_db - slack_db) for bar in (PATH, PATH_GRADS))
        num, worst = len(self._picked), []
        for i, (result, rank) in enumerate(zip(results, self._job.local_ranks, strict=True)):
            here = slice(rank * num, (rank + 1) * num)
            worst.append(require(f"{who} out", result.out_TD[self._picked], self._out[here], out_bar))
            if result.grad_x_TD is None:
                continue
            pairs = {
                "grad x": (result.grad_x_TD[self._picked], self._grad_x[here]),
                # The K scores of a token are too few for a row.
                "grad scores": (result.grad_scores_TK[self._picked].view(1, -1), self._grad_scores[here].view(1, -1)),
            }
            for place, e, dw13, dw2 in self._weight_grads:
                if place == i:
                    pairs[f"grad w13[{e}]"] = (result.grad_w13_L2FD[e], dw13)
                    pairs[f"grad w2[{e}]"] = (result.grad_w2_LDF[e], dw2)
            worst += [require(f"{who} {name}", *pair, grad_bar) for name, pair in pairs.items()]
        return min(worst)


def require_alike(who: str, results: list[RankResults], others: list[RankResults]) -> None:
    """All rows of two results that each passed the oracle on a few. Raises Miss."""
    bar = Tolerance(rows_db=PATH_GRADS.rows_db - BASELINE_SLACK_DB)
    for result, other in zip(results, others, strict=True):
        for name in ("out_TD", "grad_x_TD", "grad_w13_L2FD", "grad_w2_LDF"):
            a, b = getattr(result, name), getattr(other, name)
            if a is not None and (a.any() or b.any()):  # the experts of a rank without rows have zeros
                require(f"{who} {name} against ours", b, a, bar)
