"""Size a job before it starts; needs no GPU.

Run: python examples/plan_memory.py
"""

import dist_moe

config = dist_moe.Config(
    num_local_input_tokens=8192,
    hidden_dim=7168,
    intermediate_dim=2048,
    top_k=8,
    num_experts=256,
    max_moe_layers_per_activation_slot=4,
    device_scratch_capacity_factor=1.25,
    activation_slot_capacity_factor=1.0,
    num_activation_slots=2,
)
print(dist_moe.plan_memory(config, ep_size=32).explain())
