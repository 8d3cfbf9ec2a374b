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


def leads_to(tensor: Tensor, leaf: Tensor) -> bool:
    """Whether the gradient of a tensor goes on to that of a leaf."""
    if tensor is leaf:
        return True
    seen, nodes = set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def is_viewed_by_torch(view: Tensor) -> bool:
    """Whether only torch's own ops lie between a view and its base, which leave gradients as they are."""
    node = view.grad_fn
    while node is not None and not hasattr(node, "variable"):
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(node.next_functions) != 1:
            return False
        ((node, _),) = node.next_functions
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
