"""``do=check``: everything that is wrong with a run's data, in one go and before it trains. Writes nothing."""

from __future__ import annotations

from rich.console import Console

from split_core import registry
from split_core.config import RunConfig
from split_core.errors import SplitError
from split_core.task import DataContext, Problem

SHOWN = 20
"""Files of each kind that are named."""


def main(config: RunConfig) -> None:
    """Build every split and let it look at all of its files.

    A data set that has files says what is wrong with them in ``problems() -> Iterable[Problem]``.

    Raises:
        SplitError: something is wrong; what, stands above.
    """
    console = Console()
    wrong = 0
    for split in dict.fromkeys(("train", "val", config.eval.split)):
        try:
            data = registry.build("data", config.data, DataContext(split, config.seed, strict=False))
        except SplitError as error:
            wrong += 1
            console.print(f"{split}: {error}", soft_wrap=True, markup=False, highlight=False)
            continue
        problems: list[Problem] = list(data.problems()) if hasattr(data, "problems") else []
        wrong += sum(problem.fault for problem in problems)
        kinds: dict[str, list[str]] = {}
        for problem in problems:
            kinds.setdefault(problem.kind, []).append(problem.what)
        lines = [f"{split}: {len(data)} images, {len(data.classes)} classes"]
        for kind, found in kinds.items():
            lines += [f"  {len(found)} {kind}", *(f"    {what}" for what in found[:SHOWN])]
            lines += [f"    and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if wrong:
        raise SplitError(f"the data has {wrong} faults, listed above; on_error=skip leaves unreadable pictures out")
