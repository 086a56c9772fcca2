"""torchvision and timm without torchvision's binary.

A build of torchvision belongs to one build of PyTorch, and some CPU builds have none. Models, transforms and
timm need only its Python code, which ``make setup`` puts into a separate folder: inside the environment a
torchvision without a binary would break packages that look for it, such as transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "vision"
OPERATORS_WITH_RULES = ("nms", "qnms")  # torchvision registers shapes for these when it is imported
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def has_torchvision() -> bool:
    """Whether ``find_torchvision`` would find it. Changes nothing."""
    return FOLDER.is_dir() or importlib.util.find_spec("torchvision") is not None


def find_torchvision() -> bool:
    """Makes ``import torchvision`` and ``import timm`` work in this process, and returns whether they are
    available. Without torchvision's binary its operators on boxes exist by name only, and raise when
    called."""
    if importlib.util.find_spec("torchvision") is None and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
        for name in OPERATORS_WITH_RULES:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", BOXES)
    return importlib.util.find_spec("torchvision") is not None
