"""What torch's checkpoints do with the forward of a call: run it again before the backward, or keep what it returned.

Nothing public tells. Were torch to rename what is looked at here, the first of two forwards would keep its room in the
slot and the second would raise SlotError: loudly wrong.
"""

import torch
import torch.utils.checkpoint
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

# How a checkpoint ends its recomputation once it has what it needs: out of a hook, and no failure.
EARLY_STOP = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

_RECOMPUTES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE, False)


def is_first_run() -> bool:
    """Whether a non-reentrant checkpoint is at its first run, which drops what is saved for backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")


def runs_again(op, inputs: tuple) -> bool:
    """Whether a checkpoint will run this op again before its backward: a plain one, or a selective one that does not
    save the outputs of the op. Its policy is asked once more for that, without an output."""
    if not is_first_run():
        return False
    mode = _selective_mode()
    return mode is None or _policy_of(mode, op, inputs) in _RECOMPUTES


def is_recomputed_when_compiled(op, inputs: tuple) -> bool:
    """Whether a checkpoint inside of the program that is being compiled will have this op twice in it."""
    mode = _selective_mode()
    # What a checkpoint of the program itself leaves: of one around the program there is none of it.
    if mode is not None and (getattr(mode, "ac_graph_id", None) is not None or "ac_graph_id" in traceback.current_meta):
        return _policy_of(mode, op, inputs) in _RECOMPUTES
    return traceback.current_meta.get("recompute") in _RECOMPUTES


def _selective_mode():
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in modes if type(mode).__name__ == "_CachingTorchDispatchMode"), None)


def _policy_of(mode, op, inputs: tuple):
    return mode.policy_fn(SelectiveCheckpointContext(is_recompute=False), op, *inputs)
