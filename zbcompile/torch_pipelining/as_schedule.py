"""A pipeline with the calls of a `torch.distributed.pipelining` schedule, so that a loop written for one fits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zbcompile.batches.batch import flatten_batch
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.training_step import LossArguments, LossFunction, with_arguments, with_metrics
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
        self._known: StepInputs | None = None

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch, or of microbatches that are already split (`arg_mbs`, `kwarg_mbs`,
        `target_mbs`, on all ranks that pass something). Returns the model's output on the last rank (None on others),
        unless `return_outputs=False`, which saves the memory of it and which an output layer sharded by `vocab=`
        needs. `losses` becomes the list of the microbatches' losses on the last rank. `loss_kwargs` go to the loss
        function in addition to output and target, whole to every microbatch; tensors may change from step to step.

        Raises PipelineError if a stage of this rank reads an input that only other ranks passed, and for shapes (or
        numbers among `loss_kwargs`) other than those of the first step.
        """
        target, target_mbs = _with_arguments(loss_kwargs, target, target_mbs)
        split = (arg_mbs, kwarg_mbs, target_mbs) != (None, None, None)
        whole = StepInputs([args] if args else None, [kwargs] if kwargs else None, None if target is None else [target])
        if split and whole != (None, None, None):
            raise PipelineError("the step received a batch and split microbatches. Pass one of them.")
        given = StepInputs(arg_mbs, kwarg_mbs, target_mbs) if split else whole
        if self._known is None:
            known = self._shared(given)
            self._with(self._pipe.compile, known, split, return_outputs=return_outputs)
            self._known = known
        self._require_known_shapes(given)
        self._require_what_is_read(given)
        where = "last" if return_outputs else False
        found, output = self._with(self._pipe.step_losses, given.over(self._known), split, return_outputs=where)
        self._fill(losses, found)
        return output if self._is_last else None

    def _with(self, run: Callable[..., Any], given: "StepInputs", split: bool, **options: Any) -> Any:
        if split:
            return run(microbatches=given.microbatches(), **options)
        ((args, kwargs, target),) = given.microbatches()
        return run(*args, target=target, **options, **kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's output for one batch, on the last rank (None elsewhere), and with a target its losses."""
        target, _ = _with_arguments(loss_kwargs, target, None)
        given = StepInputs([args] if args else None, [kwargs] if kwargs else None, None if target is None else [target])
        ((args, kwargs, target),) = self._shared(given).microbatches()
        if self._known is None and target is not None:  # a first step would have to place the parameters
            self._pipe.compile(*args, target=target, return_outputs=True, **kwargs)
        output = self._pipe.eval(*args, **kwargs)
        if target is not None and self._pipe.loss is not None:
            whole = flatten_batch((output,), {}, target, None)
            count = whole.most_parts(self._pipe.program.schedule.microbatches, even=True)
            parts = (part.example for part in whole.into(count).each)
            self._fill(
                losses, [with_metrics(with_arguments(self._pipe.loss, part[0], goal))[0] for part, _, goal in parts]
            )
        return output if self._is_last else None

    @property
    def _is_last(self) -> bool:
        program = self._pipe.program
        return bool(set(program.ranks_of(program.schedule.stages - 1)) & set(self._pipe.ranks.local))

    def _fill(self, losses: list[torch.Tensor] | None, found: list[torch.Tensor]) -> None:
        if losses is not None and self._is_last:
            losses[:] = found

    def _shared(self, given: "StepInputs") -> "StepInputs":
        """Inputs, every keyword and target, each from the first rank that passed it."""
        found = StepInputs(None, None, None)
        for each in self._pipe.ranks.gather_here(given):
            found = found.over(each)
        return found

    def _require_known_shapes(self, given: "StepInputs") -> None:
        known = self._known or given
        names = [set(kwargs) for kwargs in given.kwargs or ()]
        passed = [{n: v for n, v in k.items() if n in own} for k, own in zip(known.kwargs or (), names, strict=False)]
        for own, other in zip(given, (known.args, passed, known.targets), strict=True):
            if own is not None and _shapes(own) != _shapes(other):
                raise PipelineError(
                    f"the step received {_shapes(own)}, the first step {_shapes(other)}; ranks that pass no inputs "
                    "cannot know of a new shape. Use pipe.step, which takes the whole batch on every rank, or make "
                    "another pipe.as_schedule()."
                )

    def _require_what_is_read(self, given: "StepInputs") -> None:
        passed = (given.args, given.kwargs, given.targets)
        absent = [name for name, own in zip(("args", "kwargs", "target"), passed, strict=True) if own is None]
        own = {name for kwargs in given.kwargs or () for name in kwargs}
        absent += [f"kwargs[{n!r}]" for kwargs in (self._known or given).kwargs or () for n in kwargs if n not in own]
        for path, stage in _inputs_read(self._pipe).items():
            if path.startswith(tuple(absent)):
                raise PipelineError(
                    f"stage {stage} on this rank reads {path}, which this rank did not pass. Pass it here as well."
                )


class StepInputs(NamedTuple):
    """What a rank passes, by microbatches (a whole batch counts as one); None for what it does not pass."""

    args: Sequence[tuple[Any, ...]] | None
    kwargs: Sequence[dict[str, Any]] | None
    targets: Sequence[Any] | None

    def over(self, other: "StepInputs") -> "StepInputs":
        """This, completed by another."""
        pairs = zip(other.kwargs or (), self.kwargs or (), strict=True) if other.kwargs and self.kwargs else ()
        kwargs = [{**theirs, **own} for theirs, own in pairs] or self.kwargs or other.kwargs
        first, last = (own if own is not None else its for own, its in zip(self[::2], other[::2], strict=True))
        return StepInputs(first, kwargs, last)

    def microbatches(self) -> list[tuple[Any, ...]]:
        """`(args, kwargs, target)` of each."""
        count = max(len(each) for each in (*self, [None]) if each is not None)
        empty: tuple[Any, ...] = ((), {}, None)
        columns = (each or [none] * count for each, none in zip(self, empty, strict=True))
        return list(zip(*columns, strict=True))


def _with_arguments(
    loss_kwargs: dict[str, Any] | None, target: Any, target_mbs: Sequence[Any] | None
) -> tuple[Any, Sequence[Any] | None]:
    """The targets that this rank passes, each with the further arguments of the loss function."""
    if not loss_kwargs:
        return target, target_mbs
    each = None if target_mbs is None else [LossArguments(part, loss_kwargs) for part in target_mbs]
    return None if target is None else LossArguments(target, loss_kwargs), each


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
