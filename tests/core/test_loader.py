"""Training batches: what augmentation draws follows from the place of a sample, not from who makes it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from split_core.engine.loader import Drawn, training_batches


class Noisy:
    """Samples that say their number and what the three global generators drew."""

    classes: Sequence[str] = ()

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return {"image": torch.tensor([float(index), *drawn]), "target": {}}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"image": torch.stack([sample["image"] for sample in samples]), "target": {}}


def batches(size: int, steps: range, **options: Any) -> list[Tensor]:
    return [batch["image"] for _, batch in training_batches(Noisy(), size, steps, seed=3, **options)]


def test_augmentation_is_the_same_whoever_makes_it() -> None:
    whole = batches(4, range(5))
    assert torch.equal(torch.stack(batches(4, range(2, 5))), torch.stack(whole[2:])), "after a resumption"
    shares = [batches(2, range(5), rank=rank, world=2) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([share[step] for share in shares]), batch), "by two processes"
    everything = torch.cat(whole)
    assert len(everything[:, 1:].unique()) == everything[:, 1:].numel(), "and never twice the same"


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_draw_what_the_process_itself_would(workers: int) -> None:
    assert torch.equal(torch.stack(batches(4, range(3), workers=workers)), torch.stack(batches(4, range(3))))


def test_the_callers_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    Drawn(Noisy(), 3)[4, 1]  # not a list of them: the checker of shapes draws which item to look at
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002


def test_a_data_set_that_makes_batches_at_once_is_asked_for_batches() -> None:
    class Together(Noisy):
        def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
            together = torch.rand(())
            return [{"image": torch.stack([torch.tensor(float(i)), together]), "target": {}} for i in indices]

    (first, again), _ = (
        [batch["image"] for _, batch in training_batches(Together(), 3, range(2), seed=3)] for _ in range(2)
    )
    assert first[:, 1].unique().numel() == 1
    assert again[0, 1] != first[0, 1]
