"""Batches for transformers' models, made from what their forward takes and from their configuration."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.oracle import Batch, Loss
from tests.support.tiny_configs import FIRST_TOKEN, IMAGE, VOCABULARY

LENGTH = 17  # a length that no kernel is made for
LABELS = 3


def batch_of(model: nn.Module, task: str) -> Callable[[int], Batch]:
    """By size: a batch for `model`, with labels for the task of its Auto class if forward takes them."""
    takes = inspect.signature(model.forward).parameters

    def batch(size: int) -> Batch:
        made = dict(_inputs(model, takes, size))
        if "labels" not in takes:
            return Batch((), made, torch.randint(0, 2, (size,)))
        return Batch((), {**made, "labels": _labels(model, task, made, size)})

    return batch


def loss_of(model: nn.Module) -> Loss | None:
    """None if the model computes its own."""
    return None if "labels" in inspect.signature(model.forward).parameters else _of_logits


def _of_logits(output: Any, target: Tensor) -> Tensor:
    """Any loss of the logits, whatever they mean."""
    logits = output.logits.flatten(1)
    return F.cross_entropy(logits[:, :2], target) + logits.square().mean()


def _inputs(model: nn.Module, takes: Mapping[str, Any], size: int) -> Iterator[tuple[str, Tensor]]:
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in takes:
        yield from _text(takes, size)
    for name in PICTURES.intersection(takes):
        yield name, _pictures(model.config, size)
    if main == "input_features":
        yield main, (spectra := _spectra(model, size))
        if "attention_mask" in takes and not model.config.is_encoder_decoder:
            yield "attention_mask", torch.ones(spectra.shape[:2], dtype=torch.long)
    if main == "input_values":
        yield main, _sound(model.config, size)
    if "bbox" in takes:
        yield "bbox", torch.randint(0, 8, (size, LENGTH, 4)).cumsum(-1)


PICTURES = {"pixel_values", "image"}


def _text(takes: Mapping[str, Any], size: int) -> Iterator[tuple[str, Tensor]]:
    """Rows of different lengths, each of them padded."""
    yield "input_ids", torch.randint(FIRST_TOKEN, VOCABULARY, (size, LENGTH))
    if "attention_mask" in takes:
        yield "attention_mask", (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (size, 1))).long()


def _pictures(config: Any, size: int) -> Tensor:
    vision = next((found for found in map(config.__dict__.get, ("vision_config", "encoder")) if found), config)
    edge = _number(getattr(vision, "image_size", None) or IMAGE)
    return torch.randn(size, getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3), edge, edge)


def _number(value: Any) -> int:
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def _spectra(model: nn.Module, size: int) -> Tensor:
    """[rows, bands, frames] for models that begin with a convolution over bands, else [rows, frames, bands]."""
    config = model.config
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d)), None)
    bands = next((getattr(config, n) for n in _BANDS if getattr(config, n, None)), 16)
    if "encoder" in config.__dict__ or not first or first.in_channels != bands:
        return torch.randn(size, 64, bands)
    frames = 2 * getattr(config, "max_source_positions", 32)
    return torch.randn(size, bands, frames)


_BANDS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "n_mels")


def _sound(config: Any, size: int) -> Tensor:
    return torch.randn(size, 6400)


def _vocabulary(config: Any) -> int:
    return int(getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY)


def _labels(model: nn.Module, task: str, made: Mapping[str, Tensor], size: int) -> Tensor:
    if re.search("CLASSIFICATION", task):
        return torch.randint(0, LABELS, (size,))
    if model.config.is_encoder_decoder or "input_ids" not in made:
        top = _vocabulary(model.config)
        return torch.randint(min(FIRST_TOKEN, top // 2), top, (size, 5 if task == "CTC" else LENGTH - 2))
    tokens, mask = made["input_ids"], made.get("attention_mask")
    return tokens if mask is None else tokens.where(mask.bool(), -100)
