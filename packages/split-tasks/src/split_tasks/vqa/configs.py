"""Settings of the entries for visual question answering. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from split_core.plugins import PluginConfig

Count = Annotated[int, Field(ge=1)]


class VisualQuestionsConfig(PluginConfig):
    """Task `vqa`.

    Attributes:
        language: the frozen language model: smollm2 (from PyPI), a folder or a name on the hub; None for the one that
            comes with the model (model=llava).
        dtype: numbers that the language model computes with; auto is what its file has.
        attention: its implementation, as transformers calls it (eager, sdpa ...); auto is transformers' own choice.
        learn: what the projector learns from: the language model's loss on answers, or (words), as a cheap start for a
            fresh one, where in the space of words an image should lie, for which the language model is not run.
        prompt: how a question is put: plain (Question: ... Answer:) or vicuna (LLaVA-1.5); None for vicuna where the
            language model comes with the model, else plain.
        max_tokens: longest sequence that is read, visual tokens included; training texts are cut there. None for the
            language model's own.
        max_new_tokens: of a generated answer.
        question: asked where images come without one (timing, pictures).
        object_share: a fine cell is on an object when at least this share of its pixels is.
    """

    language: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: str = "auto"
    learn: Literal["answers", "words"] = "answers"
    prompt: Literal["plain", "vicuna"] | None = None
    max_tokens: Count | None = None
    max_new_tokens: Count = 16
    question: str = "What is in the picture?"
    object_share: Annotated[float, Field(gt=0, le=1)] = 0.1


class LlavaModelConfig(PluginConfig):
    """Model `llava`.

    Attributes:
        checkpoint: a LLaVA 1.5 of transformers: a folder, or a name on the hub.
        dtype: of the whole checkpoint while it is loaded; the vision tower is trained in float32.
    """

    checkpoint: str = "llava-hf/llava-1.5-7b-hf"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class EasyVQAConfig(PluginConfig):
    """Data set `easy_vqa`.

    Attributes:
        val: images kept from the package's train split for val; all their questions go with them.
        kinds: kinds of question asked: shape, colour, yesno.
    """

    val: Annotated[int, Field(ge=1, le=3999)] = 400
    kinds: tuple[Literal["shape", "colour", "yesno"], ...] = ("shape", "colour", "yesno")


class LlavaDataConfig(PluginConfig):
    """Data set `llava`: conversations about pictures in LLaVA's own format.

    Attributes:
        annotations: the json file: a list of {id, image, conversations: [{from, value}, ...]}.
        root: folder that the pictures' paths are relative to.
        subset: share of the records that is used (the paper trains on 0.05), drawn by the seed.
        val: share of those that is kept for val and test.
    """

    annotations: Path
    root: Path
    subset: Annotated[float, Field(gt=0, le=1)] = 1.0
    val: Annotated[float, Field(gt=0, lt=1)] = 0.02
