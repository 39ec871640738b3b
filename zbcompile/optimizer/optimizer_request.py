"""The request to `pipe.optimizer`: a kind of optimizer; its groups (a parameter is in the first one
whose predicate takes it); its options."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zbcompile.distributed.mesh import Mesh
from zbcompile.errors import PipelineError
from zbcompile.options import refuse_removed
from zbcompile.passes.compile_options import is_real

ELEMENTWISE = (
    "AdamW",
    "Adam",
    "SGD",
    "RMSprop",
    "Adagrad",
)  # of torch.optim: they update element by element


Predicate = Callable[[str, torch.Tensor], bool]


def read_groups(
    given: Sequence[Mapping[str, Any]] | None,
) -> tuple[list[Predicate], list[dict[str, Any]]]:
    """The predicates of the groups that were asked for, and the options of all groups, the default
    one last."""
    groups = [dict(each) for each in given or ()]
    for each in groups:
        if not callable(each.get("params")):
            raise PipelineError(
                f'groups= has a group whose "params" is {each.get("params")!r}; expected a function'
                ' of a parameter\'s name and the parameter, such as {"params": lambda name, p:'
                ' p.ndim < 2, "weight_decay": 0}.'
            )
    return [each.pop("params") for each in groups], [*groups, {}]


def divide_into_groups(
    parameters: Mapping[str, torch.Tensor],
    predicates: Sequence[Predicate],
    chosen: Predicate | None,
) -> dict[str, int]:
    """The number of the group of each of the `parameters` that the optimizer has: all, or those
    that are `chosen`. Raises PipelineError for a predicate that takes none of them."""
    for what, takes in (
        ("params=", chosen),
        *((f"groups[{i}]", each) for i, each in enumerate(predicates)),
    ):
        if (
            takes is not None
            and parameters
            and not any(takes(name, p) for name, p in parameters.items())
        ):
            raise PipelineError(
                f"{what} takes none of the model's {len(parameters)} parameters, the first of which"
                f" is called {next(iter(parameters))}. Its function receives a parameter's name and"
                " the parameter."
            )
    return {
        name: next(
            (i for i, takes in enumerate(predicates) if takes(name, parameter)), len(predicates)
        )
        for name, parameter in parameters.items()
        if chosen is None or chosen(name, parameter)
    }


@dataclass(frozen=True)
class OptimizerRequest:
    """A request to `pipe.optimizer`, which explains every field."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    params: Predicate | None = None
    groups: Sequence[Mapping[str, Any]] | None = None
    zero: int = 0
    clip: float | None = None
    early: bool = False
    validate: str = "before"
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _require_known(self)

    @property
    def validates(self) -> bool:
        """Whether updates are made before the norm of all gradients is known, and corrected
        afterwards."""
        return self.validate == "after"

    @property
    def updates_early(self) -> bool:
        """Whether stages update inside of the step."""
        return self.early or self.validates

    @property
    def alone(self) -> bool:
        """Whether no other optimizer may have the same parameters."""
        return bool(self.zero) or self.updates_early or self.reduce_dtype is not None

    @property
    def is_elementwise(self) -> bool:
        """Whether the optimizer is known to update element by element; any other one sees whole
        parameters."""
        return any(getattr(torch.optim, name) is self.kind for name in ELEMENTWISE)

    def require_replicas(self, mesh: Mesh) -> None:
        """Raise PipelineError if the optimizer is to be divided and there are no replicas."""
        if self.zero and "dp" not in mesh.names:
            raise PipelineError(
                f"zero={self.zero} divides the optimizer among replicas, but the mesh has no"
                ' dimension "dp". Pass mesh= with one, or zero=0.'
            )

    def make(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        """The torch optimizer over these groups."""
        try:
            return self.kind([dict(each) for each in groups], **self.options)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"{self.kind.__name__} cannot be made: {error}") from error


EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "params": (
        lambda given: given is None or callable(given),
        "a function of a parameter's name and the parameter",
    ),
    "groups": (
        lambda given: given is None or _is_list(given),
        'a list of groups, such as {"params": function}',
    ),
    "zero": (lambda given: is_real(given) and given in (0, 1), "0 or 1"),
    "clip": (
        lambda given: given is None or (is_real(given) and given > 0),
        "a norm above 0, or None",
    ),
    "early": (lambda given: isinstance(given, bool), "True or False"),
    "validate": (lambda given: given in ("before", "after"), '"before" or "after"'),
    "reduce_dtype": (
        lambda given: given is None or (isinstance(given, torch.dtype) and given.is_floating_point),
        "a dtype of floating-point numbers, such as torch.bfloat16, or None",
    ),
}


NO_CLOSURE = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


def _is_list(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(each, Mapping) for each in given)


def _require_known(request: OptimizerRequest) -> None:
    kind = request.kind
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise PipelineError(
            f"pipe.optimizer received {getattr(kind, '__name__', type(kind).__name__)}; expected a"
            " class of torch optimizers, such as torch.optim.AdamW."
        )
    refuse_removed("pipe.optimizer", request.options)
    for name, (holds, expected) in EXPECTED.items():
        if not holds(given := getattr(request, name)):
            raise PipelineError(f"{name}={given!r}; expected {expected}.")
    if request.early and request.clip is not None and not request.validates:
        raise PipelineError(
            "early=True updates a stage before the norm of all gradients is known, by which clip="
            ' clips. Pass validate="after", which corrects such updates, or leave one of them out.'
        )
    if (
        inspect.signature(kind.step).parameters.get("closure", NO_CLOSURE).default
        is inspect.Parameter.empty
    ):
        raise PipelineError(
            f"{kind.__name__}.step() needs a closure, to compute gradients several times for one"
            " update. A pipeline's optimizer updates once, from the gradients of a step: take"
            " AdamW, say."
        )
