"""A pipeline with the calls of a `torch.distributed.pipelining` schedule, so that a loop written for one fits."""

from typing import Any, Protocol

import torch

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.batch import flatten_batch
from zbcompile.passes.capture.training_step import LossFunction, with_metrics
from zbcompile.program.program import Program
from zbcompile.torch_private import pytree


class Steps(Protocol):
    """The part of a pipeline that a schedule needs."""

    @property
    def program(self) -> Program: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def loss(self) -> LossFunction | None: ...
    def compile(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Any: ...
    def step_losses(self, *args: Any, target: Any = None, **kwargs: Any) -> Any: ...
    def eval(self, *args: Any, **kwargs: Any) -> Any: ...


class ScheduleLike:
    """Made by `pipe.as_schedule()`. As with torch, the rank of the first stage passes the inputs, that of the last one
    the target, and a rank that has neither calls `step()`.

    Other ranks learn the inputs that only one rank passes in the first step, which sends them to all and compiles; from
    then on their shapes are fixed, and only boundary tensors travel. Differences from torch: gradients are
    scaled by the pipeline's `loss_reduction` (torch's `scale_grads`).

    >>> schedule = pipe.as_schedule()                                                        # doctest: +SKIP
    >>> schedule.step(inputs)                                # on the first rank             # doctest: +SKIP
    >>> output = schedule.step(target=targets, losses=losses)  # on the last one             # doctest: +SKIP
    """

    def __init__(self, pipe: Steps) -> None:
        self._pipe = pipe
        self._known: tuple[Any, Any, Any] | None = None

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch. Returns the model's output on the last rank (None on others), unless
        `return_outputs=False`, which saves the memory of it and which an output layer sharded by `vocab=` needs.
        `losses` becomes the list of the microbatches' losses on the last rank.

        Raises PipelineError if a stage of this rank reads an input that only other ranks passed, and for shapes
        other than those of the first step.
        """
        given = (args or None, kwargs or None, target)
        if self._known is None:
            known = self._shared(*given)
            args, keywords, target = known
            self._pipe.compile(*(args or ()), target=target, return_outputs=return_outputs, **(keywords or {}))
            self._known = known
        self._require_known_shapes(given)
        self._require_what_is_read(given)
        first, last = (given[i] if given[i] is not None else self._known[i] for i in (0, 2))
        where = "last" if return_outputs else False
        whole = {**(self._known[1] or {}), **kwargs}
        found, output = self._pipe.step_losses(*(first or ()), target=last, return_outputs=where, **whole)
        self._fill(losses, found)
        return output if self._is_last else None

    def eval(self, *args: Any, target: Any = None, losses: list[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """The model's output for one batch, on the last rank (None elsewhere), and with a target its losses."""
        args, kwargs, target = self._shared(args or None, kwargs or None, target)
        if self._known is None and target is not None:  # a first step would have to place the parameters
            self._pipe.compile(*(args or ()), target=target, return_outputs=True, **(kwargs or {}))
        output = self._pipe.eval(*(args or ()), **(kwargs or {}))
        if target is not None and self._pipe.loss is not None:
            whole = flatten_batch((output,), {}, target, None)
            count = whole.most_parts(self._pipe.program.schedule.microbatches, even=True)
            parts = (part.example for part in whole.into(count).each)
            self._fill(losses, [with_metrics(self._pipe.loss(part[0], goal))[0] for part, _, goal in parts])
        return output if self._is_last else None

    @property
    def _is_last(self) -> bool:
        program = self._pipe.program
        return bool(set(program.ranks_of(program.schedule.stages - 1)) & set(self._pipe.ranks.local))

    def _fill(self, losses: list[torch.Tensor] | None, found: list[torch.Tensor]) -> None:
        if losses is not None and self._is_last:
            losses[:] = found

    def _shared(self, *given: Any) -> tuple[Any, Any, Any]:
        """Inputs, every keyword and target, each from the first rank that passed it."""
        everyone = self._pipe.ranks.gather_here(given)
        args, keywords, target = ([v for v in values if v is not None] for values in zip(*everyone, strict=True))
        kwargs = {name: value for own in reversed(keywords) for name, value in own.items()}
        return (*args, None)[0], kwargs or None, (*target, None)[0]

    def _require_known_shapes(self, given: tuple[Any, Any, Any]) -> None:
        args, kwargs, target = self._known or (None, None, None)
        kwargs = kwargs or {}
        passed = {name: kwargs[name] for name in given[1] or () if name in kwargs}
        for own, known in zip(given, (args, passed, target), strict=True):
            if own is not None and _shapes(own) != _shapes(known):
                raise PipelineError(
                    f"the step received {_shapes(own)}, the first step {_shapes(known)}; ranks that pass no inputs "
                    "cannot know of a new shape. Use pipe.step, which takes the whole batch on every rank, or make "
                    "another pipe.as_schedule()."
                )

    def _require_what_is_read(self, given: tuple[Any, Any, Any]) -> None:
        absent = [name for name, own in zip(("args", "kwargs", "target"), given, strict=True) if own is None]
        absent += [f"kwargs[{name!r}]" for name in (self._known or given)[1] or () if name not in (given[1] or ())]
        for path, stage in _inputs_read(self._pipe).items():
            if path.startswith(tuple(absent)):
                raise PipelineError(
                    f"stage {stage} on this rank reads {path}, which this rank did not pass. Pass it here as well."
                )


def _inputs_read(pipe: Steps) -> dict[str, int]:
    """The input paths that ranks of this process read, each with the first stage that does; shards of the output layer
    count as their ranks' first stages."""
    program = pipe.program
    found: dict[str, int] = {}
    for rank in pipe.ranks.local:
        stages = program.stages_of(rank)
        read = [(stage, piece) for stage in stages for piece in program.stages[stage].pieces.values()]
        read += [(stages[0], piece) for piece in program.vocabulary.pieces[rank].values()] if program.vocabulary else []
        for stage, piece in sorted(read, key=lambda each: each[0], reverse=True):
            found |= {slot.name: stage for slot in piece.inputs if slot.kind == "input"}
    return found


def _shapes(value: Any) -> list[Any]:
    return [list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(value)]
