"""What is asked of `pipe.optimizer`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from zbcompile.errors import PipelineError
from zbcompile.optimizer.parameter_groups import Predicate
from zbcompile.optimizer.update_rules import rule_of


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


def _require_known(wanted: Wanted) -> None:
    if not (isinstance(wanted.kind, type) and issubclass(wanted.kind, Optimizer)):
        raise PipelineError(
            f"pipe.optimizer received {getattr(wanted.kind, '__name__', type(wanted.kind).__name__)}; expected a class "
            "of torch optimizers, such as torch.optim.AdamW."
        )
    if wanted.zero not in (0, 1, 2):
        raise PipelineError(f"zero={wanted.zero!r}; expected 0, 1 or 2.")
    if wanted.clip is not None and not wanted.clip > 0:
        raise PipelineError(f"clip={wanted.clip!r}; expected a norm above 0, or None.")
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
