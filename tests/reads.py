"""Counts of what a forward asks of its device: operators, and reads that make the host wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from split_core.model import SplitViT
from tiny import images


class Reads:
    """Counts what would make the host wait for a device: every call that turns tensor values into Python."""

    METHODS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "nonzero", "cpu", "unique")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in self.METHODS:
            monkeypatch.setattr(Tensor, name, self.counted(name, getattr(Tensor, name)))

    def counted(self, name: str, method: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return method(tensor, *args, **kwargs)

        return call


class Operations(TorchDispatchMode):
    """Counts operators; masked indexing and the like read the device without a call from Python."""

    READ = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"})

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        ):
            name = "nonzero"
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            name = "nonzero"  # its length is read from the counts
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return sum(self.counts[name] for name in self.READ)


def counted_forward(model: SplitViT, batch: int, size: tuple[int, int] = (60, 44)) -> tuple[Counter[str], int]:
    with torch.no_grad(), Operations() as operations:
        model(images(batch, *size))
    return operations.counts, operations.reads
