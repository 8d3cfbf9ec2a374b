"""What torch's autograd engine says of the visit it makes of a node's backward.

Not public in torch: without _will_engine_execute_node there is no split backward, and without
_get_current_graph_task_keep_graph a gradient may be kept for a visit that cannot come.
"""

import torch
from torch import Tensor

_executes = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def takes(node) -> bool:
    """Whether the engine passes on a gradient to this next node."""
    try:
        return _executes(node)
    except RuntimeError:  # how torch answers for a leaf whose gradient autograd.grad() returns
        return True


def adds(node, owner: Tensor | None) -> bool:
    """Whether what it passes on to this next node ends in the .grad of the owner, a leaf, or of any leaf for None;
    autograd.grad() returns it instead."""
    if owner is not None and getattr(node, "variable", None) is not owner:
        node = torch.autograd.graph.get_gradient_edge(owner).node
    try:
        return _executes(node)
    except RuntimeError:  # see takes
        return False
