"""The arguments of `pipe.optimizer`: a class of torch optimizers, its parameters, groups and
options."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zbcompile.errors import PipelineError
from zbcompile.options import refuse_removed
from zbcompile.passes.compile_options import is_real
from zbcompile.passes.torch_private import version_of
from zbcompile.torch_private import SET_BY_STEP, pytree

# Classes of torch.optim that update element by element.
ELEMENTWISE = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad")

PLAIN = (bool, int, float, str, tuple, type(None))  # options that ranks compare

Predicate = Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class OptimizerConfig:
    """The arguments of `pipe.optimizer`, which explains every field."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    params: Predicate | None = None
    groups: Sequence[Mapping[str, Any]] | None = None
    zero: int = 0
    clip: float | None = None
    overlap: bool = False
    validate: str = "before"
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        kind = self.kind
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise PipelineError(
                f"pipe.optimizer received {getattr(kind, '__name__', type(kind).__name__)};"
                " expected a class of torch optimizers, such as torch.optim.AdamW."
            )
        refuse_removed("pipe.optimizer", self.options)
        for name, (is_valid, expected) in EXPECTED.items():
            if not is_valid(value := getattr(self, name)):
                raise PipelineError(f"{name}={_short(value)}; expected {expected}.")
        for group in self.groups or ():
            if not callable(group.get("params")):
                raise PipelineError(
                    f'groups= has a group whose "params" is {_short(group.get("params"))}; expected'
                    " a function of a parameter's name and the parameter, such as"
                    ' {"params": lambda name, p: p.ndim < 2, "weight_decay": 0}.'
                )
        if self.overlap and self.clip is not None and not self.post_validates:
            raise PipelineError(
                "overlap=True updates a stage before the norm of all gradients is known, by which"
                ' clip= clips. Pass validate="after", which corrects such updates, or leave one of'
                " them out."
            )
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise PipelineError(
                f"{kind.__name__}.step() needs a closure, to compute gradients several times for"
                " one update. A pipeline's optimizer updates once, from the gradients of a step:"
                " take AdamW, say."
            )

    @property
    def post_validates(self) -> bool:
        """Returns whether updates are made before the norm of all gradients is known, and corrected
        afterwards."""
        return self.validate == "after"

    @property
    def overlaps_step(self) -> bool:
        """Returns whether `pipe.step` updates each stage."""
        return self.overlap or self.post_validates

    @property
    def exclusive(self) -> bool:
        """Returns whether no other optimizer may have the same parameters."""
        return bool(self.zero) or self.overlaps_step or self.reduce_dtype is not None

    @property
    def is_elementwise(self) -> bool:
        """Returns whether the optimizer is known to update element by element. Others need whole
        parameters."""
        return any(getattr(torch.optim, name) is self.kind for name in ELEMENTWISE)

    def make(self, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Returns the torch optimizer over these groups."""
        try:
            return self.kind([dict(group) for group in groups], **self.options)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"{self.kind.__name__} cannot be made: {error}") from error

    def group_numbers(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns the group of each of the `parameters` that the optimizer trains: the first one
        whose predicate takes it, or one after the last. Raises PipelineError for a predicate that
        takes none of them."""
        predicates: list[Predicate] = [group["params"] for group in self.groups or ()]
        named = [("params=", self.params)] if self.params is not None else []
        named += [(f"groups[{i}]", predicate) for i, predicate in enumerate(predicates)]
        for what, predicate in named if parameters else ():
            if not any(predicate(name, p) for name, p in parameters.items()):
                raise PipelineError(
                    f"{what} takes none of the model's {len(parameters)} parameters, the first of"
                    f" which is called {next(iter(parameters))}. Its function receives a"
                    " parameter's name and the parameter."
                )
        return {
            name: next((i for i, p in enumerate(predicates) if p(name, parameter)), len(predicates))
            for name, parameter in parameters.items()
            if self.params is None or self.params(name, parameter)
        }


def _short(value: Any) -> str:
    """Returns the text of a value in one line: a list of tensors takes many."""
    return " ".join(short(value).split())


EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "params": (
        lambda value: value is None or callable(value),
        "a function of a parameter's name and the parameter, or None for all of the pipeline's",
    ),
    "groups": (
        lambda value: (
            value is None
            or (isinstance(value, list | tuple) and all(isinstance(g, Mapping) for g in value))
        ),
        'a list of groups, such as {"params": function}',
    ),
    "zero": (lambda value: is_real(value) and value in (0, 1), "0 or 1"),
    "clip": (
        lambda value: value is None or (is_real(value) and value > 0),
        "a norm above 0, or None",
    ),
    "overlap": (lambda value: isinstance(value, bool), "True or False"),
    "validate": (lambda value: value in ("before", "after"), '"before" or "after"'),
    "reduce_dtype": (
        lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
        "a dtype of floating-point numbers, such as torch.bfloat16, or None",
    ),
}


def shared_values(optimizer: Optimizer) -> list[Any]:
    """Returns marks of the options, attributes and state of an optimizer that belong to all
    parameters; a mark changes when its value does. An update that changes one is wrong if stages
    update one after the other."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = [v for k, v in dict[Any, Any](optimizer.state).items() if isinstance(k, str)]
    attributes = [
        v for k, v in vars(optimizer).items() if k not in {"state", "param_groups", *SET_BY_STEP}
    ]
    return [_mark(leaf) for leaf in pytree.tree_leaves((groups, state, attributes))]


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else (id(value), version_of(value))
    return repr(value) if isinstance(value, PLAIN) else None
