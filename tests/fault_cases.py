"""Faults of a call on ranks as processes, shared by the tests of faults and of reset.

A fault is a function `fault(rank, context, step)` that every rank runs in place of a training step; it returns what
the step gave, or raises. The tables say what the ranks must find then.
"""

import re
import time

import torch

import dist_moe
from dist_moe import create_context, routed_experts

from .path_cases import Case
from .rank_calls import NAMES, forward, leaves_of

PATIENT_S = 60.0  # deadline of a context whose peers all come
DEADLINE_S = {"reference": 1.0, "triton": 4.0}  # interpreted kernels on a busy machine take a second or two of it
LATE = 1.5  # part of the deadline that a late rank sleeps
CASE = {W: Case(f"{W} ranks", W=W, T=4, D=32, F=32, K=2, E=2 * W, routing="balanced") for W in (2, 3)}


class Step:
    """A training step of one rank, to be taken apart and bent."""

    def __init__(self, rank, context, case):
        self.context, self.inputs = context, case.inputs()[rank]
        self.leaves = leaves_of(self.inputs, context.config)

    def forward(self, **changes):
        leaves = {name: changes.pop(name, leaf) for name, leaf in self.leaves.items()}
        return forward(leaves, changes.pop("ids_TK", self.inputs.ids_TK), self.context)

    def backward(self, out_TD, **options):
        out_TD.backward(self.inputs.grad_out_TD, **options)

    def grads(self):
        return [self.leaves[name].grad for name in NAMES]


def join(group, config, timeout_s=PATIENT_S, backend="reference"):
    return create_context(group=group, config=config, device="cpu", backend=backend, peer_timeout_s=timeout_s)


def error_of(fn, *args, **options):
    try:
        fn(*args, **options)
    except Exception as error:
        return error
    return None


def is_nan(value) -> bool:
    return bool(value.isnan().all())


def assert_error(error, kind, words) -> None:
    assert type(error) is kind and re.search(words, str(error)), f"{error!r} is no {kind.__name__} with {words!r}"


# ---- faults that all ranks find together


def overflow(rank, context, step):
    L = context.experts_per_rank
    return [step.forward(ids_TK=step.inputs.ids_TK % L)]


def invalid_id(rank, context, step):
    ids = step.inputs.ids_TK.clone()
    if rank == 1:
        ids[2, 1] = ids[3, 0] = context.config.num_experts
    return [step.forward(ids_TK=ids)]


def huge_id(rank, context, step):
    ids = step.inputs.ids_TK.clone()
    if rank == 1:
        ids[1, 0] = 2**40  # 0 in its low 32 bits
    return [step.forward(ids_TK=ids)]


def backward_meets_forward(rank, context, step):
    out = step.forward()
    if rank == 1:
        step.backward(out)
        return step.grads()
    return [step.forward()]


def training_meets_no_grad(rank, context, step):
    with torch.set_grad_enabled(rank != 1):
        return [step.forward()]


SHARED = {
    "overflow": (overflow, dist_moe.RoutingOverflowError, r"rank 0 needs {all} rows, {room} are available"),
    "invalid id": (invalid_id, dist_moe.InvalidExpertIdError, r"rank 1 .* token 2, k 1"),
    "huge id": (huge_id, dist_moe.InvalidExpertIdError, r"rank 1 .* token 1, k 0"),
    "backward meets forward": (
        backward_meets_forward,
        dist_moe.RankMismatchError,
        r"call kind of rank 0 is training forward, of rank 1 backward",
    ),
    "training meets no_grad": (
        training_meets_no_grad,
        dist_moe.RankMismatchError,
        r"call kind of rank 0 is training forward, of rank 1 forward without gradients",
    ),
}

# ---- faults of one rank


def wrong_dtype(rank, context, step):
    if rank == 1:
        return [step.forward(x_TD=step.leaves["x_TD"].float())]
    return [step.forward()]


def too_many_tokens(rank, context, step):
    if rank == 1:
        return [step.forward(x_TD=torch.zeros(context.config.num_local_input_tokens + 1, 32).bfloat16())]
    return [step.forward()]


