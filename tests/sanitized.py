"""Small cases of the path, training and decode over virtual ranks on one GPU, to run under compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python3 -m tests.sanitized
    compute-sanitizer --tool racecheck --error-exitcode 1 python3 -m tests.sanitized

PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an allocation of its own, so that memcheck sees where each one ends.
test_sanitizer.py runs both tools.
"""

import torch

from dist_moe.path_oracle import FORWARD_ONLY, forward_only, on_device
from dist_moe.virtual import RankResults, run_virtual
from tests.path_cases import Case, assert_results_close, dense

CASES = (
    Case("per route", T=70, D=96, F=160, K=2, E=4, routing="zipf(1.0)"),
    Case("de-duplicated recomputed", W=3, T=40, D=96, F=160, K=4, E=6, slot_factor=None),
)
DECODE = tuple(Case(f"decode, {W} rank(s)", W=W, T=4, D=96, F=160, K=2 * W, E=16 * W) for W in (1, 2))


def main() -> None:
    for case in CASES + DECODE:
        inputs, config = case.inputs(), case.config(**FORWARD_ONLY if case in DECODE else {})
        expected = dense(case, inputs)
        if case in DECODE:
            inputs, expected = forward_only(inputs), [RankResults(rank.out_TD) for rank in expected]
        results = run_virtual(case.W, config, [on_device(rank, "cuda") for rank in inputs], device="cuda")
        assert_results_close([on_device(result, "cpu") for result in results], expected)
        print(f"{case.note}: right", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
