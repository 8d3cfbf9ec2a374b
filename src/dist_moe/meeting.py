"""How ranks meet: signals to the peers and waits for them, as ops of their own or as an end or beginning of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .symm import Region

if TYPE_CHECKING:
    from .calls import LocalRank, Path


@dataclass(frozen=True)
class Signal:
    """Sent by the last program of a launch: the arguments of the op `signal`."""

    stage: int
    rank: int
    signals: Region
    sent_S: Tensor
    header: Region
    fault_F: Tensor
    finished_1: Tensor  # int64, in which the programs of the launch count themselves; 0 outside of it

    @property
    def arguments(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "finished_1"}


@dataclass(frozen=True)
class Wait:
    """Waited for by every program of a small launch: the arguments of the op `wait`."""

    stage: int
    rank: int
    timeout_ns: int
    signals: Region
    sent_S: Tensor
    fault_F: Tensor

    @property
    def arguments(self) -> dict:
        return dict(vars(self))


def exchange(path: Path, ranks: list[LocalRank], stage: int) -> None:
    """Every rank tells its peers that it is here, then waits for them. Two launches: none both signals and waits."""
    if path.exchanges:
        for r in ranks:
            signal(path, r, stage)
    meet(path, ranks, stage)


def meet(path: Path, ranks: list[LocalRank], stage: int) -> None:
    """Every rank waits for its peers; all ranks have signalled by now."""
    if path.exchanges:
        for r in ranks:
            wait(path, r, stage)


def signal_of(path: Path, r: LocalRank, stage: int) -> Signal | None:
    """What an op needs that ends with the signal."""
    if not path.exchanges:
        return None
    return Signal(stage, r.rank, r.signals, r.sent_S, r.header, r.fault_F, r.finished_1)


def wait_of(path: Path, r: LocalRank, stage: int) -> Wait | None:
    """What an op needs that begins with the wait."""
    return Wait(stage, r.rank, path.timeout_ns, r.signals, r.sent_S, r.fault_F) if path.exchanges else None


def signal(path: Path, r: LocalRank, stage: int) -> None:
    path.ops.signal(stage=stage, rank=r.rank, signals=r.signals, sent_S=r.sent_S, header=r.header, fault_F=r.fault_F)


def wait(path: Path, r: LocalRank, stage: int) -> None:
    path.ops.wait(
        stage=stage, rank=r.rank, timeout_ns=path.timeout_ns, signals=r.signals, sent_S=r.sent_S, fault_F=r.fault_F
    )
