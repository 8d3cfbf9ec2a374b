"""Which activation slot each forward of a pipeline schedule saves into, and how many slots that takes.

A slot is held from a forward to the last part of its backward, and given again when it is free. On one rank holds are
intervals of one line of actions, and the lowest free slot at every start takes as many slots as are ever held at once.

Example: stages 0 and 2, actions 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 ..., one slot for each (stage, microbatch):
(0, 0) 0, (0, 1) 1, (2, 0) 2, (2, 1) 3, (0, 2) 4; 2B0 frees 2, which (0, 3) takes; 2B1 frees 3, which (2, 2) takes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NoReturn

import torch

from .config import Config, as_int
from .planner import plan_memory

_WHERE = "color_activation_slots"
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_HOLDS_NOTHING = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
_BEFORE = {"F": "", "B": "F", "I": "F", "W": "FI"}  # what a (stage, microbatch) has run before each kind

Key = tuple[int, int]  # (stage, microbatch)


@dataclass(frozen=True)
class SlotColoring:
    """The activation slots of one pipeline rank.

    Attributes: granularity: "microbatch", a slot for all local stages of a microbatch, or "stage_microbatch".
                num_activation_slots, max_moe_layers_per_activation_slot: for Config, under the same names.
                microbatch_bytes, stage_microbatch_bytes: what all slots take in either granularity.
                slots: the slot of every (stage, microbatch) with MoE layers.
                moe_layers: MoE layers of every local stage.
    """

    granularity: Literal["microbatch", "stage_microbatch"]
    num_activation_slots: int
    max_moe_layers_per_activation_slot: int
    microbatch_bytes: int
    stage_microbatch_bytes: int
    slots: dict[Key, int]
    moe_layers: dict[int, int]

    def selection(self, stage: int, microbatch: int) -> tuple[int, int]:
        """(slot, layers) for `context.select_activation_slot(*...)` before the forward of a stage on a microbatch.

        The layers are all that the slot will hold, not what the stage adds: the device keeps room for those to come.
        Raises ValueError for what has no slot: a stage without MoE layers, or what the schedule does not run.
        """
        if (stage, microbatch) not in self.slots:
            raise ValueError(
                f"selection: no activation slot for stage {stage}, microbatch {microbatch}; slots are for stages "
                f"{_listed(s for s, _ in self.slots)} and microbatches {_listed(m for _, m in self.slots)}"
            )
        in_slot = self.moe_layers[stage] if self.granularity == "stage_microbatch" else sum(self.moe_layers.values())
        return self.slots[stage, microbatch], in_slot


def color_activation_slots(
    actions: Iterable[Any],
    moe_layers: int | Mapping[int, int],
    layer_bytes: int | None = None,
    *,
    config: Config | None = None,
    ep_size: int | None = None,
    device: torch.device | str | None = None,
) -> SlotColoring:
    """Give every forward of one pipeline rank's schedule its activation slot. Plain arithmetic, once, at setup.

    A slot is taken before F (forward) and given back after B (full backward) or, where the backward is split, after W
    (weights), held through I (inputs). Of the two granularities the one that takes fewer bytes is used, of equals
    "microbatch"; but "stage_microbatch" where a microbatch runs the backwards of its stages in another order than the
    reverse of their forwards, which one slot does not allow.

    Args:    actions: what this rank runs, in order; of torch's schedules `schedule.pipeline_order[rank]`, with
             communication or without. An action is torch's, a string ("0F1", "2B0", "0SEND_F1",
             "(0F1;2B0)OVERLAP_F_B"), a tuple (stage, kind, microbatch), or None or "" for idle. Kinds are F, B, I, W;
             sends, receives, UNSHARD, RESHARD and REDUCE_GRAD hold no slot.
             moe_layers: MoE layers of every local stage, or {stage: layers} for exactly the local stages, 0 for none.
             layer_bytes: what one layer takes in a slot. Or
             config, ep_size: the Config to be, but for its numbers of slots and layers; plan_memory then gives the
             bytes. With neither, bytes count layers.
             device: of the Context, as in plan_memory.
    Returns: the SlotColoring; num_activation_slots is the largest number of slots ever held at once.
    Raises:  ValueError for actions that are no schedule (one comes twice, a forward or backward is missing, a stage or
             kind is unknown, stages run different microbatches), for no MoE layers at all, and for a Config that is
             for inference or fixes the bytes of a slot; TypeError for numbers that are not integers.
    Order:   not collective; ranks that share a Context run the same schedule and get the same answer.
    """
    if isinstance(actions, str) or not isinstance(actions, Iterable):
        raise TypeError(f"{_WHERE}: actions must be a list of actions, got {actions!r}")
    by_name = isinstance(moe_layers, Mapping)
    holds = _holds(actions, set(moe_layers) if by_name else None)
    layers = {
        stage: as_int(_WHERE, f"moe_layers of stage {stage}", moe_layers[stage] if by_name else moe_layers)
        for stage in sorted({stage for stage, _ in holds})
    }
    if any(number < 0 for number in layers.values()):
        raise ValueError(f"{_WHERE}: moe_layers must not be negative, got {layers}; 0 is a stage without MoE layers")
    if not any(layers.values()):
        raise ValueError(f"{_WHERE}: no local stage has MoE layers, got {layers}; such a rank needs no slots")
    _check_size(layer_bytes, config, ep_size)

    with_layers = {key: hold for key, hold in holds.items() if layers[key[0]]}
    by_stage = _color({key: (hold[0], hold[-1]) for key, hold in with_layers.items()})
    of_microbatch = {}
    for (_, microbatch), hold in holds.items():
        start, end = of_microbatch.get(microbatch, (hold[0], hold[-1]))
        of_microbatch[microbatch] = (min(start, hold[0]), max(end, hold[-1]))
    by_microbatch = _color(of_microbatch)

    def num_bytes(slots: dict, depth: int) -> int:
        num_slots = 1 + max(slots.values())
        if config is None:
            return num_slots * depth * (1 if layer_bytes is None else layer_bytes)
        sized = replace(config, num_activation_slots=num_slots, max_moe_layers_per_activation_slot=depth)
        return plan_memory(sized, ep_size, device=device).total_activation_bytes

    all_layers, most_layers = sum(layers.values()), max(layers.values())
    microbatch_bytes, stage_bytes = num_bytes(by_microbatch, all_layers), num_bytes(by_stage, most_layers)
    if microbatch_bytes <= stage_bytes and _nest(with_layers):
        granularity, depth = "microbatch", all_layers
        slots = {(stage, microbatch): by_microbatch[microbatch] for stage, microbatch in with_layers}
    else:
        granularity, depth, slots = "stage_microbatch", most_layers, by_stage
    return SlotColoring(granularity, 1 + max(slots.values()), depth, microbatch_bytes, stage_bytes, slots, layers)


def _check_size(layer_bytes: int | None, config: Config | None, ep_size: int | None) -> None:
    if (config is None) != (ep_size is None) or (config is not None and layer_bytes is not None):
        raise ValueError(f"{_WHERE}: bytes come from layer_bytes, or from config and ep_size together; pass one of")
    if layer_bytes is not None and as_int(_WHERE, "layer_bytes", layer_bytes) <= 0:
        raise ValueError(f"{_WHERE}: layer_bytes must be positive, got {layer_bytes}")
    if config is None:
        return
    if not isinstance(config, Config):
        raise TypeError(f"{_WHERE}: config must be a Config, got {type(config).__name__}")
    if config.inference:
        raise ValueError(f"{_WHERE}: config is for inference, which saves nothing; it needs no slots")
    if config.activation_slot_bytes is not None:
        raise ValueError(
            f"{_WHERE}: config fixes activation_slot_bytes={config.activation_slot_bytes} whatever a slot holds; size "
            "slots by activation_slot_capacity_factor, or pass layer_bytes"
        )


def _holds(actions: Iterable[Any], known: set[int] | None) -> dict[Key, list[int]]:
    """Places in the schedule of the forward, the backward and, where split, its second part, by (stage, microbatch)."""
    kinds: dict[Key, str] = {}
    holds: dict[Key, list[int]] = {}
    compute = (part for action in actions for part in _compute_parts(action))
    for place, (stage, kind, microbatch) in enumerate(compute):
        what, key = f"{stage}{kind}{microbatch}", (stage, microbatch)
        if known is not None and stage not in known:
            raise ValueError(
                f"{_WHERE}: action {what} is of stage {stage}, moe_layers has stages {_listed(known)}; add its number "
                "of MoE layers, 0 for none, or pass the actions of this rank alone"
            )
        before = kinds.get(key, "")
        if before != _BEFORE[kind]:
            raise ValueError(f"{_WHERE}: {_misplaced(stage, kind, microbatch, before)}")
        kinds[key] = before + kind
        holds.setdefault(key, []).append(place)
    for (stage, microbatch), seen in kinds.items():
        if seen in ("F", "FI"):
            split = f"{stage}W{microbatch}"
            missing = split if seen == "FI" else f"{stage}B{microbatch} (or {stage}I{microbatch}, {split})"
            raise ValueError(
                f"{_WHERE}: stage {stage}, microbatch {microbatch} has no backward {missing}; pass the actions of a "
                "whole training step (forwards without grad need no slot)"
            )
    stages, microbatches = {stage for stage, _ in kinds}, {microbatch for _, microbatch in kinds}
    if not stages or known is not None and known - stages:
        raise ValueError(
            f"{_WHERE}: the actions run stages {_listed(stages)}, moe_layers has stages {_listed(known or ())}; pass "
            "all actions of this rank, and moe_layers of its stages alone"
        )
    for stage in stages:
        if absent := {microbatch for microbatch in microbatches if (stage, microbatch) not in kinds}:
            raise ValueError(
                f"{_WHERE}: stage {stage} does not run microbatches {_listed(absent)}, which another stage of this "
                "rank runs; pass all actions of this rank"
            )
    return holds


def _compute_parts(action: Any) -> Iterator[tuple[int, str, int]]:
    """(stage, one of F B I W, microbatch): one for a computation, several for a composite, none for the rest."""
    if isinstance(action, str):
        action = _parse(action)
    composite = action if isinstance(action, list) else getattr(action, "sub_actions", None)
    if composite:
        for part in composite:
            yield from _compute_parts(part)
        return
    if hasattr(action, "computation_type"):
        action = action.stage_index, action.computation_type, action.microbatch_index
    if action is None:
        return
    if not isinstance(action, tuple) or len(action) != 3:
        _refuse(action)
    stage, kind, microbatch = action
    kind = getattr(kind, "value", kind)
    kind = _KINDS.get(kind, kind)
    if kind in _HOLDS_NOTHING:
        return
    if kind not in _BEFORE or microbatch is None:
        _refuse(action)
    stage, microbatch = as_int(_WHERE, "a stage", stage), as_int(_WHERE, "a microbatch", microbatch)
    if stage < 0 or microbatch < 0:
        _refuse(action)
    yield stage, kind, microbatch


def _parse(text: str) -> tuple[int, str, int | None] | list[str] | None:
    """An action in words: 2F0, 1UNSHARD, (0F1;2B0)OVERLAP_F_B as a list of its parts, or nothing for idle."""
    text = text.strip()
    if not text:
        return None
    if composite := re.fullmatch(r"\((.+)\)OVERLAP_F_B", text):
        return composite[1].split(";")
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text)
    if match is None:
        _refuse(text)
    return int(match[1]), match[2], int(match[3]) if match[3] else None


def _refuse(action: Any) -> NoReturn:
    raise ValueError(
        f"{_WHERE}: {action!r} is no action of a schedule; pass one rank's list of torch's actions, of strings as 0F1, "
        f"or of tuples (stage, kind, microbatch), of kind F, B, I, W or, without effect, {', '.join(_HOLDS_NOTHING)}"
    )


def _misplaced(stage: int, kind: str, microbatch: int, before: str) -> str:
    what = f"{stage}{kind}{microbatch}"
    if kind in before:
        return f"action {what} comes twice; a schedule runs it once a step"
    if not before:
        return f"action {what} has no forward {stage}F{microbatch} before it; put it first, or drop {what}"
    if before == "F":
        return f"action {what} has no {stage}I{microbatch} before it; a split backward runs I, then W"
    other = f"{stage}{before[1]}{microbatch}"
    return f"action {what} is a second backward beside {other}; a backward is B alone, or I and then W"


def _color(holds: dict[Any, tuple[int, int]]) -> dict[Any, int]:
    """The lowest slot that is free at the start of each hold (first place, last place)."""
    slots, last_places = {}, []
    for key, (start, end) in sorted(holds.items(), key=lambda item: item[1]):
        slot = next((s for s, last in enumerate(last_places) if last < start), len(last_places))
        last_places[slot : slot + 1] = [end]
        slots[key] = slot
    return slots


def _nest(holds: dict[Key, list[int]]) -> bool:
    """Whether each microbatch runs the backwards of its stages, and their last parts, in reverse order of forwards."""
    of_microbatch: dict[int, list[list[int]]] = {}
    for (_, microbatch), hold in holds.items():
        of_microbatch.setdefault(microbatch, []).append(hold)
    return all(
        inner[1] < outer[1] and inner[-1] < outer[-1]
        for group in of_microbatch.values()
        for outer, inner in pairwise(group)
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers)))) or "none"
