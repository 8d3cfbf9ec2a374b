"""Expert weights quantised once, ahead of the calls that use them: prepared, refilled in place, read back, saved."""

import functools
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import formats, registry
from .config import DIM_MULTIPLE, BlockScaledConfig, BlockScaledFormat, Config, as_bool
from .quantized import QuantizedWeights, empty_weights, weights_layout
from .reference_formats import dequantize_weights

_OWNED = ("fprop_data", "fprop_scale", "dgrad_data", "dgrad_scale", "global_scale", "global_scale_inv")
_SAVED = tuple(name for name in _OWNED if name != "dgrad_data")  # dgrad_data is fprop_data


class _State(NamedTuple):
    """Of a tensor: differs once it was written to or moved. While a program is traced there is no address, 0."""

    address: int
    version: int | None  # counts what was written in place; tensors made in inference mode count nothing
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class _Filled(NamedTuple):
    """What was so when the tensors were filled, and has to be so when they are used."""

    source: _State | None  # None after an optimizer's step on it
    owned: tuple[_State, ...]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class PreparedWeight:
    """A quantised weight with its scales; made by prepare_block_scaled_weight() only.

    source is the bf16 weight [G, N, K], where gradients land. fprop_* are the operand of the forward, which sums over
    K; dgrad_* that of the gradient of x, which sums over N (None if prepared for inference), dgrad_data being
    fprop_data itself. Scales are in blocked order, each expert padded to whole atoms by itself. global_scale and its
    inverse, FP32 [G], belong to NVFP4 (None for MXFP8).

    Whoever uses it calls require_filled() first. What that cannot see is what torch does not count as a write to the
    source: through source.data, by a collective, by the replay of a CUDA graph; and storages that were freed and came
    back at the same address. A step of an optimizer is seen, fused or not, where it had a gradient for the source or
    for a parameter that shares its storage.
    """

    source: Tensor
    format: BlockScaledFormat
    fprop_data: Tensor
    fprop_scale: Tensor
    dgrad_data: Tensor | None
    dgrad_scale: Tensor | None
    global_scale: Tensor | None
    global_scale_inv: Tensor | None

    def __init__(self, *args, **kwargs):
        raise TypeError("PreparedWeight: cannot be constructed directly; use prepare_block_scaled_weight()")

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """The owned tensors, one for each storage, in field order; without source.

        Storages are told apart by identity, not by address, so that the answer stands when they are resized to 0.
        """
        by_storage = {}
        for name in _OWNED:
            tensor = getattr(self, name)
            if tensor is not None:
                by_storage.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tuple(by_storage.values())

    def require_filled(self) -> None:
        """RuntimeError unless the tensors hold what source holds now. Not collective.

        So when they were never filled, or since then freed, replaced or written by another, as the fill of a shallow
        copy; and when source was changed or moved. Of a compiled call only the first is found, when it is compiled: a
        graph holds neither addresses nor versions.
        """
        if problem := self._problem():
            raise RuntimeError(f"PreparedWeight: {problem}; call prepare_block_scaled_weight(weight, config, out=this)")

    def _problem(self) -> str | None:
        if self._filled is None:
            return "it was never filled"
        if torch.compiler.is_compiling():
            return None
        if _are_freed(self):
            return "its storages were freed"
        if _states(self) != self._filled.owned:
            return "its storages were written, freed or replaced since it was filled"
        if _state(self.source) != self._filled.source:
            return "its source was changed since it was prepared"
        return None

    def dequantize(self) -> Tensor:
        """FP32 [G, N, K]: value * scale, which is exact, in NVFP4 * the inverse global scale, which rounds."""
        self.require_filled()
        return dequantize_weights(_quantized(self), format=formats.by_name(self.format))

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name, those that the format has; each once, not copied, without source."""
        self.require_filled()
        return self._tensors()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Fill the tensors with saved ones, in place. What is loaded is taken for the quantised source.

        Raises:  ValueError for other names, shapes or dtypes, which is how another format or purpose shows, and for
                 storages that were freed.
        """
        where, mine = "PreparedWeight.load_state_dict", self._tensors()
        if set(state) != set(mine):
            raise ValueError(f"{where}: the names must be {', '.join(mine)}, got {', '.join(state)}")
        for name, tensor in mine.items():
            found = state[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                wanted, got = (f"{t.dtype} {list(t.shape)}" for t in (tensor, found))
                raise ValueError(f"{where}: {name} must be {wanted}, got {got}")
        if _are_freed(self):
            raise ValueError(f"{where}: the storages were freed; resize them back first")
        with torch.inference_mode():
            for name, tensor in mine.items():
                tensor.view(torch.uint8).copy_(state[name].view(torch.uint8))
        _mark_filled(self)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name in _SAVED if (value := getattr(self, name)) is not None}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_filled": self._problem() is None}

    def __setstate__(self, state: dict) -> None:
        """Of a copy or a pickle: filled if the original was, by its own tensors."""
        self.__dict__.update(state | {"_filled": None})
        if state["_filled"]:
            _mark_filled(self)


