"""A cheap start for a fresh projector (not in the paper): images point at words before a language model is asked.

From random weights, hundreds of passes through the language model teach a projector no more than which answers are
frequent. What it must find first needs no such pass: the mean of an image's tokens should lie in the direction of the
words of its answer, among all words of the table, and tokens should be as long as words are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE = 0.05
"""Cosines are divided by it."""


@dataclass(frozen=True)
class Pointing:
    """How near images are to every word.

    Args:
        logits: (b, v) cosine of an image's mean token and a word's embedding, over TEMPERATURE.
        wanted: (b, v) share of each word in the right answer; rows sum to one.
        length: (b,) mean squared deviation of the tokens' lengths from a word's, relative to that.
    """

    logits: Float[Tensor, "b v"]
    wanted: Float[Tensor, "b v"]
    length: Float[Tensor, " b"]

    def error(self) -> Float[Tensor, " b"]:
        """Cross-entropy over the vocabulary, and the deviation of lengths."""
        return F.cross_entropy(self.logits, self.wanted, reduction="none") + self.length

    def exact(self) -> Float[Tensor, " b"]:
        """1 where the nearest word is one of the answer, else 0."""
        return (self.wanted.gather(1, self.logits.argmax(1, keepdim=True))[:, 0] > 0).float()


def point(tokens: Float[Tensor, "t w"], counts: Sequence[int], answers: Sequence[str], language: Any) -> Pointing:
    """Compare images with the words of a language model.

    Args:
        tokens: projected visual tokens, image after image.
        counts: tokens of each image.
        answers: the right one for each image.
        language: model and tokenizer (`split_tasks.vqa.language.Language`).
    """
    table = language.model.get_input_embeddings().weight
    lengths = table.float().norm(dim=1)
    owner = torch.repeat_interleave(torch.tensor(counts, device=tokens.device))
    off = (tokens.norm(dim=1) / lengths.mean() - 1).square()
    sums = tokens.new_zeros(len(counts), tokens.shape[1]).index_add(0, owner, tokens)
    nearness = F.linear(F.normalize(sums, dim=1).to(table.dtype), table).float() / lengths
    wanted = torch.zeros_like(nearness)
    for row, answer in zip(wanted, answers, strict=True):
        ids = language.tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
        row[ids] = 1 / len(set(ids))
    deviation = off.new_zeros(len(counts)).index_add(0, owner, off) / tokens.new_tensor(counts)
    return Pointing(nearness / TEMPERATURE, wanted, deviation)
