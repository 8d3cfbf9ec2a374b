"""A transformer block that holds the call, compiled as one graph: training steps of several sizes, then inference.

Run: torchrun --nproc-per-node=2 examples/compile.py        (or with --cpu)
"""

import torch
import torch.distributed as dist
from common import D, E, F, K, T, expert_weights, print_once, process_group

import dist_moe

config = dist_moe.Config(T, D, F, K, E, 1, device_scratch_capacity_factor=2.0)


class Block(torch.nn.Module):
    def __init__(self, context, device):
        super().__init__()
        self.context = context
        self.norm = torch.nn.RMSNorm(D, device=device, dtype=torch.bfloat16)
        self.router = torch.nn.Linear(D, E, bias=False, device=device, dtype=torch.bfloat16)
        self.w13, self.w2 = expert_weights(device)

    def forward(self, x):
        h = self.norm(x)
        scores, ids = self.router(h).float().softmax(dim=1).topk(K, dim=1)
        return x + dist_moe.routed_experts(h, ids, scores, self.w13, self.w2, self.context)


with process_group(__doc__) as device, dist_moe.create_context(group=dist.group.WORLD, config=config) as context:
    torch.manual_seed(0)
    block = Block(context, device)
    # On a CPU the graph runs without inductor, whose C++ takes a minute to compile there.
    compiled = torch.compile(block, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(dist.get_rank())).to(device, torch.bfloat16)
    for num_tokens in (T, 100, 33, 77, 5):  # two compilations: one of the first size, one of any
        optimizer.zero_grad()
        loss = compiled(x[:num_tokens]).float().square().mean()
        loss.backward()
        context.check()
        print_once(f"{num_tokens} tokens: loss {loss.item():.4f}")
        optimizer.step()
    with torch.no_grad():
        print_once("inference:", list(compiled(x[:9]).shape))
    num_compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print_once(f"{num_compilations} compilations")
    assert num_compilations <= 4
