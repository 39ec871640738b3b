"""Batches for transformers' models, made from what their forward takes and from their
configuration: text, sound, and pictures in the form that each takes."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tiny_configs import END, FIRST_TOKEN, IMAGE, VOCABULARY
from tests.support.oracle import Batch, Loss

LENGTH = 17  # a length that no kernel is made for
LABELS = 3


def batch_of(model: Any, task: str) -> Callable[[int], Batch]:
    """By size: a batch for `model`, with labels for the task of its Auto class if forward takes
    them."""
    takes = inspect.signature(model.forward).parameters

    def batch(size: int) -> Batch:
        created = dict(_inputs(model, takes, size))
        if "labels" not in takes:
            return Batch((), created, torch.randint(0, 2, (size,)))
        return Batch((), {**created, "labels": _labels(model, task, created, size)})

    return batch


def loss_of(model: Any) -> Loss | None:
    """Returns None if the model computes its own."""
    return None if "labels" in inspect.signature(model.forward).parameters else _of_logits


def _of_logits(output: Any, target: Tensor) -> Tensor:
    """Any loss of the logits, whatever they mean."""
    logits = output.logits.flatten(1)
    return F.cross_entropy(logits[:, :2], target) + logits.square().mean()


def _inputs(model: Any, takes: Mapping[str, Any], size: int) -> Iterator[tuple[str, Tensor]]:
    main = getattr(model, "main_input_name", "input_ids")
    seen = dict(pictures(model, takes, size))
    yield from seen.items()
    if "input_ids" in takes:
        yield from _text(model, takes, size, tokens_of(model, seen, size))
    if main == "input_features":
        yield main, (spectra := _spectra(model, size))
        if "attention_mask" in takes and not model.config.is_encoder_decoder:
            yield "attention_mask", torch.ones(spectra.shape[:2], dtype=torch.long)
    if main == "input_values":
        yield main, torch.randn(size, 6400)
    if "bbox" in takes:
        yield "bbox", torch.randint(0, 8, (size, LENGTH, 4)).cumsum(-1)


def _text(
    model: Any, takes: Mapping[str, Any], size: int, begin: int
) -> Iterator[tuple[str, Tensor]]:
    """Rows of different lengths, each of them padded, after the `begin` tokens that stand for a
    picture."""
    text = torch.randint(FIRST_TOKEN, VOCABULARY, (size, LENGTH))
    lengths = torch.randint(LENGTH // 2, LENGTH, (size, 1))
    mask = torch.arange(LENGTH) < lengths
    if (
        model.config.is_encoder_decoder and "labels" in takes
    ):  # classes are told from the end of the text
        text[torch.arange(LENGTH) == lengths - 1] = END
    printed = torch.ones(size, begin, dtype=torch.long)
    yield "input_ids", torch.cat([printed * (picture_token(model) or 0), text], 1)
    if "attention_mask" in takes:
        yield "attention_mask", torch.cat([printed, mask.long()], 1)
    for name in {"token_type_ids", "mm_token_type_ids"}.intersection(takes) if begin else ():
        yield name, torch.cat([printed, torch.zeros_like(text)], 1)


def _spectra(model: Any, size: int) -> Tensor:
    """[rows, bands, frames] for models that begin with a convolution over bands, else [rows,
    frames, bands]."""
    config, bands = model.config, 16
    for name in reversed(BANDS):
        bands = getattr(config, name, None) or bands
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d)), None)
    frames_first = {"encoder", "conv_kernel_sizes"}.intersection(config.__dict__)
    if frames_first or not first or first.in_channels != bands:
        return torch.randn(size, 64, bands)
    return torch.randn(size, bands, 2 * getattr(config, "max_source_positions", 32))


BANDS = (
    *("num_mel_bins", "input_feat_per_channel"),
    *("feature_projection_input_dim", "input_dim", "n_mels"),
)


def _labels(model: Any, task: str, made: Mapping[str, Tensor], size: int) -> Tensor:
    if re.search("CLASSIFICATION", task):
        return torch.randint(0, LABELS, (size,))
    if model.config.is_encoder_decoder or "input_ids" not in made:
        top = int(getattr(model.config.get_text_config(), "vocab_size", None) or VOCABULARY)
        shape = (size, 5 if task == "CTC" else LENGTH - 2)
        return torch.randint(min(FIRST_TOKEN, top // 2), top, shape)
    tokens, mask = made["input_ids"], made.get("attention_mask")
    return tokens if mask is None else tokens.where(mask.bool(), -100)


PATCHES = 4  # of a picture that comes as patches: so many rows and columns


def pictures(model: Any, takes: Mapping[str, Any], size: int) -> Iterator[tuple[str, Tensor]]:
    """One picture per row: as pixels, as a list of one, or as patches with the form of
    their grid."""
    config = model.config
    parts = map(config.__dict__.get, ("vision_config", "encoder"))
    vision: Any = next((part for part in parts if part), config)
    if {"image_grid_thw", "spatial_shapes"}.intersection(takes):
        yield from _patches(model, vision, takes, size)
        return
    edge = getattr(vision, "image_size", None) or IMAGE
    edge = int(edge[0]) if isinstance(edge, list | tuple) else int(edge)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    tiles, inside = hasattr(config, "image_grid_pinpoints"), "pixel_attention_mask" in takes
    # a dimension for the pictures of a row, or for the picture and one tile, if the model has one
    lists = (2,) if tiles else (1,) if inside and "spatial_shapes" not in takes else ()
    for name in {"pixel_values", "image"}.intersection(takes):
        yield name, torch.randn(size, *lists, int(channels or 3), edge, edge)
    if "qformer_input_ids" in takes:
        yield "qformer_input_ids", torch.randint(FIRST_TOKEN, VOCABULARY, (size, 5))
    if "image_sizes" in takes and (tiles or vision.model_type == "pixtral"):
        yield "image_sizes", torch.tensor([[edge, edge]] * size)


def _patches(
    model: Any, vision: Any, takes: Mapping[str, Any], size: int
) -> Iterator[tuple[str, Tensor]]:
    """Patches of all pictures in one list, or of each picture a list, with a mask."""
    seeing = next((m for m in model.modules() if getattr(m, "config", None) is vision), model)
    first = next(m for m in seeing.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d))
    values = int(first.weight[0].numel())  # what the first layer of the part that sees takes
    if "spatial_shapes" in takes:
        yield "pixel_values", torch.randn(size, PATCHES**2, values)
        yield "pixel_attention_mask", torch.ones(size, PATCHES**2, dtype=torch.long)
        yield "spatial_shapes", torch.tensor([[PATCHES, PATCHES]] * size)
    else:
        yield "pixel_values", torch.randn(size * PATCHES**2, values)
        yield "image_grid_thw", torch.tensor([[1, PATCHES, PATCHES]] * size)
    if "image_merge_sizes" in takes:
        yield "image_merge_sizes", torch.ones(size, dtype=torch.long)


def picture_token(model: Any) -> int | None:
    first = getattr(model.config, "image_token_id", None)
    return getattr(model.config, "image_token_index", None) if first is None else first  # type: ignore[no-any-return]


def tokens_of(model: Any, created: Mapping[str, Tensor], size: int) -> int:
    """How many tokens of each row stand for its picture: the model says so itself."""
    asked = next((m for m in model.modules() if hasattr(m, "get_image_features")), None)
    if asked is None or "pixel_values" not in created or picture_token(model) is None:
        return 0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        result = asked.get_image_features(**created)
    features = getattr(result, "pooler_output", result)
    listed = features if isinstance(features, list | tuple) else [features]
    width = model.config.get_text_config().hidden_size
    return int(sum(item.numel() for item in listed) // width // size)
