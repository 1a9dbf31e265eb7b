"""Training, evaluation, timing and pictures: what `split-core[train]` adds around the library."""
