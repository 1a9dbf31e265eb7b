"""Every scorer against cases computed by hand, and answers files that survive a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from split_core.errors import SplitError
from split_tasks.vqa.answers import AnswersFile
from split_tasks.vqa.scoring.__main__ import main, mme_truth
from split_tasks.vqa.scoring.choices import letter, mmbench, sqa
from split_tasks.vqa.scoring.normalise import normalise, normalise_textvqa, soft_accuracy
from split_tasks.vqa.scoring.words import gqa, plain_question, textvqa, vqa, without_ocr
from split_tasks.vqa.scoring.yesno import mme, mme_reading, pope, says_yes, yes_no


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The cat", "cat"),
        ("Two dogs", "2 dogs"),
        ("none", "0"),
        ("dont know", "don't know"),
        ("red/blue", "red blue"),
        ("red / blue", "red blue"),
        ("1,000", "1000"),
        ("wi-fi, fast", "wi fi fast"),  # the dash touches no space, the comma does
        ("3.5", "3.5"),
        ("5.", "5"),
        ("a.m.", "am"),
        ("what? no!", "what no"),  # the last sign touches no space and becomes one
        ("  An\tapple\n", "apple"),
    ],
)
def test_the_standard_form(answer: str, expected: str) -> None:
    assert normalise(answer) == expected


def test_textvqas_form_sets_the_genitive_apart() -> None:
    assert normalise_textvqa("McDonald's, what?") == "mcdonald 's what"


@pytest.mark.parametrize(
    ("agree", "expected"),
    # of ten annotators n say it: n of the leave-one-outs see n - 1 of them, the others n
    [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)],
)
def test_soft_accuracy(agree: int, expected: float) -> None:
    answers = ["yes"] * agree + [f"other {i}" for i in range(10 - agree)]
    assert soft_accuracy("yes", answers) == pytest.approx(expected)


def annotated(answers: list[str], question: int = 1, kind: str = "other") -> dict:
    return {"question_id": question, "answers": [{"answer": a} for a in answers], "answer_type": kind}


def test_vqa_normalises_only_where_annotators_disagree() -> None:
    truth = {"annotations": [annotated(["a cat"] * 10), annotated(["a cat"] * 9 + ["dog"], 2, "animal")]}
    scores = vqa({"1": "cat", "2": "the cat"}, truth)
    assert scores == {"accuracy": 50.0, "accuracy_other": 0.0, "accuracy_animal": 100.0}


def test_gqa() -> None:
    truth = {"1": {"answer": "yes"}, "2": {"answer": "red"}, "3": {"answer": "left"}, "4": {"answer": "car"}}
    assert gqa({"1": "Yes.", "2": "Red", "3": "right", "4": "a car"}, truth) == {"accuracy": 50.0}
    with pytest.raises(SplitError, match=r"2 of 4 questions have no answer, e.g. 3, 4; finish"):
        gqa({"1": "yes", "2": "red"}, truth)


OCR = "what is the brand?\nReference OCR token: Nokia, 2\nAnswer the question using a single word or phrase."


def test_textvqa_matches_by_image_and_question() -> None:
    assert plain_question(OCR) == plain_question(without_ocr(OCR)) == "what is the brand?"
    assert plain_question("Reference OCR token: a\nwhat?\nAnswer") == "what?"
    assert plain_question("OCR tokens: a b. Question: what is it? Short answer:") == "what is it?"
    assert without_ocr(OCR) == "what is the brand?\nAnswer the question using a single word or phrase."
    truth = {
        "data": [
            {"image_id": "x", "question": "What is the brand?", "answers": ["Nokia"] * 3 + ["nope"] * 7},
            {"image_id": "x", "question": "how many?", "answers": ["two"] * 10},
        ]
    }
    lines = [
        {"question_id": "x", "prompt": "how many?\nAnswer", "text": "2"},
        {"question_id": "x", "prompt": OCR, "text": "nokia."},
    ]
    assert textvqa(lines, truth) == {"accuracy": pytest.approx(95.0)}
    with pytest.raises(SplitError, match="no question 'who' about image x"):
        textvqa([{"question_id": "x", "prompt": "who", "text": ""}], truth)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("B", "B"),
        ("B. Because", "B"),
        ("I think so. The answer is C.", "C"),
        ("The answer is A. The answer is B.", None),
        ("Bread", None),
        ("F", None),
    ],
)
def test_letters(said: str, expected: str | None) -> None:
    assert letter(said, "ABCDE") == expected


def test_sqa() -> None:
    problems = {
        "1": {"answer": 0, "image": "image.png"},
        "2": {"answer": 1, "image": None},
        "3": {"answer": 2, "image": "image.png"},
    }
    splits = {"test": ["1", "2", "3"]}
    scores = sqa({"1": "A", "2": "B.", "3": "D"}, problems, splits)
    assert scores == {"accuracy": pytest.approx(100 / 3), "accuracy_image": 50.0}
    assert sqa({"1": "A", "3": "C"}, problems, splits) == {"accuracy": 100.0, "accuracy_image": 100.0}
    with pytest.raises(SplitError, match="1 of 2 questions have no answer"):
        sqa({"1": "A"}, problems, splits)


def test_mmbench_counts_a_question_right_in_every_order_only() -> None:
    rows = [
        {"index": "7", "answer": "A", "category": "colour"},
        {"index": "1000007", "answer": "B", "category": "colour"},
        {"index": "8", "answer": "C", "category": "place"},
    ]
    assert mmbench({"7": "A", "1000007": "B", "8": "C"}, rows) == {
        "accuracy": 100.0, "accuracy_colour": 100.0, "accuracy_place": 100.0,
    }  # fmt: skip
    assert mmbench({"7": "A", "1000007": "A", "8": "C"}, rows)["accuracy"] == 50.0


def test_pope() -> None:
    assert [says_yes(t) for t in ("Yes", "No", "no, there is", "There is not one", "Nothing", "Yes. No")] == [
        True, False, False, False, True, True,
    ]  # fmt: skip
    # 2 hits, 1 false alarm, 1 miss, 1 right no
    expected = {"accuracy": 60.0, "f1": 200 / 3, "precision": 200 / 3, "recall": 200 / 3, "yes": 60.0}
    scores = yes_no([True, True, True, False, False], [True, True, False, True, False])
    assert scores == {key: pytest.approx(value) for key, value in expected.items()}
    assert yes_no([False], [False])["f1"] == 0.0
    questions = [
        {"question_id": 1, "category": "random"},
        {"question_id": 2, "category": "popular"},
        {"question_id": 3, "category": "random"},
    ]
    labels = {"random": ["yes", "no"], "popular": ["no"]}
    scores = pope({"1": "Yes", "2": "Yes", "3": "No"}, questions, labels)
    assert (scores["accuracy_random"], scores["accuracy_popular"], scores["accuracy"]) == (100.0, 0.0, 50.0)
    with pytest.raises(SplitError, match="random has 2 questions and 1 labels"):
        pope({}, questions, {"random": ["yes"]})


def test_mme(tmp_path: Path) -> None:
    assert [mme_reading(t) for t in ("Yes", "No.", "Yes, it is", "Maybe")] == ["yes", "no", "yes", None]
    for picture, answers in (("a", "YN"), ("b", "YN")):
        folder = tmp_path / "count"
        folder.mkdir(exist_ok=True)
        (folder / f"{picture}.png").touch()
        words = {"Y": "Yes", "N": "No"}
        (folder / f"{picture}.txt").write_text("".join(f"Q{i}?\t{words[a]}\n" for i, a in enumerate(answers)))
    truth = mme_truth(tmp_path)
    lines = [
        {"question_id": f"count/{picture}.png", "prompt": f"Q{i}?\nAnswer briefly.", "text": said}
        for picture, texts in (("a", ("Yes", "No")), ("b", ("Yes", "Yes")))
        for i, said in enumerate(texts)
    ]
    assert mme(lines, truth) == {"count": 75.0 + 50.0}  # 3 of 4 questions, 1 of 2 pictures
    with pytest.raises(SplitError, match="1 of 4 questions have no answer"):
        mme(lines[1:], truth)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"1": {"answer": "yes"}}))
    (tmp_path / "a.jsonl").write_text('{"question_id": 1, "prompt": "?", "text": "Yes"}\n')
    paths = [f"answers={tmp_path / 'a.jsonl'}", f"truth={tmp_path / 't.json'}"]
    assert main(["gqa", *paths]) == 0
    assert capsys.readouterr().out == "accuracy\t100.00\n"
    for arguments, message in (
        (["gqq", *paths], "no benchmark is called 'gqq'. Did you mean gqa?"),
        (["gqa", paths[0]], "gqa needs truth=PATH"),
        (["gqa", paths[0], "truth=absent"], "there is no such file"),
        (["pope", *paths], "pope needs questions="),
        (["gqa", "x=1"], "is none of answers=PATH"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


QUESTIONS = [{"question_id": i // 2, "image": "x.png", "text": f"question {i}"} for i in range(6)]


def test_an_answers_file_goes_on_where_a_kill_stopped_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    with AnswersFile(path).open() as file:
        file.write(QUESTIONS[:2], ["a", "b"])
        file.write(QUESTIONS[2:4], ["c", "dé"])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in sorted({*range(0, len(whole), 13), *ends, *(end - 1 for end in ends)}):  # killed after any byte
        path.write_bytes(whole[:cut])
        again = AnswersFile(path)
        left = again.left(QUESTIONS)
        with again.open() as file:
            for question in left:
                file.write([question], ["new"])
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [line["prompt"] for line in lines] == [question["text"] for question in QUESTIONS]
        kept = whole[:cut].count(b"\n")
        assert [line["text"] for line in lines] == ["a", "b", "c", "dé"][:kept] + ["new"] * (6 - kept)


def test_answers_of_other_questions_and_damage_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"question_id": 9, "prompt": "else", "text": "x"}\n')
    with pytest.raises(SplitError, match=r"answers other questions \(e.g. 9\)"):
        AnswersFile(path).left(QUESTIONS)
    path.write_text('nonsense\n{"question_id": 0, "prompt": "question 0", "text": "x"}\n')
    with pytest.raises(SplitError, match="line 1 is no answer"):
        AnswersFile(path)
    with pytest.raises(SplitError, match="two questions have the same question_id and text"):
        AnswersFile(tmp_path / "new.jsonl").left([*QUESTIONS, QUESTIONS[0]])
