"""Weights must fit key by key: the one comparison, and the one line that names all that does not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from split_core.errors import SplitError


def check_fit(source: object, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not exactly those of a model.

    Args:
        source: where they were found, for the message.

    Raises:
        SplitError: names every missing and unexpected key and every shape that differs.
    """
    faults = [f"missing {key}" for key in wanted.keys() - found.keys()]
    faults += [f"unexpected {key}" for key in found.keys() - wanted.keys()]
    faults += [
        f"{key} is {tuple(found[key].shape)}, wanted {tuple(wanted[key].shape)}"
        for key in wanted.keys() & found.keys()
        if found[key].shape != wanted[key].shape
    ]
    if faults:
        raise SplitError(f"{source} does not fit the model: {'; '.join(sorted(faults))}")
