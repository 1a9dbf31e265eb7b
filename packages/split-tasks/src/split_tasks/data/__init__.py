"""Data sets: generated digits, composites of photographs, folders of images."""
