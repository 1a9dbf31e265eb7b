"""An attention backend around another: it lets reducers see what attention sees, and weighs keys.

A key that stands for s tokens should draw s times the attention: logits + log s (ToMe's proportional attention).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.attention import AttentionBackend
from split_core.attention.weighted import with_log_weight
from split_core.packing import Segments

FAINT = 1e-6
"""Added to weights before the logarithm, so that a key of weight zero has a gradient and no weight to speak of."""


class Tap(AttentionBackend):
    """Serves the attention of one block, once.

    Args:
        inner: does the work.
        prefix: k tokens in front of each image's patches; they weigh one each.
        weight: (b, n) of the patch tokens; None is one each.
    """

    name = "tap"

    def __init__(self, inner: AttentionBackend, prefix: int, weight: Float[Tensor, "b n"] | None) -> None:
        super().__init__()
        self.inner, self.prefix = inner, prefix
        self.log_weight = None if weight is None else F.pad((weight.float() + FAINT).log(), (prefix, 0))
        self._seen: tuple[Tensor, Tensor, float] | None = None
        self._watched: tuple[Tensor, Tensor] | None = None

    @property
    def input(self) -> Float[Tensor, "b t d"]:
        """What attention read: normed in a pre-norm block, the tokens as they are in a post-norm one."""
        return self._before()[0]

    @property
    def keys(self) -> Float[Tensor, "b t e"]:
        """Keys, mean over heads, prefix included; before rotary positions turn them: what tokens say, not where."""
        return self._before()[1].mean(2)

    @property
    def class_attention(self) -> Float[Tensor, "b t"]:
        """The attention that the class token (the first) pays to every token, mean over heads.

        One row beside a fused kernel that never shows its matrix: O(n d).
        """
        q, k, scale = self._read()
        logits = torch.einsum("bhe,bthe->bht", q[:, 0].float(), k.float()) * scale
        if self.log_weight is not None:
            logits = logits + self.log_weight[:, None]
        return logits.softmax(-1).mean(1)

    def watch(self, x: Float[Tensor, "T d"], keys: Float[Tensor, "T h e"]) -> None:
        """As `Stream.watch`."""
        self._watched = x, keys

    def _before(self) -> tuple[Tensor, Tensor]:
        """Attention's input and its keys before they are turned, image by image."""
        assert self._watched is not None, "read after the block's attention"
        x, keys = self._watched
        shape = self._read()[0].shape[:2]
        return x.unflatten(0, shape), keys.unflatten(0, shape)

    def _read(self) -> tuple[Tensor, Tensor, float]:
        assert self._seen is not None, "read after the block's attention"
        return self._seen

    def attend(
        self, q: Float[Tensor, "T h e"], k: Float[Tensor, "T h e"], v: Float[Tensor, "T h e"], segments: Segments,
        *, scale: float, dropout: float = 0.0,
    ) -> Float[Tensor, "T h e"]:  # fmt: skip
        """As the inner backend, on segments of one length."""
        shape = len(segments.lengths), segments.max_length
        self._seen = q.unflatten(0, shape), k.unflatten(0, shape), scale
        if self.log_weight is None:
            return self.inner.attend(q, k, v, segments, scale=scale, dropout=dropout)
        width = q.shape[-1]
        q, k, v = with_log_weight(q, k, v, self.log_weight.flatten(), scale)
        return self.inner.attend(q, k, v, segments, scale=scale, dropout=dropout)[..., :width]
