"""Cases of the whole path, shared by virtual ranks, CPU processes and GPUs, and the dense answer to each."""

from dataclasses import dataclass

import torch

from dist_moe import testing
from dist_moe.config import BlockScaledConfig, Config
from dist_moe.dense import dense_moe
from dist_moe.formats import ROW_ALIGNMENT
from dist_moe.planner import saved_full_bytes, saved_h1_bytes, saved_input_bytes
from dist_moe.shapes import KEPT_NAMES
from dist_moe.virtual import RankInputs, RankResults


@dataclass(frozen=True)
class Case:
    """One shape and routing; the note says which edge it is there for."""

    note: str
    W: int = 2
    T: int = 8
    D: int = 64
    F: int = 96
    K: int = 2
    E: int = 4
    routing: str = "uniform"
    slot_factor: float | None = 1.0  # None: the minimum, every layer is recomputed from x
    activation: str = "swiglu"
    limit: float = 1.0  # of the clamped one: low enough to act on unit-scale data
    scores: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    wgrad: torch.dtype | None = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        return self.note.replace(" ", "-")

    def config(self, **changes) -> Config:
        fields = {
            "num_local_input_tokens": self.T,
            "hidden_dim": self.D,
            "intermediate_dim": self.F,
            "top_k": self.K,
            "num_experts": self.E,
            "max_moe_layers_per_activation_slot": 1,
            "device_scratch_capacity_factor": float(self.W),  # room for everything on one rank
            "activation_slot_capacity_factor": self.slot_factor,
            "activation": self.activation,
            "swiglu_alpha": 1.5,
            "swiglu_limit": self.limit,
            "wgrad_dtype": self.wgrad,
        }
        return Config(**fields | changes)

    def inputs(self) -> list[RankInputs]:
        """Unit-scale data, other values on every rank; weights are normal with the inverse root of the fan-in."""
        g = torch.Generator().manual_seed(self.seed)
        L = self.E // self.W
        w13 = (torch.randn(self.E, 2 * self.F, self.D, generator=g) * self.D**-0.5).bfloat16()
        w2 = (torch.randn(self.E, self.D, self.F, generator=g) * self.F**-0.5).bfloat16()
        ids = testing.routing(self.routing, num_ranks=self.W, T=self.T, K=self.K, E=self.E, seed=self.seed)
        inputs = []
        for rank in range(self.W):
            T, here = len(ids[rank]), slice(rank * L, (rank + 1) * L)
            scores = torch.rand(T, self.K, generator=g) + 0.1
            inputs.append(
                RankInputs(
                    torch.randn(T, self.D, generator=g).bfloat16(),
                    ids[rank].to(self.ids),
                    (scores / scores.sum(1, keepdim=True)).to(self.scores),
                    w13[here],
                    w2[here],
                    torch.randn(T, self.D, generator=g).bfloat16(),
                )
            )
        return inputs


CASES = (
    Case("one rank", W=1),
    Case("one token", W=1, T=1, K=1),
    Case("one rank all experts of a token", W=1, K=4, E=4),
    Case("two ranks per route"),
    Case("two ranks recomputed", slot_factor=None),
    Case("two ranks de-duplicated", K=4, E=8),
    Case("two ranks de-duplicated recomputed", K=4, E=8, slot_factor=None),
    Case("three ranks six experts K three", W=3, T=7, F=32, K=3, E=6),
    Case("three ranks de-duplicated", W=3, T=6, D=32, F=32, K=4, E=6),
    Case("four ranks per route", W=4, T=6, D=32, F=32, K=2, E=8),
    Case("four ranks de-duplicated K eight", W=4, T=5, D=32, F=64, K=8, E=8),
    Case("five ranks one expert each", W=5, T=6, D=32, F=32, K=2, E=5),
    Case("five ranks de-duplicated", W=5, T=4, D=32, F=32, K=6, E=10),
    Case("five ranks recomputed two empty", W=5, T=4, D=32, F=32, E=10, routing="empty_ranks", slot_factor=None),
    Case("five ranks all to one rank", W=5, T=4, D=32, F=32, E=10, routing="one_rank"),
    Case("six ranks per route", W=6, T=4, D=32, F=32, E=12),
    Case("six ranks de-duplicated recomputed", W=6, T=4, D=32, F=32, K=7, E=12, slot_factor=None),
    Case("eight ranks K larger than L", W=8, T=4, D=32, F=32, K=3, E=16),
    Case("eight ranks one expert each", W=8, T=2, D=32, F=32, E=8, routing="zipf(1.0)"),
    Case("eight ranks de-duplicated four without tokens", W=8, T=2, D=32, F=32, K=8, E=16, routing="empty_ranks"),
    Case("eight ranks de-duplicated recomputed", W=8, T=2, D=32, F=32, K=8, E=16, slot_factor=None),
    Case("eight ranks all to one rank", W=8, T=2, D=32, F=32, E=16, routing="one_rank"),
    Case("bf16 scores int32 ids", scores=torch.bfloat16, ids=torch.int32, wgrad=None),
    Case("clamped activation", activation="swiglu_clamped"),
    Case("all to one expert", routing="one_expert"),
    Case("all to one rank", routing="one_rank", K=2, E=8),
    Case("some slots without expert", routing="dropped(0.4)", K=4, E=8),
    Case("an expert named twice", routing="duplicates", K=3, E=8),
    Case("a rank without tokens", W=3, routing="empty_ranks", E=6),
    Case("rows past a tile border", T=150, D=32, F=160, K=2, E=4, routing="zipf(1.0)"),
)


