"""Tables, merged runs and pictures from what runs have written."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from split_core import resolve
from split_core.engine import merge, plots, report, tables, tradeoffs
from split_core.engine.results import metric_of, read_metrics, read_results, write_json
from split_core.errors import SplitError

GROUPS = {"task": "cls", "data": "digits", "model": "digits_vit", "policy": "xattn"}
METHODS = ("dense", "entropy", "xattn_warmstart", "xattn")


def results(seed: int = 0, rho: float = 0.5, **changes: Any) -> dict[str, Any]:
    """A run's results.json with made-up numbers."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for name in METHODS:
        row = {
            "method": name,
            "rho": rho,
            "seed": seed,
            "images": 64,
            "token_fraction": 1.0 if name == "dense" else rho,
        }
        row |= {"accuracy": rng.random(), "accuracy_se": 0.01, "error": rng.random(), "object_recall": rng.random()}
        row |= {"images_per_s": 100.0, "speedup": 1.5, "ideal_speedup": 1.6}
        rows.append(row)
    for row in rows:
        others = [other for other in rows if other is not row]
        row["minus"] = {o["method"]: {"mean": row["accuracy"] - o["accuracy"], "se": 0.02} for o in others}
    return {"command": "python run.py", "commit": "abc", "machine": "CPU", "rows": rows} | changes


def run_dir(folder: Path, **settings: Any) -> str:
    """A run folder with results and training curves."""
    folder.mkdir()
    write_json(folder / "results.json", results(**settings))
    numbers = {"token_fraction": 0.5, "deployed_fraction": 0.4, "error": 1.0}
    lines = [{"phase": "estimate_xattn", "step": s, "lambda": s / 10, **numbers} for s in range(300)]
    lines += [{"phase": f"adapt_{name}", "step": s, "error": 2.0} for name in METHODS[:3] for s in range(5)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"phase": "cut sho')
    return str(folder)


def test_json_is_written_whole_with_null_for_what_json_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_json(path, {"rows": [{"a": float("nan"), "b": (1.0, float("inf"))}]})
    assert read_results(path, hint="") == {"rows": [{"a": None, "b": [1.0, None]}]}
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"rows": []}'])
def test_results_that_cannot_be_used_are_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SplitError, match=r"results\.json"):
        read_results(path, hint="train first")


def test_lines_cut_short_are_passed_over(tmp_path: Path) -> None:
    run = Path(run_dir(tmp_path / "a"))
    assert len(read_metrics(run / "metrics.jsonl")) == 315
    assert read_metrics(run / "nothing") == []


def test_the_metric_is_the_number_with_a_standard_error() -> None:
    assert metric_of(results()["rows"][0]) == "accuracy"
    assert metric_of({"error": 1.0}) is None


def test_comparison_shows_every_method_and_its_distance_to_the_last() -> None:
    content = results()
    table = tables.comparison(content)
    assert [row[0] for row in table.rows] == list(METHODS)
    own, entropy = content["rows"][-1], content["rows"][1]
    difference = own["accuracy"] - entropy["accuracy"]
    assert table.rows[1][3] == f"{difference:+.3f} ± 0.020"
    assert table.rows[-1][3] == "-"
    lines = table.markdown().splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert all(line.count("|") == len(table.header) + 1 for line in lines)


def test_rows_with_numbers_missing_make_a_table() -> None:
    content = results()
    for row in content["rows"]:
        row |= {"object_recall": None, "accuracy": None, "accuracy_se": None}
        del row["images_per_s"], row["speedup"]
    cells = tables.comparison(content).rows[0]
    assert [cells[i] for i in (2, 5, 6, 7)] == ["-"] * 4


def test_saved_tables_name_command_commit_and_machine(tmp_path: Path) -> None:
    tables.comparison(results()).save(tmp_path / "t.md", results())
    assert "`python run.py` at commit abc on CPU" in (tmp_path / "t.md").read_text()


@pytest.mark.parametrize(("terminal", "width"), [(True, 60), (True, 300), (False, 60)])
def test_tables_are_shown_without_losing_cells(terminal: bool, width: int) -> None:
    console = Console(record=True, width=width, force_terminal=terminal, file=io.StringIO())
    tables.comparison(results()).show(console)
    text = console.export_text()
    assert all(name in text for name in (*METHODS, "FLOPs-ideal"))


def test_aggregate_combines_seeds_as_written_out() -> None:
    runs = [results(seed) for seed in (0, 1, 2)]
    rows = [row for run in runs for row in run["rows"]]
    table = merge.aggregate(rows, "accuracy")
    assert [(row["method"], row["seeds"]) for row in table] == [(name, 3) for name in METHODS]
    own = [run["rows"][-1] for run in runs]
    values = [row["accuracy"] for row in own]
    assert table[-1]["accuracy"] == {"mean": statistics.fmean(values), "std": statistics.stdev(values)}
    gaps = [row["minus"]["entropy"]["mean"] for row in own]
    expected = {
        "mean": pytest.approx(sum(gaps) / 3),
        "se": pytest.approx((3 * 0.02**2) ** 0.5 / 3),
        "std": pytest.approx(np.std(gaps, ddof=1)),
        "seeds": 3,
    }
    assert table[-1]["minus"]["entropy"] == expected


