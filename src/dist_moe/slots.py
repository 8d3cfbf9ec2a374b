"""The host's memory of what lies in the activation slots, so that a misuse is an exception before anything runs.

The device keeps its own count, which alone decides when a graph replays or a trace runs without these lines.
"""

import itertools
from dataclasses import dataclass

from .errors import SlotError


@dataclass(eq=False)
class SavedForward:
    """A forward whose state lies in a slot; the address is that of its place record."""

    slot: int
    number: int
    address: int = 0


class SavedForwards:
    """One stack of saved forwards a slot, and the slot that the next one goes to.

    Attributes: selected (slot, layers it will hold); newest, the forward saved last; num_resets, how often all were
    forgotten.
    """

    def __init__(self, num_slots: int, deepest: int):
        self._stacks: list[list[SavedForward]] = [[] for _ in range(num_slots)]
        self._deepest = deepest
        self._numbers = itertools.count()
        self.selected = (0, deepest)
        self.newest: SavedForward | None = None
        self.num_resets = 0

    def __len__(self) -> int:
        return len(self._stacks)

    def select(self, slot: int, depth: int) -> None:
        """Raises ValueError out of range."""
        if not 0 <= slot < len(self):
            raise ValueError(f"select_activation_slot: activation slot must be in 0..{len(self) - 1}, got {slot}")
        if not 1 <= depth <= self._deepest:
            raise ValueError(
                f"select_activation_slot: num_moe_layers_in_slot must be in 1..{self._deepest}, got {depth}"
            )
        self.selected = (slot, depth)

    def push(self, slot: int, depth: int) -> None:
        """Note a forward that is about to save. Raises SlotError when the slot is full."""
        if len(self._stacks[slot]) >= depth:
            raise SlotError(
                f"activation slot {slot} already holds {depth} layers: run their backwards first, select another slot, "
                "or call context.reset() when their graphs were dropped"
            )
        self.newest = SavedForward(slot, next(self._numbers))
        self._stacks[slot].append(self.newest)

    def problem_of(self, saved: SavedForward) -> str | None:
        """Why this forward cannot have its backward now."""
        stack = self._stacks[saved.slot]
        if saved not in stack:
            return (
                f"this forward's state in activation slot {saved.slot} is gone: it had its backward, or the context "
                "was reset; a second backward of one forward needs a second forward"
            )
        if stack[-1] is not saved:
            return f"backwards of activation slot {saved.slot} must run in the reverse order of their forwards"
        return None

    def pop(self, slot: int, address: int = 0) -> None:
        """Note that the newest forward of a slot has its backward.

        A negative slot is that of the forward with this place record, or, where the record was moved, the one saved
        into last.
        """
        if slot < 0:
            same = [saved for stack in self._stacks for saved in stack if saved.address == address]
            newest = max(same, key=lambda saved: saved.number, default=self.newest)
            if newest is None:
                return
            slot = newest.slot
        stack = self._stacks[slot]
        if stack:
            stack.pop()

    def clear(self) -> None:
        for stack in self._stacks:
            stack.clear()
        self.num_resets += 1
        self.selected = (0, self._deepest)
