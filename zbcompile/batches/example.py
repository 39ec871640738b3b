"""The example that a TARGET function returns: a model with one microbatch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.passes.capture.losses import join_loss


@dataclass(frozen=True)
class Example:
    """A model with the inputs of ONE microbatch, as a function named on the command line returns
    it.

    `args` and `kwargs` are those of the model's forward; `loss(output, target)` and `target` as in
    `zbcompile.pipeline`: without `loss`, forward returns the loss. Raises PipelineError for parts
    that do not fit together.

    >>> def example():
    ...     return zbcompile.Example(GPT(), (tokens,), loss=loss_fn)  # doctest: +SKIP
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Any] | None = None
    target: Any = None

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("args", tuple), ("kwargs", Mapping)):
            if not isinstance(value := getattr(self, name), kind):
                raise PipelineError(
                    f"{name} of an example is a {type(value).__name__}; expected a {kind.__name__}."
                )
        if self.target is not None and self.loss is None:
            raise PipelineError(
                "an example has target= but no loss=; pass loss=fn(output, target), or leave target"
                " out."
            )
        join_loss(self.model, self.loss)
