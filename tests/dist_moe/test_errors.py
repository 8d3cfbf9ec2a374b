"""What an exception advises must hold."""

import pytest

from dist_moe import Config, RoutingOverflowError, SlotError, errors, plan_memory, shapes


@pytest.mark.parametrize("tokens, needed", [(7001, 7004), (7001, 7002), (8192, 8193), (3, 5), (100_000, 100_001)])
def test_the_advised_factor_fits(tokens, needed):
    """Rounded to nearest, 7004 / 7001 would read as a factor of 1, which does not fit."""
    config = Config(tokens, 32, 32, 1, 2, 1)
    record = [shapes.FAULT_OVERFLOW | 1 << shapes.FAULT_RANK_SHIFT, needed, tokens, 0]
    error = errors.from_fault_record(record, balanced_rows=plan_memory(config, 2).balanced_recv_rows)
    assert isinstance(error, RoutingOverflowError) and (error.needed_rows, error.available_rows) == (needed, tokens)
    advised = float(str(error).split("a capacity factor of ")[1].split()[0])
    assert advised == error.needed_factor
    plan = plan_memory(Config(tokens, 32, 32, 1, 2, 1, device_scratch_capacity_factor=advised), 2)
    assert plan.device_scratch_capacity_rows >= needed


def test_a_slot_without_room_names_the_call_that_made_it_so():
    error = errors.from_fault_record([shapes.FAULT_SLOT_ROOM, 3, 1, 2], balanced_rows=8)
    words = "activation slot 3 has no room for layer 1 of 2.*select_activation_slot wants the number of layers"
    with pytest.raises(SlotError, match=words):
        raise error
