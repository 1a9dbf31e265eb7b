"""Task `vqa`: the error of a partition is the language model's loss on the answer (Sec. 3.3, 4.4)."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float
from torch import Tensor, distributed

from split_core.errors import SplitError
from split_core.task import Target, Task, TaskContext
from split_core.types import Grid
from split_tasks.objects import object_cells
from split_tasks.vqa.configs import LlavaModelConfig, VisualQuestionsConfig
from split_tasks.vqa.cost import prefill_flops
from split_tasks.vqa.expand import Expanded, expand
from split_tasks.vqa.language import Language, language_of_llava, load_language
from split_tasks.vqa.prompts import TEMPLATES, Turn, tokenize, with_image
from split_tasks.vqa.reader import Answers, Projector, Reader, visual_tokens
from split_tasks.vqa.words import Pointing, point

if TYPE_CHECKING:
    from split_core.features import Features
    from split_core.model import SplitViT
    from split_core.reducer import Reducer


class VisualQuestions(Task):
    """A frozen language model answers from the visual tokens; the projector between the two is trained.

    A target has "question" and "answer" (lists of b), or "turns" (lists of (question, answer) pairs); "id" names
    samples in messages and "kind" groups them in results.

    Args:
        config: the language model and the prompt.
        context: width of the tokens, and the backbone, which may bring its language model.
    """

    metric_name = "accuracy"
    model_head = False
    output_name = "prefill"

    def __init__(self, config: VisualQuestionsConfig, context: TaskContext) -> None:
        super().__init__()
        self.config = config
        language = _language(config, getattr(context.backbone, "checkpoint", None))
        self.language, self.tokenizer, self.whole = language, language.tokenizer, language.whole
        self.template = TEMPLATES[config.prompt or ("vicuna" if language.projector is not None else "plain")]
        projector = copy.deepcopy(language.projector)
        self.pretrained = projector is not None
        projector = projector or Projector(context.dim, language.width)
        self.reader = Reader(language.model, projector.float().requires_grad_(True), language.image_token)
        self.taps: tuple[int, ...] = getattr(context.backbone, "taps", ())

    def output(self, model: SplitViT | Reducer, features: Features, target: Target | None = None) -> Answers | Pointing:
        """Logits at the answers' tokens; with `learn=words` how near the image is to the answer's words.

        Args:
            target: questions and answers; None asks the default question and learns no answer, for timing.
        """
        visual, counts = visual_tokens(features, model.vit, whole=self.whole)
        if target is None:
            target = {"question": [self.config.question] * features.batch}
        elif self.config.learn == "words":
            if "answer" not in target:
                raise SplitError("task.learn=words needs data with one answer to each image: easy_vqa or composites")
            return point(self.reader.projector(visual), counts, target["answer"], self.language)
        batch = self.prompts(target, counts).to(visual.device)
        if "answer" not in target and "turns" not in target:
            return self.reader.prefill(batch, visual)
        return self.reader.answers(batch, visual)

    def error(self, output: Answers | Pointing, target: Target) -> Float[Tensor, " b"]:
        """The language model's mean loss over the tokens of each answer."""
        return output.error()

    def score(self, output: Answers | Pointing, target: Target) -> Float[Tensor, " b"]:
        """1 where greedy decoding gives exactly the answer, else 0."""
        return output.exact()

    def metric(self) -> KindAccuracy:
        """Accuracy by kind of question."""
        return KindAccuracy()

    def flops(self, tokens: Any) -> Any:
        """Of the projector and of reading a prompt with the default question; see `split_tasks.vqa.cost`."""
        return prefill_flops(self.reader, tokens, self._default_words)

    @cached_property
    def _default_words(self) -> int:
        """Tokens of the prompt with the default question, less those of the picture."""
        return int(self.prompts({"question": [self.config.question]}, [0]).mask.sum())

    def beyond(self, model: SplitViT | Reducer, features: Features) -> dict[str, Callable[[], object]]:
        """Decoding `max_new_tokens` words of an answer to the default question."""
        visual, counts = visual_tokens(features, model.vit, whole=self.whole)
        batch = self.prompts({"question": [self.config.question] * features.batch}, counts).to(visual.device)
        return {"decode": self.reader.decoding(batch, visual, self.config.max_new_tokens)}

    def answer(
        self, model: SplitViT | Reducer, features: Features, questions: Sequence[str], **options: Any
    ) -> list[str]:
        """Generated answers, greedy unless options of transformers' generate say otherwise."""
        visual, counts = visual_tokens(features, model.vit, whole=self.whole)
        batch = self.prompts({"question": questions}, counts).to(visual.device)
        settings = {"max_new_tokens": self.config.max_new_tokens, "do_sample": False, **options}
        settings |= {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.eos_token_id}
        new = self.reader.generate(batch, visual, **settings)
        return [text.strip() for text in self.tokenizer.batch_decode(new, skip_special_tokens=True)]

    def say(self, model: SplitViT | Reducer, features: Features, target: Target | None) -> list[str]:
        """The answer to each image's question, and the visual tokens that it took."""
        questions = None if target is None else target.get("question")
        given = self.answer(model, features, questions or [self.config.question] * features.batch)
        dense = features.layout.valid_cells.tolist()
        spent = zip(given, features.layout.lengths, dense, strict=True)
        return [f"{_caption(answer)}  ({count} of {of} tokens)" for answer, count, of in spent]

    def objects(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"] | None:
        """Fine cells on labelled objects; None when the data has no masks."""
        mask = target.get("mask")
        return None if mask is None else object_cells(mask, grid, patch_size, self.config.object_share)

    def prompts(self, target: Target, counts: Sequence[int]) -> Expanded:
        """The batch that the language model reads, padded left; one image for each sample.

        Raises:
            SplitError: a sample's prompt has other than one placeholder, or is too long; the message names it.
        """
        encoded = [tokenize(with_image(turns), self.template, self.tokenizer) for turns in conversations(target)]
        limit = self.config.max_tokens or self.reader.limit
        names = None if target.get("id") is None else [f"sample {name}" for name in target["id"]]
        return expand(
            [ids for ids, _ in encoded], [[count] for count in counts], image_token=self.reader.image_token,
            labels=[labels for _, labels in encoded], limit=limit, truncate="turns" in target, names=names,
        )  # fmt: skip


class KindAccuracy:
    """Accuracy over a data set by kind of question (`split_core.task.Metric`)."""

    def __init__(self) -> None:
        self.counts: dict[str, list[float]] = {}

    def update(self, output: Answers | Pointing, target: Target) -> None:
        """Count a batch; a target without kinds counts nothing."""
        for kind, right in zip(target.get("kind", ()), output.exact().tolist(), strict=False):
            seen = self.counts.setdefault(kind, [0.0, 0.0])
            seen[0] += right
            seen[1] += 1

    def compute(self) -> dict[str, Any]:
        """{"accuracy_KIND": share right} over all processes, kinds sorted."""
        parts: list[Any] = [self.counts]
        if distributed.is_available() and distributed.is_initialized():
            parts = [None] * distributed.get_world_size()
            distributed.all_gather_object(parts, self.counts)
        kinds = sorted({kind for part in parts for kind in part})
        total = {kind: [sum(part.get(kind, (0, 0))[i] for part in parts) for i in (0, 1)] for kind in kinds}
        return {f"accuracy_{kind}": right / seen for kind, (right, seen) in total.items()}


def _caption(answer: str) -> str:
    """A generated text on one short line."""
    return textwrap.shorten("".join(sign if sign.isprintable() else " " for sign in answer), 40, placeholder=" ...")


def conversations(target: Target) -> list[Sequence[Turn]]:
    """The turns of every sample.

    Raises:
        SplitError: the data has neither questions nor conversations.
    """
    if "turns" in target:
        return list(target["turns"])
    if "question" not in target:
        raise SplitError("task=vqa needs data with questions, e.g. data=easy_vqa, composites or llava")
    answers = target.get("answer") or [None] * len(target["question"])
    return [[(question, answer)] for question, answer in zip(target["question"], answers, strict=True)]


def _language(config: VisualQuestionsConfig, checkpoint: Any) -> Language:
    """The named language model, or the one that comes with the backbone."""
    if isinstance(checkpoint, LlavaModelConfig):
        if config.language is not None:
            raise SplitError(
                f"task.language={config.language}: model=llava brings its own language model, and its projector would "
                f"not fit another; leave task.language out"
            )
        return language_of_llava(checkpoint)
    if config.language is None:
        raise SplitError("task.language is needed: this model brings no language model. E.g. task.language=smollm2")
    return load_language(config.language, config.dtype, config.attention)
