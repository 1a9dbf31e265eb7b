"""The command line, from arguments to exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import run
from split_core import registry, resolve
from split_core.config import GROUPS, RunConfig

LAUNCH = Path(run.__file__).parent
NEEDED = {
    "imagefolder": ["data.root=."],
    "coco": ["data.root=.", "model.weights=none"],
    "ade20k": ["data.root=.", "model.weights=none"],
    "llava": ["data.annotations=a.json", "data.root=."],
}
"""Settings without a default, by data set."""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, RunConfig]:
    """Engines that only note the configuration they were called with."""
    calls: dict[str, RunConfig] = {}
    for command, name in run.ENGINES.items():
        engine = ModuleType(f"split_core.engine.{name}")
        engine.main = lambda config, command=command: calls.update({command: config})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, engine.__name__, engine)
    return calls


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the launcher's modules, and everything that this one finds."""
    own = filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LAUNCH), *environment.values(), *own])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, check=False
    )


def test_listing_plugins_loads_no_torch_and_aligns_its_columns() -> None:
    code = "import sys, run; code = run.main(['do=plugins']); print('torch' in sys.modules, code)"
    done = python(code)
    *table, last = done.stdout.splitlines()
    assert last == "False 0"
    assert done.stderr == ""
    assert table[0].split() == ["kind", "name", "distribution", "version", "summary"]
    column = table[0].index("distribution")
    assert all(line[column - 1] == " " and line[column] != " " for line in table)
    for kind in registry.KINDS:
        for name, registered in registry.entries(kind).items():
            row = [kind, name, registered.distribution, registered.version, *registered.entry.summary.split()]
            assert row in [line.split() for line in table]


def test_checking_a_command_line_loads_no_torch() -> None:
    code = "import sys, run; run.configure({'task': {'name': 'cls'}}); print('torch' in sys.modules)"
    assert python(code).stdout == "False\n"


def every_setting() -> Iterator[tuple[str, str]]:
    """All dotted settings: of the schema, and of every installed plugin."""

    def leaves(prefix: str, schema: type[BaseModel]) -> Iterator[str]:
        for key, field in schema.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from leaves(f"{prefix}{key}.", field.annotation)
            else:
                yield prefix + key

    yield from (("", key) for key in leaves("", RunConfig))
    for kind in GROUPS:
        for name, registered in registry.entries(kind).items():
            yield from ((f"{kind}={name}", key) for key in leaves(f"{kind}.", registered.entry.config))


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["do=train", "--help"]])
def test_help_exits_cleanly(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments) == 0
    assert "usage: python launch/run.py" in capsys.readouterr().out


def test_help_holds_every_command_recipe_plugin_and_setting_with_default_and_description() -> None:
    lines = run.usage(run.RECIPES).splitlines()
    words = [line.split() for line in lines]
    for command in [*run.ENGINES, "plugins"]:
        assert any(w[:1] == [f"do={command}"] for w in words)
    for name in resolve.recipes(run.RECIPES):
        assert any(w[:1] == [f"recipe={name}"] and len(w) > 2 for w in words)
    start: dict[str, int] = {"": lines.index("settings")}
    for kind in GROUPS:
        start |= {f"{kind}={name}": [w[:1] for w in words].index([f"{kind}={name}"]) for name in registry.entries(kind)}
    bare = []
    for owner, key in every_setting():
        row = next(w for w in words[start[owner] :] if w[:1] == [key])
        assert row[1] in ("=", "(needed)")
        if len(row) < (4 if row[1] == "=" else 3):
            bare.append((owner, key))
    assert bare == []


ERRORS = {
    "key": (["adapt.imags=3"], "adapt.imags: no such setting. Did you mean adapt.images?"),
    "value": (["budget=2"], "budget=2: should be less than or equal to 1"),
    "policy": (["policy=entrpy"], "Did you mean entropy?"),
    "task": (["task=clss"], "task: no task is called 'clss'. Did you mean cls?"),
    "recipe": (["recipe=digit_cls"], "no recipe is called 'digit_cls'. Did you mean digits_cls?"),
    "file": (["recipe=mine.yaml"], "recipe=mine.yaml: there is no such file"),
    "image": (["do=draw", "image=mine.jpg"], "draw.image=mine.jpg: should be a picture file"),
    "command": (["do=trian"], "do=trian: no such command. Did you mean do=train?"),
    "flag": (["--budget", "0.5"], "'--budget' is not key=value; --help lists the keys"),
    "plugins": (["do=plugins", "seed=3"], "do=plugins takes no settings, but got seed"),
    "run_dir": (["run_dir=3", "seed=x"], "seed=x: should be a valid integer"),
}


