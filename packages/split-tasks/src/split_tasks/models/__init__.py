"""Backbones: timm's hub, a tiny ViT for the digits, a pretrained DINOv2 that installs from PyPI."""
