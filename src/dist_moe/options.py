"""What one call of routed_experts may ask for beyond the plain path, checked when it is written down."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .config import DIM_MULTIPLE, as_bool, as_float
from .context import Context
from .norm import MAX_NORM_DIM

_NORM_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class RMSNormPostprocess:
    """RMSNorm of every route's expert output, before the scores are applied. Checked by routed_experts, not here.

    Args:    norm_output_dtype: of the normalised rows, fp32 or bf16.  output_dtype: of the layer's output, that of x.
             require_bitwise: keep the operation order of the unfused norm, as the one kernel always does: rows are
             normalised and rounded, multiplied by the score, and added in slot order; the squares are added in an order
             of its own.
             weight, gain_center: gain bf16(weight + gain_center) on the expert output before the norm, rounded to bf16;
             bf16 [D]. The weight gets a gradient, of the tokens of this rank.
             use_kahan: compensated sum of squares.  recompute_rstd: do not save 1/rms for backward.
             observe_expert_output_fn(output), observe_expert_output_grad_fn(output, grad): called with [T*K, D] in
             forward and in backward, zeros for slots without an expert; eager only.
    """

    eps: float
    norm_output_dtype: torch.dtype
    output_dtype: torch.dtype
    require_bitwise: bool = True
    weight: Tensor | None = None
    gain_center: float = 0.0
    use_kahan: bool = False
    observe_expert_output_fn: Callable[[Tensor], Any] | None = None
    observe_expert_output_grad_fn: Callable[[Tensor, Tensor], Any] | None = None
    recompute_rstd: bool = False

    @property
    def has_observer(self) -> bool:
        return self.observe_expert_output_fn is not None or self.observe_expert_output_grad_fn is not None

    @property
    def numbers(self) -> list[float]:
        """As norm.norm_of takes them."""
        bf16 = self.norm_output_dtype is torch.bfloat16
        flags = (bf16, self.use_kahan, not self.recompute_rstd)
        return [float(self.eps), float(self.gain_center), *map(float, flags)]


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of one call.

    Args:    inplace_wgrad_accum: backward adds into the owners' .grad where both have one: FP32 sums, one rounding, no
             gradient between. Where not, autograd attaches the gradients. Post-accumulate hooks run once either way.
             wgrad_parameter_owners: (w13_owner, w2_owner), the leaves whose .grad that is, in the memory order of the
             weights; DTensors count with their local shard. Default: the weights or the leaves that they are views of.
             Kept by weak references.
             weights_preprocess_fn(weight) -> bf16 weight in a layout of routed_experts, run again in backward, so that
             nothing else is kept; the gradient of what it returns is taken for that of weight.
             experts_output_postprocess: an RMSNormPostprocess, or a callable [T*K, D] -> [T*K, D], applied to what the
             experts returned for this rank's slots before the scores are (zeros for a slot without an expert). Needs
             Config(route_outputs=True) where top_k is larger than the number of ranks. A callable is eager: it runs
             without gradients in forward and, where inputs of the call want gradients, again with them in backward, on
             the same rows, which are kept, and with the same random numbers; parameters that it has captured get
             gradients then. The same on all ranks.
             wgrad_postprocess_fn(name, grad) -> grad or None, called with "w2", then with "w13", when backward is
             issued; autograd gets what it returns.
             swiglu_clip_stats_out_3: fp32 [3], overwritten by every forward with [gates above the limit, ups beyond it
             on either side, all gates] of the rows that this rank receives, before any clamp: exact, then rounded to
             FP32, NaN after a fault. It may lie on any device here; that it lies on x's is checked by the call, because
             only the call knows x (and a CPU call needs a CPU tensor).
             swiglu_clip_limit: the limit that is counted, any finite one, whatever Config.swiglu_limit is.
             wgrad_destination_fn(name, shape, dtype, device) -> (tensor, accumulate), called with "w13", then with
             "w2", before backward runs. The contiguous tensor, bf16 or FP32, takes the gradient and autograd gets
             none. Experts without rows leave what is there when accumulating, and write zeros when not.
    Raises:  TypeError, ValueError.
    """

    inplace_wgrad_accum: bool = False
    wgrad_parameter_owners: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)
    weights_preprocess_fn: Callable[[Tensor], Tensor] | None = None
    experts_output_postprocess: Callable[[Tensor], Tensor] | RMSNormPostprocess | None = None
    wgrad_postprocess_fn: Callable[[str, Tensor], Tensor | None] | None = None
    swiglu_clip_stats_out_3: Tensor | None = None
    swiglu_clip_limit: float = 7.0
    wgrad_destination_fn: Callable[..., tuple[Tensor, bool]] | None = None

    def __post_init__(self):
        where = "ExecutionOptions"
        as_bool(where, "inplace_wgrad_accum", self.inplace_wgrad_accum)
        self._check_owners()
        _check_callable("weights_preprocess_fn", self.weights_preprocess_fn)
        post = self.experts_output_postprocess
        if post is not None and not isinstance(post, RMSNormPostprocess) and not callable(post):
            raise ValueError(
                f"{where}: experts_output_postprocess must be a callable, an RMSNormPostprocess or None, got {post!r}"
            )
        _check_callable("wgrad_postprocess_fn", self.wgrad_postprocess_fn)
        if self.inplace_wgrad_accum and self.wgrad_postprocess_fn is not None:
            raise ValueError(
                f"{where}: wgrad_postprocess_fn needs a gradient of its own, got inplace_wgrad_accum=True; drop one"
            )
        self._check_clip_stats()
        self._check_destination()

    @property
    def requires_eager(self) -> bool:
        """Whether the call runs Python of the caller's, which no trace or graph can hold."""
        post = self.experts_output_postprocess
        if isinstance(post, RMSNormPostprocess):
            runs_post = post.has_observer
        else:
            runs_post = post is not None
        hooks = (self.weights_preprocess_fn, self.wgrad_postprocess_fn, self.wgrad_destination_fn)
        return runs_post or any(hook is not None for hook in hooks)

    @property
    def leaves_weights_alone(self) -> bool:
        """Whether weights are used as they are and all their gradients are autograd's."""
        hooks = (self.weights_preprocess_fn, self.wgrad_postprocess_fn, self.wgrad_destination_fn)
        return not self.inplace_wgrad_accum and all(hook is None for hook in hooks)

    def _check_owners(self):
        owners = self.wgrad_parameter_owners
        if owners is None:
            return
        if not self.inplace_wgrad_accum:
            raise ValueError("ExecutionOptions: wgrad_parameter_owners requires inplace_wgrad_accum=True")
        if not (isinstance(owners, tuple) and len(owners) == 2 and all(isinstance(t, Tensor) for t in owners)):
            got = [type(t).__name__ for t in owners] if isinstance(owners, tuple) else type(owners).__name__
            raise TypeError(
                f"ExecutionOptions: wgrad_parameter_owners must be a tuple of two tensors, W13's and W2's, got {got}"
            )

    def _check_clip_stats(self):
        name, stats = "ExecutionOptions: swiglu_clip_stats_out_3", self.swiglu_clip_stats_out_3
        if stats is not None:
            if not isinstance(stats, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(stats).__name__}")
            if stats.dtype is not torch.float32:
                raise TypeError(f"{name} must be float32, got {stats.dtype}")
            if stats.shape != (3,) or not stats.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous of shape [3], got shape {list(stats.shape)}, strides {stats.stride()}"
                )
        limit = as_float("ExecutionOptions", "swiglu_clip_limit", self.swiglu_clip_limit)
        if not math.isfinite(limit):
            raise ValueError(f"ExecutionOptions: swiglu_clip_limit must be finite, got {limit}")
        object.__setattr__(self, "swiglu_clip_limit", limit)

    def _check_destination(self):
        _check_callable("wgrad_destination_fn", self.wgrad_destination_fn)
        if self.wgrad_destination_fn is None:
            return
        for name in ("inplace_wgrad_accum", "wgrad_postprocess_fn"):
            if _is_requested(getattr(self, name)):
                raise ValueError(f"ExecutionOptions: wgrad_destination_fn cannot be combined with {name}; drop one")


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"ExecutionOptions: {name} must be callable or None, got {value!r}")


