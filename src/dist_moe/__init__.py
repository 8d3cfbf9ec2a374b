"""Routed experts of a mixture-of-experts layer across GPUs.

Importing the package starts neither CUDA nor a process group and needs neither a GPU nor triton: names are imported
from their modules when they are first asked for.
"""

from importlib import import_module

__version__ = "0.1.0"

# What `from dist_moe import *` gives: the names that programs written for the API expect.
_API = {
    "Bf16GroupedGemmPreset": "config",
    "BlockScaledConfig": "config",
    "BlockScaledFormat": "config",
    "BlockScaledKernelConfig": "config",
    "Config": "config",
    "Context": "context",
    "ExecutionOptions": "options",
    "MemoryPlan": "planner",
    "PreparedWeight": "weights",
    "RMSNormPostprocess": "options",
    "VmmConfig": "config",
    "create_context": "context",
    "plan_memory": "planner",
    "prepare_block_scaled_weight": "weights",
    "routed_experts": "ops",
    "supports_fused_post_expert_rmsnorm": "options",
}

# The additions, reached by name only.
_ADDITIONS = {
    "DistMoEError": "errors",
    "InvalidExpertIdError": "errors",
    "PeerAbortedError": "errors",
    "PeerTimeoutError": "errors",
    "RankMismatchError": "errors",
    "RoutingOverflowError": "errors",
    "SlotError": "errors",
    "World": "symm",
    "explain": "registry",
}

__all__ = list(_API)


def __getattr__(name: str):
    module = _API.get(name) or _ADDITIONS.get(name)
    if module is not None:
        value = getattr(import_module(f"{__name__}.{module}"), name)
    elif name == "testing":
        value = import_module(f"{__name__}.testing")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, *_ADDITIONS, "testing"})
