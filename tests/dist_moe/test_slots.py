"""SavedForwards: stacks of saved forwards, one a slot."""

import pytest

from dist_moe.errors import SlotError
from dist_moe.slots import SavedForwards


def test_layers_leave_in_reverse_order():
    saved = SavedForwards(num_slots=2, deepest=3)
    saved.push(0, 3)
    first = saved.newest
    saved.push(1, 1)
    other = saved.newest
    saved.push(0, 3)
    second = saved.newest
    assert "reverse order" in saved.problem_of(first)
    assert saved.problem_of(second) is None and saved.problem_of(other) is None
    saved.pop(0)
    assert "is gone" in saved.problem_of(second) and saved.problem_of(first) is None


def test_a_full_slot_takes_no_more_until_one_leaves():
    saved = SavedForwards(num_slots=1, deepest=2)
    saved.push(0, 2)
    saved.push(0, 2)
    with pytest.raises(SlotError, match=r"already holds 2 layers.*reset"):
        saved.push(0, 2)
    saved.pop(0)
    saved.push(0, 2)


def test_the_slot_of_the_last_push_is_the_default_of_pop():
    saved = SavedForwards(num_slots=2, deepest=1)
    saved.push(1, 1)
    last = saved.newest
    saved.pop(-1)
    assert "is gone" in saved.problem_of(last)


def test_selection_and_its_bounds():
    saved = SavedForwards(num_slots=2, deepest=3)
    assert saved.selected == (0, 3) and len(saved) == 2
    saved.select(1, 2)
    assert saved.selected == (1, 2)
    wrong = ((2, 1, "activation slot must be in"), (-1, 1, "activation slot"), (0, 0, "num_moe_layers"))
    for slot, depth, words in wrong:
        with pytest.raises(ValueError, match=words):
            saved.select(slot, depth)
    saved.push(0, 1)
    forgotten = saved.newest
    saved.clear()
    assert saved.selected == (0, 3) and "is gone" in saved.problem_of(forgotten)
