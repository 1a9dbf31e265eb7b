"""Splitting policies: learned, heuristic and reference ones."""
