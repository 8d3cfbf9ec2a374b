"""What the demo trains: a byte-level language model with routed experts, its text, four ways to run the experts."""

import ast
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import virtual
from ..config import BlockScaledConfig, Config
from ..context import Context
from ..dense import dense_moe
from ..ops import routed_experts
from ..weights import prepare_block_scaled_weight

NUM_BYTES = 256  # the vocabulary
NUM_BYTES_BEFORE = 2
TEXT_BYTES = 1_000_000  # enough text for the demo
HELD_OUT_BYTES = 50_000  # at its end
BLOCK_SCALED = {"bf16": None, "mxfp8": BlockScaledConfig("mxfp8_e4m3"), "nvfp4": BlockScaledConfig("nvfp4")}

# (x_TD bf16, ids_TK, scores_TK, w13 bf16, w2 bf16) -> out_TD; the weights are those of the experts in this process.
RunExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- text ------------------------------------------------------------------------------------------------------------


def load_text() -> Tensor:
    """English text that comes with Python, as uint8: its language reference, else the docstrings of its library."""
    try:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    except ImportError:
        text = docstrings(Path(sysconfig.get_path("stdlib")))
    return torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES]), dtype=torch.uint8)


def split_text() -> tuple[Tensor, Tensor]:
    """(the text that training draws from, the text that no step sees)."""
    text = load_text()
    return text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]


def docstrings(folder: Path) -> str:
    """Docstrings of the modules of a folder, in the order of their file names."""
    found, size = [], 0
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
                found.append(doc)
                size += len(doc)
        if size > TEXT_BYTES:
            break
    return "\n\n".join(found)


def global_batch(text: Tensor, *, seed: int, step: int, num_sequences: int, length: int) -> Tensor:
    """The sequences of one step, int64 [num_sequences, length + 1], the same in every process."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(text.numel() - length - 1, (num_sequences, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


def part_of_batch(sequences: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The sequences of one rank; each belongs to exactly one rank."""
    return sequences.chunk(num_ranks)[rank]


# ---- model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 3
    hidden_dim: int = 128
    intermediate_dim: int = 128
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    length: int = 128  # bytes of a sequence

    def moe(self, num_local_tokens: int, num_ranks: int, precision: str = "bf16", inference: bool = False) -> Config:
        """The layers' Config. All of them share one activation slot; no routing can overflow the scratch."""
        return Config(
            num_local_input_tokens=num_local_tokens,
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.intermediate_dim,
            top_k=self.top_k,
            num_experts=self.num_experts,
            max_moe_layers_per_activation_slot=self.num_layers,
            device_scratch_capacity_factor=float(num_ranks),
            activation_slot_capacity_factor=None if inference else 1.0,
            block_scaled=BLOCK_SCALED[precision],
            inference=inference,
        )


