"""The routings of a sweep: those of dist_moe.testing under names for a command line, and ids that a user recorded.

    balanced  uniform  zipf:S  hot-expert[:P]  hot-rank:R  one-rank  file:PATH

A recorded file is a .pt (torch.save) or .npy of one integer tensor [ranks, T, K]: the expert ids of every token of
every rank, -1 for no expert. It says how many tokens a rank has.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dist_moe import testing
from dist_moe.models import Shape

NAMES = ("balanced", "uniform", "zipf:S", "hot-expert[:P]", "hot-rank:R", "one-rank", "file:PATH")
# Of those that dist_moe.testing makes, the parameter where none is given.
KINDS = {"balanced": "", "uniform": "", "zipf": "", "hot-expert": "0.5", "hot-rank": "", "one-rank": ""}
NO_EXPERT = -1


@dataclass(frozen=True)
class Routing:
    """name: as in rows; of dist_moe.testing, or of the file with the hash of its ids.  recorded: int64 [W, T, K]."""

    name: str
    recorded: Tensor | None = None

    def tokens(self, asked: list[int]) -> list[int]:
        """Tokens of a rank that it is measured with."""
        return asked if self.recorded is None else [self.recorded.shape[1]]

    def check(self, shape: Shape, W: int) -> None:
        """Raises ValueError when it cannot route this model over W ranks."""
        if self.recorded is None:
            ratio = re.fullmatch(r"hot_rank\((.+)\)", self.name)
            if ratio and float(ratio[1]) > W:
                raise ValueError(f"hot-rank:{ratio[1]}: of {W} ranks one can receive at most {W} times the mean")
            testing.routing(self.name, num_ranks=W, T=1, K=shape.K, E=shape.E)
            return
        ranks, _, K = self.recorded.shape
        if (ranks, K) != (W, shape.K):
            raise ValueError(
                f"{self.name}: holds {ranks} ranks with {K} experts a token, "
                f"wanted are {W} ranks and the {shape.K} of {shape.name}"
            )
        low, high = int(self.recorded.min()), int(self.recorded.max())
        if low < NO_EXPERT or high >= shape.E:
            wrong = low if low < NO_EXPERT else high
            raise ValueError(f"{self.name}: id {wrong} is outside of -1 to {shape.E - 1}, the experts of {shape.name}")

    def draw(self, shape: Shape, W: int, T: int) -> list[Tensor]:
        """int64 [T, K] of every rank."""
        if self.recorded is None:
            return testing.routing(self.name, num_ranks=W, T=T, K=shape.K, E=shape.E)
        return list(self.recorded.unbind())


def parse(text: str) -> Routing:
    """The routing of a word of the command line. Raises ValueError for an unknown name or parameter, and as read()."""
    kind, colon, parameter = text.partition(":")
    if kind == "file":
        return read(Path(parameter))
    try:
        if kind not in KINDS:
            raise ValueError("is unknown")
        parameter = parameter if colon else KINDS[kind]
        name = kind.replace("-", "_") + (f"({float(parameter)})" if parameter else "")
        testing.routing(name, num_ranks=1, T=1, K=1, E=1)
    except ValueError as error:
        raise ValueError(f"routing {text!r}: {error}; known are {', '.join(NAMES)}") from None
    return Routing(name)


def read(path: Path) -> Routing:
    """Recorded ids. Raises ValueError for a file that is not there, or holds something else."""
    if not path.is_file():
        raise ValueError(f"file:{path}: there is no such file")
    ids = _load(path)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"file:{path}: wanted is one integer tensor [ranks, T, K], found is {found}")
    if ids.dim() != 3 or not ids.numel():
        raise ValueError(f"file:{path}: wanted is [ranks, T, K] with at least one of each, found is {list(ids.shape)}")
    ids = ids.to(torch.int64).contiguous()
    digest = hashlib.sha256(bytes(ids.flatten().view(torch.uint8).untyped_storage())).hexdigest()[:8]
    return Routing(f"file:{path.name}@{digest}", ids)


def _load(path: Path) -> object:
    if path.suffix == ".pt":
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of a zip file, of a pickle, or of what weights_only refuses
            raise ValueError(f"file:{path}: torch.load fails: {error}") from None
    if path.suffix == ".npy":
        import numpy

        return torch.from_numpy(numpy.load(path))
    raise ValueError(f"file:{path}: its name must end in .pt or .npy")