def _are_freed(prepared: PreparedWeight) -> bool:
    return any(tensor.numel() and tensor.untyped_storage().nbytes() == 0 for tensor in prepared.storage_tensors())


def _state(tensor: Tensor) -> _State:
    address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    return _State(address, _version(tensor), tensor.dtype, tensor.shape, tensor.stride())


def _version(tensor: Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # it was made in inference mode; is_inference() goes by the data that it was given since
        return None


def _states(prepared: PreparedWeight) -> tuple[_State, ...]:
    return tuple(_state(tensor) for tensor in prepared.storage_tensors())


def _mark_filled(prepared: PreparedWeight) -> None:
    object.__setattr__(prepared, "_filled", _Filled(_state(prepared.source), _states(prepared)))
    _live[id(prepared)] = prepared
    _watch_optimizers()


_live: weakref.WeakValueDictionary[int, PreparedWeight] = weakref.WeakValueDictionary()  # once filled, by id


@functools.cache
def _watch_optimizers() -> None:
    """From the first fill of this process on, after every step."""
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


@torch.no_grad()
def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Mark as changed the sources that share a storage with a parameter that the step had a gradient for.

    Steps that are fused, and those of DTensors, count as no write to them.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    written = {_storage(parameter) for parameter in parameters if parameter.grad is not None} - {None}
    for reference in _live.valuerefs():  # a list: other threads fill meanwhile
        prepared = reference()
        if prepared is not None and prepared._filled is not None and _storage(prepared.source) in written:
            object.__setattr__(prepared, "_filled", prepared._filled._replace(source=None))


def _storage(tensor: Tensor) -> int | None:
    """Which one it is; of a DTensor that of this rank's shard."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()._cdata if torch._C._has_storage(local) else None


def _make_prepared(**values) -> PreparedWeight:
    """One whose tensors count as not filled."""
    prepared = object.__new__(PreparedWeight)
    for name in PreparedWeight.__dataclass_fields__:
        object.__setattr__(prepared, name, values[name])
    object.__setattr__(prepared, "_filled", None)
    return prepared


def _quantized(prepared: PreparedWeight) -> QuantizedWeights:
    return QuantizedWeights(
        prepared.fprop_data,
        prepared.fprop_scale,
        prepared.dgrad_scale,
        prepared.global_scale,
        prepared.global_scale_inv,
    )


# ---- ops: opaque to tracing ----------------------------------------------------------------------------------------


def _quantize(weight: Tensor, format: formats.Format, square: bool, out: QuantizedWeights) -> None:
    """By Triton where it runs: a GPU, or a CPU that interprets; else by the oracle on a CPU."""
    call = registry.call_of(registry.default_device(weight.device), None)
    impl, _ = registry.choose("quantize_weights", call)
    with torch.cuda.device_of(weight):
        registry.function(impl)(weight, format=format, square=square, out=out)


@torch.library.custom_op("dist_moe::prepare_mxfp8_weight", mutates_args=())
def _prepare_mxfp8_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales for the forward, scales for the gradient of x."""
    out = empty_weights(*weight.shape, formats.MXFP8_E4M3, True, weight.device)
    _quantize(weight, formats.MXFP8_E4M3, True, out)
    return out.values, out.scales, out.transposed_scales


@_prepare_mxfp8_weight.register_fake
def _(weight):
    return empty_weights(*weight.shape, formats.MXFP8_E4M3, True, weight.device)[:3]


@torch.library.custom_op("dist_moe::fill_prepared_weight", mutates_args=("outputs",))
def _fill_prepared_weight(weight: Tensor, outputs: list[Tensor], format: str, square: bool) -> None:
    """outputs: those of QuantizedWeights that the format has, in order."""
    record, given = formats.by_name(format), iter(outputs)
    layout = weights_layout(*weight.shape, record, square)
    _quantize(weight, record, square, QuantizedWeights(*(None if want is None else next(given) for want in layout)))


@_fill_prepared_weight.register_fake
def _(weight, outputs, format, square):
    return None


def prepare_block_scaled_weight(
    weight: Tensor,
    config: BlockScaledConfig | Config,
    *,
    inference: bool = False,
    out: PreparedWeight | None = None,
) -> PreparedWeight:
    """Quantise expert weights into the operands of block-scaled execution. Not differentiable, not collective.

    Args:    weight: bf16 [G, N, K], contiguous: W13 as [L, 2F, D] or W2 as [L, D, F]; on a GPU, or on the CPU.
             config: the block-scaled configuration, or a Config that has one.
             inference: MXFP8 only: 1x32 blocks and no operand for backward; NVFP4 is always for inference. Without it
             MXFP8 has 32x32 blocks, whose values differ.
             out: a weight prepared for the same purpose from one of this shape. Its tensors are overwritten where they
             lie, weight becomes its source, and it is returned. A fill that fails leaves it unfilled, its source as
             it was.
    Returns: fprop_data e4m3 [G, N, K], or two e2m1 values a byte, [G, N, K / 2] float4_e2m1fn_x2;
             fprop_scale [G * align(N, 128), align(K / block, 4)] and dgrad_scale [G * align(K, 128), align(N / 32, 4)]
             in blocked order, e8m0 for blocks of 32 or e4m3 for 16; FP32 [G] global_scale and its reciprocal.
    Raises:  TypeError, ValueError; RuntimeError when no backend runs.
    """
    format = _check_format(config)
    _check_weight(weight)
    as_bool("prepare_block_scaled_weight", "inference", inference)
    square = format is BlockScaledFormat.MXFP8_E4M3 and not inference
    if out is not None:
        _check_out(out, weight, format, square)
        object.__setattr__(out, "_filled", None)
        _fill(out, weight, square)
        return out
    with torch.inference_mode(False), torch.no_grad():  # tensors that count what is written to them
        if square:
            found = QuantizedWeights(*torch.ops.dist_moe.prepare_mxfp8_weight(weight), None, None)
        else:
            found = empty_weights(*weight.shape, formats.by_name(format), square, weight.device)
    prepared = _make_prepared(
        source=weight,
        format=format,
        fprop_data=found.values,
        fprop_scale=found.scales,
        dgrad_data=found.values if square else None,
        dgrad_scale=found.transposed_scales,
        global_scale=found.outer_G,
        global_scale_inv=found.outer_inv_G,
    )
    if square:
        _mark_filled(prepared)
    else:
        _fill(prepared, weight, square)
    return prepared


def _fill(prepared: PreparedWeight, weight: Tensor, square: bool) -> None:
    outputs = [tensor for tensor in _quantized(prepared) if tensor is not None]
    with torch.inference_mode():  # writes to copies that were made in it, too
        torch.ops.dist_moe.fill_prepared_weight(weight, outputs, str(prepared.format), square)
    object.__setattr__(prepared, "source", weight)
    _mark_filled(prepared)


def _check_format(config: BlockScaledConfig | Config) -> BlockScaledFormat:
    if not isinstance(config, BlockScaledConfig | Config):
        raise TypeError(
            f"prepare_block_scaled_weight: config must be a BlockScaledConfig or a Config, got {type(config).__name__}"
        )
    block_scaled = config.block_scaled if isinstance(config, Config) else config
    if block_scaled is None:
        raise ValueError("prepare_block_scaled_weight: config.block_scaled is None; set it to a BlockScaledConfig")
    return block_scaled.format


def _check_weight(weight: Tensor) -> None:
    where = "prepare_block_scaled_weight: weight"
    if not isinstance(weight, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(weight).__name__}")
    if weight.dim() != 3:
        raise ValueError(f"{where} must be 3-D [experts, rows, columns], got shape {list(weight.shape)}")
    if weight.dtype is not torch.bfloat16:
        raise TypeError(f"{where} must be bfloat16, got {weight.dtype}; call .bfloat16()")
    if not weight.is_contiguous():
        raise ValueError(f"{where} must be contiguous, got strides {weight.stride()}; call .contiguous()")
    if any(size == 0 or size % DIM_MULTIPLE for size in weight.shape[1:]):
        raise ValueError(
            f"{where} must have rows and columns a positive multiple of {DIM_MULTIPLE}, got {list(weight.shape)}"
        )


def _check_out(out: PreparedWeight, weight: Tensor, format: BlockScaledFormat, square: bool) -> None:
    where = "prepare_block_scaled_weight: out"
    if not isinstance(out, PreparedWeight):
        raise TypeError(f"{where} must be a PreparedWeight, got {type(out).__name__}")
    if out.format is not format:
        raise ValueError(f"{where} must hold {format}, got {out.format}")
    if (out.dgrad_scale is not None) != square:
        wanted, found = ("training", "inference") if square else ("inference", "training")
        raise ValueError(f"{where} must be prepared for {wanted}, got one prepared for {found}; change inference")
    if out.source.shape != weight.shape or out.source.dtype is not weight.dtype:
        raise ValueError(
            f"{where} must come from a weight like this one, {list(weight.shape)} {weight.dtype}, "
            f"got {list(out.source.shape)} {out.source.dtype}"
        )
    if out.fprop_data.device != weight.device:
        raise ValueError(f"{where} must be on the device of the weight, {weight.device}, got {out.fprop_data.device}")
    if _are_freed(out):
        raise ValueError(f"{where} must have its storages, some are of 0 bytes; resize them back first")


def prepared_operands(*weights: PreparedWeight) -> list[Tensor | None]:
    """What block_scaled_forward takes of prepared weights: values, scales, transposed scales, inverse outer scales."""
    names = ("fprop_data", "fprop_scale", "dgrad_scale", "global_scale_inv")
    return [getattr(weight, name) for weight in weights for name in names]


def operands_of_backward(prepared: list[Tensor | None]) -> list[Tensor | None]:
    return [*prepared[:3], *prepared[4:7]]


def unprepared(inputs: tuple) -> tuple[tuple, list[Tensor | None]]:
    """The inputs of a call with the sources of prepared weights, to which gradients go, and prepared_operands."""
    weights = inputs[3:]
    if not isinstance(weights[0], PreparedWeight):
        return inputs, []
    return (*inputs[:3], *(weight.source for weight in weights)), prepared_operands(*weights)
