"""The README's commands are commands, and its numbers are those of the results files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import run
import sweep
from split_core import resolve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    python launch/run.py")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_line_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").touch()
    arguments = shlex.split(command)[2:]
    if "--help" in arguments:
        assert run.main(arguments) == 0
    elif "do=sweep" in arguments:
        runs = sweep.combinations(arguments[1:], tmp_path)
        assert {run.configure(resolve.parse_arguments(one.arguments)).do for one in runs} == {"train"}
    else:
        assert run.configure(resolve.parse_arguments(arguments)).do in run.ENGINES


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_row_of_a_results_table_stands_in_a_results_file() -> None:
    written = {line for path in (ROOT / "docs" / "results").glob("*.md") for line in path.read_text().splitlines()}
    rows = [line for line in README.splitlines() if line.startswith("| ") and "token fraction" not in line]
    assert len(rows) >= 10
    for row in rows:
        assert row in written, row


def test_every_link_leads_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert link.startswith("http") or (path.parent / link).exists(), f"{path}: {link}"
