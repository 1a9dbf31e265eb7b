"""The counts of docs/reliability.md say of every test what became of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.report import outcomes

TESTS = """\
import pytest
@pytest.fixture
def broken(): raise OSError
def test_passes(): pass
def test_fails(): assert False
def test_needs(broken): pass
@pytest.mark.skip
def test_skips(): pass
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [(TESTS, [True, False, False]), ("import nosuch", [False]), (None, [False])],
    ids=["tests", "not importable", "not there"],
)
def test_an_error_of_a_fixture_or_of_pytest_itself_counts_as_failed(
    content: str | None, expected: list[bool], tmp_path: Path
) -> None:
    tests = tmp_path / "test_some.py"
    if content is not None:
        tests.write_text(content)
    assert outcomes(tests, tmp_path / "outcomes.xml") == expected
