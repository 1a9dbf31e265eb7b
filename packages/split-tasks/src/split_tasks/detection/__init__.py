"""Object detection from one dense map: simple feature pyramid, region proposals, cascade of box heads, soft-NMS.

Boxes are (left, top, right, bottom) in pixels of the canvas. A batch holds equally many proposals for each image, with
a flag for those that are there, so that nothing is ragged between the two readings of the features.
"""
