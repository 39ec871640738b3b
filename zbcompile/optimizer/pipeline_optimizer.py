"""The optimizer of a pipeline: a torch optimizer that exists before the pipeline is compiled, over
parameters, or parts of them, that are known afterwards."""

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbcompile.distributed.agreement import agree, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.optimizer_parameters import LATE, OptimizerParameters
from zbcompile.errors import PipelineError
from zbcompile.optimizer.optimizer_config import PLAIN, OptimizerConfig, shared_values
from zbcompile.optimizer.optimizer_state import MASTER, NamedParameter, OptimizerState
from zbcompile.optimizer.post_validation import PostValidation, norm_of_all
from zbcompile.optimizer.trained_parameters import (
    TrainedParameters,
    sharded_parameters,
    whole_parameters,
)
from zbcompile.torch_private import step_without_hooks

State = dict[str, Any]
SETTINGS = ("zero", "clip", "overlap", "validate", "reduce_dtype")  # what else they compare


class PipelineOptimizer(Optimizer):
    """The optimizer that `pipe.optimizer` returns. Another torch optimizer, with the same groups
    and state, does the updates.

    Before the pipeline is compiled the groups have no parameters. `siblings` are the optimizers of
    its pipeline, including this one until it is closed. `numbers` has the group of every parameter
    of the model that it trains. Within a step of the pipeline, `begin_step`, `update` of each stage
    and `end_step` follow each other.
    """

    _inner: Optimizer
    trained: TrainedParameters
    _state_dict: OptimizerState
    _updating: bool  # within a step, whether a stage has updated
    _partially_updated: bool  # whether a step failed between updates
    _pending_validation: PostValidation | None

    def __init__(
        self, config: OptimizerConfig, ranks: Ranks, siblings: "list[PipelineOptimizer]"
    ) -> None:
        self.config, self._ranks, self._siblings = config, ranks, siblings
        self.numbers: dict[str, int] = {}
        self._parameters: OptimizerParameters | None = None
        self._norm: Tensor | None = None
        self._closed = False
        self.forget_updates()
        if config.zero and "dp" not in ranks.mesh.names:
            raise PipelineError(
                f"zero={config.zero} divides the optimizer among replicas, but the mesh has no"
                ' dimension "dp". Pass mesh= with one, or zero=0.'
            )
        options = [{**group, "params": []} for group in config.groups or ()]
        inner = config.make([*options, {"params": []}])
        super().__init__(inner.param_groups, inner.defaults)
        self._adopt(inner)
        siblings.append(self)

    def _adopt(self, inner: Optimizer) -> None:
        """Makes `inner` do the updates, with the groups of this optimizer as its own."""
        for group, options in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(options)
        self._inner = inner
        inner.param_groups = self.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """This process's state, by the tensors of `param_groups`."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        """Ignores torch's assignment: the state is that of the inner optimizer."""

    @property
    def bound(self) -> bool:
        """Returns whether the pipeline is compiled, so that the parameters are known."""
        return self._parameters is not None

    @property
    def parameters(self) -> OptimizerParameters:
        """The parameters that it updates. Raises PipelineError before they are known."""
        if self._closed:
            raise PipelineError(
                "this optimizer is closed, or could not be made. Make another by pipe.optimizer."
            )
        if self._parameters is None:
            raise PipelineError(
                "the pipeline is not compiled yet, so its optimizer is empty. Call pipe.compile"
                " with a batch, or run a step, first."
            )
        return self._parameters

    @property
    def norm(self) -> Tensor | None:
        """The norm by which the last update clipped."""
        self.settle()
        return self._norm

    # Binding to the parameters of a compiled pipeline

    def bind(self, trained: TrainedParameters) -> None:
        """Takes the parameters of a compiled pipeline; every rank must call it. Raises
        PipelineError on every rank."""
        try:
            together(self._ranks, "making the optimizer", lambda: self._bind(trained))
            options = [
                {key: repr(value) for key, value in group.items() if isinstance(value, PLAIN)}
                for group in self.param_groups
            ]
            agree(
                self._ranks,
                {
                    "optimizer": self.config.kind.__name__,
                    **{name: repr(getattr(self.config, name)) for name in SETTINGS},
                    "groups": self.numbers,
                    "options": options,
                },
                "made different optimizers",
                "Every rank must make the same optimizer.",
            )
        except Exception:
            self.close()
            raise

    def _bind(self, trained: TrainedParameters) -> None:
        config, plain = self.config, self.config.is_elementwise
        self.numbers = config.group_numbers(trained.model)
        self._require_exclusive(trained)
        for name in () if plain else self.numbers:
            trained.require_whole(name, config.kind.__name__, config.zero or config.overlaps_step)
        if config.zero:
            parameters = sharded_parameters(trained, self.numbers, plain, config.reduce_dtype)
        else:
            parameters = whole_parameters(trained, self.numbers, plain or config.overlaps_step)
            parameters.reduce_dtype = config.reduce_dtype
        groups: list[State] = [{**group, "params": []} for group in self.param_groups]
        for entry in parameters.tensors:
            groups[self.numbers[entry.name]]["params"].append(entry.tensor)
        self._adopt(config.make(groups))
        self._parameters, self.trained = parameters, trained
        self._state_dict = OptimizerState(config, self._ranks, trained, parameters, self.numbers)

    def _require_exclusive(self, trained: TrainedParameters) -> None:
        """Raises PipelineError for parameters of two optimizers if one of these must have them
        alone."""
        for sibling in self._siblings:
            shared = self.numbers.keys() & sibling.numbers.keys() & trained.program.trained
            exclusive = self.config.exclusive or sibling.config.exclusive
            if sibling is not self and sibling.bound and shared and exclusive:
                raise PipelineError(
                    f"{min(shared)} is in two optimizers of this pipeline, one of which is divided,"
                    " overlaps the step or has a reduce_dtype, so that it must be the only one."
                    " Pass params=, or close() the other."
                )

    def close(self) -> None:
        """Releases the parameters, so that another optimizer can have them. Every rank must call
        it."""
        self.wait()
        self._parameters, self._closed = None, True
        self._siblings[:] = (sibling for sibling in self._siblings if sibling is not self)

    def add_param_group(self, param_group: State) -> None:
        if hasattr(self, "_inner"):
            raise PipelineError(
                "the groups of a pipeline's optimizer are fixed. Pass them as"
                " pipe.optimizer(groups=)."
            )
        super().add_param_group(param_group)

    # Within a step of the pipeline

    def begin_step(self) -> None:
        """Corrects the last update if it was not valid. Raises PipelineError, on every rank, after
        a step that failed between updates."""
        if self._partially_updated:
            raise self._ranks.refusal(
                "a step has failed after some stages had updated their parameters, or before their"
                " updates were corrected, so that the model is of two steps. Load a checkpoint."
            )
        self.settle()

    def update(self, stage: int) -> None:
        """Updates, inside of a step, what is complete with the last W of `stage`."""
        parameters = self.parameters
        if self.config.post_validates and not self._updating:
            program, rank = self.trained.program, self._ranks.rank
            stages = () if rank is None or program.copies > 1 else program.stages_of(rank)
            options = [
                {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                for group in self.param_groups
            ]
            self._pending_validation = PostValidation(
                self._ranks, self.config.clip, len(stages), options
            )
        self._updating, validation = True, self._pending_validation
        with torch.no_grad():
            self._take_gradients()
            parameters.require_reduced(stage)
            parameters.begin_update(stage)
            tensors = parameters.of_stage(stage)
            may_update = True
            if validation is not None:
                may_update = validation.may_update(parameters.counted_gradients(stage))
                if stage == LATE:  # the last call of a step
                    validation.begin_total(parameters.counted_gradients())
                if may_update:
                    validation.keep(tensors, self.state)
            if may_update:
                before = shared_values(self._inner)
                self._step_inner([entry.tensor for entry in tensors])
                if shared_values(self._inner) != before:
                    raise PipelineError(
                        f"{self.config.kind.__name__}.step() wrote a value that belongs to all"
                        " parameters, such as a count of steps, but with overlap=True or"
                        ' validate="after" it is called for every stage. Keep such values in the'
                        " state of each parameter, or leave overlap= and validate= out."
                    )
            parameters.end_update(stage)

    def end_step(self) -> None:
        """Takes the gradients of a step of the pipeline. If the step has updated, they become
        None."""
        self._take_gradients()
        if self._updating:
            if self._pending_validation is not None:
                self._pending_validation.end_step(self.parameters.tensors)
            self._updating = False
            self.parameters.drop_gradients()

    def fail_step(self) -> None:
        """Forgets the gradients of a step that has failed."""
        if self._updating:
            self.forget_updates()
            self._partially_updated = True
        if self._parameters is not None:
            self._parameters.drop_gradients()

    def _take_gradients(self) -> None:
        if self._parameters is not None:
            self._make_masters(lambda parameter: parameter.grad is not None)
            for entry in self._parameters.tensors:
                if not entry.is_part:  # the master of a whole parameter has its gradient
                    entry.tensor.grad = entry.source.grad

    def _make_masters(self, needs_master: Callable[[Tensor], object]) -> None:
        """Makes masters of parameters that were frozen at first, and updates them from now on."""
        masters = self.parameters.make_masters(needs_master)
        for group in self.param_groups if masters else ():
            group["params"] = [masters.get(member, member) for member in group["params"]]

    # After a step of the pipeline

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips, if `clip` is set, and updates; does nothing if `pipe.step` has updated. Every rank
        must call it. Returns what `closure`, which may run the pipeline's step, returns."""
        loss = None if closure is None else closure()
        parameters = self.parameters
        if not self.config.overlaps_step:
            with self._ranks.watch.region("the optimizer's step"), torch.no_grad():
                if not parameters.zero:  # the user may have replaced gradients
                    self.trained.parts.take_gradients()
                    self._take_gradients()
                parameters.require_reduced()
                self._update_all()
        return loss

    def _update_all(self, norm: Tensor | None = None) -> None:
        """Updates everything; the norm of all gradients may be known already."""
        parameters = self.parameters
        parameters.begin_update()
        if self.config.clip is not None:
            if norm is None:
                norm = norm_of_all(parameters.counted_gradients(), self._ranks)
            self._norm = norm
            parameters.clip(self.config.clip, norm)
        self._step_inner([entry.tensor for entry in parameters.tensors])
        parameters.end_update()

    def _step_inner(self, tensors: Collection[Tensor]) -> None:
        """Updates these of its tensors."""
        members, updated = [group["params"] for group in self.param_groups], set(tensors)
        self._state_dict.stepped.update(tensor for tensor in tensors if tensor.grad is not None)
        for group in self.param_groups:
            group["params"] = [member for member in group["params"] if member in updated]
        try:
            step_without_hooks(self._inner)
        finally:
            for group, params in zip(self.param_groups, members, strict=True):
                group["params"] = params

    def settle(self) -> None:
        """Blocks until the norm of all gradients is known, and corrects the last update if it was
        not valid. Called before a step or the user reads parameters."""
        validation, self._pending_validation = self._pending_validation, None
        if validation is None:
            return
        with torch.no_grad():
            is_valid = validation.settle()
            if self.config.clip is not None:
                self._norm = validation.norm
            if is_valid:
                return
            self._partially_updated = True
            with validation.as_in_step(self.param_groups):
                self.parameters.wait()
                validation.undo(self.state)
                self.parameters.round_masters()
                self._update_all(validation.norm)
            self._partially_updated = False

    def wait(self) -> None:
        """Waits until the parameters have the values of the last update."""
        self.settle()
        if self._parameters is not None:
            self._parameters.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, like `torch.optim.Optimizer.zero_grad`."""
        super().zero_grad(set_to_none)
        if (parameters := self._parameters) is None:
            return
        if set_to_none:
            parameters.drop_gradients()
        else:
            parameters.is_reduced = parameters.is_used = False

    def forget_updates(self) -> None:
        """Forgets updates that are not settled: the parameters get values from elsewhere."""
        self._updating = self._partially_updated = False
        self._pending_validation = None

    # State dicts

    def state_dict(self) -> State:
        """Returns this process's options and state under the names of parameters, in the form that
        `torch.distributed.checkpoint.state_dict` calls flattened: `state.NAME.KEY` and
        `param_groups.NAME.KEY`.

        Every rank calls it. Of a parameter that replicas divide one replica has the whole state, on
        the CPU; parts of sharded parameters are tensors that only torch.distributed.checkpoint
        reads. Before the first update the state is that of an update with gradients of zero, so
        that `torch.distributed.checkpoint.load` has tensors to fill. The float32 master of a
        parameter in half precision is the `master` of its state.
        """
        if not self.bound:
            return {}
        self.settle()
        return self._state_dict.entries(self._inner, is_checkpoint=False)

    def checkpoint_state(self) -> State:
        """Returns the entries of `state_dict` that this process writes into a checkpoint."""
        assert self.parameters is not None
        return self._state_dict.entries(self._inner, is_checkpoint=True)

    def parameters_to_load(self) -> list[NamedParameter]:
        """Returns the parameters whose state `load_state_dict` takes on this process."""
        return self._state_dict.parameters_to_load()

    def load_state_dict(self, state_dict: State) -> None:
        """Continues from what `state_dict` returned on this rank, with the same `zero`, or after
        torch.distributed.checkpoint has filled it. Every rank calls it."""
        assert self.parameters is not None  # raises before the pipeline is compiled
        self.forget_updates()
        states, options = self._state_dict.load(state_dict)
        with_masters = {entry.source for entry, state in states.items() if MASTER in state}
        self._make_masters(lambda source: source in with_masters)
        self._state_dict.load_into(self._inner, states, options)
        self.param_groups = self._inner.param_groups
