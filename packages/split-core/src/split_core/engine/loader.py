"""Batches by step number, so that a resumed run sees what a straight one would.

Nothing here has state to save: the samples of step t, and the seed of everything random in it, follow from
(seed, phase, t) alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch.utils.data import DataLoader, Sampler

from split_core.engine.interrupt import deaf, held_back
from split_core.engine.tolerance import Tolerant
from split_core.errors import SplitError
from split_core.model import SplitViT
from split_core.quadtree import picture_cells
from split_core.reducer import Reducer
from split_core.task import Dataset


def step_seed(seed: int, phase: str, step: int) -> int:
    """A 62-bit seed for one step of one phase."""
    text = f"{seed}/{phase}/{step}".encode()
    return (zlib.crc32(text) << 30) ^ zlib.adler32(text[::-1])


class StepSampler(Sampler[list[int]]):
    """Indices of each step's batch: epochs of seeded permutations, cut into equal batches that may cross epochs.

    Args:
        length: samples of the data set.
        batch_size: of one process.
        steps: first and last + 1.
        seed: decides the permutations.
        rank, world: this process and how many share a global batch of world * batch_size; the global batches do not
            depend on how many processes share them.
    """

    def __init__(
        self, length: int, batch_size: int, steps: range, *, seed: int, rank: int = 0, world: int = 1
    ) -> None:  # fmt: skip
        self.length, self.batch_size, self.steps, self.seed = length, batch_size, steps, seed
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, [0]
        for step in self.steps:
            start = (step * self.world + self.rank) * self.batch_size
            batch = []
            for position in range(start, start + self.batch_size):
                if position // self.length != epoch:
                    epoch = position // self.length
                    order = self._order(epoch)
                batch.append(order[position % self.length])
            yield batch

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(step_seed(self.seed, "order", epoch))
        return torch.randperm(self.length, generator=generator).tolist()


Place = tuple[int, int]
"""Number of a sample, and where it stands in the order in which all processes of a run see samples."""


class Drawn:
    """A data set whose random augmentation follows from (seed, place in the run): whoever makes a sample, a worker or
    another process, makes the same, and so does a resumed run. Augmentation draws from the global generators.
    """

    def __init__(self, data: Dataset, seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitems__(self, places: Sequence[Place]) -> list[Any]:
        together = getattr(self.data, "__getitems__", None)
        if together is not None:
            with self._seeded(places[0]):
                samples: list[Any] = together([number for number, _ in places])
                return samples
        return [self[place] for place in places]

    def __getitem__(self, place: Place) -> Any:
        with self._seeded(place):
            return self.data[place[0]]

    @contextmanager
    def _seeded(self, place: Place) -> Iterator[None]:
        """Global generators set for one sample, and afterwards as they were."""
        before = random.getstate(), np.random.get_state()  # noqa: NPY002 (what timm's transforms draw from)
        seed = step_seed(self.seed, "augment", place[1])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            try:
                yield
            finally:
                random.setstate(before[0])
                np.random.set_state(before[1])  # noqa: NPY002


class _Places(Sampler[list[Place]]):
    """The batches of a `StepSampler`, each sample with its place."""

    def __init__(self, sampler: StepSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[Place]]:
        own = self.sampler
        for step, numbers in zip(own.steps, own, strict=True):
            start = (step * own.world + own.rank) * own.batch_size
            yield [(number, start + i) for i, number in enumerate(numbers)]


def training_batches(
    data: Dataset, batch_size: int, steps: range, *, seed: int, workers: int = 0, rank: int = 0, world: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, batch) for every step in `steps`; batches are {"image": (b, c, H, W), "target": ...}.

    Raises:
        SplitError: no picture of a batch can be read, so that there is nothing to learn from.
    """
    sampler = StepSampler(len(data), batch_size, steps, seed=seed, rank=rank, world=world)
    for step, batch in zip(steps, _loader(data, Drawn(data, seed), _Places(sampler), workers), strict=True):
        if not batch:
            raise SplitError(f"no picture of the batch of step {step} can be read: see what was left out")
        yield step, batch


def evaluation_batches(
    data: Dataset, batch_size: int, samples: range, *, workers: int = 0, rank: int = 0, world: int = 1,
    gaps: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The samples with these numbers in order, each once; numbers past the end are left out. A batch of which no
    picture can be read is passed over, or with `gaps` is {}, so that processes that count batches stay together.

    Of several processes each gets whole batches, every world-th one, so that a batch is the same whoever computes it.
    """
    numbers = [number for number in samples if number < len(data)]
    batches = [numbers[i : i + batch_size] for i in range(0, len(numbers), batch_size)]
    yield from (batch for batch in _loader(data, data, batches[rank::world], workers) if batch or gaps)


def _loader(data: Any, read: Any, batches: Iterable[list[Any]], workers: int) -> Iterator[dict[str, Any]]:
    """Batches of `data`, whose samples `read` makes."""
    # A child process that inherits a busy thread pool can hang, so workers start afresh.
    context = "spawn" if workers else None
    loader = DataLoader(
        read, batch_sampler=batches, num_workers=workers, collate_fn=data.collate, multiprocessing_context=context,
        worker_init_fn=deaf,
    )  # fmt: skip
    with held_back():
        started = iter(loader)
    return map(data.note, started) if isinstance(data, Tolerant) else started


def valid_of(model: SplitViT | Reducer, batch: Mapping[str, Any]) -> Bool[torch.Tensor, "b r c"] | None:
    """Fine cells that hold picture, where a batch says that its pictures differ in size; else None."""
    if "size" not in batch:
        return None
    return picture_cells(batch["size"], model.embed.grid(batch["image"].shape[-2:]), model.embed.patch_size)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors of a batch, however nested, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(inner, device) for inner in value)
    return value
