"""Plugins are found, named, and kept apart from each other's faults."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import ValidationError

from split_core import registry
from split_core.errors import SplitError, nearest
from split_core.plugins import KINDS, Entry, Hooks, PluginConfig

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
GOOD = """
from split_core.plugins import Entry, PluginConfig, hookimpl

class Settings(PluginConfig):
    tau: float = 1.0

def target(settings, context):
    return settings, context

@hookimpl
def split_policies():
    return [Entry("probe_policy", __name__ + ":target", Settings, "for tests")]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one plugin module on the path, as pip would."""
    modules = []

    def put(distribution: str, code: str, *, version: str = "0.5") -> None:
        module = f"plugin_of_{distribution.replace('-', '_')}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(dedent(code))
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[split]\nprobe = {module}\n")
        registry.discover.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    registry.discover.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


def test_an_installed_plugin_is_found_with_its_distribution_and_version(install: Install) -> None:
    install("good-one", GOOD, version="7.1")
    found = registry.get("policy", "probe_policy")
    assert (found.distribution, found.version, found.entry.summary) == ("good-one", "7.1", "for tests")


def test_build_calls_the_target_with_checked_settings_and_the_context(install: Install) -> None:
    install("good-one", GOOD)
    for spec, tau in [("probe_policy", 1.0), ({"name": "probe_policy", "tau": 3}, 3.0)]:
        settings, context = registry.build("policy", spec, "context")
        assert (settings.tau, context) == (tau, "context")
    choice = registry.choose("policy", {"name": "probe_policy", "tau": 2})
    assert registry.build("policy", choice)[0] is choice.settings
    with pytest.raises(ValidationError, match="tua"):
        registry.build("policy", {"name": "probe_policy", "tua": 3})
    with pytest.raises(SplitError, match="write policy=NAME"):
        registry.build("policy", {"tau": 3})


def test_two_offers_of_one_name_raise_and_name_both(install: Install) -> None:
    install("good-one", GOOD, version="7.1")
    install("other-one", GOOD, version="8.2")
    with pytest.raises(SplitError, match="probe_policy") as caught:
        registry.discover()
    for part in ("good-one 7.1", "other-one 8.2", "plugin_of_good_one:target", "plugin_of_other_one:target"):
        assert part in str(caught.value)


HEAD = "from split_core.plugins import Entry, PluginConfig, hookimpl\n"
# set afterwards, because under test Entry checks the types of its own arguments
WRONG = (
    HEAD
    + """
entry = Entry("a", "b:c", PluginConfig, "")
object.__setattr__(entry, "{}", {})

@hookimpl
def split_tasks():
    return [entry]
"""
)
BROKEN = {
    "import": ("import no_such_module_anywhere", "no_such_module_anywhere"),
    "raise": (HEAD + "@hookimpl\ndef split_tasks():\n    raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "typo": (HEAD + "@hookimpl\ndef split_policys():\n    return []", "split_policys"),
    "argument": (HEAD + "@hookimpl\ndef split_tasks(config):\n    return []", "config"),
    "string": (HEAD + "@hookimpl\ndef split_tasks():\n    return 'cls'", "split_tasks returned str"),
    "tuple": (HEAD + "@hookimpl\ndef split_tasks():\n    return [('a', 'b:c')]", "expected Entry"),
    "name": (WRONG.format("name", 3), "Entry.name is 3"),
    "target": (WRONG.format("target", "'b.c'"), "'b.c'"),
    "config": (WRONG.format("config", "dict"), "config of 'a'"),
    "reserved": (
        HEAD + "class C(PluginConfig):\n    name: str = ''\n@hookimpl\ndef split_tasks():\n"
        "    return [Entry('a', 'b:c', C, '')]",
        "field 'name'",
    ),
}


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_skipped_with_one_warning_and_quoted(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, reason: str
) -> None:
    install("bad-one", code)
    install("good-one", GOOD)
    with caplog.at_level(logging.WARNING):
        assert "probe_policy" in registry.entries("policy")
        registry.entries("task")
    warnings = [record.getMessage() for record in caplog.records if "bad-one" in record.getMessage()]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert "\n" not in warnings[0]
    with pytest.raises(SplitError) as caught:
        registry.get("policy", "missing")
    assert "bad-one 0.5 is broken" in str(caught.value)
    assert reason in str(caught.value)


def test_the_core_offers_its_own_entries_without_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    registry.discover.cache_clear()
    try:
        found = registry.discover()
    finally:
        registry.discover.cache_clear()
    assert set(found.tables["attention"]) == {"sdpa", "masked", "varlen", "xformers"}
    assert set(found.tables["estimator"]) == {"ppo", "credit", "gate", "supervised"}
    assert found.tables["attention"]["sdpa"].distribution == "split-core"
    assert found.broken == ()


@pytest.mark.parametrize(
    ("kind", "name", "line"),
    [
        ("attention", "maskd", "no attention is called 'maskd'. Did you mean masked?"),
        ("attention", "MASKED", "Did you mean masked?"),
        ("attention", "qqq", "Known: masked, sdpa, varlen, xformers"),
        ("atention", "masked", "no kind of plugin is called 'atention'. Did you mean attention?"),
    ],
)
def test_unknown_names_get_the_nearest_and_the_list(kind: str, name: str, line: str) -> None:
    with pytest.raises(SplitError) as caught:
        registry.get(kind, name)
    assert line in str(caught.value)


def test_nearest_says_nothing_when_nothing_is_near() -> None:
    assert nearest("zzzz", ["entropy", "cosine"]) is None
    assert nearest("anything", []) is None


@pytest.mark.parametrize("target", ["no_such_module_anywhere:x", "split_core.errors:Missing"])
def test_a_target_that_cannot_be_imported_is_one_line(target: str) -> None:
    with pytest.raises(SplitError, match="'it' cannot be loaded from"):
        registry.load(Entry("it", target, PluginConfig, ""))


def test_plugins_of_this_repository_are_whole() -> None:
    registry.discover.cache_clear()
    found = registry.discover()
    assert found.broken == ()
    for table in found.tables.values():
        for registered in table.values():
            assert callable(registry.load(registered.entry)), registered
            assert registered.entry.summary
            assert not registered.entry.summary.endswith(".")


def test_every_hook_has_a_kind_and_stands_in_the_documentation() -> None:
    hooks = {name for name in vars(Hooks) if name.startswith("split_")}
    assert set(KINDS.values()) == hooks
    text = DOCS.read_text(encoding="utf-8")
    for kind, hook in KINDS.items():
        assert f"| `{hook}` | `{kind}` |" in text


def test_importing_the_core_imports_neither_torch_nor_a_plugin() -> None:
    code = "import sys, split_core; print([m for m in sys.modules if m in ('torch', 'timm') or 'plugin' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_plugins_imports_no_torch() -> None:
    code = "import sys; from split_core import registry; registry.discover(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_entry_point_outside_a_distribution_counts_as_the_cores() -> None:
    found = registry.collect([EntryPoint("core", "split_core.builtin", "split")])
    assert found.tables["estimator"]["ppo"].version == "source"
