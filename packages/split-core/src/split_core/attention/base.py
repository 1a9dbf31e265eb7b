"""The protocol of attention backends, their probe, and the choice between them."""

from __future__ import annotations

import logging
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from split_core import registry
from split_core.errors import SplitError
from split_core.packing import Segments

logger = logging.getLogger(__name__)

PREFERENCE = {"cuda": ("varlen", "xformers", "sdpa"), "cpu": ("sdpa",)}


class AttentionBackend:
    """Block-diagonal softmax attention over the segments of a packed sequence."""

    name: str = ""

    def __init__(self, config: object = None, context: object = None) -> None:
        """Backends have no settings; the arguments are those every plugin target gets."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what lengths a batch has must not enter a compiled graph: it differs every time
    def attend(
        self, q: Float[Tensor, "T h e"], k: Float[Tensor, "T h e"], v: Float[Tensor, "T h e"], segments: Segments,
        *, scale: float, dropout: float = 0.0,
    ) -> Float[Tensor, "T h e"]:  # fmt: skip
        """softmax(q k^T * scale) v within each segment.

        Raises:
            ValueError: segments do not add up to T.
        """
        if segments.total != q.shape[0]:
            raise ValueError(f"segments hold {segments.total} tokens but the sequence has {q.shape[0]}")
        if segments.total == 0:
            return v
        # A norm on q, k runs in float32 under autocast while v does not; kernels want one dtype.
        return self._attend(q.to(v.dtype), k.to(v.dtype), v, segments, scale=scale, dropout=dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define _attend")

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend cannot run here, or None. Runs the operator, forward and backward, on a tiny input.

        It leaves no trace: the input is not random (a first forward must not move the random state) and the caller's
        inference mode is set aside (which allows no backward).
        """
        try:
            with torch.inference_mode(False), torch.enable_grad():
                q = torch.linspace(-1, 1, 448, device=device).view(7, 2, 32).to(dtype).requires_grad_()
                cu = torch.tensor([0, 3, 7], device=device, dtype=torch.int32)
                self.attend(q, q, q, Segments(cu, (3, 4), 8), scale=0.2).sum().backward()
        except Exception as failure:  # kernels fail with whatever their library raises
            first_line = next(iter(str(failure).strip().splitlines()), "no message")
            return f"{type(failure).__name__}: {first_line}"
        return None


@cache
def _probe(name: str, device_type: str, dtype: torch.dtype) -> str | None:
    return registry.build("attention", name, None).unavailable(torch.device(device_type), dtype)


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first of the device's preference that passes its probe.

    Raises:
        SplitError: `name` cannot run on this device; says why.
    """
    if name != "auto":
        reason = _probe(name, device.type, dtype)
        if reason is not None:
            raise SplitError(f"attention backend {name!r} is unavailable on {device.type} in {dtype}: {reason}")
        return registry.build("attention", name, None)
    for candidate in PREFERENCE.get(device.type, ("sdpa",)):
        reason = _probe(candidate, device.type, dtype)
        if reason is None:
            return registry.build("attention", candidate, None)
        logger.info("attention backend %s is unavailable (%s); trying the next", candidate, reason)
    raise SplitError(f"no attention backend runs on {device.type} in {dtype}; see do=plugins for the list")
