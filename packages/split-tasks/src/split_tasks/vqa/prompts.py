"""Conversations as token ids: how a question is put to a language model, and which tokens are the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from split_core.errors import SplitError
from split_tasks.vqa.expand import IGNORED

IMAGE = "<image>"
Turn = tuple[str, str | None]
"""Question and answer; the last answer is None where the model is to write it."""


@dataclass(frozen=True)
class Template:
    """The text around questions and answers: begin, then for each turn ask + question + answer + text + end.

    Args:
        begin: before everything.
        ask: before a question.
        answer: between a question and its answer.
        between: after the end of an answer and before the next question.
    """

    begin: str
    ask: str
    answer: str
    between: str = ""

    def pieces(self, turns: Sequence[Turn], end: str) -> list[tuple[str, bool]]:
        """Text in order, and whether it is to be learned (answers and the ends that follow them)."""
        pieces = [(self.begin, False)]
        for index, (question, answer) in enumerate(turns):
            pieces.append(((self.between if index else "") + self.ask + question + self.answer, False))
            if answer is not None:
                pieces.append((f" {answer}{end}", True))
            elif index + 1 < len(turns):
                raise SplitError(f"turn {index + 1} of {len(turns)} of a conversation has no answer")
        return pieces


TEMPLATES = {
    "plain": Template("", "Question: ", " Answer:", "\n"),
    # the prompt that Vicuna v1.5 and LLaVA-1.5 were trained with
    "vicuna": Template(
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. ",
        "USER: ", " ASSISTANT:",
    ),
}  # fmt: skip


def with_image(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with a placeholder before the first question, if none of them has one."""
    if any(IMAGE in question for question, _ in turns):
        return list(turns)
    (question, answer), *rest = turns
    return [(f"{IMAGE}\n{question}", answer), *rest]


def tokenize(turns: Sequence[Turn], template: Template, tokenizer: Any) -> tuple[Int[Tensor, " l"], Int[Tensor, " l"]]:
    """Ids and labels. The text is tokenized whole, as it will be in generation; a token belongs to an answer if it lies
    in its text."""
    pieces = template.pieces(turns, tokenizer.eos_token)
    spans, at = [], 0
    for text, learned in pieces:
        if learned:
            spans.append((at, at + len(text)))
        at += len(text)
    encoded = tokenizer("".join(text for text, _ in pieces), return_offsets_mapping=True)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.long)
    inside = [
        any(first <= start and stop <= last and start < stop for first, last in spans)
        for start, stop in encoded["offset_mapping"]
    ]
    return ids, torch.where(torch.tensor(inside, dtype=torch.bool), ids, IGNORED)
