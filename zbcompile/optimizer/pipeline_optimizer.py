"""The optimizer of a pipeline: a torch optimizer that exists before the pipeline is compiled, over
parameters, or parts of them, that are known afterwards."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zbcompile.distributed.agreement import agree, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.slice import Slice
from zbcompile.errors import PipelineError
from zbcompile.model.tensor_shard import local_of
from zbcompile.optimizer.divided_state import kept_names, slice_states, whole_states
from zbcompile.optimizer.division import TrainedParameters, divided_slices, whole_slices
from zbcompile.optimizer.named_state import (
    MEMBERS,
    NamedParameter,
    by_name,
    option_entries,
    state_entries,
    torch_state_dict,
)
from zbcompile.optimizer.optimizer_request import OptimizerRequest, divide_into_groups, read_groups
from zbcompile.optimizer.parameter_updates import ParameterUpdates
from zbcompile.torch_private import step_without_hooks

State = dict[str, Any]
MASTER = "master"
STATE_DICTS = "torch.distributed.checkpoint.state_dict"
PLAIN = (bool, int, float, str, tuple, type(None))  # options that ranks compare
SETTINGS = ("zero", "clip", "early", "validate", "reduce_dtype")  # what else they compare


class PipelineOptimizer(ParameterUpdates):
    """What `pipe.optimizer` returns: a `torch.optim.Optimizer` with the options, groups and state
    of another one.

    Before the pipeline is compiled the groups have no parameters. `made` are the optimizers of its
    pipeline, of which it is one until it is closed.
    """

    def __init__(
        self, request: OptimizerRequest, ranks: Ranks, made: "list[PipelineOptimizer]"
    ) -> None:
        self.prepare(request, ranks)
        self._made = made
        self.numbers = {}
        request.require_replicas(ranks.mesh)
        self._predicates, options = read_groups(request.groups)
        inner = request.make([{**each, "params": []} for each in options])
        super().__init__(inner.param_groups, inner.defaults)
        self._adopt(inner)
        made.append(self)

    def _adopt(self, inner: Optimizer) -> None:
        """Let `inner` do the updates; a change of a group of this optimizer is a change of its
        options."""
        for group, made in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(made)
        self._inner = inner
        inner.param_groups = self.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """This process's state, by the tensors of `param_groups`. Raises PipelineError for torch's
        `get_optimizer_state_dict` and `set_optimizer_state_dict` if these tensors are not the
        model's parameters.
        """
        caller = (
            frame := inspect.currentframe()
        ) and frame.f_back  # torch has no hook: it reads this attribute first
        if caller is not None and caller.f_globals.get("__name__") == STATE_DICTS:
            self._require_parameters_of_the_model()
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        """It is that of the optimizer that does the updates."""

    def _require_parameters_of_the_model(self) -> None:
        own = () if self._slices is None else self._slices.mine()
        apart = next((each.name for each in own if each.tensor is not each.shown), None)
        if apart is not None:
            raise PipelineError(
                f"torch's {STATE_DICTS} knows optimizers of a model's parameters, and this one"
                f" updates a part or a float32 copy of {apart}. Call"
                " zbcompile.save_checkpoint(folder, pipe, optimizer), which any zero= and number"
                " of ranks can load, and zbcompile.load_checkpoint."
            )

    def bind(self, trained: TrainedParameters) -> None:
        """Take the parameters of a compiled pipeline; every rank must call it. Raises PipelineError
        on every rank."""
        try:
            together(self._ranks, "making the optimizer", lambda: self._bind(trained))
            said = {key: repr(getattr(self.request, key)) for key in SETTINGS}
            options = [
                {k: repr(v) for k, v in g.items() if isinstance(v, PLAIN)}
                for g in self.param_groups
            ]
            made = {
                "optimizer": self.request.kind.__name__,
                **said,
                "groups": self.numbers,
                "options": options,
            }
            agree(
                self._ranks,
                made,
                "made different optimizers",
                "Every rank must make the same optimizer.",
            )
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Leave the pipeline, so that another optimizer can have these parameters. Every rank must
        call it."""
        self.arrive()
        self._slices, self.closed = None, True
        self._made[:] = (each for each in self._made if each is not self)

    def _bind(self, trained: TrainedParameters) -> None:
        request, plain = self.request, self.request.is_elementwise
        self.numbers = divide_into_groups(trained.model, self._predicates, request.params)
        self._require_alone(trained)
        for name in () if plain else self.numbers:
            trained.require_whole(
                name, request.kind.__name__, request.zero or request.updates_early
            )
        if request.zero:
            slices = divided_slices(trained, self.numbers.keys(), plain)
        else:
            slices = whole_slices(trained, self.numbers, plain or request.updates_early)
        slices.reduce_dtype = request.reduce_dtype
        groups: list[State] = [{**group, "params": []} for group in self.param_groups]
        for each in slices.mine():
            groups[self.numbers[each.name]]["params"].append(each.tensor)
        self._adopt(request.make(groups))
        self._slices, self.trained = slices, trained

    def _require_alone(self, trained: TrainedParameters) -> None:
        """Refuse parameters of another optimizer if either wants them alone."""
        request = self.request
        for other in self._made:
            both = self.numbers.keys() & other.numbers.keys() & trained.program.trained
            if (
                other is not self
                and other.bound
                and both
                and (request.alone or other.request.alone)
            ):
                asked = " and ".join(map(_what_needs_it_alone, (other.request, request)))
                raise PipelineError(
                    f"{min(both)} is in two optimizers of this pipeline, with {asked}. One that is"
                    " divided, early or has a reduce_dtype must be the only one: pass params=, or"
                    " close() the other."
                )

    def add_param_group(self, param_group: State) -> None:
        if hasattr(self, "_inner"):
            raise PipelineError(
                "the groups of a pipeline's optimizer are fixed. Pass them as"
                " pipe.optimizer(groups=)."
            )
        super().add_param_group(param_group)

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
        states = self._states()
        return self.named_state(states if any(states.values()) else self._initial_states())

    def named_state(
        self, states: Mapping[Slice, State] | None = None, counted: bool = False
    ) -> State:
        """Returns the entries of `state_dict`; with `counted` only what this process writes into a
        checkpoint."""
        states, slices, entries = (
            self._states() if states is None else states,
            self.slices.slices,
            State(),
        )
        members = {each.name: self._member(each) for each in slices}
        for name in self._own_names():
            if not counted or self.trained.counts(name):
                entries |= option_entries(name, self.param_groups[self.numbers[name]])
        if self.slices.divided:
            with self._ranks.watch.position.waiting("the optimizer's state"):
                named = whole_states(states, slices)
        else:
            named = {each.name: state for each, state in states.items()}
        silent = {each.name for each in slices if counted and not each.counts}
        for name, state in named.items():
            entries |= {} if name in silent else state_entries(members[name], state)
        return entries

    def members_to_load(self) -> list[NamedParameter]:
        """Returns the parameters whose state `load_state_dict` takes on this process."""
        if not self.slices.divided:
            return [self._member(each) for each in self.slices.mine()]
        parts = {each.name: each for each in self.slices.slices}
        return [self._member(parts[name]) for name in kept_names(self.slices.slices)]

    def load_state_dict(self, state_dict: State) -> None:
        """Continues from what `state_dict` returned on this rank, with the same `zero`, or after
        torch.distributed.checkpoint has filled it. Every rank calls it."""
        slices, names = self.slices, self._own_names()
        self.forget_updates()
        options = by_name(state_dict, "param_groups", names)
        states = by_name(state_dict, "state", names)
        self._require_own(
            state_dict, [key for each in self.members_to_load() for key in states[each.name]]
        )
        if slices.divided:
            whole = {
                name: {key: local_of(value) for key, value in state.items()}
                for name, state in states.items()
            }
            with self._ranks.watch.position.waiting("the optimizer's state"):
                found = slice_states(whole, slices.slices)
        else:
            found = {each: dict(states[each.name]) for each in slices.mine()}
        masters = {
            each: local_of(state.pop(MASTER)) for each, state in found.items() if MASTER in state
        }
        given = {each.given for each in masters}
        self._give_masters(lambda parameter: parameter in given)
        parts = self._parts()
        members = [self._member(parts[tensor]) for tensor in self._members()]
        own = [found[parts[tensor]] for tensor in self._members()]
        self._inner.load_state_dict(torch_state_dict(members, own, options, self.param_groups))
        self.param_groups = self._inner.param_groups
        for each, master in masters.items():
            each.tensor.detach().copy_(master)
        self._stepped = {each.tensor for each in masters}

    def _require_own(self, state_dict: State, taken: Sequence[str]) -> None:
        """Refuses state that this process would ignore."""
        if sum(key.startswith("state.") for key in state_dict) != len(taken):
            raise PipelineError(
                "this state dict is of another rank, or another zero=. Load what this rank has"
                " saved, or use zbcompile.save_checkpoint, which any rank can read."
            )

    def _states(self) -> dict[Slice, State]:
        """Returns the state of this process's slices, with the masters."""
        found = {}
        for tensor, part in self._parts().items():
            master = part.is_master and bool(tensor in self._stepped or self.state.get(tensor))
            found[part] = {
                **self.state.get(tensor, {}),
                **({MASTER: tensor.detach()} if master else {}),
            }
        return found

    def _initial_states(self) -> dict[Slice, State]:
        """Returns the state that an update with gradients of zero makes."""
        found = {}
        for tensor, part in self._parts().items():
            if not tensor.requires_grad:
                continue
            like = torch.zeros_like(tensor).detach().requires_grad_()
            like.grad = torch.zeros_like(like).detach()
            group = self.param_groups[self.numbers[part.name]]
            options = {key: value for key, value in group.items() if key not in MEMBERS}
            optimizer = self.request.make([{**options, "params": [like]}])
            step_without_hooks(optimizer)
            state = dict(optimizer.state.get(like, {}))
            if "step" in state:
                state["step"] = (
                    torch.zeros_like(state["step"])
                    if isinstance(state["step"], torch.Tensor)
                    else 0
                )
            found[part] = {**state, **({MASTER: tensor.detach()} if part.is_master else {})}
        return found

    def _parts(self) -> dict[torch.Tensor, Slice]:
        """Returns this process's slices by the tensors in `param_groups`."""
        return {each.tensor: each for each in self.slices.mine()}

    def _own_names(self) -> list[str]:
        return [name for name in self.numbers if name in self.trained.own]

    def _member(self, part: Slice) -> NamedParameter:
        name = part.name
        return NamedParameter(
            name, self.numbers[name], part.tensor, part.parameter, self.trained.chunk(name)
        )


def _what_needs_it_alone(request: OptimizerRequest) -> str:
    more = "" if request.reduce_dtype is None else f", reduce_dtype={request.reduce_dtype}"
    return f"zero={request.zero}, early={request.updates_early}{more}"
