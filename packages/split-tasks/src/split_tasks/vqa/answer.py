"""``python -m split_tasks.vqa.answer run_dir=RUN questions=FILE images=FOLDER answers=FILE``: answer a question file.

The questions are LLaVA's jsonl, {question_id, image, text}. The run is one of task=vqa and answers as it was evaluated;
without a training run, recipe=FILE.yaml answers with a checkpoint as it is. Killed, the same command goes on where it
stopped. The answers file is LLaVA's, for `python -m split_tasks.vqa.scoring`.

    method=NAME       one of the run's methods (dense, random, entropy ...); its own policy by default
    batch_size=N      8 by default
    ocr=no            leave the line of reference OCR tokens out of TextVQA's prompts
    max_new_tokens=N  the task's own by default
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError

from split_core import resolve
from split_core.engine.adapt import own_settings
from split_core.engine.deploy import deployed
from split_core.engine.methods import is_learned, plan
from split_core.engine.session import Learner, Session
from split_core.errors import SplitError, unknown
from split_core.pictures import read_rgb
from split_core.plugins import PluginConfig
from split_core.task import DataContext
from split_core.wrapping import backbone_info
from split_tasks.vqa.answers import AnswersFile
from split_tasks.vqa.data.pictures import as_input
from split_tasks.vqa.prompts import IMAGE
from split_tasks.vqa.scoring.files import Record, read_jsonl
from split_tasks.vqa.scoring.words import without_ocr
from split_tasks.vqa.task import VisualQuestions


class AnswerConfig(PluginConfig):
    """What the command takes."""

    run_dir: Path
    questions: Path
    images: Path
    answers: Path
    recipe: Path | None = None
    method: str | None = None
    batch_size: int = Field(8, ge=1)
    ocr: bool = True
    max_new_tokens: int | None = Field(None, ge=1)


def answer_file(learner: Learner, questions: Sequence[Record], config: AnswerConfig) -> int:
    """Answer what has no answer yet; returns how many questions that were.

    Raises:
        SplitError: a question or its picture is not as it should be; it is named, and nothing is written.
    """
    task = learner.task
    if not isinstance(task, VisualQuestions):
        raise SplitError(f"run_dir={config.run_dir} is no run of task=vqa")
    check_questions(questions, config)
    if not config.ocr:
        questions = [{**question, "text": without_ocr(question["text"])} for question in questions]
    file = AnswersFile(config.answers)
    left = file.left(questions)
    options = {} if config.max_new_tokens is None else {"max_new_tokens": config.max_new_tokens}
    with file.open():
        for start in range(0, len(left), config.batch_size):
            batch = left[start : start + config.batch_size]
            texts, counts = answer_batch(learner, task, batch, config.images, options)
            file.write(batch, texts)
            print(f"{len(file.done)}/{len(questions)}, {sum(counts) / len(counts):.0f} visual tokens", file=sys.stderr)
    return len(left)


def check_questions(questions: Sequence[Record], config: AnswerConfig) -> None:
    """Refuse what would fail only after an hour of answering.

    Raises:
        SplitError: no questions, or one without id, text or picture.
    """
    if not questions:
        raise SplitError(f"questions={config.questions}: the file holds no question")
    for number, question in enumerate(questions, start=1):
        name = f"{config.questions}, question {question.get('question_id', f'number {number}')}"
        for key, kind in (("question_id", (str, int)), ("text", str), ("image", str)):
            if not isinstance(question.get(key), kind) or question[key] == "":
                raise SplitError(f"{name}: {key} is {question.get(key, 'missing')!r}; LLaVA's question files have one")
        if not (config.images / question["image"]).is_file():
            raise SplitError(f"{name}: there is no picture {config.images / question['image']}")
        if question["text"].count(IMAGE) > 1:
            raise SplitError(f"{name}: its text has {question['text'].count(IMAGE)} {IMAGE} for one picture")


@torch.no_grad()
def answer_batch(
    learner: Learner, task: VisualQuestions, batch: Sequence[Record], folder: Path, options: dict[str, Any]
) -> tuple[list[str], tuple[int, ...]]:
    """Answers, and the visual tokens of each image."""
    model = learner.model
    info, size = backbone_info(model.vit, stages=1, budget=None), tuple(model.vit.patch_embed.img_size)
    channels = model.vit.patch_embed.proj.in_channels
    mean, std = info.mean[:channels], info.std[:channels]
    context = DataContext("test", image_size=(size[0], size[1]), mean=mean, std=std, in_chans=channels)
    pictures = [as_input(read_rgb(folder / question["image"]), context, (size[0], size[1])) for question in batch]
    images = torch.stack(pictures).to(model.vit.patch_embed.proj.weight.device)
    features = model.forward_features(images)
    return task.answer(model, features, [question["text"] for question in batch], **options), features.layout.lengths


def chosen(session: Session, name: str | None) -> Learner:
    """A method of the run as it was evaluated; without trained weights, an unlearned policy on the checkpoint."""
    methods = {method.name: method for method in plan(session.config)}
    name = name or str(session.config.policy["name"])
    if name not in methods:
        raise SplitError(unknown("method", name, methods))
    if (session.run_dir / "models").is_dir():
        return deployed(session, methods[name])
    if is_learned(methods[name].policy):
        raise SplitError(f"policy {name} is learned, and {session.run_dir} holds no trained weights")
    return session.learner(own_settings(session.config, methods[name].policy), rule=session.config.decision).eval()


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        try:
            config = AnswerConfig.model_validate(resolve.parse_arguments(arguments))
        except ValidationError as error:
            fault = error.errors()[0]
            raise SplitError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}; --help lists the settings") from None
        written = config.run_dir / resolve.CONFIG_FILE
        written = written if written.is_file() or config.recipe is None else config.recipe
        if not written.is_file():
            raise SplitError(
                f"run_dir={config.run_dir}: there is no {written}; name a training run, or recipe=FILE.yaml"
            )
        if not config.images.is_dir():
            raise SplitError(f"images={config.images}: there is no such folder")
        run = resolve.load(resolve.merge(resolve.read_recipe(written), {"run_dir": str(config.run_dir)}))
        count = answer_file(chosen(Session(run), config.method), read_jsonl(config.questions), config)
    except SplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} answered, {config.answers} is complete")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
