"""UperNet over a plain ViT, as EVA-02 is fine-tuned on ADE20K: four taps, a simple pyramid, an auxiliary FCN head.

The two heads are those of transformers, used by themselves; dropout before their classifiers, which that library leaves
out, is added here. The pyramid keeps the names fpn1, fpn2 of the official checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.features import Features

POOLS = (1, 2, 3, 6)
AUXILIARY_INDEX = 2
"""The map of the pyramid that the auxiliary head reads: the one at the ViT's own resolution."""


class UperNet(nn.Module):
    """Logits at a quarter of a patch.

    Args:
        dim: width of the tokens.
        taps: which of the features' taps each of the four maps comes from.
        classes: outputs.
        channels: of the decoder.
        auxiliary_channels: of the auxiliary head; 0 leaves it out.
        dropout: of whole channels before the classifiers.
    """

    def __init__(
        self, dim: int, *, taps: Sequence[int], classes: int, channels: int, auxiliary_channels: int, dropout: float
    ) -> None:  # fmt: skip
        super().__init__()
        self.taps = tuple(taps)
        config_class, upernet, fcn = _transformers()
        config = config_class(
            hidden_size=channels, pool_scales=POOLS, num_labels=classes, auxiliary_in_channels=dim,
            auxiliary_channels=max(1, auxiliary_channels), auxiliary_num_convs=1, auxiliary_concat_input=False,
        )  # fmt: skip
        self.fpn1 = nn.Sequential(
            nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.BatchNorm2d(dim), nn.GELU(),
            nn.ConvTranspose2d(dim, dim, 2, stride=2),
        )  # fmt: skip
        self.fpn2 = nn.Sequential(nn.ConvTranspose2d(dim, dim, 2, stride=2))
        self.decode = upernet(config, in_channels=[dim] * 4)
        self.decode.classifier = _Classifier(channels, classes, dropout)
        self.auxiliary = None
        if auxiliary_channels:
            self.auxiliary = fcn(config, in_channels=[dim] * 4, in_index=AUXILIARY_INDEX)
            self.auxiliary.classifier = _Classifier(auxiliary_channels, classes, dropout)

    def forward(self, features: Features) -> tuple[Float[Tensor, "b k h w"], Float[Tensor, "b k r c"] | None]:
        """Logits (b, k, 4 rows, 4 cols), and in training those of the auxiliary head (b, k, rows, cols)."""
        maps = [features.dense(tap) for tap in self.taps]
        # Odd grids keep their last row and column.
        pyramid = [self.fpn1(maps[0]), self.fpn2(maps[1]), maps[2], F.max_pool2d(maps[3], 2, ceil_mode=True)]
        auxiliary = self.auxiliary(pyramid) if self.training and self.auxiliary is not None else None
        return self.decode(pyramid), auxiliary


class _Classifier(nn.Conv2d):
    """1 x 1 convolution after dropout, under the plain convolution's keys."""

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__(channels, classes, 1)
        self.dropout = dropout

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.dropout2d(input, self.dropout, self.training))


def _transformers() -> tuple[Any, Any, Any]:
    """UperNetConfig, UperNetHead and UperNetFCNHead; imported here because it takes seconds and other heads need none.

    Raises:
        SplitError: transformers is not installed.
    """
    try:
        from transformers.models.upernet.configuration_upernet import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead
    except ModuleNotFoundError as error:
        raise SplitError(
            f"task.head=upernet needs {error.name}: pip install 'split-tasks[seg]', or set task.head=linear"
        ) from error
    return UperNetConfig, UperNetHead, UperNetFCNHead


def default_taps(depth: int) -> tuple[int, ...]:
    """Blocks that end a third, a half, two thirds and all of the depth: 7, 11, 15, 23 of 24 and 3, 5, 7, 11 of 12."""
    return tuple(max(0, round(depth * share) - 1) for share in (1 / 3, 1 / 2, 2 / 3, 1))
