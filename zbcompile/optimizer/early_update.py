"""What an update inside of a step was made with: it must not change until `optimizer.step()`
completes the update."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.errors import PipelineError
from zbcompile.passes.torch_private import version_of
from zbcompile.torch_private import attributes_of

TWICE = (
    "pipe.step was called again without optimizer.step() after the last one, which has updated the"
    ' parameters: it does with early=True and validate="after". Call optimizer.step() after each'
    " step outside of pipe.no_sync(), and accumulate inside of it."
)
NOTHING = (
    'optimizer.step() has nothing to complete: with early=True and validate="after" pipe.step makes'
    " the updates, outside of pipe.no_sync(). Run a step first."
)
TORN = (
    "a step has failed after some stages had updated their parameters, or before their updates were"
    " corrected, so that the model is of two steps. Load a checkpoint."
)

PLAIN = (bool, int, float, complex, str, type(None))
Options = list[dict[str, Any]]
Gradients = Mapping[str, torch.Tensor | None]


@dataclass
class EarlyUpdate:
    """What an update inside of a step was made with: the `options` of every group, and the
    `gradients` that it used and the `parameters` that it wrote, each with the number of writes into
    it at that time."""

    options: Options
    gradients: Mapping[str, tuple[torch.Tensor | None, int]]
    parameters: Mapping[str, tuple[torch.Tensor | None, int]]

    @classmethod
    def made_with(
        cls, groups: Sequence[Mapping[str, Any]], gradients: Gradients, parameters: Gradients
    ) -> "EarlyUpdate":
        """The record of an update that has just been made, with these groups and gradients, of
        these parameters."""
        used, written = (
            {name: (each, _writes(each)) for name, each in given.items()}
            for given in (gradients, parameters)
        )
        return cls(options_of(groups), used, written)

    def require_gradients(self) -> None:
        """Raise PipelineError if a gradient was written in place since."""
        for name in _written(self.gradients):
            raise PipelineError(
                f"the gradient of {name} was written before the norm of all gradients was known, so"
                " that the update cannot be corrected. Call optimizer.zero_grad(), which sets"
                " gradients to None."
            )

    def require_parameters(self) -> None:
        """Raise PipelineError if a parameter was written since: a correction would replace what was
        written."""
        for name in _written(self.parameters):
            raise PipelineError(
                f"{name} was written before its update was validated, which may have to undo the"
                " update. Call pipe.parameters() first, which waits for the validation."
            )

    def require_unchanged(self, groups: Sequence[Mapping[str, Any]], gradients: Gradients) -> None:
        """Raise PipelineError if an option or a gradient has changed since the update used it."""
        for number, (used, now) in enumerate(zip(self.options, options_of(groups), strict=True)):
            changed = next(
                (key for key in used.keys() | now.keys() if not _same(used.get(key), now.get(key))),
                None,
            )
            if changed is not None:
                values = (
                    f"{changed} of param_groups[{number}] was {used.get(changed)}, now it is"
                    f" {now.get(changed)}"
                )
                raise PipelineError(_too_late(values))
        for name, (used_gradient, writes) in self.gradients.items():
            now_gradient = gradients.get(name)
            if now_gradient is not used_gradient or _writes(now_gradient) != writes:
                raise PipelineError(_too_late(f"the gradient of {name} was changed"))


def options_of(groups: Sequence[Mapping[str, Any]]) -> Options:
    """The options of every group, as they are now."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in groups
    ]


@contextmanager
def writes_only_its_state(optimizer: Optimizer) -> Iterator[None]:
    """Around an update of some parameters. Raises PipelineError if it writes what belongs to all of
    them, such as a count of steps in a group: the next stage's update would count again."""
    before = _common(optimizer)
    yield
    after = _common(optimizer)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        raise PipelineError(
            f"{type(optimizer).__name__}.step() wrote its {changed[0]}, which belongs to all"
            ' parameters, but with early=True and validate="after" it is called for every stage,'
            " and again for a correction. Let it keep such values in the state of each parameter,"
            " or leave early= and validate= out."
        )


def _common(optimizer: Optimizer) -> dict[str, Any]:
    groups = {
        f"param_groups[{i}]": {**group, "params": ()}
        for i, group in enumerate(optimizer.param_groups)
    }
    named = {
        f"{at}[{key!r}]": value for at, group in groups.items() for key, value in group.items()
    }
    return {name: _mark(value) for name, value in (named | attributes_of(optimizer)).items()}


def _mark(value: Any) -> Any:
    """A token of a value that changes when the value, or one inside of it, is written."""
    if isinstance(value, torch.Tensor):
        return None if isinstance(value, nn.Parameter) else (id(value), version_of(value))
    if isinstance(value, Mapping):
        return tuple(map(_mark, value.values()))
    if isinstance(value, list | tuple):
        return tuple(map(_mark, value))
    return repr(value) if isinstance(value, PLAIN) else None


def _too_late(what: str) -> str:
    return (
        f"between pipe.step and optimizer.step() {what}, but pipe.step has made the update: it does"
        ' with early=True and validate="after". Change it before pipe.step, or leave them out.'
    )


def _writes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else version_of(tensor)


def _written(used: Mapping[str, tuple[torch.Tensor | None, int]]) -> list[str]:
    """The names of those that were written since the update."""
    return [name for name, (tensor, writes) in used.items() if _writes(tensor) != writes]


def _same(one: Any, other: Any) -> bool:
    tensors = [isinstance(each, torch.Tensor) for each in (one, other)]
    return torch.equal(one, other) if all(tensors) else not any(tensors) and bool(one == other)
