"""Architectures of timm, tiny, as problems of the oracle: convolutions, transformers, and mixtures
of both."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.oracle import Batch, Problem
from tests.support.tiny_batches import LABELS

PATCHES = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "drop_rate": 0.1,
}
WINDOWS = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 4),
    "drop_rate": 0.1,
}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "test_vit": {"img_size": 64, "drop_rate": 0.1},
    "test_vit_relpos": {"img_size": 64},
    "test_resnet": {"drop_rate": 0.1},
    "test_convnext": {},
    "test_convnext2": {},
    "test_efficientnet": {"drop_rate": 0.1},
    "test_efficientnet_gn": {},
    "test_byobnet": {},
    "test_efficientnet_ln": {},
    "test_nfnet": {},
    "test_mambaout": {},
    "test_coatnet": {"img_size": 64},
    "test_maxvit": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": PATCHES,
    "beit_base_patch16_224": PATCHES,
    "cait_xxs24_224": {**PATCHES, "depth_token_only": 1},
    "convit_tiny": PATCHES,
    "xcit_nano_12_p8_224": PATCHES,
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
}


def problem_of(name: str) -> Problem:
    inputs = ARCHITECTURES[name]
    return Problem(
        partial(_make, name, inputs),
        nn.functional.cross_entropy,
        partial(_pictures, inputs.get("img_size", 64)),
    )


def _make(name: str, options: Mapping[str, Any]) -> nn.Module:
    import timm

    created: nn.Module = timm.create_model(name, num_classes=LABELS, **options)
    return created


def _pictures(edge: int, size: int) -> Batch:
    labels: Tensor = torch.randint(0, LABELS, (size,))
    return Batch((torch.randn(size, 3, edge, edge),), {}, labels)
