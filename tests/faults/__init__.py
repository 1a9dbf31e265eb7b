"""Faults brought about on purpose: kills, full disks, damaged files, lost processes."""
