"""``python tests/faults/report.py``: bring about faults of every kind, count what became of them: docs/reliability.md.

A fault counts as survived when what follows is right (the same losses and weights, the right pixels, the older
checkpoint) and as refused when it ends in one line that names the thing. Anything else is a failure.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "launch")]

import torch  # noqa: E402
import yaml  # noqa: E402

import run  # noqa: E402
from faults.damage import FORMATS, damaged, picture_bytes  # noqa: E402
from faults.kills import kill_and_resume  # noqa: E402
from faults.ranks import LIMIT, together  # noqa: E402
from faults.tiny_run import SETTINGS, arguments, differences  # noqa: E402
from split_core import resolve  # noqa: E402
from split_core.engine.checkpoint import Checkpoints  # noqa: E402
from split_core.engine.session import provenance  # noqa: E402
from split_core.engine.tables import Table  # noqa: E402
from split_core.errors import SplitError  # noqa: E402
from split_core.pictures import read_rgb  # noqa: E402
from split_core.task import DataContext  # noqa: E402
from split_tasks.data.index import read_index  # noqa: E402
from split_tasks.vqa.configs import LlavaDataConfig  # noqa: E402
from split_tasks.vqa.data.llava import LlavaConversations  # noqa: E402
from tinyrun import metrics  # noqa: E402


@dataclass
class Count:
    """What became of the faults of one kind."""

    kind: str
    what: str
    tried: int = 0
    survived: int = 0
    refused: int = 0

    def add(self, survived: bool, refused: bool = False) -> None:
        self.tried += 1
        self.survived += survived
        self.refused += refused and not survived


def kills(folder: Path) -> Iterator[Count]:
    count = Count("SIGKILL at a random moment, run started again", "losses, weights and results equal to the last bit")
    for seed in range(2):
        place = folder / str(seed)
        place.mkdir()
        result = kill_and_resume(place, 20, seed, seconds=1200)
        good = not any(result["differences"])
        for _ in range(result["kills"]):
            count.add(good)
    yield count


def checkpoints(folder: Path) -> Iterator[Count]:
    count = Count("damaged checkpoint (cut, bits, bytes)", "named, and the one before used")
    for seed in range(200):
        kept = Checkpoints(folder / str(seed), keep_last=2)
        for step in (1, 2):
            kept.save(step, {"value": torch.arange(64) * step})
        path = kept.folder / "00000002" / ("state.pt" if seed % 4 else "facts.json")
        before = path.read_bytes()
        path.write_bytes(damaged(before, seed))
        step = kept.newest()
        whole = path.read_bytes() == before or json_equal(path, before)
        value = kept.load(step or 0)["value"] if step else None
        count.add(value is not None and torch.equal(value, torch.arange(64) * (step or 0)) and (step == 1 or whole))
    yield count


def json_equal(path: Path, before: bytes) -> bool:
    """Whether damage left the facts' meaning alone."""
    try:
        return path.suffix == ".json" and json.loads(path.read_bytes())["sha256"] == json.loads(before)["sha256"]
    except (ValueError, KeyError, TypeError):
        return False


def disks(folder: Path) -> Iterator[Count]:
    count = Count("disk that takes no more in mid-file", "one line; with room again the run ends as a straight one")
    straight = folder / "straight"
    assert run.main(arguments(straight)) == 0
    for most in (200, 4_000, 20_000, 60_000, 90_000):
        run_dir = folder / f"full{most}"
        command = [sys.executable, run.__file__, *arguments(run_dir)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        )  # fmt: skip
        one_line = done.returncode == 0 or (done.returncode == 2 and done.stderr.count("\n") == 1)
        again = subprocess.run(command, capture_output=True, check=False).returncode
        count.add(one_line and again == 0 and not differences(run_dir, straight), refused=one_line)
    yield count


def processes(folder: Path) -> Iterator[Count]:
    lost = Count("one of two processes raises or is killed", f"the other ends within {LIMIT} s with one line, non-zero")
    same = Count("step logged by two processes", "its loss that of one process within 0.2%")
    results = together(folder, 1200)
    for case in ("raises", "dies"):
        result = results[case]
        lost.add(
            result["waited"] < LIMIT and 0 not in result["codes"] and "process of this run is gone" in result["said"][0]
        )
    assert {*results["one"]["codes"], *results["two"]["codes"]} == {0}
    for alone, shared in zip(metrics(folder / "one"), metrics(folder / "two"), strict=True):
        key = "loss" if "loss" in alone else "error"
        same.add(alone["step"] == shared["step"] and abs(shared[key] - alone[key]) <= 2e-3 * abs(alone[key]))
    yield lost
    yield same