class MoELayer(nn.Module):
    """Router and experts. The router is everybody's; of the experts it holds those of this process, in fp32."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, D, inner = config.num_experts, config.hidden_dim, config.intermediate_dim
        self.top_k = config.top_k
        self.router = nn.Linear(D, E, bias=False)
        self.w13 = nn.Parameter(torch.randn(E, 2 * inner, D) / math.sqrt(D))
        self.w2 = nn.Parameter(torch.randn(E, D, inner) / math.sqrt(inner))

    def forward(self, x_BSD: Tensor, run_experts: RunExperts, ids_TK: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Output, load-balance loss, and the expert ids, [B*S, K]: the router's choice if ids_TK is None.

        The balance loss (Switch Transformer's, E sum_e share_e probability_e, 1 when balanced) is taken of each
        sequence and averaged: then it does not depend on how the sequences are divided among ranks.
        """
        B, S, D = x_BSD.shape
        probabilities_BSE = self.router(x_BSD).softmax(dim=-1)
        ids_BSK = probabilities_BSE.topk(self.top_k, dim=-1).indices if ids_TK is None else ids_TK.view(B, S, -1)
        scores_BSK = probabilities_BSE.gather(-1, ids_BSK)
        scores_BSK = scores_BSK / scores_BSK.sum(dim=-1, keepdim=True)

        E = probabilities_BSE.shape[-1]
        share_BE = F.one_hot(ids_BSK, E).sum(dim=2).float().mean(dim=1) / self.top_k
        balance = E * (share_BE * probabilities_BSE.mean(dim=1)).sum(dim=1).mean()

        ids_TK = ids_BSK.reshape(B * S, -1)
        out_TD = run_experts(
            x_BSD.reshape(B * S, D).bfloat16(),
            ids_TK,
            scores_BSK.reshape(B * S, -1),
            self.w13.bfloat16(),
            self.w2.bfloat16(),
        )
        return out_TD.view(B, S, D).float(), balance, ids_TK


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.hidden_dim
        self.num_heads = config.num_heads
        self.norm_attention, self.norm_experts = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.projection = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.moe = MoELayer(config)

    def forward(self, x_BSD: Tensor, run_experts: RunExperts, ids_TK: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        B, S, D = x_BSD.shape
        qkv = self.qkv(self.norm_attention(x_BSD)).view(B, S, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSD = x_BSD + self.projection(mixed.transpose(1, 2).reshape(B, S, D))
        out_BSD, balance, ids_TK = self.moe(self.norm_experts(x_BSD), run_experts, ids_TK)
        return x_BSD + out_BSD, balance, ids_TK


class LanguageModel(nn.Module):
    """Predicts the next byte. Everything is computed in fp32 but the experts, which take and give bf16.

    A position also sees the bytes just before it by embeddings of their own: attention would learn that too, but later
    than a demo lasts.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.hidden_dim
        self.bytes = nn.ModuleList(nn.Embedding(NUM_BYTES, D) for _ in range(1 + NUM_BYTES_BEFORE))
        self.positions = nn.Embedding(config.length, D)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, NUM_BYTES, bias=False)
        for table in self.bytes:
            nn.init.normal_(table.weight, std=0.4)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(
        self, inputs_BS: Tensor, run_experts: RunExperts, ids: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits, the mean balance loss of the layers, and the layers' expert ids.

        ids: what an earlier forward returned, to send every token to the same experts again.
        """
        S = inputs_BS.shape[1]
        x_BSD = self.positions.weight[:S]
        for back, table in enumerate(self.bytes):
            x_BSD = x_BSD + table(F.pad(inputs_BS, (back, 0))[:, :S])
        balances, used = [], []
        for layer, block in enumerate(self.blocks):
            x_BSD, balance, ids_TK = block(x_BSD, run_experts, ids[layer] if ids else None)
            balances.append(balance)
            used.append(ids_TK)
        return self.head(self.norm(x_BSD)), torch.stack(balances).mean(), used

    def loss(
        self, sequences: Tensor, run_experts: RunExperts, ids: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Mean nats a byte of the sequences [B, S + 1], the balance loss, and the layers' expert ids."""
        logits, balance, ids = self(sequences[:, :-1], run_experts, ids)
        return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()), balance, ids

    def split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(dense parameters, alike on all ranks; experts, each on its rank alone)."""
        experts = [weight for block in self.blocks for weight in (block.moe.w13, block.moe.w2)]
        mine = {id(weight) for weight in experts}
        return [weight for weight in self.parameters() if id(weight) not in mine], experts


def build_model(config: ModelConfig, *, seed: int, rank: int = 0, num_ranks: int = 1, device="cpu") -> LanguageModel:
    """The initial model of a seed, with the experts of one rank only; the same weights for any number of ranks."""
    torch.manual_seed(seed)
    model = LanguageModel(config)
    for weight in model.split_parameters()[1]:
        weight.data = weight.data.chunk(num_ranks)[rank].clone()
    return model.to(device)


# ---- the experts, four ways ------------------------------------------------------------------------------------------


def on_one_rank(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """All experts here, by the oracle and autograd."""
    return dense_moe(x_TD, ids_TK, scores_TK, w13, w2)


def on_ranks(context: Context) -> RunExperts:
    """This rank's experts here, the others with their ranks."""

    def run(x_TD, ids_TK, scores_TK, w13, w2):
        return routed_experts(x_TD, ids_TK, scores_TK, w13, w2, context)

    return run


def on_virtual_ranks(context: Context) -> RunExperts:
    """All ranks in this process: equal parts of the tokens and of the experts go to each."""
    num_ranks = context.world.size

    def run(*tensors):
        parts = zip(*(tensor.chunk(num_ranks) for tensor in tensors), strict=True)
        return torch.cat(virtual.routed_experts([virtual.RankInputs(*part) for part in parts], context))

    return run


def in_service(context: Context) -> RunExperts:
    """As on_ranks or on_virtual_ranks, without a backward: block-scaled weights are quantised when first seen."""
    num_ranks = len(context.ranks)  # in this process
    prepared = {}

    def prepare(weight: Tensor):
        if context.config.block_scaled is None:
            return weight.chunk(num_ranks)
        if weight not in prepared:
            parts = weight.chunk(num_ranks)
            prepared[weight] = [prepare_block_scaled_weight(part, context.config, inference=True) for part in parts]
        return prepared[weight]

    def run(x_TD, ids_TK, scores_TK, w13, w2):
        tokens = (tensor.chunk(num_ranks) for tensor in (x_TD, ids_TK, scores_TK))
        ranks = [virtual.RankInputs(*part) for part in zip(*tokens, prepare(w13), prepare(w2), strict=True)]
        return torch.cat(virtual.routed_experts(ranks, context))

    return run
