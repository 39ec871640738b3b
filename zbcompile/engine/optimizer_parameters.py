"""The parameters of one optimizer in this process: whole, or the parts of a ZeRO-1 replica.

A step receives the parameters that other replicas have updated, and calls it for its actions:
REDUCE sums gradients over replicas, OPT updates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.zero1 import ShardedBuffer
from zbcompile.errors import PipelineError
from zbcompile.passes.compile_options import HALF
from zbcompile.program.program import Program

LATE = -1  # in place of a stage: a parameter of several stages, or read outside of stages


@dataclass(eq=False)
class OptimizerTensor:
    """A tensor that an optimizer updates, as `tensor`: the parameter, a part of it, or the float32
    master of either.

    `source` is the parameter that the optimizer would be passed in eager mode (which may be a
    DTensor over the memory of `parameter`), or the part in the parameter's memory; `user_parameter`
    is what users see. `counted` says whether this process adds its gradient to norms and writes its
    state.
    """

    name: str
    parameter: nn.Parameter
    user_parameter: nn.Parameter
    source: Tensor
    stage: int
    counted: bool
    is_part: bool = False

    def __post_init__(self) -> None:
        source = self.source
        self.tensor = source if isinstance(source, nn.Parameter) else nn.Parameter(source)

    @property
    def is_master(self) -> bool:
        return self.tensor.dtype != self.parameter.dtype

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that an update uses."""
        return (self.tensor if self.is_part else self.parameter).grad

    def refresh_master(self) -> None:
        """Copies the parameter's values into the master where they differ from the rounded master,
        that is, where the user has overwritten the parameter."""
        if self.is_master:
            master, values = self.tensor.detach(), self.source.detach()
            master.copy_(torch.where(master.to(values.dtype) == values, master, values.float()))