def pictures(folder: Path) -> Iterator[Count]:
    for suffix in FORMATS:
        count = Count(f"damaged {suffix}", "pixels, or one line that names the file")
        path, content = folder / f"x{suffix}", picture_bytes(suffix)
        for seed in range(500):
            path.write_bytes(damaged(content, seed))
            try:
                count.add(read_rgb(path, max_pixels=100_000).mode == "RGB")
            except SplitError as error:
                count.add(False, refused=str(path) in str(error))
        yield count


def words(folder: Path) -> Iterator[Count]:
    chance = random.Random(0)
    letters = "abc=,.[]{}:'\"$\\/\n\t\0 é0123456789-+*&!|>%@`#"
    keys = ["task", "policy", "budget", "adapt.images", "estimator.dual", "seed", "eval.methods", "data.root"]
    lines = Count("random command line", "a configuration, or one line")
    tables = Count("random table of pictures", "rows, or one line that names the file")
    recipes = Count("random recipe", "settings, or one line")
    records = Count("damaged file of conversations", "records and what is wrong with them, or one line")
    path, recipe = folder / "x.yaml", yaml.safe_dump(SETTINGS)
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    whole = json.dumps([{"id": str(i), "image": "x.png", "conversations": turns} for i in range(4)]).encode()
    asked = LlavaDataConfig(annotations=folder / "records.json", root=folder)
    for seed in range(500):
        asked.annotations.write_bytes(damaged(whole, seed))
        try:
            found = LlavaConversations(asked, DataContext("train")).problems()
            records.add(all(len(problem.what.splitlines()) == 1 for problem in found))
        except SplitError as error:
            records.add(False, refused=len(str(error).splitlines()) == 1)
    for _ in range(500):
        text = "".join(chance.choices(letters, k=chance.randint(0, 30)))
        for count, attempt in (
            (lines, lambda text=text: run.configure(resolve.parse_arguments([f"{chance.choice(keys)}={text}"]))),
            (tables, lambda: read_index(path)),
            (recipes, lambda: resolve.load(resolve.read_recipe(path))),
        ):
            path.write_text(("path,label\n" if count is tables else recipe) + text)
            try:
                attempt()
                count.add(True)
            except SplitError as error:
                count.add(False, refused=len(str(error).splitlines()) == 1)
    yield from (lines, tables, recipes, records)


def slurm(folder: Path) -> Iterator[Count]:
    count = Count(
        "Slurm: told to stop, or preempted on two nodes, and queued again; a rank refused; a wrong partition",
        "as tests/slurm says",
    )
    for good in outcomes(ROOT / "tests" / "slurm", folder / "outcomes.xml"):
        count.add(good)
    yield count


def outcomes(tests: Path, report: Path) -> list[bool]:
    """Whether each test that pytest ran there passed; a fixture that fails, or a pytest that does, is a failure too."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", tests, "-p", "no:cacheprovider"]
    code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, capture_output=True, check=False).returncode
    cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    passed = [case.find("failure") is None and case.find("error") is None for case in cases if not _skipped(case)]
    return passed if code in (0, 5) or not all(passed) else [*passed, False]


def _skipped(case: ElementTree.Element) -> bool:
    return case.find("skipped") is not None


PARTS = (kills, checkpoints, disks, processes, pictures, words, slurm)


def main() -> int:
    """Run all parts; returns how many faults were neither survived nor refused."""
    logging.disable(logging.WARNING)  # hundreds of checkpoints passed over
    counts: list[Count] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            place = Path(folder) / part.__name__
            place.mkdir()
            counts += part(place)
            print(part.__name__, flush=True)
    cells = [
        [c.kind, c.what, str(c.tried), str(c.survived), str(c.refused), str(c.tried - c.survived - c.refused)]
        for c in counts
    ]
    header = ["fault", "wanted", "tried", "survived", "one clear line", "failed"]
    notes = ["Survived: what follows is right. One clear line: refused, the thing named, nothing lost."]
    facts = provenance() | {"command": "python tests/faults/report.py"}
    Table("Faults tried", header, cells, notes).save(ROOT / "docs" / "reliability.md", facts)
    return sum(c.tried - c.survived - c.refused for c in counts)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
