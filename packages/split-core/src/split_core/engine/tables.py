"""Results as a table: aligned Markdown in files and pipes, rich on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from split_core.engine.results import metric_of

NONE = "-"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Args:
        title: one line.
        header: column names; the first column is set flush left, the others flush right.
        rows: cells.
        notes: lines below.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Aligned, so that it also reads well as plain text."""
        widths = [max(3, *map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        ruler = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
        lines = [_line(self.header, widths), "|" + "|".join(f" {cell} " for cell in ruler) + "|"]
        return "\n".join([*lines, *(_line(row, widths) for row in self.rows)])

    def show(self, console: Console) -> None:
        """On a terminal that is wide enough with rules, elsewhere as Markdown."""
        table = RichTable(title=self.title, title_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*row)
        wanted = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        if console.is_terminal and wanted <= console.width:
            console.print(table)
        else:
            console.print(f"{self.title}\n{self.markdown()}", soft_wrap=True, markup=False, highlight=False)
        for note in self.notes:
            console.print(note, soft_wrap=True, markup=False, highlight=False)

    def save(self, path: Path, source: Mapping[str, Any]) -> None:
        """As Markdown, with the command, commit and machine that `source` names."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"# {self.title}", "", self.markdown(), ""]
        lines += [line for note in self.notes for line in (note, "")]
        path.write_text("\n".join([*lines, made_by(source), ""]), encoding="utf-8")


def made_by(source: Mapping[str, Any]) -> str:
    """Command, commit and machine in one paragraph."""
    return f"Made by `{source['command']}` at commit {source['commit']} on {source['machine']}."


def comparison(results: Mapping[str, Any]) -> Table:
    """Methods of one run; `results` as in results.json."""
    rows = results["rows"]
    own = rows[-1]
    metric = metric_of(own) or "score"
    header = [
        "method", "token fraction", f"{metric} ± SE", f"{own['method']} minus it", "error", "object recall", "images/s",
        "speed-up", "FLOPs-ideal",
    ]  # fmt: skip
    further = further_of(rows)
    header[2:2] = further
    cells = [
        [
            row["method"],
            number(row["token_fraction"]),
            *(number(row.get(name)) for name in further),
            plus_minus(row.get(metric), row.get(f"{metric}_se"), signed=False),
            plus_minus(**own["minus"].get(row["method"], {"mean": None, "se": None})),
            number(row.get("error")),
            number(row.get("object_recall")),
            number(row.get("images_per_s"), 1),
            number(row.get("speedup"), 2),
            number(row.get("ideal_speedup"), 2),
        ]
        for row in rows
    ]
    notes = [
        f"{own['images']} images, budget {own['rho']:g}, seed {own['seed']}. `{own['method']} minus it`: mean paired"
        " difference over the same images ± its standard error. Speed-up: whole pipeline against the dense timm model.",
    ]
    return Table("Methods at the same token fraction", header, cells, notes)


def merged(content: Mapping[str, Any]) -> Table:
    """Methods over runs; `content` as `split_core.engine.merge` makes it."""
    rows = content["aggregate"]
    metric = content["metric"]
    header = [
        "method", "budget", "seeds", "token fraction", metric, "error", "object recall", "images/s", "speed-up",
        "FLOPs-ideal",
    ]  # fmt: skip
    own = content["methods"]
    further = further_of(content["rows"])
    header[4:4] = further
    header[5 + len(further) : 5 + len(further)] = [f"{name} minus it" for name in own]
    cells = [
        [
            row["method"],
            f"{row['rho']:g}",
            str(row["seeds"]),
            mean_std(row, "token_fraction"),
            *(mean_std(row, name) for name in further),
            mean_std(row, metric),
            *(_difference(rows, name, row) for name in own),
            mean_std(row, "error"),
            mean_std(row, "object_recall"),
            mean_std(row, "images_per_s", 1),
            mean_std(row, "speedup", 2),
            mean_std(row, "ideal_speedup", 2),
        ]
        for row in rows
    ]
    notes = [
        "Numbers are means over seeds ± their standard deviation. Differences are means over seeds of the paired"
        " differences ± their combined standard error, with the standard deviation over seeds in brackets.",
    ]
    return Table(content["title"], header, cells, notes)


def per_class(results: Mapping[str, Any]) -> Table:
    """One number for each class and method; `results` as in results.json, with "per_class"."""
    found = results["per_class"]
    classes = list(next(iter(found.values())))
    cells = [[name, *(number(own.get(name)) for own in found.values())] for name in classes]
    return Table("Classes", ["class", *found], cells)


def further_of(rows: Iterable[Row]) -> list[str]:
    """Names of the numbers that rows hold beyond those of every task, in order."""
    return list(dict.fromkeys(name for row in rows for name in row.get("further", ())))


def _difference(rows: Iterable[Row], own: str, row: Row) -> str:
    """How far a learned method lies above the one of `row` at the same budget."""
    for other in rows:
        if other["method"] == own and other["rho"] == row["rho"] and row["method"] in other["minus"]:
            found = other["minus"][row["method"]]
            spread = "" if found["std"] is None else f" ({found['std']:.3f})"
            return plus_minus(found["mean"], found["se"]) + spread
    return NONE


def compared(content: Mapping[str, Any]) -> Table:
    """Every method at every budget: what it costs, what it scores, how fast it is; as `do=compare` makes it."""
    metric, bench = content["metric"], content["bench"]["rows"]
    sizes = list(dict.fromkeys(row["batch_size"] for row in bench))
    header = [
        "method", "budget", "seeds", "tokens", "FLOPs", metric, "error", "FLOPs-ideal",
        *(f"speed-up b={size}" for size in sizes), "tokens per layer",
    ]  # fmt: skip
    cells = []
    for row in content["aggregate"]:
        timed = [speed_of(bench, row["method"], row["rho"], size) for size in sizes]
        ideal = row["ideal_speedup"]
        layers = next((found["tokens_per_layer"] for found in timed if found and "tokens_per_layer" in found), None)
        cells.append(
            [
                row["method"],
                f"{row['rho']:g}",
                str(row["seeds"]),
                mean_std(row, "token_fraction"),
                NONE if ideal is None else number(1 / ideal["mean"]),
                mean_std(row, metric),
                mean_std(row, "error"),
                mean_std(row, "ideal_speedup", 2),
                *(number(None if found is None else found["speedup"], 2) for found in timed),
                NONE if layers is None else " ".join(str(count) for pair in layers for count in pair),
            ]
        )
    notes = [
        "`tokens`: share of the patch tokens in an average layer; `FLOPs`: of blocks and patch embedding, as a share of"
        " the dense model's. A reducer gets the weakest settings within the FLOPs of splitting at the budget. Numbers"
        " are means over seeds ± their standard deviation.",
        "Speed-up: whole pipeline, against runs of the dense timm model before and after; thresholds as deployed"
        " (ragged lengths) where a policy has one. `tokens per layer`: attention, MLP, attention, MLP ...",
        *content["left_out"],
    ]
    return Table(content["title"], header, cells, notes)


def speed_of(bench: Iterable[Row], method: str, budget: float, size: int) -> Row | None:
    """The timing of a method at a budget: ragged lengths where there are some, as it deploys."""
    known = [row for row in bench if row["method"] == method and row["batch_size"] == size]
    known = [row for row in known if row["rho"] in (None, budget)]
    return max(known, key=lambda row: row["lengths"] == "ragged") if known else None


def bench(results: Mapping[str, Any]) -> Table:
    """Speed of methods; `results` as in bench.json."""
    header = [
        "method", "batch", "budget", "lengths", "token fraction", "images/s", "speed-up", "spread", "FLOPs-ideal",
        "share", "peak GiB", "pyramid", "decide", "pack", "blocks", "head",
    ]  # fmt: skip
    cells = [
        [
            row["method"],
            str(row["batch_size"]),
            number(row["rho"], 2),
            row["lengths"],
            number(row["token_fraction"]),
            number(row["images_per_s"], 1),
            number(row["speedup"], 3),
            f"{row['speedup_spread'][0]:.2f}..{row['speedup_spread'][1]:.2f}",
            number(row["ideal_speedup"], 3),
            number(row["share_of_ideal"], 3),
            number(row.get("peak_memory_gib"), 2),
            *(_share(row.get("stages_s"), name) for name in header[-5:]),
        ]
        for row in results["rows"]
    ]
    chosen = results["model"].get("architecture", results["model"]["name"])
    notes = [
        f"{chosen}, {results['image_size'][0]}x{results['image_size'][1]} px, {results['dtype']}, attention"
        f" {results['attention']}, {results['threads']} threads, median of {results['repeats']} repeats. `timm` is the"
        " dense model; every other row is timed between two runs of it; `spread`: lowest and highest ratio to them.",
        "`equal`: each image gets exactly the budget. `ragged`: a threshold spends it on average. `share` is the"
        " speed-up divided by what the FLOPs of the tokens promise. `peak GiB` is what stands in memory at most during"
        " a forward, all methods' weights included. Last five columns: per cent of the whole.",
        *results.get("left_out", ()),
    ]
    return Table("Speed of the whole pipeline", header, cells, notes)


def _share(stages: Mapping[str, float] | None, name: str) -> str:
    return NONE if stages is None else f"{100 * stages[name] / sum(stages.values()):.1f}"


def number(value: float | int | None, digits: int = 3) -> str:
    """With so many decimals; a dash where there is none."""
    return NONE if value is None else f"{value:.{digits}f}"


def plus_minus(mean: float | int | None, se: float | int | None, *, signed: bool = True, digits: int = 3) -> str:
    """Mean ± standard error."""
    if mean is None:
        return NONE
    text = f"{mean:+.{digits}f}" if signed else f"{mean:.{digits}f}"
    return text if se is None else f"{text} ± {se:.{digits}f}"


def mean_std(row: Row, key: str, digits: int = 3) -> str:
    """Mean ± standard deviation over seeds, from an aggregate."""
    found = row.get(key)
    return NONE if found is None else plus_minus(found["mean"], found["std"], signed=False, digits=digits)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join([first, *others]) + " |"