@dataclass(eq=False)
class OptimizerParameters:
    """The `tensors` that one optimizer updates in this process, by the order of its collectives.

    With `zero` replicas divide the `buffers`. `names` are the optimizer's parameters on all ranks;
    every step trains those in `trained`. Gradients are summed over replicas in `reduce_dtype`; None
    keeps their dtype. `is_reduced` says whether the parts have gradients, `is_used` whether an
    update has used these. The ranks that share a parameter make all calls in the same order.
    """

    tensors: Sequence[OptimizerTensor]
    ranks: Ranks
    zero: bool
    names: frozenset[str]
    trained: frozenset[str]
    buffers: Sequence[ShardedBuffer] = ()
    reduce_dtype: torch.dtype | None = None
    is_reduced: bool = False
    is_used: bool = False

    def __post_init__(self) -> None:
        self.local_names = frozenset(entry.name for entry in self.tensors).union(
            *(buffer.parameters for buffer in self.buffers)
        )

    def of_stage(self, stage: int | None) -> list[OptimizerTensor]:
        """Returns the tensors whose gradients are complete with a stage; with None all."""
        return [entry for entry in self.tensors if stage is None or entry.stage == stage]

    def buffers_of(self, stage: int | None) -> list[ShardedBuffer]:
        return [entry for entry in self.buffers if stage is None or entry.stage == stage]

    # Within a step of the pipeline

    def begin(self, program: Program) -> None:
        """Prepares a step. Raises PipelineError if it trains other parameters, or would add to
        gradients that an update has used."""
        if program.trained & self.names != self.trained:
            name = min((program.trained & self.names) ^ self.trained)
            now, before = (
                ("trains", "did not") if name in program.trained else ("does not train", "did")
            )
            raise self.ranks.refusal(
                f"this step {now} {name}, and the first one {before}. An optimizer that is divided"
                " among replicas needs steps that train the same parameters; pass zero=0 to"
                " pipe.optimizer."
            )
        if self.is_used:
            raise self.ranks.refusal(
                "this step would add to gradients that an update has used already. Call"
                " optimizer.zero_grad() after optimizer.step(): replicas hold parts of the"
                " gradients, which model.zero_grad() does not know."
            )
        self.wait()
        for buffer in self.buffers:
            buffer.attach_gradients()

    def reduce(self, stage: int, gradients: Gradients) -> None:
        """Starts to sum the gradients of a stage over replicas."""
        for buffer in self.buffers:
            if buffer.reduction_is_complete:  # its gradients are freed before others need memory
                self._take_sum(buffer)
        for buffer in self.buffers_of(stage):
            buffer.reduce(gradients)

    def finish(self, stage: int | None = None) -> None:
        """Completes the gradient sums of a stage, or of all stages with None."""
        for buffer in self.buffers_of(stage):
            self._take_sum(buffer)
        self.is_reduced = True

    def _take_sum(self, buffer: ShardedBuffer) -> None:
        total = buffer.finish_reduction()
        if total is None:
            return
        for entry in self.tensors:
            if entry.name in buffer.parameters:
                part = buffer.local_part(total, entry.name)
                assert part is not None
                part, gradient = part.to(entry.tensor.dtype), entry.tensor.grad
                entry.tensor.grad = part if gradient is None else gradient.add_(part)

    def wait(self) -> None:
        """Receives the parameters that other replicas have updated. Raises PipelineError if the
        user has written into one, which would be lost."""
        if self.buffers:
            with (
                self.ranks.watch.outside_calls(what := "the updated parameters"),
                self.ranks.waiting(what),
            ):
                for buffer in self.buffers:
                    buffer.wait()

    # Around an update

    def make_masters(self, needs_master: Callable[[Tensor], object]) -> dict[Tensor, nn.Parameter]:
        """Makes float32 masters of the parameters in half precision that need one and have none.
        Returns them by the tensors that they replace."""
        masters: dict[Tensor, nn.Parameter] = {}
        for entry in self.tensors:
            if entry.parameter.dtype in HALF and not entry.is_master and needs_master(entry.source):
                replaced, entry.tensor = entry.tensor, nn.Parameter(entry.source.detach().float())
                masters[replaced] = entry.tensor
        return masters

    def counted_gradients(self, stage: int | None = None) -> Iterator[Tensor]:
        """Yields the gradients that this process counts in the norm of all."""
        gradients = (entry.gradient for entry in self.of_stage(stage) if entry.counted)
        return (gradient for gradient in gradients if gradient is not None)

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scales all gradients, whose norm is `norm`, to the norm `limit` if theirs is larger."""
        clipped = [entry.tensor if entry.is_part else entry.parameter for entry in self.tensors]
        nn.utils.clip_grads_with_norm_(clipped, limit, norm)

    def require_reduced(self, stage: int | None = None) -> None:
        """Raises PipelineError for gradients that are not summed over replicas."""
        for buffer in self.buffers_of(stage):
            for name, parameter in buffer.parameters.items():
                if parameter.grad is not None:
                    raise PipelineError(
                        f"the gradient of {name} is this replica's own: the last step was inside"
                        " no_sync, or the gradient was made elsewhere. Run a step outside of"
                        " no_sync before optimizer.step()."
                    )

    def begin_update(self, stage: int | None = None) -> None:
        """Copies values that the user has written into the parameters into the masters."""
        if stage is None:
            self.wait()
        for buffer in self.buffers_of(stage):
            buffer.attach_parameters()
        for entry in self.of_stage(stage):
            entry.refresh_master()

    def end_update(self, stage: int | None = None) -> None:
        """Rounds masters, and starts to send the values to the other replicas."""
        self.is_used = self.is_reduced
        self.round_masters(stage)
        for buffer in self.buffers_of(stage):
            buffer.gather()

    def round_masters(self, stage: int | None = None) -> None:
        """Copies the masters into the parameters."""
        for entry in self.of_stage(stage):
            if entry.is_master:
                entry.source.detach().copy_(entry.tensor.detach())

    def drop_gradients(self) -> None:
        """Forgets all gradients, and sums that have been started."""
        self.is_reduced = self.is_used = False
        for buffer in self.buffers:
            buffer.drop_gradients()
            for name, parameter in buffer.parameters.items():
                parameter.grad = buffer.user_parameters[name].grad = None
        for entry in self.tensors:
            entry.tensor.grad = entry.user_parameter.grad = entry.parameter.grad = None
