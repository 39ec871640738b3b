"""The optimizer of a pipeline: a torch optimizer that exists before the pipeline is compiled, over parameters, or parts
of them, that are known afterwards."""

import inspect
from itertools import zip_longest
from typing import Any

import torch
from torch.optim import Optimizer

from zbcompile.distributed.agreement import agree, together
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.optimizer.division import TrainedParameters, divided_slices, whole_slices
from zbcompile.optimizer.optimizer_request import OptimizerRequest, divide_into_groups, read_groups
from zbcompile.optimizer.parameter_updates import ParameterUpdates

State = dict[str, Any]
MASTER = "master"
STATE_DICTS = "torch.distributed.checkpoint.state_dict"
PLAIN = (bool, int, float, str, tuple, type(None))  # options that ranks compare
SETTINGS = ("zero", "clip", "early", "validate", "reduce_dtype")  # what else they compare


class PipelineOptimizer(ParameterUpdates):
    """What `pipe.optimizer` returns: a `torch.optim.Optimizer` with the options, groups and state of another one.

    Before the pipeline is compiled the groups have no parameters. `made` are the optimizers of its pipeline, of which
    it is one until it is closed.
    """

    def __init__(self, request: OptimizerRequest, ranks: Ranks, made: "list[PipelineOptimizer]") -> None:
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
        """Let `inner` do the updates; a change of a group of this optimizer is a change of its options."""
        for group, made in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(made)
        self._inner = inner
        inner.param_groups = self.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """This process's state, by the tensors of `param_groups`. Raises PipelineError for torch's
        `get_optimizer_state_dict` and `set_optimizer_state_dict` if these tensors are not the model's parameters."""
        caller = (frame := inspect.currentframe()) and frame.f_back  # torch has no hook: it reads this attribute first
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
                f"torch's {STATE_DICTS} knows optimizers of a model's parameters, and this one updates a part or a "
                f"float32 copy of {apart}. Call zbcompile.save_checkpoint(folder, pipe, optimizer), which any zero= "
                "and number of ranks can load, and zbcompile.load_checkpoint."
            )

    def bind(self, trained: TrainedParameters) -> None:
        """Take the parameters of a compiled pipeline; every rank must call it. Raises PipelineError on every rank."""
        try:
            together(self._ranks, "making the optimizer", lambda: self._bind(trained))
            said = {key: repr(getattr(self.request, key)) for key in SETTINGS}
            options = [{k: repr(v) for k, v in g.items() if isinstance(v, PLAIN)} for g in self.param_groups]
            made = {"optimizer": self.request.kind.__name__, **said, "groups": self.numbers, "options": options}
            agree(self._ranks, made, "made different optimizers", "Every rank must make the same optimizer.")
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Leave the pipeline, so that another optimizer can have these parameters. Every rank must call it."""
        self.arrive()
        self._slices, self.closed = None, True
        self._made[:] = (each for each in self._made if each is not self)

    def _bind(self, trained: TrainedParameters) -> None:
        request, plain = self.request, self.request.is_elementwise
        self.numbers = divide_into_groups(trained.model, self._predicates, request.params)
        self._require_alone(trained)
        for name in () if plain else self.numbers:
            trained.require_whole(name, request.kind.__name__, request.zero or request.updates_early)
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
            if other is not self and other.bound and both and (request.alone or other.request.alone):
                asked = " and ".join(map(_what_needs_it_alone, (other.request, request)))
                raise PipelineError(
                    f"{min(both)} is in two optimizers of this pipeline, with {asked}. One that is divided, early or "
                    "has a reduce_dtype must be the only one: pass params=, or close() the other."
                )

    def add_param_group(self, param_group: State) -> None:
        if hasattr(self, "_inner"):
            raise PipelineError("the groups of a pipeline's optimizer are fixed. Pass them as pipe.optimizer(groups=).")
        super().add_param_group(param_group)

    def state_dict(self) -> State:
        """This process's options and state, in the form of torch's optimizers, for the same number of ranks;
        `zbcompile.save_checkpoint` writes one that any number can read. The float32 master of a parameter in half
        precision is the `master` of its state; `parts` says what of which parameters the state belongs to."""
        self.settle()
        found = super().state_dict()
        for number, tensor in enumerate(self._members()):
            if self.keeps_master(tensor):
                found["state"][number] = {**found["state"].get(number, {}), MASTER: tensor.detach()}
        return {**found, "parts": self._parts()} if self.bound else found

    def keeps_master(self, tensor: torch.Tensor) -> bool:
        """Whether this is the master of a parameter, or a part of one, and may have digits that the parameter lacks."""
        return self.slices.of_tensor(tensor).is_master and bool(tensor in self._stepped or self.state.get(tensor))

    def _parts(self) -> list[list[str | int]]:
        """For each tensor, the part of a parameter that it holds: the parameter's name, begin and end."""
        found: dict[Any, list[str | int]] = {s.tensor: [s.name, s.begin, s.end] for s in self.slices.mine()}
        return [found[tensor] for tensor in self._members()]

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from what `state_dict` returned on this rank."""
        self.forget_updates()
        self._require_own(state_dict.get("parts", self._parts()))
        kept = {number: dict(each) for number, each in state_dict["state"].items()}
        masters = {number: each.pop(MASTER) for number, each in kept.items() if MASTER in each}
        members = self._members()
        self._give_masters(lambda parameter: any(members[number] is parameter for number in masters))
        self._inner.load_state_dict({"param_groups": state_dict["param_groups"], "state": kept})
        self.param_groups = self._inner.param_groups
        for number, master in masters.items():
            self._members()[number].detach().copy_(master)
        self._stepped = {self._members()[number] for number in masters}

    def _require_own(self, parts: list[list[str | int]]) -> None:
        """Refuse the state of parts that are not this process's."""
        one, other = next(filter(lambda each: each[0] != each[1], zip_longest(self._parts(), parts)), (None, None))
        if one != other:
            raise PipelineError(
                f"this state dict is of another rank, or another zero=: it has {other} where this optimizer has {one} "
                "(name, begin, end of a parameter). Load what this rank has saved, or use zbcompile.save_checkpoint, "
                "which any rank can read."
            )


def _what_needs_it_alone(request: OptimizerRequest) -> str:
    more = "" if request.reduce_dtype is None else f", reduce_dtype={request.reduce_dtype}"
    return f"zero={request.zero}, early={request.updates_early}{more}"
