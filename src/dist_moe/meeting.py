"""What an op that ends with a signal to the peers, or begins with a wait for them, has to know of it."""

from dataclasses import dataclass

from torch import Tensor

from .symm import Region


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
