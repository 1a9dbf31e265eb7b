"""transformers' LLaVA with an adaptive vision tower.

    model = AdaptiveLlava.from_pretrained("llava-hf/llava-1.5-7b-hf", policy="entropy", budget=0.7)
    inputs = processor(images=pictures, text=prompts, padding=True, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=20)

Forward and generate take what transformers' own take. Placeholders may be one per image, or as many as the processor
writes for the dense model. All patches fine, logits and generations are those of the unmodified model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, LlavaConfig, LlavaForConditionalGeneration

from split_core.backbone.tower import VisionTower
from split_core.errors import SplitError, first_line
from split_core.features import Features
from split_core.policy import SplitPolicy
from split_core.types import Layout
from split_core.wrapping import wrap
from split_tasks.vqa.expand import Expanded, Side, collapse, expand
from split_tasks.vqa.reader import Reader, visual_tokens

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class AdaptiveLlava(nn.Module):
    """A LLaVA that reads fine patches where its policy asks for them.

    Its parameters are the tower's, the policy's and the projector's; the language model belongs to `reader.language`.

    Args:
        llava: the model; its modules are used as they are, not copied.
        mean, std: normalisation of its images, which policies that look at pixels undo.
        policy, options: as for `split_core.wrap`.

    Raises:
        SplitError: the vision tower cannot be wrapped.
    """

    def __init__(
        self, llava: LlavaForConditionalGeneration, policy: str | Mapping[str, Any] | SplitPolicy = "entropy", *,
        mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        tower = VisionTower(llava.model.vision_tower, layers=llava.config.vision_feature_layer, mean=mean, std=std)
        self.whole = keeps_prefix(llava.config, tower)
        self.tower = wrap(tower, policy, **options)
        self.reader = Reader(llava, llava.model.multi_modal_projector, llava.config.image_token_id)

    @classmethod
    def from_pretrained(
        cls, checkpoint: str | Path, policy: Any = "entropy", *, dtype: Any = "auto", **options: Any
    ) -> Any:
        """A checkpoint by its name on the hub or its folder."""
        return cls(load_llava(str(checkpoint), dtype), policy, **options).eval()

    @property
    def dense_tokens(self) -> int:
        """Visual tokens of an image when all patches are fine, at the tower's own size."""
        rows, cols = self.tower.vit.patch_embed.grid_size
        return rows * cols + (self.tower.vit.num_prefix_tokens if self.whole else 0)

    @property
    def layout(self) -> Layout | None:
        """Of the images of the last call."""
        return self.tower.layout

    def forward(
        self, input_ids: Int[Tensor, "b l"], pixel_values: Float[Tensor, "k ch H W"] | None = None,
        attention_mask: Tensor | None = None, labels: Int[Tensor, "b l"] | None = None, layout: Layout | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """transformers' output for the expanded sequences, padded on the side on which the prompts are.

        Args:
            input_ids: prompts; the images' placeholders in the order of pixel_values, sample after sample.
            pixel_values: all images of the batch, or None for text alone.
            attention_mask: 0 at padding.
            labels: aligned with input_ids; the output then has a loss.
            layout: a partition to use instead of the policy's.
            options: of the language model's forward.
        """
        padded_right = attention_mask is not None and bool((attention_mask[:, -1] == 0).any())
        batch, visual = self.prepare(
            input_ids, pixel_values, attention_mask, labels, layout, side="right" if padded_right else "left"
        )
        if labels is not None:
            options["labels"] = batch.labels
        return self.reader.language(**self.reader.inputs(batch, visual), **options)

    @torch.no_grad()
    def generate(
        self, input_ids: Int[Tensor, "b l"], pixel_values: Float[Tensor, "k ch H W"] | None = None,
        attention_mask: Tensor | None = None, layout: Layout | None = None, **options: Any,
    ) -> Int[Tensor, "b new"]:  # fmt: skip
        """The new tokens alone, since expanded prompts differ in length. Options: transformers' generate's."""
        batch, visual = self.prepare(input_ids, pixel_values, attention_mask, None, layout)
        return self.reader.generate(batch, visual, **options)

    def prepare(
        self, input_ids: Int[Tensor, "b l"], pixel_values: Float[Tensor, "k ch H W"] | None = None,
        attention_mask: Tensor | None = None, labels: Int[Tensor, "b l"] | None = None, layout: Layout | None = None,
        *, side: Side = "left",
    ) -> tuple[Expanded, Float[Tensor, "t d"] | None]:  # fmt: skip
        """The expanded batch and the images' tokens.

        Raises:
            SplitError: placeholders and images do not fit; the sample is named.
        """
        token = self.reader.image_token
        real = [row.bool() for row in attention_mask] if attention_mask is not None else [...] * len(input_ids)
        prompts = [row[keep] for row, keep in zip(input_ids, real, strict=True)]
        learned = None if labels is None else [row[keep] for row, keep in zip(labels, real, strict=True)]
        images = 0 if pixel_values is None else len(pixel_values)
        prompts, kept = collapse(prompts, images, image_token=token, dense=self.dense_tokens)
        if learned is not None:
            learned = [row[keep] for row, keep in zip(learned, kept, strict=True)]
        visual, lengths = None, iter(list[int]())
        if pixel_values is not None:
            features = self.encode(pixel_values, layout)
            visual, counts = visual_tokens(features, self.tower.vit, whole=self.whole)
            lengths = iter(counts)
        own = [[next(lengths) for _ in range(int((prompt == token).sum()))] for prompt in prompts]
        batch = expand(prompts, own, image_token=token, labels=learned, side=side, limit=self.reader.limit)
        return batch, visual

    def encode(self, pixel_values: Float[Tensor, "k ch H W"], layout: Layout | None = None) -> Features:
        """Features of the tower, with the layers that the projector reads."""
        pixels = pixel_values.to(self.tower.embed.proj.weight.dtype)
        pyramid = self.tower.pyramid(pixels)
        self.tower.layout = layout or self.tower.decide(pyramid, pixels)
        return self.tower.encode(pyramid, self.tower.layout, taps=cast(Any, self.tower.vit).taps)


def keeps_prefix(config: LlavaConfig, tower: VisionTower) -> bool:
    """Whether the language model reads the class token too.

    Raises:
        SplitError: the configuration drops the first token of a tower that has no class token.
    """
    if config.vision_feature_select_strategy == "full":
        return tower.num_prefix_tokens > 0
    if not tower.num_prefix_tokens:
        raise SplitError(
            "vision_feature_select_strategy='default' drops the first token, and this vision tower has no class token "
            "there: it would drop a patch. Use 'full'"
        )
    return False


def load_llava(checkpoint: str, dtype: Any = "auto") -> LlavaForConditionalGeneration:
    """A LLaVA by its name on the hub or its folder, in eval mode.

    Raises:
        SplitError: it cannot be had, in one line.
    """
    with one_line(f"cannot load LLaVA from {checkpoint}"):
        config = AutoConfig.from_pretrained(checkpoint)
        if not isinstance(config, LlavaConfig):
            raise SplitError(f"{checkpoint} is a {config.model_type} model; a LLaVA 1.5 (model type llava) is needed")
        return LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype).eval()


def image_statistics(checkpoint: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that the checkpoint's image processor normalises with."""
    with one_line(f"cannot read the image processor of {checkpoint}"):
        processor = AutoImageProcessor.from_pretrained(checkpoint)
        return tuple(processor.image_mean), tuple(processor.image_std)


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """transformers' and the hub's failures, whose texts run over many lines, as one SplitError."""
    try:
        yield
    except SplitError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise SplitError(f"{what}: {first_line(error)}") from None
