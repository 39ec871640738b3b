"""Pictures for transformers' models, in the form that each takes, and the tokens that stand for
them in a text."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny_configs import FIRST_TOKEN, IMAGE, VOCABULARY

PATCHES = 4  # of a picture that comes as patches: so many rows and columns


def pictures(model: nn.Module, takes: Mapping[str, Any], size: int) -> Iterator[tuple[str, Tensor]]:
    """One picture per row: as pixels, as a list of one, or as patches with the form of
    their grid."""
    vision = _vision(model.config)
    if {"image_grid_thw", "spatial_shapes"}.intersection(takes):
        yield from _patches(model, vision, takes, size)
        return
    edge = _number(getattr(vision, "image_size", None) or IMAGE)
    shape = (getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3), edge, edge)
    for name in PICTURES.intersection(takes):
        yield name, torch.randn(size, *_lists(model.config, takes), *shape)
    if "qformer_input_ids" in takes:
        yield "qformer_input_ids", torch.randint(FIRST_TOKEN, VOCABULARY, (size, 5))
    if "image_sizes" in takes and (
        hasattr(model.config, "image_grid_pinpoints") or vision.model_type == "pixtral"
    ):
        yield "image_sizes", torch.tensor([[edge, edge]] * size)


def _patches(
    model: nn.Module, vision: Any, takes: Mapping[str, Any], size: int
) -> Iterator[tuple[str, Tensor]]:
    """Patches of all pictures in one list, or of each picture a list, with a mask."""
    values = _patch_values(model, vision)
    if "spatial_shapes" in takes:
        yield "pixel_values", torch.randn(size, PATCHES**2, values)
        yield "pixel_attention_mask", torch.ones(size, PATCHES**2, dtype=torch.long)
        yield "spatial_shapes", torch.tensor([[PATCHES, PATCHES]] * size)
    else:
        yield "pixel_values", torch.randn(size * PATCHES**2, values)
        yield "image_grid_thw", torch.tensor([[1, PATCHES, PATCHES]] * size)
    if "image_merge_sizes" in takes:
        yield "image_merge_sizes", torch.ones(size, dtype=torch.long)


PICTURES = {"pixel_values", "image"}


def _vision(config: Any) -> Any:
    return next(
        (result for result in map(config.__dict__.get, ("vision_config", "encoder")) if result),
        config,
    )


def _patch_values(model: nn.Module, vision: Any) -> int:
    """Returns what the first layer of the part that sees takes of each patch."""
    seeing = next((m for m in model.modules() if getattr(m, "config", None) is vision), model)
    first = next(m for m in seeing.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d))
    return int(first.weight[0].numel())


def _lists(config: Any, takes: Mapping[str, Any]) -> tuple[int, ...]:
    """A dimension for the pictures, or the tiles, of a row, if the model has one."""
    if hasattr(config, "image_grid_pinpoints"):
        return (2,)  # the picture, and one tile
    return (1,) if "pixel_attention_mask" in takes and "spatial_shapes" not in takes else ()


def _number(value: Any) -> int:
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def picture_token(model: nn.Module) -> int | None:
    names = ("image_token_id", "image_token_index")
    return next(
        (
            value
            for value in (getattr(model.config, name, None) for name in names)
            if value is not None
        ),
        None,
    )


def tokens_of(model: nn.Module, created: Mapping[str, Tensor], size: int) -> int:
    """How many tokens of each row stand for its picture: the model says so itself."""
    requested = next((m for m in model.modules() if hasattr(m, "get_image_features")), None)
    if requested is None or "pixel_values" not in created or picture_token(model) is None:
        return 0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        result = requested.get_image_features(**created)
    features = getattr(result, "pooler_output", result)
    listed = features if isinstance(features, list | tuple) else [features]
    width = model.config.get_text_config().hidden_size
    return int(sum(item.numel() for item in listed) // width // size)
