"""Methods as they are compared, and as they are timed and drawn: weights, and how much each spends."""

from __future__ import annotations

import torch

from split_core.engine.adapt import load_learner
from split_core.engine.calibration import calibrated
from split_core.engine.methods import Method
from split_core.engine.session import Learner, Session
from split_core.errors import SplitError
from split_core.reducer import Reducer


@torch.no_grad()
def deployed(session: Session, method: Method) -> Learner:
    """A trained method of the run, under the run's decision rule or the one that its kind deploys with.

    Raises:
        SplitError: its weights are not there.
    """
    path = session.run_dir / "models" / f"{method.weights}.safetensors"
    if not path.is_file():
        raise SplitError(f"{path} is missing: train the run first (do=train run_dir={session.run_dir})")
    learner = load_learner(session, method.weights, method.policy, rule=session.config.decision)
    if isinstance(learner.model, Reducer):
        learner.model.spend(session.config.budget)
    if method.calibrated and session.config.decision in (None, "threshold"):
        config = session.config.eval
        on_test = config.calibrate == "test"
        # Past the images that are evaluated: thresholds follow the evaluated distribution, not the evaluated images.
        split, start = (config.split, config.images) if on_test else ("val", 0)
        learner.model.decision = calibrated(session, learner, split, start=start)
    return learner
