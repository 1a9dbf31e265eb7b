"""Data sets of questions about images."""
