"""What routed_experts refuses, before anything is launched."""

import itertools
import math
import operator

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .config import BlockScaledFormat
from .context import Context
from .memory_plan import format_bytes
from .norm import MAX_NORM_DIM
from .options import ExecutionOptions, RMSNormPostprocess, norm_weights_of, supports_fused_post_expert_rmsnorm
from .weights import PreparedWeight

_NO_OPTIONS = ExecutionOptions()


def check_call(x_TD, ids_TK, scores_TK, w13, w2, context: Context, options: ExecutionOptions | None = None) -> None:
    """Everything the host can know of a call, in the documented order. Raises TypeError, ValueError or RuntimeError."""
    config = context.config
    where = "routed_experts"
    if options is not None and not isinstance(options, ExecutionOptions):
        raise TypeError(f"{where}: options must be an ExecutionOptions or None, got {type(options).__name__}")
    options = options or _NO_OPTIONS
    for name, value in (("x_TD", x_TD), ("topk_expert_ids_TK", ids_TK), ("topk_scores_TK", scores_TK)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{where}: {name} must be a tensor, got {type(value).__name__}")
    stats = options.swiglu_clip_stats_out_3
    if stats is not None and stats.device != x_TD.device:
        raise ValueError(f"{where}: swiglu_clip_stats_out_3 is on {stats.device}, x_TD on {x_TD.device}")
    if stats is not None:
        _check_writable("swiglu_clip_stats_out_3", stats)

    T_max, D, K = config.num_local_input_tokens, config.hidden_dim, config.top_k
    if x_TD.dim() != 2 or x_TD.shape[1] != D:
        raise ValueError(f"{where}: x_TD must be [T, {D}], got {list(x_TD.shape)}")
    T = x_TD.shape[0]
    if T > T_max:
        raise ValueError(
            f"{where}: x_TD has {T} tokens, more than Config.num_local_input_tokens = {T_max}; the count must equal or "
            "be less than it"
        )
    for name, value in (("topk_expert_ids_TK", ids_TK), ("topk_scores_TK", scores_TK)):
        if value.shape != (T, K):
            raise ValueError(f"{where}: {name} must be [{T}, {K}] as x_TD has {T} tokens, got {list(value.shape)}")

    prepared = [isinstance(weight, PreparedWeight) for weight in (w13, w2)]
    if any(prepared) and not all(prepared):
        raise TypeError(f"{where}: both weights must be prepared or both tensors, got one of each")
    if all(prepared):
        _check_prepared({"w13_weight": w13, "w2_weight": w2}, context)
        if options.weights_preprocess_fn is not None:
            raise ValueError(f"{where}: weights_preprocess_fn makes bf16 weights, prepared weights have no use for it")
        w13, w2 = w13.source, w2.source
    elif config.block_scaled is not None and config.block_scaled.format is BlockScaledFormat.NVFP4:
        raise ValueError(
            f"{where}: nvfp4 requires pre-quantized weights; pass what prepare_block_scaled_weight returns"
        )
    for name, value in (("w13_weight", w13), ("w2_weight", w2)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{where}: {name} must be a tensor, got {type(value).__name__}")
    weights = {"w13_weight": w13, "w2_weight": w2}
    if options.weights_preprocess_fn is not None:
        weights = {}  # check_preprocessed comes when the function was called
    else:
        _check_weight_layouts(w13, w2, context)

    _check_dtype("x_TD", x_TD, torch.bfloat16)
    for name, value in weights.items():
        _check_dtype(name, value, torch.bfloat16)
    _check_dtype("topk_expert_ids_TK", ids_TK, torch.int32, torch.int64)
    _check_dtype("topk_scores_TK", scores_TK, torch.bfloat16, torch.float32)
    named = {"x_TD": x_TD, "topk_expert_ids_TK": ids_TK, "topk_scores_TK": scores_TK}
    _check_device(named | weights, context)
    if T and x_TD.stride(1) != 1:
        raise ValueError(
            f"{where}: x_TD must have unit stride along D, got strides {x_TD.stride()}; call .contiguous()"
        )
    _check_contiguous(weights)

    _check_tracing(options)
    _check_rmsnorm(options.experts_output_postprocess, x_TD, scores_TK)
    if options.experts_output_postprocess is not None:
        require_route_outputs(context)


def check_preprocessed(given: tuple[Tensor, Tensor], found: tuple, context: Context) -> None:
    """What weights_preprocess_fn made of the weights of a call, by the rules of weights that are passed as they are."""
    weights = dict(zip(("weights_preprocess_fn(w13_weight)", "weights_preprocess_fn(w2_weight)"), found, strict=True))
    for (name, value), weight in zip(weights.items(), given, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"routed_experts: {name} must be a tensor, got {type(value).__name__}")
        if weight.requires_grad and not (weight.is_contiguous() and same_order(weight.shape, value.shape)):
            raise ValueError(
                f"routed_experts: {name} has the shape {list(value.shape)}, so its gradient has none for a contiguous "
                f"weight of shape {list(weight.shape)}: the function has to keep the memory order, or pass that weight "
                "with requires_grad=False"
            )
    _check_weight_layouts(*found, context)
    for name, value in weights.items():
        _check_dtype(name, value, torch.bfloat16)
    _check_device(weights, context)
    _check_contiguous(weights)
    check_apart(weights)


def same_order(a: torch.Size, b: torch.Size) -> bool:
    """Whether one of the two shapes only splits dimensions of the other, so that contiguous tensors of both are in the
    same memory order. It cannot tell a transposed square."""
    splits = [set(itertools.accumulate(reversed(shape), operator.mul)) for shape in (a, b)]
    return math.prod(a) == math.prod(b) and (splits[0] <= splits[1] or splits[1] <= splits[0])


def check_apart(tensors: dict[str, Tensor]) -> None:
    """Raises ValueError when two of these contiguous tensors share memory; those of a trace have none."""
    real = {name: t for name, t in tensors.items() if type(t) in (Tensor, torch.nn.Parameter) and t.nbytes}
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in real.items())
    for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise ValueError(f"routed_experts: {name} and {other} share memory; each needs its own")


MADE_INFERRING = "was made under inference_mode and cannot be written outside"


def _check_writable(name: str, out: Tensor) -> None:
    if out.requires_grad and _is_recording():
        raise ValueError(f"routed_experts: {name} is written over and must not require a gradient; detach it")
    if not torch.compiler.is_compiling() and is_read_only(out):
        raise ValueError(f"routed_experts: {name} {MADE_INFERRING}")


def is_read_only(tensor: Tensor) -> bool:
    """Whether torch refuses to write it here: made under inference_mode, which is off now. Not to be compiled."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def _is_recording() -> bool:
    """Whether autograd records what is called: under inference_mode it does not, whatever enable_grad says."""
    # torch.compile knows nothing of inference_mode.
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def _check_device(named: dict[str, Tensor], context: Context) -> None:
    for name, value in named.items():
        if value.device != context.device:
            raise ValueError(f"routed_experts: {name} is on {value.device}, the context on {context.device}")


def _check_contiguous(weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        if not value.is_contiguous():
            raise ValueError(
                f"routed_experts: {name} must be contiguous, got strides {value.stride()}; call .contiguous()"
            )


def _check_tracing(options: ExecutionOptions) -> None:
    where = "routed_experts"
    if options.requires_eager and (torch.compiler.is_compiling() or get_proxy_mode() is not None):
        raise RuntimeError(f"{where}: these options require eager execution: they call Python in every step")
    if options.inplace_wgrad_accum and torch.is_grad_enabled() and torch.compiler.is_compiling():
        raise NotImplementedError(f"{where}: not in this release under torch.compile: inplace_wgrad_accum")


def _check_dtype(name: str, value: Tensor, *wanted: torch.dtype) -> None:
    if value.dtype not in wanted:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        raise TypeError(
            f"routed_experts: {name} must be {names}, got {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        )


def _check_weight_layouts(w13: Tensor, w2: Tensor, context: Context) -> None:
    L, D, F = context.experts_per_rank, context.config.hidden_dim, context.config.intermediate_dim
    where = "routed_experts"
    if w13.dim() == 4 and w2.dim() == 3 and w13.shape[1] != 2:
        raise ValueError(f"{where}: w13_weight with four dimensions must be [E, 2, F, D], got {list(w13.shape)}")
    if (w13.dim(), w2.dim()) not in ((3, 3), (4, 3), (2, 2)):
        raise ValueError(
            f"{where}: incompatible expert-weight layouts: w13_weight {list(w13.shape)}, w2_weight {list(w2.shape)}; "
            "use [L, 2F, D] and [L, D, F], [L, 2, F, D] and [L, D, F], or [L*2F, D] and [L*D, F]"
        )
    wanted_w13 = {3: (L, 2 * F, D), 4: (L, 2, F, D), 2: (L * 2 * F, D)}[w13.dim()]
    wanted_w2 = {3: (L, D, F), 2: (L * D, F)}[w2.dim()]
    for name, value, wanted in (("w13_weight", w13, wanted_w13), ("w2_weight", w2, wanted_w2)):
        if tuple(value.shape) != wanted:
            raise ValueError(f"{where}: {name} must be {list(wanted)} (L = {L} local experts), got {list(value.shape)}")


def _check_prepared(weights: dict[str, PreparedWeight], context: Context) -> None:
    config, where = context.config, "routed_experts"
    if config.block_scaled is None:
        raise ValueError(f"{where}: prepared weights require block-scaled execution; pass the bf16 tensors")
    for name, weight in weights.items():
        if weight.format is not config.block_scaled.format:
            raise ValueError(
                f"{where}: {name} was prepared as {weight.format}, the context runs {config.block_scaled.format}"
            )
        weight.require_filled()
        if weight.fprop_data.device != context.device:
            raise ValueError(f"{where}: {name} is on {weight.fprop_data.device}, the context on {context.device}")


def check_saved(ids_TK, scores_TK, w13, w2, options: ExecutionOptions | None) -> None:
    """What a call that saves keeps of its arguments until backward. Raises ValueError for weights that were prepared
    for inference, and for tensors that autograd cannot keep; in a compiled program the op asks for these."""
    for weight in (w13, w2):
        if isinstance(weight, PreparedWeight) and weight.dgrad_scale is None:
            raise ValueError(
                "routed_experts: weights must provide dgrad operands for backward: prepare them with inference=False"
            )
    if not torch.compiler.is_compiling():
        require_savable(ids_TK, scores_TK, w13, w2, *norm_weights_of(options))


def require_savable(ids_TK, scores_TK, w13, w2, norm_weight_D: Tensor | None = None, prepared=()) -> None:
    """Raises ValueError for tensors made under inference_mode, which autograd cannot keep. Not to be compiled.

    Args:    prepared: the operands of weights that are not passed as PreparedWeight.
    """
    named = {
        "topk_expert_ids_TK": [ids_TK],
        "topk_scores_TK": [scores_TK],
        "w13_weight": _tensors_of(w13),
        "w2_weight": _tensors_of(w2),
        "RMSNormPostprocess.weight": [norm_weight_D],
        "a prepared weight": prepared,
    }
    for name, tensors in named.items():
        if any(tensor is not None and tensor.is_inference() for tensor in tensors):
            raise ValueError(
                f"routed_experts: {name} was made under inference_mode and cannot be kept for backward; make it "
                "outside or pass a clone"
            )


def _tensors_of(weight: Tensor | PreparedWeight) -> list[Tensor]:
    return [weight.source, *weight.storage_tensors()] if isinstance(weight, PreparedWeight) else [weight]


def require_route_outputs(context: Context) -> None:
    """Raises ValueError in a context without room for the output of every route."""
    missing = context.missing_route_bytes
    if missing:
        raise ValueError(
            "routed_experts: experts_output_postprocess needs room for every route's output, which this context has "
            f"not: top_k {context.config.top_k} is larger than the number of ranks, {context.world.size}; set "
            f"Config(route_outputs=True), which takes {format_bytes(missing)} more on every rank"
        )


def _check_rmsnorm(post, x_TD: Tensor, scores_TK: Tensor) -> None:
    """Raises ValueError for an RMSNormPostprocess that does not fit the call."""
    if not isinstance(post, RMSNormPostprocess):
        return
    where = "routed_experts: RMSNormPostprocess"
    if not post.eps > 0 or post.eps == float("inf"):
        raise ValueError(f"{where}.eps must be finite and positive, got {post.eps}")
    if post.output_dtype != x_TD.dtype:
        raise ValueError(f"{where}.output_dtype must be that of x_TD, {x_TD.dtype}, got {post.output_dtype}")
    if post.gain_center != 0 and post.weight is None:
        raise ValueError(f"{where}.gain_center needs a weight")
    if post.weight is not None:
        if post.use_kahan:
            raise ValueError(f"{where}: weight and use_kahan exclude each other")
        weight, D = post.weight, x_TD.shape[1]
        found = (weight.shape, weight.dtype, weight.device)
        if found != ((D,), x_TD.dtype, x_TD.device) or not weight.is_contiguous():
            raise ValueError(
                f"{where}.weight must be contiguous [{D}] {x_TD.dtype} on {x_TD.device}, got {list(weight.shape)} "
                f"{weight.dtype} on {weight.device}, strides {weight.stride()}"
            )
    dtypes = {"input_dtype": x_TD.dtype, "norm_output_dtype": post.norm_output_dtype, "output_dtype": post.output_dtype}
    sizes = {"topk": scores_TK.shape[1], "dim": x_TD.shape[1]}
    if not supports_fused_post_expert_rmsnorm(score_dtype=scores_TK.dtype, **dtypes, **sizes):
        raise ValueError(
            f"{where}: norm_output_dtype must be float32 or bfloat16 and the hidden size at most {MAX_NORM_DIM}, got "
            f"{post.norm_output_dtype} and {x_TD.shape[1]}"
        )


def wants_backward(context: Context, *differentiable: Tensor | PreparedWeight) -> bool:
    """Whether this call saves state. Raises RuntimeError on an inference context, which has no room for it."""
    tensors = (x.source if isinstance(x, PreparedWeight) else x for x in differentiable)
    save = _is_recording() and any(tensor.requires_grad for tensor in tensors)
    if save and context.config.inference:
        raise RuntimeError(
            "routed_experts: inference contexts do not support autograd; call under torch.no_grad(), or make the "
            "context with inference=False"
        )
    return save
