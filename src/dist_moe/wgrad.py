"""Where the weight gradients of a call go: to autograd, into their owners' .grad, or where a callback says.

Everything is resolved and checked before the backward runs: what raises here has written nothing. The gradient that
autograd gets and the one that is added in place come from one FP32 sum with one rounding.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from . import engine
from .checks import MADE_INFERRING, check_apart, check_preprocessed, is_read_only, same_order
from .context import Context
from .options import ExecutionOptions

W13, W2 = 3, 4  # places of the weights among the inputs of a call
NAMES = {W13: "w13", W2: "w2"}


@dataclass(frozen=True)
class Destination:
    """A tensor of the caller's that takes the gradient of a weight: contiguous, bf16 or FP32, of the weight's shape."""

    tensor: Tensor
    accumulate: bool

    def take(self, grad: Tensor, stop_1: Tensor) -> None:
        """What the backward would have written here, from the FP32 gradient of an earlier visit; not after a fault."""
        if self.accumulate:
            self.tensor.add_(torch.where(stop_1 == 0, grad, 0.0))  # in FP32, rounded once
        else:
            self.tensor.copy_(grad)


@dataclass(frozen=True)
class Targets:
    """Of one visit of the backward: the dtype of what autograd gets, and the destinations of what it does not get, by
    place."""

    dtype: torch.dtype
    into: dict[int, Destination]

    def written_by_backward(self, needed: set[int]) -> bool:
        """Whether the backward itself writes all weight gradients it makes. If not, it makes new ones: those that have
        a destination go there after it, and what this visit does not take is kept for the next."""
        return bool(self.into) and self.into.keys() == needed

    def check_apart(self, w13: Tensor, w2: Tensor) -> None:
        """Raises ValueError for destinations that share memory with one another or with a weight."""
        named = {f"what takes the gradient of {NAMES[place]}": to.tensor for place, to in self.into.items()}
        if named:
            check_apart(named | {f"{NAMES[W13]}_weight": w13, f"{NAMES[W2]}_weight": w2})

    def dtype_of_new(self, needed: set[int], taken: set[int], wgrads: "WeightGrads") -> torch.dtype:
        """FP32 where they may be added to something, so that they are rounded once, as they are added."""
        return torch.float32 if wgrads.writes_itself and (self.into or not needed <= taken) else self.dtype


@dataclass(frozen=True)
class _Weight:
    """What is known of a weight with a gradient when the weight itself may be gone or changed."""

    shape: torch.Size
    device: torch.device
    owner: "weakref.ref[Tensor] | None"
    behind: "weakref.ref[Tensor] | None"  # the leaf that its gradient goes on to, where one is known


class WeightGrads:
    """What a forward asks of its weight gradients. Its autograd node holds it, so it holds no owner.

    The default asks for nothing: gradients go to autograd in Config.wgrad_dtype or bf16.
    """

    def __init__(self, options: ExecutionOptions | None = None, weights: dict[int, Tensor] | None = None):
        """weights: by place, those of a call that saves, as the caller passed them. Raises ValueError for owners."""
        options = options or ExecutionOptions()
        self.preprocess_fn = options.weights_preprocess_fn
        self._postprocess_fn, self._destination_fn = options.wgrad_postprocess_fn, options.wgrad_destination_fn
        self.in_place = options.inplace_wgrad_accum
        explicit = dict(zip(NAMES, options.wgrad_parameter_owners or (None, None), strict=True))
        self._weights = {}
        for place, weight in (weights or {}).items():
            owner = _checked_owner(NAMES[place], weight, explicit[place]) if self.in_place else None
            if weight.requires_grad:
                behind = owner if owner is not None and engine.leads_to(weight, owner) else None
                if not self.in_place and not weight.is_leaf and weight._base is not None and weight._base.is_leaf:
                    behind = weight._base
                refs = (None if leaf is None else weakref.ref(leaf) for leaf in (owner, behind))
                self._weights[place] = _Weight(weight.shape, weight.device, *refs)

    @property
    def writes_itself(self) -> bool:
        """Whether gradients may bypass autograd."""
        return self.in_place or self._destination_fn is not None

    def preprocessed(self, context: Context, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """The weights that the experts multiply with; without a graph, in forward and again in backward.

        Raises: TypeError, ValueError for what the callback returned.
        """
        if self.preprocess_fn is None:
            return w13, w2
        with torch.no_grad():
            found = self.preprocess_fn(w13.detach()), self.preprocess_fn(w2.detach())
        check_preprocessed((w13, w2), found, context)
        return found

    def owner(self, place: int) -> Tensor | None:
        """Raises RuntimeError when it is gone."""
        weight = self._weights.get(place)
        if weight is None or weight.owner is None:
            return None
        owner = weight.owner()
        if owner is None:
            raise RuntimeError(
                f"routed_experts: the owner of the gradient of {NAMES[place]} was released before backward; keep it"
            )
        return owner

    def resolve(self, configured: torch.dtype | None, nodes: dict) -> Targets:
        """Where the gradients of this visit go. Checks everything and asks the callback; nothing is written.

        Args:    configured: Config.wgrad_dtype.  nodes: what the engine visits next, by place.
        Raises:  TypeError, RuntimeError; what the callback raises.
        """
        if not self.writes_itself or not self._weights:
            return Targets(configured or torch.bfloat16, {})
        behind = {place: weight.behind and weight.behind() for place, weight in self._weights.items()}
        added = [place for place in self._weights if engine.adds(nodes[place], behind[place])]
        if self.in_place:
            return self._resolve_owners(configured, added)
        dtype, into = configured or torch.bfloat16, {}
        for place in added:
            weight = self._weights[place]
            found = self._destination_fn(NAMES[place], weight.shape, dtype, weight.device)
            into[place] = _checked_destination(NAMES[place], weight, found)
        return Targets(dtype, into)

    def _resolve_owners(self, configured: torch.dtype | None, added: list[int]) -> Targets:
        """In place only if all owners have a gradient: the first contribution goes to autograd, which attaches it."""
        dtypes, grads = {}, {}
        for place in self._weights:
            owner = self.owner(place)
            existing = None if owner.grad is None else owner.grad.dtype
            dtypes[place] = wgrad_dtype(NAMES[place], owner.grad_dtype, configured, existing, owner.dtype)
            if owner.grad is not None:
                grads[place] = _checked_grad(NAMES[place], owner, self._weights[place])
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{_name(dtype)} of {NAMES[place]}" for place, dtype in dtypes.items())
            raise RuntimeError(f"routed_experts: different WGRAD dtypes, {found}; both weights need the same")
        into = {}
        if grads.keys() == self._weights.keys():
            into = {place: Destination(grads[place].view(self._weights[place].shape), True) for place in added}
        return Targets(next(iter(dtypes.values())), into)

    def deliver(self, targets: Targets, grads: dict[int, Tensor], taken: set[int], stop_1: Tensor) -> None:
        """Put the weight gradients that this visit takes where they go; what is left of them in grads is autograd's."""
        for place in (W2, W13):
            if place not in taken or place not in grads:
                continue
            if place in targets.into:
                targets.into[place].take(grads.pop(place), stop_1)
            else:
                grads[place] = self._for_autograd(place, grads[place], targets.dtype)

    def _for_autograd(self, place: int, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
        """A gradient in the dtype and the shape in which it leaves backward, after the callback."""
        weight = self._weights.get(place)
        grad = grad if grad.dtype is dtype else grad.to(dtype)
        if weight is not None:
            grad = grad.view(weight.shape)
        if self._postprocess_fn is None:
            return grad
        name = NAMES[place]
        found = self._postprocess_fn(name, grad)
        if found is not None and not isinstance(found, Tensor):
            raise TypeError(
                f"routed_experts: wgrad_postprocess_fn must return a tensor or None for {name}, "
                f"got {type(found).__name__}"
            )
        if found is not None and (found.device != grad.device or not found.is_floating_point()):
            raise ValueError(
                f"routed_experts: wgrad_postprocess_fn must return floating-point values on {grad.device} for {name}, "
                f"got {_name(found.dtype)} on {found.device}"
            )
        if found is not None and found.shape != grad.shape:
            raise ValueError(
                f"routed_experts: wgrad_postprocess_fn must keep the shape {list(grad.shape)} of {name}, "
                f"got {list(found.shape)}"
            )
        return found


PLAIN = WeightGrads()


def weight_grads_of(options: ExecutionOptions | None, inputs: tuple, save: bool) -> WeightGrads:
    """Of a call whose prepared weights are their sources. Raises ValueError for owners."""
    if options is None or options.leaves_weights_alone or not save and options.weights_preprocess_fn is None:
        return PLAIN
    return WeightGrads(options, {W13: inputs[W13], W2: inputs[W2]} if save else None)


def wgrad_dtype(
    name: str,
    declared: torch.dtype | None,
    configured: torch.dtype | None,
    existing: torch.dtype | None,
    parameter: torch.dtype,
) -> torch.dtype:
    """The dtype of gradients that are accumulated in place: the first that is given.

    Args:    declared: the owner's grad_dtype.  configured: Config.wgrad_dtype.  existing: that of the owner's .grad.
    Raises:  RuntimeError when two of them contradict, TypeError when it is neither bf16 nor fp32.
    """
    dtype = declared or configured or existing or parameter
    where = f"routed_experts: the gradient of {name}"
    if configured not in (None, dtype):
        raise RuntimeError(
            f"{where} conflicts: its owner's grad_dtype is {_name(dtype)}, Config.wgrad_dtype {_name(configured)}; "
            f"set owner.grad_dtype to None or {configured}"
        )
    if existing not in (None, dtype):
        raise RuntimeError(
            f"{where} conflicts: it is to be {_name(dtype)}, its owner's .grad is {_name(existing)}; clear that .grad"
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{where} must be bfloat16 or float32, got {_name(dtype)}; set owner.grad_dtype")
    return dtype


def _checked_owner(name: str, weight: Tensor, explicit: Tensor | None) -> Tensor | None:
    """The leaf whose .grad takes the gradient of this weight; None for a weight that has none."""
    owner, where = explicit, f"routed_experts: inplace_wgrad_accum: the owner of {name}"
    if explicit is None:
        if not weight.requires_grad:
            return None
        owner = weight if weight.is_leaf or weight._base is None else weight._base
        if owner is not weight and owner.is_leaf and not engine.is_viewed_by_torch(weight):
            raise ValueError(
                f"{where} cannot be told: a function of the caller's lies between the weight and the leaf it is a view "
                f"of, and would be left out; pass {_OWNERS}"
            )
    if not owner.is_leaf:
        raise ValueError(f"{where} must be an autograd leaf, it is made by {owner.grad_fn.name()}; pass {_OWNERS}")
    if owner.requires_grad != weight.requires_grad:
        which = "owner" if weight.requires_grad else "weight"
        raise ValueError(
            f"{where} and the weight belong together, but the {which} has requires_grad=False and so needs gradients "
            f"switched on; pass {_OWNERS} that are the leaves behind both weights"
        )
    if not owner.requires_grad:
        return None
    local = _local(owner)
    contiguous = local.is_contiguous() and weight.is_contiguous()
    if not contiguous or not same_order(local.shape, weight.shape) or local.device != weight.device:
        raise ValueError(
            f"{where} must hold the whole weight in its memory order and both be contiguous, on one device: the weight "
            f"is {list(weight.shape)} with strides {weight.stride()} on {weight.device}, the owner {list(local.shape)} "
            f"with strides {local.stride()} on {local.device}"
        )
    return owner


_OWNERS = "wgrad_parameter_owners=(w13_owner, w2_owner)"


def _checked_grad(name: str, owner: Tensor, weight: _Weight) -> Tensor:
    """The storage of the owner's .grad, of a DTensor the local shard's."""
    grad, local = _local(owner.grad), _local(owner)
    fits = grad.shape == local.shape and grad.device == weight.device and grad.is_contiguous()
    if not fits or grad.numel() != weight.shape.numel():
        raise RuntimeError(
            f"routed_experts: the .grad of the owner of {name} must be contiguous {list(local.shape)} on "
            f"{weight.device}, got {list(grad.shape)} with strides {grad.stride()} on {grad.device}; clear it"
        )
    if is_read_only(grad):
        raise RuntimeError(f"routed_experts: the .grad of the owner of {name} {MADE_INFERRING}; clear it")
    return grad


def _checked_destination(name: str, weight: _Weight, found) -> Destination:
    where = f"routed_experts: wgrad_destination_fn for {name}"
    pair = isinstance(found, tuple) and len(found) == 2
    if not (pair and isinstance(found[0], Tensor) and isinstance(found[1], bool)):
        got = [type(part).__name__ for part in found] if isinstance(found, tuple) else type(found).__name__
        raise TypeError(f"{where} must return (Tensor, bool), got {got}")
    tensor = _local(found[0])
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{where} must return a tensor of bfloat16 or float32, got {_name(tensor.dtype)}")
    if tensor.shape != weight.shape or tensor.device != weight.device or not tensor.is_contiguous():
        raise RuntimeError(
            f"{where} must return a contiguous tensor of the requested shape {list(weight.shape)} on "
            f"{weight.device}, got {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
    if is_read_only(tensor):
        raise RuntimeError(f"{where} must return a tensor that can be written: this one {MADE_INFERRING}")
    return Destination(tensor, found[1])


def _local(tensor: Tensor) -> Tensor:
    """The tensor without its graph; of a DTensor, this rank's shard."""
    with torch.no_grad():
        to_local = getattr(tensor, "to_local", None)
        return (tensor if to_local is None else to_local()).detach()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
