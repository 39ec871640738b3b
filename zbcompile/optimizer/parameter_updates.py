"""How the optimizer of a pipeline updates: at once in `step()`, or stage by stage inside of the pipeline's steps."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.optimizer.early_update import NOTHING, SCALED, TORN, TWICE, UNSCALED, EarlyUpdate, writes_only_its_state
from zbcompile.optimizer.gradient_norm import norm_of_all
from zbcompile.optimizer.post_validation import PostValidation, Verdict
from zbcompile.optimizer.sharded_parameters import ShardedParameters
from zbcompile.optimizer.wanted import Wanted
from zbcompile.optimizer.whole_parameters import TrainedParameters, WholeParameters
from zbcompile.runtime.data_parallel import LATE
from zbcompile.torch_private import step_without_hooks


class ParameterUpdates(Optimizer):
    """A torch optimizer that lets another one, `_inner`, update what `_update` has of the parameters.

    Inside of a step of the pipeline, `begin_step`, `update` of each stage and `take` follow each other; `step`
    completes such an update. `settle` corrects it, if it has not waited for the norm of all gradients.
    """

    _inner: Optimizer
    numbers: dict[str, int]  # the group of every parameter of the model that it trains
    closed = False

    def prepare(self, wanted: Wanted, ranks: Ranks) -> None:
        """Before the parameters are known."""
        self.wanted = wanted
        self._ranks = ranks
        self._stepped: set[torch.Tensor] = set()  # which of its tensors have had an update
        self._update: WholeParameters | ShardedParameters | None = None
        self._scaler: GradScaler | None = None
        self._asked = False  # whether that scaler has asked for infinities in the last update
        self._infinite: torch.Tensor | None = None  # whether the last update with a scaler has met an infinity
        self._norm: torch.Tensor | None = None
        self.forget_updates()

    def forget_updates(self) -> None:
        """The parameters get values from elsewhere."""
        self._begun = self._torn = False  # whether stages have updated in this step, or in one that failed
        self._made_early: EarlyUpdate | None = None  # what `step` completes
        self._unsettled: PostValidation | None = None

    @property
    def trained(self) -> TrainedParameters:
        """What the pipeline has told of its parameters."""
        return self._bound_update().trained

    @property
    def whole(self) -> WholeParameters | None:
        """What every replica updates alike; None if replicas update parts."""
        return self._update if isinstance(self._update, WholeParameters) else None

    @property
    def sharded(self) -> ShardedParameters | None:
        """What is divided among replicas; None if nothing is."""
        return self._update if isinstance(self._update, ShardedParameters) else None

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm by which the last step clipped."""
        self.settle()
        return self._norm

    # Around and inside of a step of the pipeline

    def begin_step(self, scaler: GradScaler | None) -> None:
        """Before a step of the pipeline. Raises PipelineError, on every rank, if its early update cannot follow."""
        scaled = scaler is not None and not self.wanted.validates
        problems = {TORN: self._torn, TWICE: self._made_early is not None, SCALED: scaled}
        found = next((text for text, is_so in problems.items() if is_so), None)
        if self.wanted.updates_early and found is not None:
            raise self._ranks.refusal(found)
        self._scaler = scaler
        if self._unsettled is not None and self._reads_at_once():
            self.settle()

    def _reads_at_once(self) -> bool:
        """Whether a step reads parameters, or adds to gradients, before its first actions."""
        update = self._bound_update()
        return bool(update.tensors_of(LATE)) or any(tensor.grad is not None for tensor in update.with_gradients())

    def update(self, stage: int) -> None:
        """Update what is complete with the last W of `stage`, inside of a step."""
        update = self._bound_update()
        if self.wanted.validates and not self._begun:
            self._unsettled = self._begin_validation()
        self._begun, validation = True, self._unsettled
        with torch.no_grad():
            self._take()
            update.begin_update(stage)
            tensors = update.tensors_of(stage)
            may_update = validation is None or validation.may_update(stage, tensors, update.counted(stage))
            if validation is not None and validation.is_last(stage):
                validation.begin_total(update.counted())
            if validation is not None and may_update:
                validation.keep(tensors, self.state)
            if may_update:
                with writes_only_its_state(self._inner):
                    self._step_inner(tensors)
            update.end_update(stage)

    def _begin_validation(self) -> PostValidation:
        program, ranks, inverse = self.trained.program, self._ranks, None
        stages = 0 if ranks.rank is None or program.copies > 1 else len(program.stages_of(ranks.rank))
        late = any(self.trained.stage_of(name) == LATE for name in self.numbers.keys() & program.trained)
        if self._scaler is not None:
            scale = torch.tensor(self._scaler.get_scale(), dtype=torch.float64, device=ranks.device)
            inverse = scale.reciprocal().float()
        return PostValidation(ranks, self.wanted.clip, inverse, stages, late or not stages)

    def take(self) -> None:
        """Take the gradients that a step of the pipeline has left."""
        self._take()
        if self._begun:
            self._begun, update = False, self._bound_update()
            self._made_early, self._asked = self._as_made(update), False
            if self._unsettled is not None:
                self._unsettled.made = self._made_early
                self._unsettled.gradients = [(tensor, tensor.grad) for tensor in update.with_gradients()]

    def _take(self) -> None:
        if self.whole is not None:
            self._give_masters(lambda parameter: parameter.grad is not None)
            self.whole.take()

    def take_replaced(self) -> None:
        """Take the gradients that are there now: the user may have put others in their place."""
        if self.whole is not None:
            self.trained.take_gradients()
            self._take()

    def _give_masters(self, wanted: Callable[[nn.Parameter], bool]) -> None:
        """Update parameters that were frozen at first by way of masters as well."""
        found = self.whole.give_masters(wanted) if self.whole is not None else {}
        for group in self.param_groups if found else ():
            group["params"] = [found.get(member, member) for member in group["params"]]

    def drop(self) -> None:
        """Forget all gradients: a step has failed, or they have been used."""
        if self._begun:
            self.forget_updates()
            self._torn = True
        if self._update is not None:
            self._update.drop()

    # After a step of the pipeline

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, if that was asked for, and update. Every rank must call it. A closure, such as one that runs the
        pipeline's step, is called first; returns what it returns."""
        loss = None if closure is None else closure()
        update = self._bound_update()
        if self.wanted.updates_early:
            self._complete(update)
            return loss
        with self._ranks.watch.region("the optimizer's step"), torch.no_grad():
            self.take_replaced()
            self._update_all(update)
        return loss

    def _complete(self, update: WholeParameters | ShardedParameters) -> None:
        """Every stage has updated within the last step; it is done if nothing has changed since."""
        if self._made_early is None:
            raise PipelineError(NOTHING)
        if self._scaler is not None and not self._asked:
            raise PipelineError(UNSCALED)
        if self.whole is not None:
            self.trained.take_gradients()
        self._made_early.require_unchanged(self.param_groups, update.gradients())
        self._made_early = None

    def _update_all(self, update: WholeParameters | ShardedParameters, norm: torch.Tensor | None = None) -> None:
        """Update everything; the norm of all gradients may be known already."""
        update.begin_update()
        if self.wanted.clip is not None:
            self._norm = norm_of_all(update.counted(), self._ranks) if norm is None else norm
            update.clip(self.wanted.clip, self._norm)
        self._step_inner(self._members())
        update.end_update()

    def _step_inner(self, chosen: Collection[torch.Tensor]) -> None:
        """Update these of its tensors."""
        members, wanted = [group["params"] for group in self.param_groups], set(chosen)
        self._stepped.update(tensor for tensor in chosen if tensor.grad is not None)
        for group, own in zip(self.param_groups, members, strict=True):
            group["params"] = [member for member in own if member in wanted]
        try:
            step_without_hooks(self._inner)
        finally:
            for group, own in zip(self.param_groups, members, strict=True):
                group["params"] = own

    def settle(self) -> None:
        """Wait for what all gradients say of the last update, and correct it if it was made too early."""
        found, self._unsettled = self._unsettled, None
        if found is None:
            return
        update = self._bound_update()
        with torch.no_grad():
            verdict, stands = found.settle()
            self._infinite = found.flags[0]
            if self.wanted.clip is not None and verdict != "skipped":
                self._norm = found.norm
            self._torn = not stands
            if found.made is not None:
                found.made.require_parameters()
            if not stands:
                self._correct(update, found, verdict)
                self._torn = False
        if self._made_early is not None:
            self._made_early = self._as_made(update)

    def _as_made(self, update: WholeParameters | ShardedParameters) -> EarlyUpdate:
        own = self.whole.own if self.whole is not None else {}  # what is divided notices writes when its parts arrive
        return EarlyUpdate.made_with(self.param_groups, update.gradients(), own)

    def _correct(self, update: WholeParameters | ShardedParameters, found: PostValidation, verdict: Verdict) -> None:
        """Undo an update, and make it as if it had waited."""
        with found.as_then(self.param_groups):
            found.undo(self.state)
            update.recall()
            if verdict != "skipped":
                self._update_all(update, found.norm)

    def found_infinity(self) -> torch.Tensor:
        """Whether a gradient of the last update was infinite, on any rank: 0 or 1. If so, it is complete."""
        self.settle()
        self._asked = True
        if self._infinite is None:
            raise PipelineError(NOTHING)
        if self._infinite:
            self._made_early = None
        return self._infinite

    def arrive(self) -> None:
        """Wait until the parameters have the values of the last update."""
        self.settle()
        if self._update is not None:
            self._update.arrive_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`."""
        if not set_to_none:
            self.settle()
        super().zero_grad(set_to_none)
        if set_to_none:
            self.drop()
        elif self.sharded is not None:
            self.sharded.summed = self.sharded.used = False

    def _bound_update(self) -> WholeParameters | ShardedParameters:
        if self.closed:
            raise PipelineError("this optimizer is closed, or could not be made. Make another by pipe.optimizer.")
        if self._update is None:
            remedy = "Call pipe.compile with a batch, or run a step, first."
            raise PipelineError(f"the pipeline is not compiled yet, so its optimizer is empty. {remedy}")
        return self._update

    def _members(self) -> list[nn.Parameter]:
        return [member for group in self.param_groups for member in group["params"]]
