"""Stand-ins for packages of peers, by their documented signatures and layouts, on one rank and in plain PyTorch.

They show that our adapters pass what such a call wants, in the order it wants, and read its answer rightly; of the
packages themselves they show nothing.
"""

import sys
import types
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dist_moe.dense import dense_moe


def install(monkeypatch, **contents) -> None:
    """Modules by dotted name (with __ for the dots), each with its attributes, in sys.modules with their parents."""
    for name, attributes in contents.items():
        parts = name.split("__")
        for i in range(1, len(parts) + 1):
            dotted = ".".join(parts[:i])
            if dotted not in sys.modules or not getattr(sys.modules[dotted], "stand_in", False):
                monkeypatch.setitem(sys.modules, dotted, types.ModuleType(dotted))
                sys.modules[dotted].stand_in = True
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[dotted])
        vars(sys.modules[".".join(parts)]).update(attributes)


def liger(monkeypatch) -> None:
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32
        return dense_moe(x, top_k_index, top_k_weights, gate_up_proj, down_proj)

    function = SimpleNamespace(apply=apply)
    install(monkeypatch, liger_kernel__ops__fused_moe={"LigerFusedMoEFunction": function})


def sonicmoe(monkeypatch) -> None:
    def moe_general_routing_inputs(
        x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id, activation_type,
        is_inference_mode_enabled=False, concat_layout=False,
    ):  # fmt: skip
        """w1 [2I, H, E] with concatenated rows, w2 [H, I, E]; one score, token and expert a route, by token."""
        assert (b1, b2, activation_type, concat_layout) == (None, None, "swiglu", True) and w2.shape[-1] == E
        assert (token_indices.diff() >= 0).all() and token_indices.dtype == expert_indices.dtype == torch.int32
        out = torch.zeros_like(x)
        for token, expert, score in zip(token_indices.tolist(), expert_indices.tolist(), router_scores, strict=True):
            weights = (w1[..., expert][None], w2[..., expert][None])
            one = torch.zeros(1, 1, dtype=torch.int64)
            out = out.index_add(
                0, torch.tensor([token]), dense_moe(x[token : token + 1], one, score.view(1, 1), *weights)
            )
        return out, None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    install(
        monkeypatch,
        sonicmoe__enums={"ActivationType": SimpleNamespace(SWIGLU="swiglu")},
        sonicmoe__functional={"moe_general_routing_inputs": moe_general_routing_inputs},
    )


def ligercute(monkeypatch) -> None:
    def moe_fused(X, expert_indices, expert_weights, all_B, all_C, all_A, num_experts, top_k, pg=None):
        assert expert_indices.dtype == torch.int32 and expert_weights.dtype == torch.bfloat16
        assert expert_indices.shape[1] == top_k and len(all_A) == num_experts
        return dense_moe(X, expert_indices, expert_weights, torch.cat([all_B, all_C], dim=1), all_A)

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=None))
    kernels = {"MoEConfig": lambda *sizes: sizes, "configure": lambda *, bootstrap_group, device, moe: None}
    install(monkeypatch, liger_cute_kernels=kernels, liger_kernel__ops__cute__ops={"moe_fused": moe_fused})


def _by_expert(ids_TK, E):
    """Slots by expert, without those that have none, and the running number of rows."""
    flat = torch.where(ids_TK < 0, E, ids_TK).flatten()
    counts = torch.bincount(flat, minlength=E + 1)[:E]
    return torch.argsort(flat, stable=True)[: int(counts.sum())], counts


def deepep(monkeypatch) -> None:
    class ElasticBuffer:
        def __init__(self, group, num_max_tokens_per_rank, hidden, num_topk):
            pass

        def dispatch(
            self, x, *, topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand
        ):
            assert do_expand and expert_alignment == 1 and len(x) <= num_max_tokens_per_rank
            slots, counts = _by_expert(topk_idx, num_experts)
            handle = SimpleNamespace(psum_num_recv_tokens_per_expert=counts.cumsum(0), slots=slots, ids=topk_idx)
            return x[slots // topk_idx.shape[1]], None, topk_weights.flatten()[slots], handle, None

        def combine(self, x, *, handle):
            """Rows of a token are added up; they have their weights already."""
            T, K = handle.ids.shape
            out = x.new_zeros(T, x.shape[1], dtype=torch.float32).index_add_(0, handle.slots // K, x.float())
            return out.to(x.dtype), None, None

    install(monkeypatch, deep_ep={"ElasticBuffer": ElasticBuffer})


def torchtitan(monkeypatch) -> None:
    """Rows of one rank are by expert, in a buffer as large as the most that it may receive."""
    sizes = {}

    def init_buffer(group, hidden_dim, tokens_per_rank, num_local_experts, top_k, dtype, device):
        sizes["capacity"] = tokens_per_rank * min(top_k, num_local_experts)

    def dispatch_op(x, ids_TK, counts_E, capacity, ep_size):
        assert capacity == sizes["capacity"] and ep_size == 1
        slots, counts = _by_expert(ids_TK, len(counts_E))
        assert torch.equal(counts, counts_E)
        rows = torch.full((capacity, x.shape[1]), float("nan"), dtype=x.dtype)
        rows[: len(slots)] = x[slots // ids_TK.shape[1]]
        maps = (torch.tensor([len(slots)]), slots, torch.argsort(slots))
        return rows, "to rank", "to row", "back rank", "back row", *maps, counts

    def active_swiglu_op(gate, up, active_rows):
        return torch.nn.functional.silu(gate) * up

    def combine_op(x, to_rank, to_row, back_rank, back_row, num_rows, slot_to_row, row_to_slot, scores_N, T, K):
        assert (to_rank, to_row, back_rank, back_row) == ("to rank", "to row", "back rank", "back row")
        weighted = x[slot_to_row].float() * scores_N[:, None]
        return weighted.view(T, K, -1).sum(dim=1).to(x.dtype), x[:num_rows]

    api = {"init_buffer": init_buffer, "dispatch_op": dispatch_op, "combine_op": combine_op}
    install(monkeypatch, torchtitan__distributed__minimal_async_ep__api=api | {"active_swiglu_op": active_swiglu_op})


STAND_INS = {
    "liger": liger,
    "torchtitan": torchtitan,
    "deepep": deepep,
    "ligercute": ligercute,
    "sonicmoe": sonicmoe,
}
