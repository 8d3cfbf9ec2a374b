"""Small cases of the path, forward and backward over virtual ranks on one GPU, to run under compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python3 -m tests.sanitized
    compute-sanitizer --tool racecheck --error-exitcode 1 python3 -m tests.sanitized

PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an allocation of its own, so that memcheck sees where each one ends.
test_sanitizer.py runs both tools.
"""

import torch

from dist_moe.virtual import RankInputs, run_virtual
from tests.path_cases import Case, assert_results_close, dense

CASES = (
    Case("per route", T=70, D=96, F=160, K=2, E=4, routing="zipf(1.0)"),
    Case("de-duplicated recomputed", W=3, T=40, D=96, F=160, K=4, E=6, slot_factor=None),
)


def main() -> None:
    for case in CASES:
        inputs = case.inputs()
        there = [RankInputs(*(tensor.cuda() for tensor in vars(rank).values())) for rank in inputs]
        results = run_virtual(case.W, case.config(), there, device="cuda")
        results = [type(result)(*(tensor.cpu() for tensor in vars(result).values())) for result in results]
        assert_results_close(results, dense(case, inputs))
        print(f"{case.note}: right", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
