"""The six products of the experts on the rows that one rank receives: the floor of a call, and what bench_op times."""

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import Tensor

from dist_moe.shapes import Activation, cdiv

from .shapes import Traffic, draw_inputs

FORWARD = ("w13", "w2")
BACKWARD = ("dgrad_w2", "wgrad_w2", "dgrad_w13", "wgrad_w13")
MIN_ROWS = 128  # buffers of a rank that receives nothing still hold a tile


class ExpertGemms:
    """Random rows in the real numbers, an expert at a time: `expert_rows` of each local expert."""

    def __init__(self, expert_rows: list[int], w13_L2FD: Tensor, w2_LDF: Tensor):
        self.w13, self.w2 = w13_L2FD.detach(), w2_LDF.detach()
        L, D, F = self.w2.shape
        device = self.w2.device
        self.R, self._sizes = sum(expert_rows), {"D": D, "F": F, "2F": 2 * F}
        starts = [0, *accumulate(expert_rows)]
        self.row_start_P = torch.tensor(starts, dtype=torch.int32, device=device)
        self.zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows_per_expert = cdiv(self.R, L)
        self.x, self.dy, self.h1, self.h2 = (self._rows(width).normal_() for width in ("D", "D", "2F", "F"))
        self.out_D, self.out_2F, self.out_F = (self._rows(width) for width in ("D", "2F", "F"))

    @classmethod
    def of_rank(cls, traffic: Traffic, rank: int, device: torch.device) -> "ExpertGemms":
        """Those of a rank, with weights as draw_inputs draws them."""
        no_ids = [torch.zeros(0, traffic.shape.K, dtype=torch.int64)] * traffic.W
        weights = draw_inputs(traffic.shape, no_ids, (rank,), device)
        return cls(traffic.expert_rows(rank), weights.w13_L2FD, weights.w2_LDF)

    def _rows(self, width: str) -> Tensor:
        shape = (max(self.R, MIN_ROWS), self._sizes[width])
        return torch.empty(shape, dtype=torch.bfloat16, device=self.w2.device)

    @cached_property
    def dw13(self) -> Tensor:
        return torch.empty_like(self.w13)

    @cached_property
    def dw2(self) -> Tensor:
        return torch.empty_like(self.w2)

    def _table(self) -> dict[str, tuple]:
        """product: op, operand in rows, second operand (weights, or rows in wgrad), result."""
        return {
            "w13": ("grouped_gemm", self.x, lambda: self.w13, lambda: self.out_2F),
            "w2": ("grouped_gemm", self.h2, lambda: self.w2, lambda: self.out_D),
            "dgrad_w2": ("grouped_gemm_dgrad", self.dy, lambda: self.w2, lambda: self.out_F),
            "wgrad_w2": ("grouped_gemm_wgrad", self.dy, lambda: self.h2, lambda: self.dw2),
            "dgrad_w13": ("grouped_gemm_dgrad", self.h1, lambda: self.w13, lambda: self.out_D),
            "wgrad_w13": ("grouped_gemm_wgrad", self.h1, lambda: self.x, lambda: self.dw13),
        }

    def op_name(self, product: str) -> str:
        return self._table()[product][0]

    def result(self, product: str) -> Tensor:
        """What run() writes, without the rows of padding."""
        out = self._table()[product][3]()
        return out[: self.R] if out.dim() == 2 else out

    def run(self, ops: SimpleNamespace, product: str) -> None:
        """By the op of a backend, into result()."""
        op, a, b, out = self._table()[product]
        if op == "grouped_gemm_wgrad":
            self.run_wgrad(ops.grouped_gemm_wgrad, product, out(), accumulate=False)
            return
        zero, b, out = self.zero_1, b(), out()
        tiles = {"rows_per_expert": self.rows_per_expert}
        getattr(ops, op)(a, zero, b, out, zero, self.row_start_P, stop_1=zero, **tiles)

    def run_wgrad(self, wgrad: Callable, product: str, out_LNK: Tensor, *, accumulate: bool) -> None:
        """A weight gradient by an implementation of grouped_gemm_wgrad, over or into a tensor of the caller's."""
        _, a, b, _ = self._table()[product]
        zero = self.zero_1
        wgrad(a, zero, b(), zero, self.row_start_P, out_LNK, accumulate=accumulate, stop_1=zero)

    def run_swiglu(self, swiglu: Callable) -> None:
        """W13 by an implementation of grouped_gemm_swiglu, as in inference: h2 into out_F, and no h1."""
        zero, how = self.zero_1, {"keep_h1": False, "activation": Activation(), "rows_per_expert": self.rows_per_expert}
        swiglu(self.x, zero, self.w13, self.out_2F, zero, self.out_F, zero, self.row_start_P, stop_1=zero, **how)

    def torch(self, product: str) -> Tensor | None:
        """By torch._grouped_mm; None without rows."""
        op, a, b, _ = self._table()[product]
        a, b, ends = a[: self.R], b(), self.row_start_P[1:]
        if not self.R:
            return None
        if op == "grouped_gemm_wgrad":
            return torch._grouped_mm(a.t(), b[: self.R], offs=ends)
        return torch._grouped_mm(a, b.transpose(1, 2) if op == "grouped_gemm" else b, offs=ends)


def floors(gemms: list[ExpertGemms], ops: SimpleNamespace, *, backward: bool) -> dict[str, Callable[[], None]]:
    """Bare products of a call, by who computes them."""
    products = FORWARD + (BACKWARD if backward else ())

    def ours() -> None:
        for rank in gemms:
            for product in products:
                rank.run(ops, product)

    def torchs() -> None:
        for rank in gemms:
            for product in products:
                rank.torch(product)

    return {"floor-ours": ours, "floor-torch": torchs}
