"""The task: what is asked, what is learned, and what a wrong setting says; runs of seconds through the engine."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from split_core import resolve
from split_core.engine import draw, evaluate, train
from split_core.engine.session import Learner
from split_core.engine.timing import parts
from split_core.errors import SplitError
from split_core.task import DataContext, ModelContext, TaskContext, repeat_target
from split_core.wrapping import wrap
from split_tasks.vqa import answer
from split_tasks.vqa.configs import LlavaDataConfig, LlavaModelConfig, VisualQuestionsConfig
from split_tasks.vqa.data.llava import LlavaConversations
from split_tasks.vqa.data.pictures import as_input, padded_square
from split_tasks.vqa.expand import IGNORED
from split_tasks.vqa.models import build
from split_tasks.vqa.prompts import TEMPLATES, tokenize, with_image
from split_tasks.vqa.reader import Answers
from split_tasks.vqa.task import VisualQuestions
from tiny import Everywhere, Logits, images, tiny_vit
from vqa_models import BYTES, IMAGE, save_language, save_llava, tokenizer


@pytest.fixture(scope="module", autouse=True)
def few_images_calibrate() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("calibration", "masks"):
            patch.setattr(f"split_core.engine.{module}.CALIBRATION_IMAGES", 8)
        yield


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_language(tmp_path_factory.mktemp("language")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llava(tmp_path_factory.mktemp("llava")))


def make_task(language: str, **options: Any) -> VisualQuestions:
    torch.manual_seed(0)
    return VisualQuestions(VisualQuestionsConfig(language=language, **options), TaskContext((), 32))


TARGET = {"question": ["what is it?", "where?"], "answer": ["red", "top left"]}


def decoded(ids: torch.Tensor) -> str:
    return tokenizer(image=True).decode(ids)


def test_an_answer_and_its_end_are_learned_and_nothing_else() -> None:
    words = tokenizer(image=True)
    ids, labels = tokenize(with_image([("What?", "red"), ("Why?", "so")]), TEMPLATES["plain"], words)
    assert decoded(ids) == "Question: <image>\nWhat? Answer: red</s>\nQuestion: Why? Answer: so</s>"
    assert decoded(labels[labels != IGNORED]) == " red</s> so</s>"
    ids, labels = tokenize([("<image>\nWhat?", "red"), ("Why?", None)], TEMPLATES["vicuna"], words)
    assert decoded(ids).endswith("questions. USER: <image>\nWhat? ASSISTANT: red</s>USER: Why? ASSISTANT:")
    assert decoded(labels[labels != IGNORED]) == " red</s>"
    with pytest.raises(SplitError, match="turn 1 of 2 of a conversation has no answer"):
        tokenize([("a", None), ("b", "c")], TEMPLATES["plain"], words)


def test_the_error_is_each_answers_own_loss_whatever_the_batch(language: str) -> None:
    task, model = make_task(language), wrap(tiny_vit(num_classes=0), Logits(), rule="threshold")
    with torch.no_grad():
        features = model.forward_features(images(2))
        error = task.error(task.output(model, features, TARGET), TARGET)
        assert len(set(features.layout.lengths)) == 2
        for index, count in enumerate(features.layout.lengths):
            ids, labels = tokenize(
                with_image([(TARGET["question"][index], TARGET["answer"][index])]), task.template, task.tokenizer
            )
            at = int((ids == task.reader.image_token).nonzero())
            visual = task.reader.projector(features.patches.split(features.layout.lengths)[index])
            table = task.reader.language.get_input_embeddings()
            row = torch.cat([table(ids[:at]), visual, table(ids[at + 1 :])])
            wanted = torch.cat([labels[:at], labels.new_full((count,), IGNORED), labels[at + 1 :]])
            logits = task.reader.language(inputs_embeds=row[None]).logits[0, :-1]
            torch.testing.assert_close(error[index], F.cross_entropy(logits, wanted[1:]), rtol=1e-4, atol=1e-5)


def test_exact_is_what_greedy_decoding_writes(language: str) -> None:
    task, model = make_task(language, max_new_tokens=3), wrap(tiny_vit(num_classes=0), Everywhere())
    with torch.no_grad():
        features = model.forward_features(images(2))
        visual = features.patches
        batch = task.prompts({"question": TARGET["question"]}, features.layout.lengths)
        options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
        new = task.reader.generate(batch, visual, **options)
        # the right answer of the first sample is what it writes, of the second all but the last token
        right = new.clone()
        right[1, 2] = (right[1, 2] + 1) % 200
        longer = type(batch)(
            torch.cat([batch.ids, right], 1), F.pad(batch.mask, (0, 3), value=True), F.pad(batch.image, (0, 3)),
            torch.cat([torch.full_like(batch.ids, IGNORED), right], 1),
        )  # fmt: skip
        assert task.reader.answers(longer, visual).exact().tolist() == [1.0, 0.0]


def test_a_fresh_projector_learns_to_point_at_words(language: str) -> None:
    task, model = make_task(language, learn="words"), wrap(tiny_vit(num_classes=0), Logits(), rule="threshold")
    target = {"question": ["a", "b"], "answer": ["no", "yo"]}
    with torch.no_grad():
        features = model.forward_features(images(2))
        found = task.output(model, features, target)
        table = task.reader.language.get_input_embeddings().weight
        for index, tokens in enumerate(task.reader.projector(features.patches).split(features.layout.lengths)):
            near = F.cosine_similarity(tokens.mean(0), table, dim=1) / 0.05
            ids = task.tokenizer(f" {target['answer'][index]}")["input_ids"]
            wanted = (
                -near.log_softmax(0)[ids].mean() + (tokens.norm(dim=1) / table.norm(dim=1).mean() - 1).pow(2).mean()
            )
            torch.testing.assert_close(task.error(found, target)[index], wanted)
            assert bool(task.score(found, target)[index]) == (int(near.argmax()) in ids)
    rate = torch.optim.Adam(task.reader.projector.parameters(), 1e-2)
    for _ in range(80):
        loss = task.loss(task.output(model, features, target), target, features)
        rate.zero_grad()
        loss.backward()
        rate.step()
    assert task.score(task.output(model, features, target), target).tolist() == [1, 1]
    with pytest.raises(SplitError, match=r"task.learn=words needs data with one answer"):
        task.output(model, features, {"turns": [[("a", "b")]] * 2})


def test_rollouts_share_the_questions(language: str) -> None:
    task, model = make_task(language), wrap(tiny_vit(num_classes=0), Everywhere())
    with torch.no_grad():
        features = model.forward_features(torch.cat([images(2)] * 3))
        repeated = repeat_target(TARGET, 3)
        error = task.error(task.output(model, features, repeated), repeated).view(3, 2)
    torch.testing.assert_close(error, error[:1].expand(3, -1))


def test_only_the_projector_is_trained_and_saved(language: str) -> None:
    task, model = make_task(language), wrap(tiny_vit(num_classes=0), Everywhere())
    assert {name.split(".")[1] for name, _ in task.named_parameters()} == {"projector"}
    output = task.output(model, model.forward_features(images(2)), TARGET)
    task.loss(output, TARGET, None).backward()
    assert task.reader.projector.linear_1.weight.grad.abs().sum() > 0
    assert model.vit.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in task.reader.language.parameters())


def test_what_it_says_and_what_is_missing(language: str) -> None:
    task, model = make_task(language, max_new_tokens=2), wrap(tiny_vit(num_classes=0), "entropy", budget=0.5)
    features = model.forward_features(images(2))
    assert all(text.endswith("(7 of 16 tokens)") for text in task.say(model, features, None))
    assert task.output(model, features).logits.shape == (2, BYTES)  # for timing: no question, no answer
    with pytest.raises(SplitError, match="task=vqa needs data with questions"):
        task.output(model, features, {"label": torch.zeros(2)})
    twice = {"question": ["a", "<image> <image>"], "answer": ["a", "b"], "id": ["a", "b"]}
    with pytest.raises(SplitError, match="sample b: its prompt has 2 <image> placeholders for 1 image"):
        task.output(model, features, twice)
    with pytest.raises(SplitError, match=r"task.language is needed"):
        VisualQuestions(VisualQuestionsConfig(), TaskContext((), 32))
    with pytest.raises(SplitError, match=r"task.language: cannot load /absent: "):
        make_task("/absent")
    with pytest.raises(SplitError, match=r"is too long: .* at most 20 are read"):
        make_task(language, max_tokens=20).output(model, features, TARGET)


def test_kinds_are_counted_apart(language: str) -> None:
    def answers(right: list[bool]) -> Answers:
        """One token each, 1 being the right one."""
        logits = F.one_hot(torch.tensor(right).long(), 2).float()
        return Answers(logits, torch.ones(2, dtype=torch.long), torch.arange(2), 2)

    metric = make_task(language).metric()
    metric.update(answers([True, False]), {"kind": ["what", "where"]})
    metric.update(answers([True, True]), {"kind": ["where", "what"]})
    assert metric.compute() == {"accuracy_what": 1.0, "accuracy_where": 0.5}


RUN: dict[str, Any] = {
    "task": {"name": "vqa", "max_new_tokens": 3},
    "data": {"name": "easy_vqa"},
    "model": {"name": "digits_vit", "weights": "none", "dim": 16, "depth": 1, "heads": 2},
    "policy": "xattn",
    "budget": 0.7,
    "adapt": {"images": 8, "batch_size": 4, "dense_fraction": 0.25, "freeze": ["vit.head"]},
    "estimator": {"name": "ppo", "images": 8, "batch_size": 4, "rollouts": 2},
    "eval": {"images": 4, "batch_size": 4, "methods": ["dense", "entropy", "resize"]},
    "bench": {"batch_sizes": [2], "repeats": 1, "warmup": 0},
    "device": "cpu",
    "threads": 2,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def trained(language: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a finished run, with a picture of one's own beside it."""
    folder = tmp_path_factory.mktemp("trained")
    Image.new("RGB", (90, 70), "teal").save(folder / "picture.png")
    settings = resolve.merge(RUN, {"run_dir": str(folder / "run"), "task": {"language": language}})
    train.main(resolve.load(settings))
    return settings


