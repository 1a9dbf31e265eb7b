"""What all tests share: shapes checked at run time, two threads, settled hypothesis profiles."""

from __future__ import annotations

import os

from jaxtyping import install_import_hook

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # threads that wait must not take the core of those that work

# before the first import of any of them
install_import_hook(["split_core", "split_policies", "split_tasks", "split_baselines"], "beartype.beartype")

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(2)

# the same examples on every run, so that a red test is one's own doing
settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
