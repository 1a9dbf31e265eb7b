"""Settings of EVA-02 as segmentation and detection use it. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from split_core.plugins import PluginConfig

Count = Annotated[int, Field(ge=1)]


class Eva02Config(PluginConfig):
    """Model `eva02`.

    Attributes:
        size: of the model.
        img_size: side that the position table is made for.
        weights: "none" (random) or a file, such as the backbone that `python -m split_tasks.models.eva02_seg` writes.
        drop_path: stochastic depth in training.
    """

    size: Literal["tiny", "base", "large"] = "large"
    img_size: Count = 512
    weights: str
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Eva02DetConfig(Eva02Config):
    """Model `eva02_det`.

    Attributes:
        size: of the model.
        img_size: side that the position table is made for.
        weights: "none" (random) or a file, such as the backbone that `python -m split_tasks.models.eva02_det` writes; a
            position table for another side is resampled.
        drop_path: stochastic depth in training.
        window: side in patches of the windows that most blocks attend within; null for none. It divides the image, and
            is a multiple of the coarsest patch.
        global_blocks: numbers of the blocks, from 0, that attend across the image; null for the detector's own: every
            second of base, every third of large, the middle one of tiny.
    """

    size: Literal["tiny", "base", "large"] = "base"
    img_size: Count = 1536
    window: Count | None = 32
    global_blocks: tuple[Annotated[int, Field(ge=0)], ...] | None = None
