"""Norm: the RMSNorm of a call as the path takes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NORM_DIM = 16384  # columns of a row that one program holds


@dataclass(frozen=True)
class Norm:
    """RMSNorm of every route's row; see options.RMSNormPostprocess, of which these are the numbers."""

    eps: float
    dtype: torch.dtype = torch.float32  # of the normalised rows
    use_kahan: bool = False
    gain_center: float = 0.0
    weight_D: Tensor | None = None


def norm_of(weight_D: Tensor | None, numbers: list[float] | None) -> Norm | None:
    """From the arguments of an op, whose schema has no dataclass: eps, gain_center, and as 0 or 1 whether rows are
    normalised into bf16, use_kahan, and whether 1 / rms is kept."""
    if numbers is None:
        return None
    eps, gain_center, bf16, use_kahan, _ = numbers
    weight_D = None if weight_D is None else weight_D.detach()
    return Norm(eps, torch.bfloat16 if bf16 else torch.float32, bool(use_kahan), gain_center, weight_D)


def keeps_rstd(numbers: list[float]) -> bool:
    return bool(numbers[4])
