"""``do=train``: fine-tune for every method, learn the policy, evaluate them side by side, report."""

from __future__ import annotations

from split_core.config import RunConfig
from split_core.engine import evaluate
from split_core.engine.adapt import adapt
from split_core.engine.estimate import estimate
from split_core.engine.methods import is_learned, plan, sources
from split_core.engine.opening import open_run


def main(config: RunConfig) -> None:
    """Run every phase that is not finished yet, then the evaluation."""
    methods = plan(config)
    with open_run(config) as session:
        for source in sources(methods):
            adapt(session, source)
        if is_learned(config.policy["name"]):
            estimate(session)
        evaluate.run(session)
