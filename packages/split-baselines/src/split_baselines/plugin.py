"""What this distribution offers: no reducer in this version.

The distribution exists so that rivals (they reduce tokens between layers, where splitting decides before the
first) have a place that neither the core nor the policies depend on.
"""

from __future__ import annotations

from split_core.plugins import Entry, hookimpl


@hookimpl
def split_reducers() -> list[Entry]:
    """The layer-wise reducers of this version."""
    return []
