"""Heads of the dense tasks."""
