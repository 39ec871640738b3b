"""The optimizer of a run, by name or by a function of the user's, and its learning rate as a function of the step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.cli.target import load_object
from zbcompile.errors import PipelineError
from zbcompile.optimizer.named_state import MEMBERS

NAMED: Mapping[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
DECAYS = ("none", "linear", "cosine")
Parameters = Iterable[tuple[str, nn.Parameter]]


def make_optimizer(name: str, parameters: Parameters, options: Mapping[str, Any]) -> Optimizer:
    """An optimizer over one rank's parameters, of which there may be none.

    `name` is one of `NAMED`, or names a function that is called with the list of (name, parameter) and `options`.
    Raises PipelineError if it cannot be made.
    """
    given = list(parameters)
    try:
        if name in NAMED:
            return NAMED[name]([{"params": [parameter for _, parameter in given]}], **options)
        if ":" not in name:
            raise PipelineError(f"--optimizer {name}; expected {', '.join(NAMED)}, or FILE.py:function.")
        made = load_object(name)(given, **options)
    except (TypeError, ValueError) as error:
        raise PipelineError(f"--optimizer {name} with {dict(options)} failed: {error}") from error
    if not isinstance(made, Optimizer):
        raise PipelineError(f"{name} returned a {type(made).__name__}; expected a torch.optim.Optimizer.")
    return made


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of every group, without its parameters."""
    return [{key: value for key, value in group.items() if key not in MEMBERS} for group in optimizer.param_groups]


def set_options(optimizer: Optimizer, options: Iterable[Mapping[str, Any]]) -> None:
    """Give the groups these options: the command overrides the checkpoint."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)


def rate_factor(step: int, steps: int, warmup: int = 0, decay: str = "none") -> float:
    """The share of the learning rate in `step` of `steps`: upwards for `warmup` steps, then down to 0 if it decays.

    >>> [rate_factor(step, steps=6, warmup=2, decay="linear") for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    passed = (step - warmup) / max(1, steps - warmup)
    if decay == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * passed)
    return 1.0 - passed if decay == "linear" else 1.0