def test_a_run_through_the_engine(trained: dict[str, Any]) -> None:
    results = json.loads((Path(trained["run_dir"]) / "results.json").read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == ["dense", "entropy", "resize", "xattn_warmstart", "xattn"]
    assert 0 < rows["xattn"]["error"] < 20
    for row in rows.values():
        assert row["samples_per_s"] == pytest.approx(2 / (row["vision_s"] + row["prefill_s"] + row["decode_s"]))
        assert {"prefill_speedup", "prefill_ideal", "patch_tokens"} < set(row["further"])
    assert [rows[name]["patch_tokens"] for name in ("dense", "resize")] == [100, 64]
    assert rows["resize"]["prefill_ideal"] > rows["dense"]["prefill_ideal"] == rows["dense"]["ideal_speedup"] == 1


def test_a_question_about_a_picture_of_ones_own(trained: dict[str, Any]) -> None:
    run_dir = Path(trained["run_dir"])
    asked = {"do": "draw", "draw": {"image": str(run_dir.parent / "picture.png"), "question": "what colour?"}}
    draw.main(resolve.load(resolve.merge(trained, asked)))
    assert (run_dir / "report" / "draw_picture.png").is_file()


def test_a_question_file_is_answered(
    trained: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "a.jsonl"
    rows = [{"question_id": i, "image": "picture.png", "text": f"what {i}?"} for i in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = Path(trained["run_dir"]).parent
    command = [f"run_dir={folder / 'run'}", f"questions={questions}", f"images={folder}", f"answers={answers}"]
    assert answer.main([*command, "method=entropy", "batch_size=2"]) == 0
    assert [json.loads(line)["question_id"] for line in answers.read_text().splitlines()] == [0, 1, 2]
    assert answer.main([*command, "method=entropy"]) == 0
    assert "0 answered" in capsys.readouterr().out
    assert answer.main([*command, "method=resize", f"answers={tmp_path / 'b.jsonl'}"]) == 0
    assert "3 answered" in capsys.readouterr().out
    for wrong, message in (
        ("method=entropi", "Did you mean entropy?"),
        ("batch_size=0", "batch_size: "),
        (f"run_dir={tmp_path}", "there is no "),
        (f"images={tmp_path / 'absent'}", "there is no such folder"),
    ):
        assert answer.main([*command, wrong]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no question"),
        ([{"question_id": 1, "image": "picture.png"}], "question 1: text is 'missing'"),
        ([{"image": "picture.png", "text": "?"}], "question number 1: question_id is 'missing'"),
        ([{"question_id": 1, "image": 5, "text": "?"}], "question 1: image is 5"),
        ([{"question_id": 1, "image": "gone.png", "text": "?"}], "question 1: there is no picture "),
        ([{"question_id": 1, "image": "picture.png", "text": "<image> <image>"}], "has 2 <image> for one picture"),
        ([{"question_id": 1, "image": "picture.png", "text": "?"}] * 2, "the same question_id and text: 1, '?'"),
    ],
)
def test_a_faulty_question_is_named_before_anything_is_written(
    trained: dict[str, Any], rows: list[Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(trained["run_dir"]).parent
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [f"run_dir={folder / 'run'}", f"questions={tmp_path / 'q.jsonl'}", f"images={folder}", "method=dense"]
    assert answer.main([*command, f"answers={tmp_path / 'new' / 'a.jsonl'}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert answer.main([*command, f"answers={tmp_path}"]) == 2


def test_decoding_apart_is_what_generation_writes(language: str) -> None:
    task, model = make_task(language, max_new_tokens=5), wrap(tiny_vit(num_classes=0), Logits(), rule="threshold")
    with torch.no_grad():
        features = model.forward_features(images(3))
        batch = task.prompts({"question": [task.config.question] * 3}, features.layout.lengths)
        assert not batch.mask.all()
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        expected = task.reader.generate(batch, features.patches, **options)
        assert torch.equal(task.beyond(model, features)["decode"](), expected)


def test_flops_of_prefill_are_those_counted_by_hand(language: str) -> None:
    task = make_task(language)
    words = len(tokenize([("What is in the picture?", None)], task.template, task.tokenizer)[0]) + len("\n")
    layer = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 96  # q, o; k, v of half the heads; MLP

    def wanted(visual: int) -> float:
        n = visual + words
        pairs = sum(range(1, n + 1))
        return visual * 2 * (32 * 48 + 48 * 48) + n * 2 * 2 * layer + 2 * 4 * 48 * pairs + 2 * BYTES * 48

    assert task.flops(16) == wanted(16)
    assert task.flops(np.array([4, 9])).tolist() == [wanted(4), wanted(9)]


def test_the_parts_of_an_answers_time(language: str) -> None:
    task = make_task(language, max_new_tokens=2)
    models = {"dense": Everywhere(), "coarse": Logits()}
    learners = {
        name: Learner(wrap(tiny_vit(num_classes=0), policy, budget=b, rule="image"), task)
        for (name, policy), b in zip(models.items(), (1.0, 0.3), strict=True)
    }
    ticks = itertools.count()
    rows = parts(learners, (images(2), None), repeats=1, warmup=1, clock=lambda: float(next(ticks)))
    times = {f"{part}_s": 1.0 for part in ("vision", "prefill", "decode")}
    same = {"samples_per_s": 2 / 3, "prefill_speedup": 1.0}
    assert rows == {
        "dense": {"patch_tokens": 16.0, "prefill_ideal": 1.0, **times, **same},
        "coarse": {"patch_tokens": 4.0, "prefill_ideal": task.flops(16) / task.flops(4), **times, **same},
    }
    del learners["dense"]
    assert set(parts(learners, (images(2), None), repeats=1, warmup=0, clock=time.perf_counter)["coarse"]) == {
        "patch_tokens",
        "samples_per_s",
        *times,
    }


def turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def conversations(tmp_path: Path, count: int = 12) -> dict[str, Any]:
    picture = Image.effect_noise((40, 20), 90).convert("RGB")
    picture.paste("red", (20, 0, 40, 20))
    picture.save(tmp_path / "p.png")
    records = [
        {
            "id": f"r{i}", "image": "p.png",
            "conversations": [
                {"from": "human", "value": f"<image>\nWhat is {i}?"}, {"from": "gpt", "value": "red"},
                {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "yes"},
            ],
        }
        for i in range(count)
    ]  # fmt: skip
    records.append({"id": "text", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]})
    path = tmp_path / "records.json"
    path.write_text(json.dumps(records))
    return {"annotations": str(path), "root": str(tmp_path)}


def test_a_llava_checkpoint_through_the_engine(checkpoint: str, tmp_path: Path) -> None:
    run = {key: value for key, value in RUN.items() if key != "task"} | {
        "task": "vqa",
        "data": {"name": "llava", "val": 0.5, **conversations(tmp_path)},
        "model": {"name": "llava", "checkpoint": checkpoint},
        "policy": "entropy",
        "adapt": {"images": 4, "batch_size": 2, "backbone_lr": 1e-4},
        "eval": {"images": 4, "batch_size": 2, "methods": ["dense"]},
    }
    run_dir = tmp_path / "run"
    train.main(resolve.load(resolve.merge(run, {"run_dir": str(run_dir)})))
    rows = {row["method"]: row for row in json.loads((run_dir / "results.json").read_text())["rows"]}
    assert 0.25 <= rows["entropy"]["token_fraction"] < rows["dense"]["token_fraction"] == 1
    recipe = tmp_path / "plain.yaml"
    recipe.write_text(json.dumps(run))
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "image": "p.png", "text": "what?"}) + "\n")
    paths = [f"questions={questions}", f"images={tmp_path}", f"answers={tmp_path / 'a.jsonl'}"]
    assert answer.main([f"run_dir={tmp_path / 'none'}", f"recipe={recipe}", "max_new_tokens=2", *paths]) == 0
    evaluate.main(resolve.load(resolve.merge(run, {"run_dir": str(run_dir), "do": "eval"})))


def test_the_parts_of_a_checkpoint_belong_together(checkpoint: str) -> None:
    config = LlavaModelConfig(checkpoint=checkpoint)
    tower = build(config, ModelContext(0))
    task = VisualQuestions(VisualQuestionsConfig(), TaskContext((), 32, backbone=tower))
    assert task.pretrained
    assert task.template is TEMPLATES["vicuna"]
    assert task.reader.image_token == IMAGE
    assert tower.pretrained_cfg["mean"][0] == pytest.approx(0.48145466)
    with pytest.raises(SplitError, match="model=llava brings its own language model"):
        VisualQuestions(VisualQuestionsConfig(language="smollm2"), TaskContext((), 32, backbone=tower))


def test_conversations_of_llava(tmp_path: Path) -> None:
    given = conversations(tmp_path)
    config = LlavaDataConfig(**given, val=0.25)
    train_data, val = (LlavaConversations(config, DataContext(split)) for split in ("train", "val"))
    assert (len(train_data), len(val)) == (9, 3)  # the record of text alone is left out
    names = [{data[i]["target"]["id"] for i in range(len(data))} for data in (train_data, val)]
    assert not names[0] & names[1]
    assert train_data[0]["target"]["turns"][1] == ("Sure?", "yes")
    assert train_data[0]["image"].shape == (3, 336, 336)
    half = LlavaConversations(LlavaDataConfig(**given, subset=0.5, val=0.2), DataContext("train", seed=1))
    assert len(half) == 5
    for change, message in (
        ({"image": ["a", "b"]}, "record r0: image=.*several pictures"),
        ({"conversations": [turn("gpt", "x")]}, "record r0: its turns should go human, gpt"),
        ({"conversations": []}, "and go nowhere"),
        (
            {"conversations": [{"from": "human", "value": "<image> <image>"}, {"from": "gpt", "value": "x"}]},
            "2 <image>",
        ),
        ({"conversations": 3}, "conversations should be a list"),
    ):
        record = {"id": "r0", "image": "p.png", "conversations": [], **change}
        (tmp_path / "bad.json").write_text(json.dumps([record, record]))
        data = LlavaConversations(
            LlavaDataConfig(annotations=tmp_path / "bad.json", root=tmp_path), DataContext("train")
        )
        with pytest.raises(SplitError, match=message):
            data[0]


def test_everything_wrong_with_the_records_is_told_in_one_go(tmp_path: Path) -> None:
    given = conversations(tmp_path)
    path = Path(given["annotations"])
    records = json.loads(path.read_text())
    (tmp_path / "cut.png").write_bytes((tmp_path / "p.png").read_bytes()[:60])
    records[0]["image"], records[1]["image"], records[2]["image"] = "gone.png", "cut.png", ["p.png", "p.png"]
    records[3]["conversations"], records[8]["id"] = [], "r7"
    path.write_text(json.dumps(records))
    problems = [
        problem
        for split in ("train", "val")
        for problem in LlavaConversations(LlavaDataConfig(**given, val=1e-6), DataContext(split)).problems()
    ]
    faults = sorted((problem.kind, problem.what.split(":")[0]) for problem in problems if problem.fault)
    assert faults[0] == ("missing pictures", "gone.png")
    assert faults[1:3] == [("records that are not as LLaVA's", f"record r{i}") for i in (2, 3)]
    assert faults[3][0] == "unreadable"
    assert "cut.png" in faults[3][1]
    assert len(faults) == 4
    assert [p.what for p in problems if not p.fault] == ["r7 (2 times)"]


def test_pictures_become_squares_on_the_mean_colour() -> None:
    picture = Image.new("RGB", (40, 20), (255, 0, 0))
    square = padded_square(picture, (1, 2, 3))
    assert square.size == (40, 40)
    assert (square.getpixel((0, 0)), square.getpixel((0, 10)), square.getpixel((0, 30))) == (
        (1, 2, 3), (255, 0, 0), (1, 2, 3),
    )  # fmt: skip
    context = DataContext("test", mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2))
    pixels = as_input(picture, context, (8, 8))
    assert pixels.shape == (3, 8, 8)
    assert pixels[:, 0].abs().max() < 0.05
    assert pixels[0, 4, 4] == pytest.approx(3.0, abs=0.01)
