"""What is asked of `pipe.optimizer`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from zbcompile.errors import PipelineError
from zbcompile.optimizer.parameter_groups import Predicate
from zbcompile.optimizer.update_rules import rule_of
from zbcompile.passes.option import is_real


@dataclass(frozen=True)
class Wanted:
    """What was asked of `pipe.optimizer`, which explains every field."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    params: Predicate | None = None
    groups: Sequence[Mapping[str, Any]] | None = None
    zero: int = 0
    clip: float | None = None
    early: bool = False
    validate: str = "before"

    def __post_init__(self) -> None:
        _require_known(self)

    @property
    def validates(self) -> bool:
        """Whether updates are made before the norm of all gradients is known, and corrected afterwards."""
        return self.validate == "after"

    @property
    def updates_early(self) -> bool:
        """Whether stages update inside of the step."""
        return self.early or self.validates

    @property
    def alone(self) -> bool:
        """Whether no other optimizer may have the same parameters."""
        return bool(self.zero) or self.updates_early

    def make(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        """The torch optimizer over these groups."""
        try:
            return self.kind([dict(each) for each in groups], **self.options)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"{self.kind.__name__} cannot be made: {error}") from error


EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "params": (lambda given: given is None or callable(given), "a function of a parameter's name and the parameter"),
    "groups": (lambda given: given is None or _is_list(given), 'a list of groups, such as {"params": function}'),
    "zero": (lambda given: is_real(given) and given in (0, 1, 2), "0, 1 or 2"),
    "clip": (lambda given: given is None or (is_real(given) and given > 0), "a norm above 0, or None"),
    "early": (lambda given: isinstance(given, bool), "True or False"),
}


def _is_list(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(each, Mapping) for each in given)


def _require(wanted: Wanted, name: str) -> None:
    holds, expected = EXPECTED[name]
    given = getattr(wanted, name)
    if not holds(given):
        raise PipelineError(f"{name}={given!r}; expected {expected}.")


def _require_known(wanted: Wanted) -> None:
    if not (isinstance(wanted.kind, type) and issubclass(wanted.kind, Optimizer)):
        raise PipelineError(
            f"pipe.optimizer received {getattr(wanted.kind, '__name__', type(wanted.kind).__name__)}; expected a class "
            "of torch optimizers, such as torch.optim.AdamW."
        )
    for name in ("params", "groups", "zero", "clip", "early"):
        _require(wanted, name)
    if wanted.validate not in ("before", "after"):
        raise PipelineError(f'validate={wanted.validate!r}; expected "before" or "after".')
    if wanted.early and wanted.clip is not None and not wanted.validates:
        raise PipelineError(
            "early=True updates a stage before the norm of all gradients is known, by which clip= clips. Pass "
            'validate="after", which corrects such updates, or leave one of them out.'
        )
    if wanted.updates_early and rule_of(wanted.kind) is None:
        raise PipelineError(
            f"early=True updates stage by stage, and {wanted.kind.__name__} is not known to update element by element "
            "or matrix by matrix. If it does, say so in its class: elementwise = True, or matrixwise = True."
        )
