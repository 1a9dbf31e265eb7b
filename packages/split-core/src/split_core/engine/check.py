"""``do=check``: everything that is wrong with a run's data, in one go and before it trains. Writes nothing."""

from __future__ import annotations

from rich.console import Console

from split_core import registry
from split_core.config import RunConfig
from split_core.errors import SplitError
from split_core.task import DataContext

SHOWN = 20
"""Files of each kind that are named."""


def main(config: RunConfig) -> None:
    """Build every split and let it look at all of its files.

    A data set that has files says what is wrong with them in ``problems() -> Iterator[tuple[kind, what]]``.

    Raises:
        SplitError: something is wrong; what, stands above.
    """
    console = Console()
    wrong = 0
    for split in dict.fromkeys(("train", "val", config.eval.split)):
        try:
            data = registry.build("data", config.data, DataContext(split, config.seed))
        except SplitError as error:
            wrong += 1
            console.print(f"{split}: {error}", soft_wrap=True, markup=False, highlight=False)
            continue
        kinds: dict[str, list[str]] = {}
        for kind, what in data.problems() if hasattr(data, "problems") else ():
            kinds.setdefault(kind, []).append(what)
        wrong += sum(len(found) for kind, found in kinds.items() if kind == "unreadable")
        lines = [f"{split}: {len(data)} images, {len(data.classes)} classes"]
        for kind, found in kinds.items():
            lines += [f"  {len(found)} {kind}", *(f"    {what}" for what in found[:SHOWN])]
            lines += [f"    and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if wrong:
        raise SplitError(f"the data has {wrong} faults, listed above; on_error=skip leaves unreadable pictures out")
