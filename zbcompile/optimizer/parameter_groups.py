"""Which parameter is in which group of an optimizer: the first group whose predicate takes it, else the last."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zbcompile.errors import PipelineError

Predicate = Callable[[str, torch.Tensor], bool]


def read_groups(given: Sequence[Mapping[str, Any]] | None) -> tuple[list[Predicate], list[dict[str, Any]]]:
    """The predicates of the groups that were asked for, and the options of all groups, the default one last."""
    groups = [dict(each) for each in given or ()]
    for each in groups:
        if not callable(each.get("params")):
            raise PipelineError(
                f'groups= has a group whose "params" is {each.get("params")!r}; expected a function of a parameter\'s '
                'name and the parameter, such as {"params": lambda name, p: p.ndim < 2, "weight_decay": 0}.'
            )
    return [each.pop("params") for each in groups], [*groups, {}]


def divide_into_groups(
    parameters: Mapping[str, torch.Tensor], predicates: Sequence[Predicate], chosen: Predicate | None
) -> dict[str, int]:
    """The number of the group of each of the `parameters` that the optimizer has: all, or those that are `chosen`.
    Raises PipelineError for a predicate that takes none of them."""
    for what, takes in (("params=", chosen), *((f"groups[{i}]", each) for i, each in enumerate(predicates))):
        if takes is not None and parameters and not any(takes(name, p) for name, p in parameters.items()):
            raise PipelineError(
                f"{what} takes none of the model's {len(parameters)} parameters, the first of which is called "
                f"{next(iter(parameters))}. Its function receives a parameter's name and the parameter."
            )
    return {
        name: next((i for i, takes in enumerate(predicates) if takes(name, parameter)), len(predicates))
        for name, parameter in parameters.items()
        if chosen is None or chosen(name, parameter)
    }
