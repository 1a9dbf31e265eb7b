"""Tasks, data sets and backbones for split_core, offered through its plugin hooks (see `plugin`)."""
