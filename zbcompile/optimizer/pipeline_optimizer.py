"""The optimizer of a pipeline: a torch optimizer that exists before the pipeline is compiled, over parameters, or parts
of them, that are known afterwards."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zbcompile.distributed.agreement import require_equal_programs, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.optimizer.early_update import NOTHING, SCALED, TORN, TWICE, EarlyUpdate
from zbcompile.optimizer.gradient_norm import norm_of_all
from zbcompile.optimizer.parameter_groups import Predicate, divide_into_groups, read_groups
from zbcompile.optimizer.sharded_parameters import ShardedParameters
from zbcompile.optimizer.trained_parameters import TrainedParameters
from zbcompile.optimizer.update_rules import ELEMENTS, require_divisible, rule_of
from zbcompile.optimizer.whole_parameters import WholeParameters
from zbcompile.torch_private import step_without_hooks

State = dict[str, Any]
MASTER = "master"
PLAIN = (bool, int, float, str, tuple, type(None))  # options that ranks compare


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

    def make(self, groups: Sequence[State]) -> Optimizer:
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
    if wanted.validate != "before":
        raise PipelineError(f"validate={wanted.validate!r} is not available yet; leave validate= out.")
    if wanted.early and wanted.clip is not None:
        raise PipelineError(
            "early=True updates a stage before the norm of all gradients is known, by which clip= clips. Leave one of "
            "them out."
        )
    if wanted.early and rule_of(wanted.kind) is None:
        raise PipelineError(
            f"early=True updates stage by stage, and {wanted.kind.__name__} is not known to update element by element "
            "or matrix by matrix. If it does, say so in its class: elementwise = True, or matrixwise = True."
        )


class PipelineOptimizer(Optimizer):
    """What `pipe.optimizer` returns: a `torch.optim.Optimizer` with the options, groups and state of another one.

    Before the pipeline is compiled the groups have no parameters. `norm` is the norm by which the last step clipped.
    `made` are the optimizers of its pipeline, of which it is one until it is closed.
    """

    norm: torch.Tensor | None = None

    def __init__(self, wanted: Wanted, ranks: Ranks, made: "list[PipelineOptimizer]") -> None:
        self.wanted = wanted
        self._ranks = ranks
        self._made = made
        self._stepped: set[torch.Tensor] = set()  # which of its tensors have had an update
        self._update: WholeParameters | ShardedParameters | None = None
        self._begun = self._torn = False  # whether stages have updated in this step, or in one that failed
        self._made_early: EarlyUpdate | None = None  # what optimizer.step() completes
        self.numbers: dict[str, int] = {}
        self._rule = require_divisible(wanted.kind, wanted.zero, ranks.mesh) if wanted.zero else rule_of(wanted.kind)
        self._predicates, options = read_groups(wanted.groups)
        inner = wanted.make([{**each, "params": []} for each in options])
        super().__init__(inner.param_groups, inner.defaults)
        self._adopt(inner)
        made.append(self)

    def _adopt(self, inner: Optimizer) -> None:
        """Let `inner` do the updates; whoever has changed a group of this optimizer has changed its options."""
        for group, made in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(made)
        self._inner = inner
        inner.param_groups = self.param_groups
        self.state = inner.state

    @property
    def bound(self) -> bool:
        """Whether the pipeline is compiled, so that the parameters are known."""
        return self._update is not None

    def bind(self, trained: TrainedParameters) -> None:
        """Take the parameters of a compiled pipeline; every rank must call it. Raises PipelineError on every rank."""
        try:
            together(self._ranks, "making the optimizer", lambda: self._bind(trained))
            said = {key: repr(getattr(self.wanted, key)) for key in ("zero", "clip", "early")}
            options = [{k: repr(v) for k, v in g.items() if isinstance(v, PLAIN)} for g in self.param_groups]
            made = {"optimizer": self.wanted.kind.__name__, **said, "groups": self.numbers, "options": options}
            what, remedy = "made different optimizers", "Every rank must make the same optimizer."
            require_equal_programs(self._ranks, made, what, remedy)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Leave the pipeline, so that another optimizer can have these parameters. Every rank must call it."""
        self.arrive()
        self._update = None
        self._made[:] = (each for each in self._made if each is not self)

    def _bind(self, trained: TrainedParameters) -> None:
        wanted, plain = self.wanted, self._rule == ELEMENTS
        self.numbers = divide_into_groups(trained.model, self._predicates, wanted.params)
        self._require_alone(trained)
        for name in () if plain else self.numbers:
            trained.require_whole(name, wanted.kind.__name__, wanted.zero or wanted.early)
        update: WholeParameters | ShardedParameters = WholeParameters(trained, self.numbers, plain or wanted.early)
        if wanted.zero:
            update = ShardedParameters(trained, self.numbers, not plain, keep=wanted.zero == 1)
        tensors = update.groups(self.numbers, len(self.param_groups))
        groups = zip(self.param_groups, tensors, strict=True)
        self._adopt(wanted.make([{**group, "params": members} for group, members in groups]))
        self._update = update

    def _require_alone(self, trained: TrainedParameters) -> None:
        """Refuse parameters of another optimizer if replicas hold parts of them, or of their gradients, for either."""
        for other in self._made:
            both = self.numbers.keys() & other.numbers.keys() & trained.program.trained
            if other is not self and other.bound and both and (self.wanted.zero or other.wanted.zero):
                zeros = f"zero={other.wanted.zero} and zero={self.wanted.zero}"
                remedy = "One that is divided must be the only one: pass params=, or close() the earlier one first."
                raise PipelineError(f"{min(both)} is in two optimizers of this pipeline, with {zeros}. {remedy}")

    @property
    def trained(self) -> TrainedParameters:
        """What the pipeline has told of its parameters."""
        return self._bound_update().trained

    def begin_step(self, scaled: bool) -> None:
        """Before a step of the pipeline. Raises PipelineError, on every rank, if its early update cannot follow."""
        problems = {TORN: self._torn, TWICE: self._made_early is not None, SCALED: scaled}
        found = next((text for text, is_so in problems.items() if is_so), None)
        if self.wanted.early and found is not None:
            raise self._ranks.watch.known_to_all(PipelineError(found))

    def update(self, stage: int) -> None:
        """Update what is complete with the last W of `stage`, inside of a step."""
        update = self._bound_update()
        self._begun = True
        with torch.no_grad():
            self._take()
            update.begin_update(stage)
            self._step_inner(update.tensors_of(stage))
            update.end_update(stage)

    def take(self) -> None:
        """Take the gradients that a step of the pipeline has left."""
        self._take()
        if self._begun:
            self._begun = False
            self._made_early = EarlyUpdate.made_with(self.param_groups, self._bound_update().gradients())

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

    @property
    def whole(self) -> WholeParameters | None:
        """What every replica updates alike; None if replicas update parts."""
        return self._update if isinstance(self._update, WholeParameters) else None

    @property
    def sharded(self) -> ShardedParameters | None:
        """What is divided among replicas; None if nothing is."""
        return self._update if isinstance(self._update, ShardedParameters) else None

    def arrive(self) -> None:
        """Wait until the parameters have the values of the last update."""
        if self._update is not None:
            self._update.arrive_all()

    def drop(self) -> None:
        """Forget all gradients: a step has failed."""
        self._torn, self._begun = self._torn or self._begun, False
        if self._update is not None:
            self._update.drop()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip, if that was asked for, and update. Every rank must call it."""
        if closure is not None:
            raise PipelineError("optimizer.step received a closure; call pipe.step before it instead.")
        update = self._bound_update()
        if self.wanted.early:
            self._complete(update)
            return
        with self._ranks.watch.region("the optimizer's step"), torch.no_grad():
            self.take_replaced()
            update.begin_update()
            if self.wanted.clip is not None:
                self.norm = norm_of_all(update.counted(), self._ranks)
                update.clip(self.wanted.clip, self.norm)
            self._step_inner(self._members())
            update.end_update()

    def _complete(self, update: WholeParameters | ShardedParameters) -> None:
        """Every stage has updated within the last step; it is done if nothing has changed since."""
        if self._made_early is None:
            raise PipelineError(NOTHING)
        if self.whole is not None:
            self.trained.take_gradients()
        self._made_early.require_unchanged(self.param_groups, update.gradients())
        self._made_early = None

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

    def _bound_update(self) -> WholeParameters | ShardedParameters:
        if all(each is not self for each in self._made):
            raise PipelineError("this optimizer is closed, or could not be made. Make another by pipe.optimizer.")
        if self._update is None:
            remedy = "Call pipe.compile with a batch, or run a step, first."
            raise PipelineError(f"the pipeline is not compiled yet, so its optimizer is empty. {remedy}")
        return self._update

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`."""
        super().zero_grad(set_to_none)
        if set_to_none:
            self.drop()
        elif self.sharded is not None:
            self.sharded.summed = self.sharded.used = False

    def add_param_group(self, param_group: State) -> None:
        if hasattr(self, "_inner"):
            raise PipelineError("the groups of a pipeline's optimizer are fixed. Pass them as pipe.optimizer(groups=).")
        super().add_param_group(param_group)

    def state_dict(self) -> State:
        """This process's options and state, in the form of torch's optimizers, for the same number of ranks;
        `zbcompile.save_checkpoint` writes one that any number can read. The float32 master of a parameter in half
        precision is the `master` of its state; `parts` says what of which parameters the state belongs to."""
        found = super().state_dict()
        for number, tensor in enumerate(self._members()):
            if self.keeps_master(tensor):
                found["state"][number] = {**found["state"].get(number, {}), MASTER: tensor.detach()}
        return {**found, "parts": self._parts()} if self.bound else found

    def keeps_master(self, tensor: torch.Tensor) -> bool:
        """Whether this is the master of a parameter, or a part of one, and may have digits that the parameter lacks."""
        return self._bound_update().is_master(tensor) and bool(tensor in self._stepped or self.state.get(tensor))

    def _parts(self) -> list[list[list[str | int]]]:
        """What each tensor has of which parameters: their names, begin and end."""
        if self.sharded is not None:
            return [
                [[each.name, each.begin, each.begin + each.size] for each in own] for _, own in self.sharded.parts()
            ]
        names = {tensor: name for name, tensor in self.whole.tensors.items()} if self.whole is not None else {}
        return [[[names[tensor], 0, tensor.numel()]] for tensor in self._members()]

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from what `state_dict` returned on this rank."""
        self._bound_update()
        self._torn, self._made_early = False, None
        self._require_own(state_dict.get("parts", self._parts()))
        kept = {number: dict(each) for number, each in state_dict["state"].items()}
        masters = {number: each.pop(MASTER) for number, each in kept.items() if MASTER in each}
        members = self._members()
        self._give_masters(lambda parameter: any(members[number] is parameter for number in masters))
        self._inner.load_state_dict({"param_groups": state_dict["param_groups"], "state": kept})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for number, master in masters.items():
            self._members()[number].detach().copy_(master)
        self._stepped = {self._members()[number] for number in masters}

    def _require_own(self, parts: list[list[list[str | int]]]) -> None:
        """Refuse the state of other parts than this process's."""
        one, other = next(filter(lambda each: each[0] != each[1], zip_longest(self._parts(), parts)), (None, None))
        if one != other:
            raise PipelineError(
                f"this state dict is of another rank, or another zero=: it has {other} where this optimizer has {one} "
                "([name, begin, end] of parameters). Load what this rank has saved, or use zbcompile.save_checkpoint, "
                "which any rank can read."
            )

    def _members(self) -> list[nn.Parameter]:
        return [member for group in self.param_groups for member in group["params"]]
