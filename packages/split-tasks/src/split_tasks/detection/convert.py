"""Neck and heads of official EVA-02 detection checkpoints (detectron2's layout) to this project's weights.

    python -m split_tasks.detection.convert CHECKPOINT.pth DETECTOR.safetensors

writes what ``task=det task.weights=`` reads. Every key must have a place: those of the backbone (backbone.net.*) have
theirs in its own converter; anchors are made anew. The mask head is there for ``task.masks=true``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from torch import Tensor

from split_core.errors import SplitError
from split_tasks.models.eva02_names import convert_file

BACKBONE = "backbone.net."
DROPPED = ("proposal_generator.anchor_generator.", "pixel_mean", "pixel_std")
PLACES = (
    (r"backbone\.simfp_(\d)\.(\d)\.(.+)", lambda m: f"neck.levels.{int(m[1]) - 2}.{m[2]}.{m[3]}"),
    (r"proposal_generator\.rpn_head\.conv\.conv(\d)\.(.+)", lambda m: f"rpn.head.conv.{m[1]}.0.{m[2]}"),
    (r"proposal_generator\.rpn_head\.objectness_logits\.(.+)", lambda m: f"rpn.head.cls_logits.{m[1]}"),
    (r"proposal_generator\.rpn_head\.anchor_deltas\.(.+)", lambda m: f"rpn.head.bbox_pred.{m[1]}"),
    (
        r"roi_heads\.box_head\.(\d)\.conv(\d)\.(norm\.)?(.+)",
        lambda m: f"cascade.heads.{m[1]}.features.{int(m[2]) - 1}.{1 if m[3] else 0}.{m[4]}",
    ),
    (r"roi_heads\.box_predictor\.(\d)\.cls_score\.(.+)", lambda m: f"cascade.heads.{m[1]}.classifier.{m[2]}"),
    (r"roi_heads\.box_predictor\.(\d)\.bbox_pred\.(.+)", lambda m: f"cascade.heads.{m[1]}.mover.{m[2]}"),
    (
        r"roi_heads\.mask_head\.mask_fcn(\d)\.(norm\.)?(.+)",
        lambda m: f"masks.convs.{int(m[1]) - 1}.{1 if m[2] else 0}.{m[3]}",
    ),
    (r"roi_heads\.mask_head\.deconv\.(.+)", lambda m: f"masks.predictor.conv5_mask.{m[1]}"),
    (r"roi_heads\.mask_head\.predictor\.(.+)", lambda m: f"masks.predictor.mask_fcn_logits.{m[1]}"),
)
"""Names there, and what they are called here."""
LINEAR = re.compile(r"roi_heads\.box_head\.(\d)\.fc1\.(.+)")
"""Its place follows from the number of convolutions before it."""


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Neck and heads under this project's keys.

    Raises:
        SplitError: a key that has no place; all are named.
    """
    convs = len({key.split(".")[3] for key in state if key.startswith("roi_heads.box_head.0.conv")})
    result: dict[str, Tensor] = {}
    unknown = []
    for key, value in state.items():
        if key.startswith((BACKBONE, *DROPPED)):
            continue
        place = _place(key, convs)
        if place is None:
            unknown.append(key)
        else:
            result[place] = value.contiguous()
    if unknown or not result:
        reason = f"no place for {', '.join(unknown)}" if unknown else "no backbone.simfp_* and no roi_heads.* in it"
        raise SplitError(f"this is no EVA-02 detection checkpoint: {reason}")
    return result


def _place(key: str, convs: int) -> str | None:
    if linear := LINEAR.fullmatch(key):
        return f"cascade.heads.{linear[1]}.features.{convs + 1}.{linear[2]}"  # behind the flattening
    for pattern, place in PLACES:
        if match := re.fullmatch(pattern, key):
            return place(match)
    return None


def main(arguments: Sequence[str]) -> int:
    """Convert one file; returns the exit code."""
    return convert_file(
        "detection.convert", "DETECTOR.safetensors", arguments, lambda state, path: {path: convert(state)}
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
