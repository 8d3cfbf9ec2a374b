"""Our layer as bench_path runs it: eager or as a replayed CUDA graph, on one rank or on all virtual ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from dist_moe import Config, PreparedWeight, create_context, routed_experts, virtual
from dist_moe.virtual import RankResults

from .launch import PEER_TIMEOUT_S, Job, Miss
from .shapes import Inputs, Traffic, config_of
from .timing import Method, capture

FORWARD, BOTH, INFERENCE = "forward", "forward+backward", "inference"
DIRECTIONS = (FORWARD, BOTH, INFERENCE)


def _source(weight: Tensor | PreparedWeight) -> Tensor:
    return weight.source if isinstance(weight, PreparedWeight) else weight


class Ours:
    """One Context and the calls of one direction: `forward` is that of training and saves for a backward."""

    def __init__(
        self,
        job: Job,
        traffic: Traffic,
        inputs: Inputs,
        direction: str,
        backend: str | None,
        config: Config | None = None,
    ):
        self._job, self._ranks, self.direction = job, inputs.ranks, direction
        self.context = create_context(
            group=job.group or job.world(),
            device=job.device,
            config=config or config_of(traffic, inference=direction == INFERENCE),
            backend=backend,
            peer_timeout_s=PEER_TIMEOUT_S,
        )

    def forward(self) -> list[Tensor]:
        with torch.set_grad_enabled(self.direction != INFERENCE):
            if self._job.group is None:
                return virtual.routed_experts(self._ranks, self.context)
            (r,) = self._ranks
            return [routed_experts(r.x_TD, r.ids_TK, r.scores_TK, r.w13_L2FD, r.w2_LDF, self.context)]

    def backward(self, outs: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of x, scores, W13 and W2, rank by rank."""
        leaves = [leaf for r in self._ranks for leaf in (r.x_TD, r.scores_TK, *map(_source, (r.w13_L2FD, r.w2_LDF)))]
        return torch.autograd.grad(outs, leaves, [r.grad_out_TD for r in self._ranks])

    def run(self) -> list[Tensor]:
        """One call; everything that it returns."""
        outs = self.forward()
        grads = self.backward(outs) if self.direction == BOTH else ()
        return [out.detach() for out in outs] + [*grads]

    @property
    def prepare(self) -> Callable[[], None] | None:
        """A forward without backward leaves its state in the slot: the next one needs an empty slot."""
        return self.context.reset if self.direction == FORWARD else None

    def results(self) -> list[RankResults]:
        values = self.run()
        self.context.check()
        self._empty_slot()
        W = len(self._ranks)
        outs, grads = values[:W], values[W:]
        return [RankResults(out, *grads[4 * i : 4 * i + 4]) for i, out in enumerate(outs)]

    def method(self) -> Method:
        return Method("ours", self.run, self.prepare)

    def graph_method(self) -> Method:
        """The call captured in a CUDA graph and replayed. Raises Miss when it cannot be captured, or replays give other
        bits than eager calls. Collective; after a Miss this Context is of no use."""
        expected = self.run()
        self._empty_slot()

        def warm_up() -> None:  # the Context's last call has to be on the stream of the capture
            self.run()
            self._empty_slot()

        graph, captured = capture(self._job, self.run, warm_up)
        graph.replay()
        self.context.check()
        self._empty_slot()

        def compare() -> None:
            if not all(map(torch.equal, captured, expected)):
                raise Miss("gives other bits than the eager call")

        self._job.agree(compare)
        return Method("ours-graph", graph.replay, self.prepare)

    def _empty_slot(self) -> None:
        if self.prepare:
            self.prepare()
