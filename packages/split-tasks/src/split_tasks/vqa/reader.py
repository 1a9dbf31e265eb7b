"""The reading side: a projector that turns visual tokens into words' embeddings, and a frozen language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.features import Features
from split_tasks.vqa.expand import IGNORED, Expanded


class Projector(nn.Module):
    """LLaVA-1.5's mlp2x_gelu, under the names of transformers' LlavaMultiModalProjector."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.linear_1, self.act, self.linear_2 = nn.Linear(dim, width), nn.GELU(), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "t d"]) -> Float[Tensor, "t w"]:
        """Visual tokens in the language model's width."""
        return self.linear_2(self.act(self.linear_1(x)))


@dataclass(frozen=True)
class Answers:
    """What the language model says where an answer is to be learned.

    Args:
        logits: (m, v) for every answer token of the batch.
        labels: (m,) the right ones.
        sample: (m,) whose answer each belongs to.
        batch: samples.
    """

    logits: Float[Tensor, "m v"]
    labels: Int[Tensor, " m"]
    sample: Int[Tensor, " m"]
    batch: int

    def error(self) -> Float[Tensor, " b"]:
        """Mean cross-entropy over the tokens of each answer: E(x, M), float32."""
        loss = F.cross_entropy(self.logits.float(), self.labels, reduction="none")
        return self._mean(loss)

    def exact(self) -> Float[Tensor, " b"]:
        """1 where every token of the answer, its end included, is the likeliest after those before it, else 0.

        That is when greedy decoding writes exactly this answer and stops.
        """
        right = (self.logits.argmax(-1) == self.labels).float()
        return (self._mean(right) > 1 - 0.5 / max(1, len(self.labels))).float()

    def _mean(self, values: Float[Tensor, " m"]) -> Float[Tensor, " b"]:
        total = values.new_zeros(self.batch).index_add(0, self.sample, values)
        return total / torch.bincount(self.sample, minlength=self.batch)


class Reader(nn.Module):
    """Projector and language model.

    The language model is shared and stays as it is: its parameters are not among this module's, so that they are
    neither trained nor saved with it. It follows the module from device to device.

    Args:
        language: a transformers model with a causal head (or a whole LLaVA, whose vision tower then rests).
        projector: (t, d) visual tokens to the language model's width.
        image_token: id of the placeholder.
    """

    language: Any

    def __init__(self, language: nn.Module, projector: nn.Module, image_token: int) -> None:
        super().__init__()
        self.projector = projector
        self.image_token = image_token
        object.__setattr__(self, "language", language)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Reader:
        self.language._apply(fn)
        return super()._apply(fn, recurse)

    @property
    def limit(self) -> int | None:
        """The longest sequence that the language model was made for."""
        config = self.language.config
        return getattr(getattr(config, "text_config", config), "max_position_embeddings", None)

    def embed(self, batch: Expanded, visual: Float[Tensor, "t d"] | None) -> Float[Tensor, "b l w"]:
        """Embeddings of the sequence: words from the language model's table, images through the projector."""
        embeddings = self.language.get_input_embeddings()(batch.ids)
        if visual is None:
            return embeddings
        projected = self.projector(visual).to(embeddings.dtype)
        # per-sample counts were checked when the batch was expanded
        assert int(batch.image.sum()) == projected.shape[0]
        return embeddings.masked_scatter(batch.image[..., None], projected)

    def inputs(self, batch: Expanded, visual: Float[Tensor, "t d"] | None) -> dict[str, Tensor]:
        """Keyword arguments of the language model's forward and generate."""
        inputs = {"inputs_embeds": self.embed(batch, visual), "attention_mask": batch.mask.long()}
        # models count positions from the padding on unless they are told
        return inputs if batch.mask.all() else inputs | {"position_ids": batch.positions}

    def answers(self, batch: Expanded, visual: Float[Tensor, "t d"] | None) -> Answers:
        """Logits at the answers' tokens; best padded left, where the answers of a batch stand together."""
        wanted = batch.labels[:, 1:] != IGNORED
        if not wanted.any(1).all():
            raise SplitError(f"sample {int((~wanted.any(1)).nonzero()[0])} of the batch has no answer to learn from")
        columns = wanted.any(0).nonzero().squeeze(1)
        logits = self.language(**self.inputs(batch, visual), use_cache=False, logits_to_keep=columns).logits
        sample, column = wanted[:, columns].nonzero(as_tuple=True)
        return Answers(logits[sample, column], batch.labels[:, 1:][:, columns][sample, column], sample, len(batch.ids))

    def prefill(self, batch: Expanded, visual: Float[Tensor, "t d"] | None) -> Answers:
        """Logits of the first word of the answers that are not there yet, without labels."""
        logits = self.language(**self.inputs(batch, visual), use_cache=False, logits_to_keep=1).logits[:, 0]
        rows = torch.arange(len(batch.ids), device=logits.device)
        return Answers(logits, torch.full_like(rows, IGNORED), rows, len(rows))

    @torch.no_grad()
    def decoding(
        self, batch: Expanded, visual: Float[Tensor, "t d"] | None, words: int
    ) -> Callable[[], Int[Tensor, "b words"]]:
        """Reads the prompts now and returns what decodes exactly so many words after them, greedily, once: decoding
        apart from prefill. The batch must be padded left."""
        read = self.language(**self.inputs(batch, visual), use_cache=True, logits_to_keep=1)
        cache, first = read.cache, read.logits[:, -1].argmax(-1)

        def decode() -> Tensor:
            mask, position, word, said = batch.mask.long(), batch.positions[:, -1:], first, [first]
            for _ in range(words - 1):
                mask, position = F.pad(mask, (0, 1), value=1), position + 1
                step = self.language(
                    input_ids=word[:, None], attention_mask=mask, position_ids=position, cache=cache,
                    use_cache=True,
                )  # fmt: skip
                word = step.logits[:, -1].argmax(-1)
                said.append(word)
            return torch.stack(said, 1)

        return decode

    @torch.no_grad()
    def generate(self, batch: Expanded, visual: Float[Tensor, "t d"] | None, **options: Any) -> Int[Tensor, "b new"]:
        """New tokens only. `options` are those of transformers' generate; the batch must be padded left."""
        inputs = self.inputs(batch, visual)
        inputs.pop("position_ids", None)  # generate derives them from the mask itself
        return self.language.generate(**inputs, **options)


def visual_tokens(features: Features, tower: Any, *, whole: bool = False) -> tuple[Tensor, tuple[int, ...]]:
    """(t, d) tokens that a language model reads, raster order by top-left cell, and how many each image has.

    Args:
        features: of the tower, with its taps where it has some.
        tower: the backbone; the layers of a `VisionTower` of several are laid side by side, in their order.
        whole: prefix tokens too (LlavaConfig.vision_feature_select_strategy is "full").
    """
    order = getattr(tower, "order", ())
    tokens = torch.cat([features.taps[tap] for tap in order], -1) if order else features.tokens
    if whole:
        return tokens, features.packed.segments.lengths
    return tokens.index_select(0, features.packed.patch_index), features.layout.lengths