def rows_of(case: Case) -> list[int]:
    """Received rows by rank; for routings that name no expert twice."""
    ids = torch.cat([inputs.ids_TK for inputs in case.inputs()])
    return torch.bincount(ids[ids >= 0] // (case.E // case.W), minlength=case.W).tolist()


def padded_rows_of(case: Case) -> list[int]:
    """Rows by rank with the padding of block-scaled experts."""
    ids = torch.cat([inputs.ids_TK for inputs in case.inputs()])
    rows = torch.bincount(ids[ids >= 0], minlength=case.E)
    return (-(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT).view(case.W, -1).sum(dim=1).tolist()


def slots_of(case: Case, block_scaled: BlockScaledConfig | None = None) -> dict[str, dict]:
    """The changes of a Config that make its layer keep just this much, by the name of what is kept."""
    config, rows = case.config(block_scaled=block_scaled), max(rows_of(case))
    if block_scaled is not None:
        rows = max(padded_rows_of(case))
    sizes = (saved_input_bytes(config), saved_h1_bytes(config, rows), saved_full_bytes(config, rows))
    assert sizes[0] < sizes[1] < sizes[2] and len(set(rows_of(case))) > 1
    return {
        name: {"activation_slot_bytes": size, "activation_slot_capacity_factor": None}
        for name, size in zip(KEPT_NAMES, sizes, strict=True)
    }


def dense(case: Case, inputs: list[RankInputs]) -> list[RankResults]:
    """The layer over all experts on one device, by autograd, cut into the ranks' parts."""
    leaves = {
        name: torch.cat([getattr(rank, name) for rank in inputs]).requires_grad_()
        for name in ("x_TD", "scores_TK", "w13_L2FD", "w2_LDF")
    }
    ids = torch.cat([rank.ids_TK for rank in inputs])
    w13, w2 = (leaves[name].float() for name in ("w13_L2FD", "w2_LDF"))
    w13.retain_grad()
    w2.retain_grad()
    out = dense_moe(leaves["x_TD"], ids, leaves["scores_TK"], w13, w2, case.config().activation_fn)
    out.backward(torch.cat([rank.grad_out_TD for rank in inputs]))
    sizes = [len(rank.x_TD) for rank in inputs]
    dtype = case.wgrad or torch.bfloat16
    parts = zip(
        out.detach().split(sizes),
        leaves["x_TD"].grad.split(sizes),
        leaves["scores_TK"].grad.split(sizes),
        w13.grad.to(dtype).chunk(case.W),
        w2.grad.to(dtype).chunk(case.W),
        strict=True,
    )
    return [RankResults(*part) for part in parts]


def assert_results_close(results: list[RankResults], expected: list[RankResults]) -> None:
    """All ranks together, each field per row; scores, a row of which is K numbers, as one row a rank."""
    for name in RankResults.__dataclass_fields__:
        out, ref = (torch.cat([getattr(rank, name) for rank in side]) for side in (results, expected))
        if name == "grad_scores_TK":
            out, ref = out.reshape(1, -1), ref.reshape(1, -1)
        testing.assert_close(out, ref, "path" if name == "out_TD" else "path_grads")


def assert_results_equal(results: list[RankResults], expected: list[RankResults]) -> None:
    for name in RankResults.__dataclass_fields__:
        for rank, (out, ref) in enumerate(zip(results, expected, strict=True)):
            if getattr(ref, name) is None:
                assert getattr(out, name) is None, name
            else:
                assert torch.equal(getattr(out, name), getattr(ref, name)), f"{name} of rank {rank}"
