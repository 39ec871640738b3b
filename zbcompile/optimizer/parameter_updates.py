"""How the optimizer of a pipeline updates: at once in `step()`, or stage by stage inside of the
pipeline's steps."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.slice import LATE
from zbcompile.engine.slices import Slices
from zbcompile.errors import PipelineError
from zbcompile.optimizer.division import TrainedParameters
from zbcompile.optimizer.early_update import (
    NOTHING,
    TORN,
    TWICE,
    EarlyUpdate,
    writes_only_its_state,
)
from zbcompile.optimizer.gradient_norm import norm_of_all
from zbcompile.optimizer.optimizer_request import OptimizerRequest
from zbcompile.optimizer.post_validation import PostValidation
from zbcompile.torch_private import step_without_hooks


class ParameterUpdates(Optimizer):
    """A torch optimizer that lets another one, `_inner`, update slices of the parameters.

    Inside of a step of the pipeline, `begin_step`, `update` of each stage and `take` follow each
    other; `step` completes such an update. `settle` corrects it, if it has not waited for the norm
    of all gradients.
    """

    _inner: Optimizer
    numbers: dict[str, int]  # the group of every parameter of the model that it trains
    trained: TrainedParameters  # what the pipeline has told of its parameters
    closed = False

    def prepare(self, request: OptimizerRequest, ranks: Ranks) -> None:
        """Set up what does not depend on the parameters, which are not known yet."""
        self.request = request
        self._ranks = ranks
        self._stepped: set[torch.Tensor] = set()  # which of its tensors have had an update
        self._slices: Slices | None = None
        self._norm: torch.Tensor | None = None
        self.forget_updates()

    def forget_updates(self) -> None:
        """Forget updates under way: the parameters get values from elsewhere."""
        # whether stages have updated in this step, or in one that failed
        self._begun = self._torn = False
        self._made_early: EarlyUpdate | None = None  # what `step` completes
        self._unsettled: PostValidation | None = None

    @property
    def slices(self) -> Slices:
        """The slices that it updates."""
        if self.closed:
            raise PipelineError(
                "this optimizer is closed, or could not be made. Make another by pipe.optimizer."
            )
        if self._slices is None:
            remedy = "Call pipe.compile with a batch, or run a step, first."
            raise PipelineError(
                f"the pipeline is not compiled yet, so its optimizer is empty. {remedy}"
            )
        return self._slices

    @property
    def bound(self) -> bool:
        """Whether the pipeline is compiled, so that the parameters are known."""
        return self._slices is not None

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm by which the last step clipped."""
        self.settle()
        return self._norm

    # Around and inside of a step of the pipeline

    def begin_step(self) -> None:
        """Called before a pipeline step. Raises PipelineError, on every rank, if its early update
        cannot follow."""
        problems = {TORN: self._torn, TWICE: self._made_early is not None}
        found = next((text for text, is_so in problems.items() if is_so), None)
        if self.request.updates_early and found is not None:
            raise self._ranks.refusal(found)
        if self._unsettled is not None and self._reads_at_once():
            self.settle()

    def _reads_at_once(self) -> bool:
        """Whether a step reads parameters, or adds to gradients, before its first actions."""
        slices = self.slices
        adds = slices.summed or any(tensor.grad is not None for tensor in slices.with_gradients())
        return adds or bool(slices.of(LATE))

    def update(self, stage: int) -> None:
        """Update, inside of a step, what is complete with the last W of `stage`."""
        slices = self.slices
        if self.request.validates and not self._begun:
            self._unsettled = self._begin_validation()
        self._begun, validation = True, self._unsettled
        with torch.no_grad():
            self._take()
            slices.begin_update(stage)
            tensors = [each.tensor for each in slices.mine(stage)]
            may_update = validation is None or validation.may_update(slices.counted(stage))
            if validation is not None and validation.is_last(stage):
                validation.begin_total(slices.counted())
            if validation is not None and may_update:
                validation.keep(tensors, self.state)
            if may_update:
                with writes_only_its_state(self._inner):
                    self._step_inner(tensors)
            slices.end_update(stage)

    def _begin_validation(self) -> PostValidation:
        program, ranks = self.trained.program, self._ranks
        stages = (
            0 if ranks.rank is None or program.copies > 1 else len(program.stages_of(ranks.rank))
        )
        late = any(
            self.trained.stage_of(name) == LATE for name in self.numbers.keys() & program.trained
        )
        return PostValidation(ranks, self.request.clip, stages, late or not stages)

    def take(self) -> None:
        """Take the gradients that a step of the pipeline has left."""
        self._take()
        if self._begun:
            self._begun = False
            self._made_early = self._as_made()
            if self._unsettled is not None:
                self._unsettled.made = self._made_early
                self._unsettled.gradients = [
                    (tensor, tensor.grad) for tensor in self.slices.with_gradients()
                ]

    def _take(self) -> None:
        if self._slices is not None:
            self._give_masters(lambda parameter: parameter.grad is not None)
            self._slices.take()

    def take_replaced(self) -> None:
        """Take the gradients that the parameters have now: the user may have put others in their
        place."""
        if not self.slices.divided:
            self.trained.take_gradients()
            self._take()

    def _give_masters(self, chosen: Callable[[nn.Parameter], bool]) -> None:
        """Give masters to parameters that were frozen at first, and update them through these as
        well."""
        found = self.slices.give_masters(chosen)
        for group in self.param_groups if found else ():
            group["params"] = [found.get(member, member) for member in group["params"]]

    def drop(self) -> None:
        """Forget all gradients: a step has failed, or they have been used."""
        if self._begun:
            self.forget_updates()
            self._torn = True
        if self._slices is not None:
            self._slices.drop()

    # After a step of the pipeline

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, if that was asked for, and update. Every rank must call it. A closure, such as one
        that runs the
        pipeline's step, is called first; returns what it returns."""
        loss = None if closure is None else closure()
        slices = self.slices
        if self.request.updates_early:
            self._complete(slices)
            return loss
        with self._ranks.watch.region("the optimizer's step"), torch.no_grad():
            self.take_replaced()
            self._update_all()
        return loss

    def _complete(self, slices: Slices) -> None:
        """Every stage has updated within the last step; it is done if nothing has changed since."""
        if self._made_early is None:
            raise PipelineError(NOTHING)
        if not slices.divided:
            self.trained.take_gradients()
        self._made_early.require_unchanged(self.param_groups, slices.gradients())
        self._made_early = None

    def _update_all(self, norm: torch.Tensor | None = None) -> None:
        """Update everything; the norm of all gradients may be known already."""
        slices = self.slices
        slices.begin_update()
        if self.request.clip is not None:
            self._norm = norm_of_all(slices.counted(), self._ranks) if norm is None else norm
            slices.clip(self.request.clip, self._norm)
        self._step_inner(self._members())
        slices.end_update()

    def _step_inner(self, chosen: Collection[torch.Tensor]) -> None:
        """Update these of its tensors."""
        members, updated = [group["params"] for group in self.param_groups], set(chosen)
        self._stepped.update(tensor for tensor in chosen if tensor.grad is not None)
        for group, own in zip(self.param_groups, members, strict=True):
            group["params"] = [member for member in own if member in updated]
        try:
            step_without_hooks(self._inner)
        finally:
            for group, own in zip(self.param_groups, members, strict=True):
                group["params"] = own

    def settle(self, stage: int = LATE) -> None:
        """Called before a stage, or anybody else, reads parameters: wait for the verdict of all
        gradients on the last update, and correct the update if it was made too early."""
        found, self._unsettled = self._unsettled, None
        if found is None:
            return
        with torch.no_grad():
            stands = found.settle()
            if self.request.clip is not None:
                self._norm = found.norm
            self._torn = not stands
            if found.made is not None:
                found.made.require_parameters()
            if not stands:
                self._correct(found)
                self._torn = False
        if self._made_early is not None:
            self._made_early = self._as_made()

    def _as_made(self) -> EarlyUpdate:
        slices = self.slices  # what is divided notices writes when its values arrive
        own = {} if slices.divided else {each.name: each.parameter for each in slices.slices}
        return EarlyUpdate.made_with(self.param_groups, slices.gradients(), own)

    def _correct(self, found: PostValidation) -> None:
        """Undo an update, and make it as if it had waited."""
        with found.as_then(self.param_groups):
            self.slices.recall()
            found.undo(self.state)
            self.slices.round()
            self._update_all(found.norm)

    def arrive(self) -> None:
        """Wait until the parameters have the values of the last update."""
        self.settle()
        if self._slices is not None:
            self._slices.arrive()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`."""
        if not set_to_none:
            self.settle()
        super().zero_grad(set_to_none)
        if set_to_none:
            self.drop()
        elif self._slices is not None:
            self._slices.summed = self._slices.used = False

    def _members(self) -> list[nn.Parameter]:
        return [member for group in self.param_groups for member in group["params"]]