@pytest.mark.parametrize(("arguments", "line"), ERRORS.values(), ids=ERRORS)
def test_a_mistake_is_one_line_exit_2_and_touches_nothing(
    arguments: list[str], line: str, empty: Path, seen: dict[str, RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert line in printed.err
    assert list(empty.iterdir()) == []
    assert seen == {}


def test_exit_codes_reach_the_shell(empty: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(LAUNCH / "run.py"), "budget=2"], capture_output=True, text=True, cwd=empty, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("command", run.ENGINES)
def test_each_command_reaches_its_engine(command: str, empty: Path, seen: dict[str, RunConfig]) -> None:
    assert run.main([f"do={command}", "policy=entropy", "policy.tau=3", "seed=4"]) == 0
    assert list(seen) == [command]
    config = seen[command]
    assert (config.do, config.seed, config.task["name"], config.data["name"]) == (command, 4, "cls", "digits")
    assert config.policy == {"name": "entropy", "tau": [3.0]}
    assert list(empty.iterdir()) == []  # an engine writes, the launcher does not


@pytest.mark.parametrize("name", run.ENGINES.values())
def test_each_engine_exists(name: str) -> None:
    assert find_spec(f"split_core.engine.{name}") is not None


@pytest.mark.parametrize("name", resolve.recipes(run.RECIPES))
def test_every_recipe_loads_and_says_what_it_is(name: str) -> None:
    path = resolve.find_recipe(name, run.RECIPES)
    assert path.read_text(encoding="utf-8").startswith("# ")
    recipe = resolve.read_recipe(path)
    data = recipe["data"]["name"] if isinstance(recipe["data"], dict) else recipe["data"]
    tree = resolve.merge(recipe, resolve.parse_arguments(NEEDED.get(data, [])))
    config = resolve.load(tree)
    assert resolve.load(yaml.safe_load(resolve.to_yaml(config))) == config


@pytest.mark.parametrize(("task", "recipe"), run.DEFAULT_RECIPES.items())
def test_a_tasks_default_recipe_is_for_that_task(task: str, recipe: str, empty: Path) -> None:
    expected = resolve.load(resolve.read_recipe(resolve.find_recipe(recipe, run.RECIPES)))
    assert run.configure(resolve.parse_arguments([f"task={task}"])) == expected
    assert expected.task["name"] == task


def test_other_commands_take_the_settings_of_the_run_they_look_at(
    empty: Path, seen: dict[str, RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    place = "run_dir=here"
    resolve.claim_run_dir(run.configure(resolve.parse_arguments([place, "policy=entropy", "policy.tau=3", "seed=4"])))
    assert run.main(["do=eval", place, "eval.images=5"]) == 0
    config = seen["eval"]
    assert (config.seed, config.policy, config.eval.images) == (4, {"name": "entropy", "tau": [3.0]}, 5)
    assert run.main(["do=eval", place, "seed=5"]) == 2
    assert "here holds a run with other settings (seed: 4 there, 5 here)" in capsys.readouterr().err
    assert run.main([place]) == 2  # training starts from the recipe, and that is another run
    assert run.main([place, "policy=entropy", "policy.tau=3", "seed=4", "workers=1"]) == 0  # the same run resumes
    assert seen["train"].workers == 1


def engine_that(action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModuleType("split_core.engine.train")
    engine.main = action  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, engine.__name__, engine)


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: RunConfig) -> None:
        raise KeyboardInterrupt

    engine_that(interrupted, monkeypatch)
    assert run.main(["task=cls"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_an_engine_finds_is_one_line_too_but_a_fault_of_ours_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong_file(config: RunConfig) -> None:
        raise run.SplitError("data.root: no such folder")

    engine_that(wrong_file, monkeypatch)
    assert run.main(["task=cls"]) == 2
    assert capsys.readouterr().err == "error: data.root: no such folder\n"

    def fault(config: RunConfig) -> None:
        raise ValueError("a bug")

    engine_that(fault, monkeypatch)
    with pytest.raises(ValueError, match="a bug"):
        run.main(["task=cls"])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")

    monkeypatch.setattr(run.importlib, "import_module", missing)
    with pytest.raises(run.SplitError, match=r"do=train needs accelerate; pip install 'split-core\[train\]' brings it"):
        run.execute(run.configure({}))
