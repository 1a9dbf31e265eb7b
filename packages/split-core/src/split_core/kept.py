"""What is computed once and kept: for as long as its sources are the same, and for every autograd mode to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

T = TypeVar("T")


class lasting(cached_property[T]):
    """A cached property whose tensors may serve training later, even if inference mode asks for them first."""

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> lasting[T]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        with torch.inference_mode(False):
            return super().__get__(instance, owner)


@dataclass(frozen=True)
class Version:
    """Which state of some tensors something was made from.

    It sees new tensors, moves and edits in place; not edits through `.data`, which leave no trace.

    Args:
        state: compared.
        held: aliases of the tensors: while they are held, no other tensor can have their address.
    """

    state: tuple[object, ...]
    held: tuple[Tensor, ...] = field(compare=False, repr=False)


def version_of(tensors: Iterable[Tensor]) -> Version | None:
    """Their present version; None if they were made in inference mode, where no edit is counted: keep nothing then."""
    tensors = tuple(tensors)
    if any(t.is_inference() for t in tensors):
        return None
    state = tuple((t.data_ptr(), t._version, t.dtype, t.device) for t in tensors)
    return Version(state, tuple(t.detach() for t in tensors))