def test_a_single_seed_has_no_spread_and_budgets_stay_apart() -> None:
    rows = results(0, 0.4)["rows"] + results(0, 0.5)["rows"]
    table = merge.aggregate(rows, "accuracy")
    assert [row["rho"] for row in table] == [0.5] * 4 + [0.4] * 4
    assert all(row["accuracy"]["std"] is None and row["minus"]["dense"]["std"] is None for row in table[1:4])


def test_thinning_keeps_the_mean_and_the_limit() -> None:
    values = [float(v) for v in range(1000)]
    assert len(merge.thin(values, 120)) <= 120
    assert statistics.fmean(merge.thin(values, 100)) == pytest.approx(statistics.fmean(values))
    assert merge.thin([1.0, None, 3.0], 120) == [1.0, 3.0]


def test_merging_runs_writes_all_rows_and_can_be_redone_from_the_json(tmp_path: Path) -> None:
    runs = [run_dir(tmp_path / f"{seed}{rho}", seed=seed, rho=rho) for seed in (0, 1) for rho in (0.5, 0.4)]
    content = merge.merge(runs, "title")
    assert len(content["rows"]) == 16
    assert content["commit"] == "abc"
    assert [run["command"] for run in content["runs"]] == ["python run.py"] * 4
    curve = content["curves"][0]
    assert len(curve["step"]) == len(curve["lambda"]) <= merge.POINTS
    write_json(tmp_path / "out.json", content)
    again = read_results(tmp_path / "out.json", hint="")
    assert tables.merged(again).rows == tables.merged(content).rows
    tradeoffs.merged(again, tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size[0] > 800


def kept(folder: Path, scores: dict[str, list[float]], *, cells: list[int], seed: int = 0) -> str:
    """A run of made-up scores, kept image by image."""
    run_dir(folder, seed=seed)
    rows = [{**results(seed)["rows"][0], "method": name, "minus": {}} for name in scores]
    write_json(folder / "results.json", results(seed, rows=rows))
    (folder / "config.yaml").write_text(f"data: {{name: digits}}\nseed: {seed}\neval: {{split: test}}\n")
    arrays = {f"{name}/score": np.array(values) for name, values in scores.items()}
    arrays |= {f"{name}/object_cells": np.array(cells) for name in scores}
    np.savez(folder / "per_image.npz", **arrays)
    return str(folder)


def test_methods_of_different_runs_are_paired_over_the_same_images(tmp_path: Path) -> None:
    first = kept(tmp_path / "a", {"entropy": [0.0, 1.0, 1.0]}, cells=[3, 0, 2])
    second = kept(tmp_path / "b", {"look": [1.0, 1.0, 1.0], "xattn": [0.0, 0.0, 1.0]}, cells=[3, 0, 2])
    others = kept(tmp_path / "c", {"mlp_parent": [1.0, 1.0, 0.0]}, cells=[2, 0, 2])
    rows = {row["method"]: row for row in merge.merge([first, second, others], "")["rows"]}
    assert rows["look"]["minus"] == {"entropy": {"mean": pytest.approx(1 / 3), "se": pytest.approx(1 / 3)}}
    assert rows["entropy"]["minus"]["xattn"]["mean"] == pytest.approx(1 / 3)
    assert set(rows["entropy"]["minus"]) == {"look", "xattn"}
    assert rows["mlp_parent"]["minus"] == {}  # it saw other pictures


def test_a_single_runs_file_is_no_merged_one(tmp_path: Path) -> None:
    write_json(tmp_path / "one.json", read_results(Path(run_dir(tmp_path / "run")) / "results.json", hint=""))
    with pytest.raises(SplitError, match=r"one.json holds a single run"):
        report.main(resolve.load({**GROUPS, "do": "report", "report": {"out": str(tmp_path / "one")}}))


def test_runs_that_would_count_twice_or_have_other_metrics_are_refused(tmp_path: Path) -> None:
    first = run_dir(tmp_path / "a")
    with pytest.raises(SplitError, match=r"both hold dense at budget 0\.5, seed 0"):
        merge.merge([first, first], "")
    with pytest.raises(SplitError, match=r"nowhere/results\.json is missing"):
        merge.merge([first, str(tmp_path / "nowhere")], "")
    other = results(1)
    for row in other["rows"]:
        row["miou"], row["miou_se"] = row.pop("accuracy"), row.pop("accuracy_se")
    (tmp_path / "b").mkdir()
    write_json(tmp_path / "b" / "results.json", other)
    with pytest.raises(SplitError, match="accuracy, miou"):
        merge.merge([first, str(tmp_path / "b")], "")


def test_a_run_s_pictures_and_table_are_rebuilt(tmp_path: Path) -> None:
    run = Path(run_dir(tmp_path / "a"))
    tokens = {f"{name}/tokens": np.full(8, 100.0 if name == "dense" else 52.0) for name in METHODS}
    np.savez_compressed(run / "per_image.npz", **tokens)
    report.main(resolve.load({**GROUPS, "do": "report", "run_dir": str(run)}))
    assert sorted(p.name for p in (run / "report").iterdir()) == ["lengths.png", "table.md", "training.png"]


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert np.allclose(plots.smooth(np.full(37, 2.5)), 2.5)
    rising = plots.smooth(np.arange(100.0))
    assert len(rising) == 100
    assert np.allclose(rising[10:90], np.arange(10.0, 90.0))


def test_methods_get_colours_of_their_own() -> None:
    colours = plots.palette([*METHODS, "random", "cosine", "oracle"], ["xattn"])
    assert len(set(colours.values())) == len(colours)
    assert colours["xattn"] == plots.OWN
