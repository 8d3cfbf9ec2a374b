"""Serving in MXFP8 and NVFP4: weights prepared once, rows quantised by their owners before they cross.

Run: torchrun --nproc-per-node=2 examples/block_scaled_inference.py        (or with --cpu)
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group, tokens

import dist_moe
from dist_moe.formats import by_name, packed_row_bytes
from dist_moe.testing import rows_sqnr_db

config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0, num_activation_slots=0, inference=True)


@torch.no_grad()
def serve(config: dist_moe.Config, device: torch.device) -> torch.Tensor:
    """y [T, D] of this rank's tokens."""
    weights = expert_weights(device)
    if config.block_scaled is not None:
        weights = [dist_moe.prepare_block_scaled_weight(w, config, inference=True) for w in weights]
    with dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
        y = dist_moe.routed_experts(*tokens(device), *weights, context)
        context.check()
        return y


with process_group(__doc__) as device:
    expected = serve(config, device)
    print_once(f"bf16:       {2 * D} bytes a row of x on the wire")
    for format in dist_moe.BlockScaledFormat:
        y = serve(replace(config, block_scaled=dist_moe.BlockScaledConfig(format)), device)
        whole, worst = rows_sqnr_db(y.flatten(), expected.flatten()), rows_sqnr_db(y, expected).min()
        num_bytes = packed_row_bytes(by_name(format), D)
        print_once(f"{format + ':':<11} {num_bytes} bytes; {whole:.1f} dB from bf16, the worst row {worst:.1f} dB")
        assert worst > (18 if format == "mxfp8_e4m3" else 6)
