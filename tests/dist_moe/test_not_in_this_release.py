"""What can be planned but not run is refused by name where a Context is made."""

from dataclasses import replace

import pytest

from dist_moe import BlockScaledConfig, Config, VmmConfig, World, create_context, explain, plan_memory

CONFIG = Config(8, 64, 96, 2, 4, 1)
BLOCK_SCALED = r"block-scaled execution \({}\) is not in this release; leave Config.block_scaled unset"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_scaled": BlockScaledConfig()}, BLOCK_SCALED.format("mxfp8_e4m3")),
        ({"block_scaled": BlockScaledConfig("nvfp4"), "inference": True}, BLOCK_SCALED.format("nvfp4")),
        ({"block_scaled": BlockScaledConfig(), "vmm": VmmConfig()}, BLOCK_SCALED.format("mxfp8_e4m3")),
    ],
)
def test_it_is_planned_and_not_run(changes, words):
    config = replace(CONFIG, **changes)
    plan_memory(config, 2, device="cpu")
    with pytest.raises(NotImplementedError, match=f"create_context: {words}"):
        create_context(group=World.virtual(2), config=config)


def test_explain_says_it():
    text = explain(replace(CONFIG, block_scaled=BlockScaledConfig()), 2, device="cpu")
    assert "prepared weights" in text
    assert text.splitlines()[-1].startswith("ops on cpu: none, block-scaled execution (mxfp8_e4m3) is not in this")
