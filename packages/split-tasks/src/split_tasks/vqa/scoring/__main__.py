"""``python -m split_tasks.vqa.scoring BENCHMARK answers=FILE truth=FILE [questions=FILE]``: scores of an answers file.

vqa      truth: VQA v2 annotations (json)
textvqa  truth: TextVQA_0.5.1_val.json
gqa      truth: testdev_balanced_questions.json
sqa      truth: folder with problems.json and pid_splits.json
pope     truth: folder of coco_pope_CATEGORY.json;  questions: llava_pope_test.jsonl
mme      truth: MME's folder: SUBTASK/[questions_answers_YY/]PICTURE.txt, two lines of question, tab, answer
mmbench  truth: mmbench_dev_20230712.tsv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from split_core.errors import SplitError, unknown
from split_tasks.vqa.scoring.choices import mmbench, sqa
from split_tasks.vqa.scoring.files import Record, by_id, read_json, read_jsonl
from split_tasks.vqa.scoring.words import Scores, gqa, textvqa, vqa
from split_tasks.vqa.scoring.yesno import mme, pope

PICTURES = (".jpg", ".png")


def pope_labels(folder: Path) -> dict[str, list[str]]:
    """Category -> labels, from the files coco_pope_CATEGORY.json (jsonl in spite of their name)."""
    files = sorted(folder.glob("coco_pope_*.json"))
    if not files:
        raise SplitError(f"pope: {folder} has no coco_pope_*.json")
    return {path.stem.removeprefix("coco_pope_"): [row["label"] for row in read_jsonl(path)] for path in files}


def mme_truth(folder: Path) -> dict[tuple[str, str], str]:
    """(SUBTASK/PICTURE, question) -> answer; a picture is named by the file that is beside the text or in images/."""
    truth: dict[tuple[str, str], str] = {}
    for subtask in sorted(path for path in folder.iterdir() if path.is_dir()):
        texts, pictures = subtask / "questions_answers_YY", subtask / "images"
        texts, pictures = (texts, pictures) if texts.is_dir() else (subtask, subtask)
        names = {path.stem: path.name for path in pictures.iterdir() if path.suffix in PICTURES}
        for path in sorted(texts.glob("*.txt")):
            if path.stem not in names:
                raise SplitError(f"mme: {path} has no picture in {pictures}")
            for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
                question, _, answer = line.partition("\t")
                truth[f"{subtask.name}/{names[path.stem]}", question.strip()] = answer.strip()
    if not truth:
        raise SplitError(f"mme: {folder} has no SUBTASK/*.txt")
    return truth


def _table(path: Path) -> list[Record]:
    csv.field_size_limit(sys.maxsize)  # the pictures are in the table
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _pope(records: Sequence[Record], truth: Path, questions: Path | None) -> Scores:
    if questions is None:
        raise SplitError("pope needs questions=llava_pope_test.jsonl, whose order the labels follow")
    return pope(by_id(records), read_jsonl(questions), pope_labels(truth))


BENCHMARKS: Mapping[str, Callable[[Sequence[Record], Path, Path | None], Scores]] = {
    "vqa": lambda records, truth, _: vqa(by_id(records), read_json(truth)),
    "textvqa": lambda records, truth, _: textvqa(records, read_json(truth)),
    "gqa": lambda records, truth, _: gqa(by_id(records), read_json(truth)),
    "sqa": lambda records, truth, _: sqa(
        by_id(records), read_json(truth / "problems.json"), read_json(truth / "pid_splits.json")
    ),
    "pope": _pope,
    "mme": lambda records, truth, _: mme(records, mme_truth(truth)),
    "mmbench": lambda records, truth, _: mmbench(by_id(records), _table(truth)),
}


def main(arguments: Sequence[str]) -> int:
    """Print the scores, one for each line; returns the exit code."""
    try:
        if not arguments or {"-h", "--help"} & set(arguments):
            print(__doc__)
            return 0
        name, *rest = arguments
        if name not in BENCHMARKS:
            raise SplitError(unknown("benchmark", name, BENCHMARKS))
        paths = dict(_path(argument) for argument in rest)
        for key in ("answers", "truth"):
            if key not in paths:
                raise SplitError(f"{name} needs {key}=PATH")
            if not paths[key].exists():
                raise SplitError(f"{key}={paths[key]}: there is no such file or folder")
        scores = BENCHMARKS[name](read_jsonl(paths["answers"]), paths["truth"], paths.get("questions"))
    except SplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for key, value in scores.items():
        print(f"{key}\t{value:.2f}")
    return 0


def _path(argument: str) -> tuple[str, Path]:
    key, equals, value = argument.partition("=")
    if not equals or key not in ("answers", "truth", "questions"):
        raise SplitError(f"{argument!r} is none of answers=PATH, truth=PATH, questions=PATH")
    return key, Path(value).expanduser()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
