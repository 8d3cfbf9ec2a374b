"""How far a layer in each block-scaled format is from the same layer in BF16, on unit-normal data, on a CPU.

Run: python -m benchmarks.format_errors
"""

from dataclasses import replace

import torch

from dist_moe import BlockScaledConfig, Config, prepare_block_scaled_weight
from dist_moe.testing import RankInputs, RankResults, routing, rows_sqnr_db, run_virtual

W, T, D, F, K, E = 2, 128, 512, 512, 2, 8
CONFIG = Config(T, D, F, K, E, 1, device_scratch_capacity_factor=float(W))
FORMATS = {"mxfp8": BlockScaledConfig("mxfp8_e4m3"), "nvfp4": BlockScaledConfig("nvfp4")}


def inputs() -> list[RankInputs]:
    g = torch.Generator().manual_seed(0)
    ranks = []
    for ids_TK in routing("uniform", num_ranks=W, T=T, K=K, E=E):
        x, dy = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
        w13, w2 = (torch.randn(E // W, N, C, generator=g) * C**-0.5 for N, C in ((2 * F, D), (D, F)))
        scores = torch.rand(T, K, generator=g)
        scores /= scores.sum(dim=1, keepdim=True)
        ranks.append(RankInputs(x, ids_TK, scores, w13.bfloat16(), w2.bfloat16(), dy))
    return ranks


def run(block_scaled: BlockScaledConfig | None, *, inference: bool) -> list[RankResults]:
    """In inference forward alone, with prepared weights."""
    config, ranks = replace(CONFIG, block_scaled=block_scaled, inference=inference), inputs()
    if inference:
        ranks = [replace(rank, grad_out_TD=None) for rank in ranks]
        for rank in ranks if block_scaled else ():
            rank.w13_L2FD, rank.w2_LDF = (
                prepare_block_scaled_weight(w, config, inference=True) for w in (rank.w13_L2FD, rank.w2_LDF)
            )
    return run_virtual(W, config, ranks, backend="reference")


def errors(results: list[RankResults], expected: list[RankResults]) -> dict[str, str]:
    """By output, "whole / worst row" in dB; score gradients count as one row."""
    found = {}
    for name in RankResults.__dataclass_fields__:
        if getattr(expected[0], name) is None:
            continue
        out, ref = (torch.cat([getattr(rank, name) for rank in side]).flatten(0, -2) for side in (results, expected))
        whole = rows_sqnr_db(out.flatten(), ref.flatten()).item()
        worst = "" if name == "grad_scores_TK" else f" / {rows_sqnr_db(out, ref).min().item():.1f}"
        found[name] = f"{whole:.1f}{worst}"
    return found


def main() -> None:
    print(f"T {T} a rank, D {D}, F {F}, top {K} of {E} experts, {W} ranks; dB from BF16, whole / worst row")
    for inference, names in ((False, ["mxfp8"]), (True, list(FORMATS))):
        expected = run(None, inference=inference)
        for name in names:
            found = errors(run(FORMATS[name], inference=inference), expected)
            print(f"{name} {'inference' if inference else 'training'}")
            for output, decibels in found.items():
                print(f"  {output:<14} {decibels}")


if __name__ == "__main__":
    main()
