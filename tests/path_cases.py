"""Cases of the whole path, shared by virtual ranks, CPU processes and GPUs."""

import torch

from dist_moe import registry
from dist_moe.config import BlockScaledConfig
from dist_moe.formats import ROW_ALIGNMENT
from dist_moe.path_oracle import Case
from dist_moe.path_oracle import assert_results_close as assert_results_close
from dist_moe.path_oracle import dense as dense
from dist_moe.planner import saved_full_bytes, saved_h1_bytes, saved_input_bytes
from dist_moe.shapes import KEPT_NAMES
from dist_moe.virtual import RankResults

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


def expand_columns(monkeypatch, expanded: bool) -> None:
    """Contexts of this process for training expand columns, as on a GPU that multiplies them so, or do not."""
    monkeypatch.setattr(registry, "expands_operands", lambda config, *_: expanded and not config.inference)


def rows_of(case: Case) -> list[int]:
    """Received rows by rank; for routings that name no expert twice."""
    ids = torch.cat([inputs.ids_TK for inputs in case.inputs()])
    return torch.bincount(ids[ids >= 0] // (case.E // case.W), minlength=case.W).tolist()


def padded_rows_of(case: Case) -> list[int]:
    """Rows by rank with the padding of block-scaled experts."""
    ids = torch.cat([inputs.ids_TK for inputs in case.inputs()])
    rows = torch.bincount(ids[ids >= 0], minlength=case.E)
    return (-(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT).view(case.W, -1).sum(dim=1).tolist()


def slots_of(case: Case, block_scaled: BlockScaledConfig | None = None, *, expanded: bool = False) -> dict[str, dict]:
    """The changes of a Config that make its layer keep just this much, by the name of what is kept."""
    config, rows = case.config(block_scaled=block_scaled), max(rows_of(case))
    if block_scaled is not None:
        rows = max(padded_rows_of(case))
    full = saved_full_bytes(config, rows, expanded=expanded)
    sizes = (saved_input_bytes(config), saved_h1_bytes(config, rows), full)
    assert sizes[0] < sizes[1] < sizes[2] and len(set(rows_of(case))) > 1
    return {
        name: {"activation_slot_bytes": size, "activation_slot_capacity_factor": None}
        for name, size in zip(KEPT_NAMES, sizes, strict=True)
    }


def assert_results_equal(results: list[RankResults], expected: list[RankResults]) -> None:
    for name in RankResults.__dataclass_fields__:
        for rank, (out, ref) in enumerate(zip(results, expected, strict=True)):
            if getattr(ref, name) is None:
                assert getattr(out, name) is None, name
            else:
                assert torch.equal(getattr(out, name), getattr(ref, name)), f"{name} of rank {rank}"
