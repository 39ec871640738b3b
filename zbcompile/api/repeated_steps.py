"""Repeats steps in which more tokens chose the experts of one rank than an exchange has room for: with a larger
capacity, and from the state before the step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.experts import ExpertExchange
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.passes.graph.roles import Slot
from zbcompile.runtime.executable import Executable
from zbcompile.runtime.slices import Slices


def grow(model: nn.Module, ranks: Ranks) -> None:
    """Double the capacity, of all exchanges of `model` alike, so that layers that are equal stay so. Raises
    PipelineError if none has less than is enough for any routing: the one that overflowed is not among them."""
    growing = [each for each in model.modules() if isinstance(each, ExpertExchange) and each.may_overflow]
    if not growing:
        raise PipelineError(
            "an exchange between experts has a capacity, and what it belongs to is no part of the model, so it "
            "cannot be enlarged. Assign the ExpertExchange to an attribute of a module; in a saved program, give "
            "it factor= the number of ranks, which is enough for any routing."
        )
    for each in growing:
        each.factor = min(2 * each.factor, float(each.ranks))
    if ranks.is_first:
        print(f"zbcompile: more tokens chose one rank than fit; a step is done again with factor={each.factor:g}.")


def require_repeatable(optimizers: Collection[PipelineOptimizer]) -> None:
    """Raise PipelineError for optimizers under which a step cannot be done again: they have updated by then."""
    if any(each.request.updates_early and not each.request.validates for each in optimizers):
        raise PipelineError(
            "early=True updates parameters before a step knows whether all tokens have fitted into the exchanges "
            'between experts. Pass validate="after", which keeps what an update changes, or ExpertExchange(factor=) '
            "the number of its ranks, which is enough for any routing."
        )


@dataclass(frozen=True)
class StateBefore:
    """A copy of what a step changes, from before it: gradients (whole ones and those of slices), the buffers that its
    forwards write, and what replicas have not summed yet. Random numbers follow from the number of the step."""

    gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    slices: Sequence[tuple[Slices, bool, bool]]
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ranks: Ranks
    partial: frozenset[str]

    @classmethod
    def of(
        cls, executable: Executable, parameters: Mapping[str, nn.Parameter], slices: Sequence[Slices], ranks: Ranks
    ) -> "StateBefore":
        """The state now. Gradients that are there already are copied."""
        tensors = [*parameters.values(), *(tensor for each in slices for tensor in each.with_gradients())]
        held = {id(each): each for each in tensors}.values()
        stages = {id(s): s for graphs in executable.everywhere for s in graphs.stages.values()}.values()
        written = {id(b): b for s in stages for b in (s.resident[Slot("buffer", name)] for name in s.program.changed)}
        return cls(
            [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in held],
            [(each, each.summed, each.used) for each in slices],
            [(each, each.clone()) for each in written.values()],
            ranks,
            frozenset(ranks.replicas.partial),
        )

    def restore(self) -> None:
        """Restore the state, in the same memory."""
        with torch.no_grad():
            for tensor, gradient, value in self.gradients:
                if gradient is not None and value is not None:
                    gradient.copy_(value)
                tensor.grad = gradient
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for slices, summed, used in self.slices:
            slices.summed, slices.used = summed, used
        self.ranks.replicas.partial = set(self.partial)
