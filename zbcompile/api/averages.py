"""Exponential moving averages of a pipeline's parameters; each rank averages its own share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zbcompile.api.pipeline import Pipeline
from zbcompile.batches.batch import Microbatches
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import local_of
from zbcompile.program.step_record import StepRecord


class Averages:
    """The averages of a pipeline's parameters; made by `zbcompile.ema`. `updates` counts the calls of `update`."""

    def __init__(self, pipe: Pipeline, decay: float) -> None:
        if not isinstance(pipe, Pipeline):
            raise PipelineError(f"ema averages what a pipeline trains, and received a {type(pipe).__name__}.")
        if not 0 <= decay <= 1:
            raise PipelineError(f"decay={decay!r}; expected a number from 0 to 1, such as 0.999.")
        self.pipe, self.decay, self.updates = pipe, decay, 0
        self._add = get_ema_multi_avg_fn(decay)
        self._own: dict[str, torch.Tensor] = {}
        self._applied = False

    def update(self) -> None:
        """Add the present parameters, after a step of the optimizer. Every rank must call it."""
        self._require_apart("update")
        if not self.updates:
            self.begin_again(1)
            return
        current = self._parameters()
        kinds: dict[torch.dtype, list[str]] = {}
        for name, parameter in current.items():
            kinds.setdefault(parameter.dtype, []).append(name)
        for names in kinds.values():
            self._add([self._own[name] for name in names], [current[name] for name in names], self.updates)
        self.updates += 1

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """As `pipe.state_dict`, a copy with the averages in place of the parameters; buffers are the present ones."""
        with self.applied():
            found = self.pipe.state_dict(full=full)
            return {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in found.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the pipeline has the averages for its parameters: `pipe.eval`, `pipe.log_probs` and
        `zbcompile.save_weights` read them. A step inside is refused. Every rank must enter it.

        >>> with ema.applied():                                                          # doctest: +SKIP
        ...     zbcompile.save_weights("averages.safetensors", pipe)
        """
        self._require_apart("applied")
        with self.pipe.observation.watched(_NoSteps(self.pipe.ranks)):
            self._swap()
            self._applied = True
            try:
                yield
            finally:
                self._applied = False
                self._swap()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """This process's averages, by the names of parameters; for a DTensor its local part. Equal to the parameters
        before the first update. Checkpoints read and fill them in place."""
        self._require_apart("a checkpoint")
        if not self._own:
            self.begin_again(0)
        return self._own

    def begin_again(self, updates: int) -> None:
        """Restart from the present parameters, as if after `updates` updates."""
        self._require_apart("a checkpoint")
        self._own = {name: parameter.clone() for name, parameter in self._parameters().items()}
        self.updates = updates

    def _parameters(self) -> dict[str, torch.Tensor]:
        """This process's parameters, with the values of the last update; for a DTensor its local part."""
        return {name: local_of(parameter).detach() for name, parameter in self.pipe.named_parameters()}

    def _swap(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters().items() if self._own else ():
                kept = parameter.clone()
                parameter.copy_(self._own[name])
                self._own[name].copy_(kept)

    def _require_apart(self, what: str) -> None:
        if self._applied:
            raise PipelineError(f"{what} inside of ema.applied(), where the pipeline has the averages. Leave it first.")


@dataclass(frozen=True)
class _NoSteps:
    """A watcher that refuses every step of the pipeline that it watches, on all `ranks`."""

    ranks: Ranks

    def wants(self, index: int) -> bool:
        raise self.ranks.refusal("a step inside of ema.applied() would train the averages. Leave it first.")

    def done(self, index: int, step: Microbatches, record: StepRecord | None) -> None:
        """Does nothing: no step gets this far."""


def ema(pipe: Pipeline, decay: float = 0.999) -> Averages:
    """Averages of the parameters of `pipe`: after each step of the optimizer `update()` replaces the average a by
    a + (1 - decay) * (p - a), elementwise in the dtype of the parameter p; the first update copies p.

    These are the bits of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` on the unsplit model.
    Each rank keeps averages of its share, and all ranks make the same calls. `zbcompile.save_checkpoint(..., ema=ema)`
    saves them, `load_checkpoint(..., ema=ema)` reads them at any ranks and schedule.

    Raises PipelineError for what is no pipeline, and for a decay that is not between 0 and 1.

    >>> ema = zbcompile.ema(pipe, decay=0.999)                                           # doctest: +SKIP
    >>> pipe.step(inputs, target=targets); optimizer.step(); ema.update()                # doctest: +SKIP
    >>> with ema.applied(): logits = pipe.eval(inputs)                                   # doctest: +SKIP
    """
    return Averages(pipe, decay)
