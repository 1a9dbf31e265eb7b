"""Tables and pictures of a run: run_dir/report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from split_core.engine.session import Learner, Session


def write(session: Session, results: Mapping[str, Any], tallies: Mapping[str, Any], learners: Mapping[str, Learner]) -> None:
    for r in results["rows"]:
        print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in r.items() if k != "minus"})
    own = results["rows"][-1]
    print({k: (round(v["mean"], 4), round(v["se"], 4)) for k, v in own["minus"].items()})
