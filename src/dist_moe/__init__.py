"""Routed experts of a mixture-of-experts layer across GPUs.

Importing the package starts neither CUDA nor a process group and needs neither a GPU nor triton.
"""

from . import testing as testing
from .config import (
    Bf16GroupedGemmPreset,
    BlockScaledConfig,
    BlockScaledFormat,
    BlockScaledKernelConfig,
    Config,
    VmmConfig,
)
from .context import Context
from .create import create_context
from .errors import DistMoEError as DistMoEError
from .errors import InvalidExpertIdError as InvalidExpertIdError
from .errors import PeerAbortedError as PeerAbortedError
from .errors import PeerTimeoutError as PeerTimeoutError
from .errors import RankMismatchError as RankMismatchError
from .errors import RoutingOverflowError as RoutingOverflowError
from .errors import SlotError as SlotError
from .op_definition import FORWARD_OPS as FORWARD_OPS
from .ops import routed_experts
from .options import ExecutionOptions, RMSNormPostprocess, supports_fused_post_expert_rmsnorm
from .planner import MemoryPlan, plan_memory
from .registry import explain as explain
from .slot_coloring import color_activation_slots as color_activation_slots
from .symm import World as World
from .weights import PreparedWeight, prepare_block_scaled_weight

__version__ = "0.1.0"

# `import *` gives the names that programs written for the API expect; the additions above are reached by name.
__all__ = [
    "Bf16GroupedGemmPreset",
    "BlockScaledConfig",
    "BlockScaledFormat",
    "BlockScaledKernelConfig",
    "Config",
    "Context",
    "ExecutionOptions",
    "MemoryPlan",
    "PreparedWeight",
    "RMSNormPostprocess",
    "VmmConfig",
    "create_context",
    "plan_memory",
    "prepare_block_scaled_weight",
    "routed_experts",
    "supports_fused_post_expert_rmsnorm",
]
