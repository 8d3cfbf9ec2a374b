"""What the path works on: what all calls of a Context share, one rank of it, and a call of either direction."""

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from .formats import Format
from .norm import Norm
from .planner import DECODE_ROWS
from .quantized import QuantizedWeights
from .route_plan import RoutePlan
from .shapes import Activation, Geometry, Small
from .symm import Region

FUSED_WIDTH = 4096  # D, at most, of W13 that is fused with SwiGLU for many rows


@dataclass(frozen=True)
class Path:
    """What all calls of a Context share; the same on every rank."""

    ops: SimpleNamespace
    hidden_dim: int
    intermediate_dim: int
    num_tokens_max: int
    num_experts: int
    capacity_rows: int
    dedup: bool  # a token's row is pulled once a rank
    sums_pairs: bool  # what its experts there return is summed there, in a forward; in a backward always where dedup is
    mega: bool  # a forward's experts are one launch
    activation: Activation
    geometry: Geometry
    config_hash: int
    timeout_ns: int
    exchanges: bool  # False: peers are emulated by this rank's own memory and nobody waits
    num_sms: int | None
    preset: str | None
    rows_per_expert: int  # on average, of full calls: tells a decode context from a training one
    small: Small  # which waits of a forward share a launch with what follows them
    fast_math: bool  # block-scaled SwiGLU with an approximate sigmoid

    @property
    def format(self) -> Format | None:
        """Of block-scaled execution."""
        return self.geometry.format

    def fuses_swiglu(self, keep_h1: bool) -> bool:
        """W13 with SwiGLU in its epilogue: in decode, where it saves a launch, and with many rows where h1 is not kept
        and the contraction is short; a longer one gained nothing (docs/performance.md). A preset asks for tiles that
        it does not have."""
        saves_time = self.rows_per_expert <= DECODE_ROWS or (not keep_h1 and self.hidden_dim <= FUSED_WIDTH)
        return saves_time and self.preset is None

    @property
    def tiles(self) -> dict:
        """What a GEMM's choice of tile may look at besides its own sizes."""
        return {"preset": self.preset, "rows_per_expert": self.rows_per_expert, "num_sms": self.num_sms}


@dataclass(frozen=True)
class LocalRank:
    """One rank that lives in this process: its regions, its activation buffer and its device words."""

    rank: int
    regions: dict[str, Region]
    pair_outputs: Region  # `outputs` as [T_max, min(K, W), D], of the de-duplicated scheme
    route_grads: Region | None  # `outputs` as the "tokens" of a backward by route, [1, T_max * K, D], if it fits ...
    route_scores: Region  # ... with `scores` as those of their only slot, [T_max * K, 1]
    buffer: Tensor  # uint8, slots and scratch
    elements: Tensor  # the buffer as bf16
    rows: dict[int, Tensor]  # by width: the buffer as bf16 rows
    values: dict[int, Tensor]  # by width: the buffer as rows of a format's values
    scales: Tensor | None  # the buffer as a format's scales
    outer_inv: Tensor | None  # the buffer as FP32, for two-level formats
    slot_used_NW: Tensor
    slot_layers_N: Tensor
    slot_calls_NM: Tensor  # which call saved each layer, M = most layers of a slot
    stats_S: Tensor  # shapes.STATS_*
    fault_F: Tensor
    stop_1: Tensor  # the word of the fault under which ops leave
    host_fault_F: Tensor  # pinned on a GPU
    sent_S: Tensor
    queue_Q: Tensor  # int32, of the launch that runs all experts; empty where there is none
    finished_1: Tensor  # programs of a launch that ends with a signal count themselves here
    call_1: Tensor
    zero_1: Tensor

    def __getattr__(self, name: str) -> Region:
        regions = self.__dict__.get("regions", {})
        if name not in regions:
            raise AttributeError(name)
        self.__dict__[name] = regions[name]  # next time it is found without this call
        return regions[name]


@dataclass
class ForwardCall:
    """One rank's forward: what it passes, and what the stages make of it.

    returns_routes: out is [T, K, D], what the experts returned for each slot, without its score; zeros for a slot
    without an expert. With a norm the rows travel in the same way, and out is the sum of the normalised ones.
    """

    x_TD: Tensor
    ids_TK: Tensor
    scores_TK: Tensor
    w13_L2FD: Tensor | QuantizedWeights
    w2_LDF: Tensor | QuantizedWeights
    out_TD: Tensor | None
    save: bool = False
    slot: int = 0
    depth: int = 1
    returns_routes: bool = False
    norm: Norm | None = None
    kept_rows_TKD: Tensor | None = None  # written with a norm, for its backward ...
    rstd_TK: Tensor | None = None  # ... and this, unless it will be made again
    clip_limit: float = 0.0
    clip_stats_3: Tensor | None = None  # FP32, overwritten with the counts at this limit
    plan: RoutePlan | None = None
    place: Tensor | None = None
    words: tuple[Tensor, ...] = ()  # of place

    def keep(self, rows_TKD: Tensor | None = None, rstd_TK: Tensor | None = None) -> None:
        """What a norm writes for backward; of 1 / rms nothing where rstd is empty."""
        self.kept_rows_TKD = rows_TKD
        self.rstd_TK = rstd_TK if rstd_TK is not None and rstd_TK.dim() > 1 else None

    @property
    def by_route(self) -> bool:
        return self.returns_routes or self.norm is not None


@dataclass
class BackwardCall:
    """One rank's backward. A weight gradient of None is not wanted; to one that adds a fault does nothing.

    Of a forward by route grad_out is [T, K, D] and has the scores in it, whose gradients are not made here: None.
    With a norm it is [T, D], as are the gradients of the scores made here.
    """

    grad_out_TD: Tensor
    ids_TK: Tensor
    scores_TK: Tensor
    w13_L2FD: Tensor | QuantizedWeights
    w2_LDF: Tensor | QuantizedWeights
    plan: RoutePlan
    saved_place: Tensor
    grad_x_TD: Tensor
    grad_scores_TK: Tensor | None
    grad_w13_L2FD: Tensor | None
    grad_w2_LDF: Tensor | None
    adds_w13: bool = False
    adds_w2: bool = False
    norm: Norm | None = None
    rows_TKD: Tensor | None = None  # kept by the forward
    rstd_TK: Tensor | None = None
    grad_norm_weight_D: Tensor | None = None
    place: Tensor | None = None
    words: tuple[Tensor, ...] = ()

    @property
    def by_route(self) -> bool:
        return self.grad_out_TD.dim() == 3 or self.norm is not None

    def outputs(self) -> list[Tensor]:
        """What is the call's own to write over."""
        weights = ((self.grad_w13_L2FD, self.adds_w13), (self.grad_w2_LDF, self.adds_w2))
        grads = [self.grad_x_TD, self.grad_scores_TK, *(None if adds else grad for grad, adds in weights)]
        return [grad for grad in grads if grad is not None]
