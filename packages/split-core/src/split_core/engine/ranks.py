"""The processes of a run, and the few things they say to one another.

Every process does the same run on its share: rows of each training batch, whole batches of the evaluation. What is
written is written by rank 0; what decides the way (which checkpoint, whether a phase is done, a request to stop)
is decided by one for all, so that no process waits for another that went elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from split_core.draws import SharedGenerator, shared_generator
from split_core.errors import SplitError

T = TypeVar("T")
LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timed out", "Broken pipe")
"""How the collectives of gloo say that a process is gone; those of NCCL raise classes of their own."""


class Ranks:
    """This process among those of the run.

    Args:
        rank, world: number of this process, and how many there are.
        device: where tensors that are sent have to be.
    """

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.world, self.device = rank, world, torch.device(device)

    @classmethod
    def present(cls, device: torch.device | str = "cpu") -> Ranks:
        """The processes as torch.distributed knows them, for what is handed none (`split_core.task.Metric`)."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, what: str, batch_size: int) -> int:
        """Rows of a global batch that each process takes.

        Raises:
            SplitError: they do not come out even.
        """
        if batch_size % self.world:
            raise SplitError(f"{what}={batch_size} does not divide among {self.world} processes")
        return batch_size // self.world

    def generator(self, seed: int, count: int) -> SharedGenerator:
        """A generator for this process's `count` rows, whose draws are those that one process alone would make."""
        return shared_generator(seed, start=self.rank * count, count=count, total=self.world * count)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up anywhere."""
        return flag if self.world == 1 else bool(self._sum(torch.tensor([float(flag)])).item())

    def mean(self, number: float) -> float:
        """Mean over the processes; they hold equally many images."""
        return self.means({"": number})[""]

    def means(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Mean of each number over the processes."""
        if self.world == 1:
            return dict(numbers)
        values = self._sum(torch.tensor(list(numbers.values()), dtype=torch.float64)) / self.world
        return dict(zip(numbers, values.tolist(), strict=True))

    def same(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, for all. An error there is an error everywhere."""
        if self.world == 1:
            return make()
        box: list[Any] = [None, None]
        if self.main:
            try:
                box[0] = make()
            except SplitError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, device=self._object_device())
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def average_gradients(self, module: nn.Module) -> None:
        """Mean of the gradients over the processes, as one message; a parameter unused here counts as zero.

        For small modules with several forwards per step, where a data-parallel wrapper's bookkeeping is in the way.
        """
        if self.world == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
        for parameter, mean in zip(parameters, self._sum(flat).split([p.numel() for p in parameters]), strict=True):
            parameter.grad = (mean / self.world).view_as(parameter)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            self.any(False)

    def _sum(self, values: Tensor) -> Tensor:
        sent = values.to(self.device)
        dist.all_reduce(sent)
        return sent.to(values.device)

    def _object_device(self) -> torch.device | None:
        return self.device if self.device.type == "cuda" else None


def lost_peer(error: BaseException) -> bool:
    """Whether the error says that another process of the run is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for text in _texts(error) for sign in LOST)
    )


def _texts(error: BaseException) -> Iterable[str]:
    seen: BaseException | None = error
    while seen is not None:
        yield str(seen)
        seen = seen.__cause__