def wrong_layout(rank, context, step):
    if rank == 1:
        return [step.forward(w13_L2FD=step.leaves["w13_L2FD"].transpose(1, 2))]
    return [step.forward()]


def bad_options(rank, context, step):
    if rank != 1:
        return [step.forward()]
    leaves = [step.leaves[name] for name in NAMES]
    leaves.insert(1, step.inputs.ids_TK)
    norm = dist_moe.RMSNormPostprocess(0.0, torch.float32, torch.bfloat16)
    options = dist_moe.ExecutionOptions(experts_output_postprocess=norm)
    return [routed_experts(*leaves, context, options=options)]


WITH_A_WAIT = {"route": "wait_route_plan", "reduce": "wait_reduce"}  # the op that a small context has in its place


def break_op(rank, context, op):
    def out_of_memory(*args, **options):
        raise MemoryError(f"no room in {op}")

    if rank == 1:
        for name in (op, WITH_A_WAIT.get(op, op)):
            setattr(context.path.ops, name, out_of_memory)


def forward_breaks_in(op):
    def fault(rank, context, step):
        break_op(rank, context, op)
        return [step.forward()]

    return fault


def backward_breaks_in(op):
    def fault(rank, context, step):
        out = step.forward()
        break_op(rank, context, op)
        step.backward(out)
        return step.grads()

    return fault


def weight_changed_in_place(rank, context, step):
    out = step.forward()
    if rank == 1:
        with torch.no_grad():
            step.leaves["w2_LDF"].mul_(2)
    step.backward(out)
    return step.grads()


def too_many_layers(rank, context, step):
    """Rank 1 alone believes that its slot holds a layer."""
    out = step.forward()
    if rank == 1:
        context.select_activation_slot(0, 1)
        return [step.forward()]
    return [step.forward(x_TD=out)]


# fault, what rank 1 raises, the stage before which the others miss it
REFUSALS = {
    "wrong dtype": (wrong_dtype, TypeError, "x_TD must be bfloat16", "published"),
    "too many tokens": (too_many_tokens, ValueError, "5 tokens", "published"),
    "wrong layout": (wrong_layout, ValueError, "w13_weight must be", "published"),
    "bad options": (bad_options, ValueError, "eps must be finite and positive", "published"),
    "publish breaks": (forward_breaks_in("publish"), MemoryError, "no room in publish", "published"),
    "route breaks": (forward_breaks_in("route"), MemoryError, "no room in route", "combined"),
    "combine breaks": (forward_breaks_in("combine"), MemoryError, "no room in combine", "combined"),
    "plan_backward breaks": (backward_breaks_in("plan_backward"), MemoryError, "plan_backward", "published"),
    "swiglu_backward breaks": (backward_breaks_in("swiglu_backward"), MemoryError, "swiglu_backward", "combined"),
    "a weight changed in place": (
        weight_changed_in_place,
        RuntimeError,
        "modified by an inplace operation",
        "published",
    ),
    "too many layers": (too_many_layers, dist_moe.SlotError, r"already holds 1 layers.*reset\(\)", "published"),
}

# ---- ranks that are late


def late_by(factor, op="publish"):
    """Rank 1 sleeps before the first `op`, for this part of the deadline."""

    def fault(rank, context, step):
        work = getattr(context.path.ops, op)

        def sleep_and_work(*args, **options):
            setattr(context.path.ops, op, work)
            time.sleep(factor * context.path.timeout_ns / 1e9)
            work(*args, **options)

        if rank == 1:
            setattr(context.path.ops, op, sleep_and_work)
        out = step.forward()
        context.check()
        step.backward(out)
        return step.grads()

    return fault


FAULTS = {
    **{name: row[0] for name, row in (SHARED | REFUSALS).items()},
    "reduce breaks": forward_breaks_in("reduce"),
    "slow": late_by(0.5),
    "slow in the call": late_by(0.5, "combine"),
    "late": late_by(LATE),
    "late in the call": late_by(LATE, "combine"),
}