def _is_requested(value: Any) -> bool:
    return value is not None and value is not False  # by identity: tensors and callables have truth values of their own


def clip_limit_of(options: ExecutionOptions | None) -> float | None:
    """The limit to count at, as FP32 can hold it; None: nothing is to be counted."""
    if options is None or options.swiglu_clip_stats_out_3 is None:
        return None
    largest = torch.finfo(torch.float32).max  # no finite BF16 value is beyond it
    return min(max(options.swiglu_clip_limit, -largest), largest)


def callable_of(options: ExecutionOptions | None) -> Callable[[Tensor], Tensor] | RMSNormPostprocess | None:
    """What takes the route rows out of the op: the caller's own function, or a norm with an observer."""
    post = None if options is None else options.experts_output_postprocess
    return None if isinstance(post, RMSNormPostprocess) and not post.has_observer else post


def norm_weights_of(options: ExecutionOptions | None) -> tuple[Tensor, ...]:
    """The weight of a norm behind the experts, if there is one."""
    post = None if options is None else options.experts_output_postprocess
    return (post.weight,) if isinstance(post, RMSNormPostprocess) and post.weight is not None else ()


def norm_arguments_of(options: ExecutionOptions | None) -> tuple[Tensor | None, list[float] | None]:
    """norm_weight_D and norm of the ops: of a norm without an observer."""
    post = None if options is None else options.experts_output_postprocess
    if not isinstance(post, RMSNormPostprocess) or post.has_observer:
        return None, None
    return post.weight, post.numbers


def supports_fused_post_expert_rmsnorm(
    *,
    input_dtype: torch.dtype,
    score_dtype: torch.dtype,
    norm_output_dtype: torch.dtype,
    output_dtype: torch.dtype,
    topk: int,
    dim: int,
    context: Context | None = None,
) -> bool:
    """Whether RMSNormPostprocess runs for these dtypes and sizes, on whatever device: bf16 rows and output, fp32 or
    bf16 scores and norm, any top-k, hidden sizes that are multiples of 32 up to 16384; and, asked of a context, whether
    that has room for every route's output (Config.route_outputs). Never raises."""
    if context is not None and context.missing_route_bytes:
        return False
    if any(dtype is not torch.bfloat16 for dtype in (input_dtype, output_dtype)):
        return False
    if any(all(dtype is not known for known in _NORM_DTYPES) for dtype in (score_dtype, norm_output_dtype)):
        return False
    if any(isinstance(size, bool) or not isinstance(size, int | torch.SymInt) for size in (topk, dim)):
        return False
    return topk >= 1 and DIM_MULTIPLE <= dim <= MAX_NORM_DIM and dim % DIM_MULTIPLE == 0
