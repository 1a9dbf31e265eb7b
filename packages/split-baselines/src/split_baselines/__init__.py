"""Rivals that reduce tokens inside the layers, to compare with. None is implemented in this version."""
