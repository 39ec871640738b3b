"""A model in parts, its parameters and its state, and what is compiled for the batches that it meets."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar, cast

import torch
from torch import nn

from zbcompile.api.optimizers import Optimizers
from zbcompile.api.same_batch import BatchComparison
from zbcompile.backends.backend import Compilation
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.batch import Given, Microbatches, flatten_batch, refuse_input_gradients, split_batches
from zbcompile.model.distributed_tensors import Part, Parts, is_distributed
from zbcompile.model.held_elsewhere import OwnParameters, readable
from zbcompile.model.placements import SHARD, along
from zbcompile.options import Options
from zbcompile.passes.capture.training_step import LossFunction, join_loss
from zbcompile.passes.capture.unsupported import raise_first, wrapper_problems
from zbcompile.planning.batch_layout import BatchLayout
from zbcompile.planning.choose_schedule import choose_schedule
from zbcompile.profiling.observation import Observation
from zbcompile.program.program import Program
from zbcompile.program.step_record import StepRecord
from zbcompile.program_cache.forward_programs import ForwardPrograms
from zbcompile.program_cache.state_dict import load_state, owned_parameters, share_state, stream_state
from zbcompile.program_cache.step_outputs import kind_of
from zbcompile.program_cache.step_programs import StepPrograms
from zbcompile.runtime.engine import Executable
from zbcompile.runtime.engines import Engine


class Closing(Protocol):
    """What a pipeline closes when it is closed itself."""

    def close(self) -> None: ...


Attached = TypeVar("Attached", bound=Closing)


class HeldModel:
    """This process's share of a model, with the programs that were compiled for it.

    `record = True` makes `last_step` hold the measured spans of the next steps. `step_index` counts steps; it enters
    `zbcompile.microbatch_seed`.
    """

    step_index: int = 0
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, model: nn.Module, options: Options, engine: Engine, saved: Program | None = None) -> None:
        self._options = options
        self._model = model
        self._engine = engine
        self._ranks = engine.ranks
        self._watch = self._ranks.watch
        self._ended = weakref.finalize(self, self._watch.close)
        self._attached: dict[type, Closing] = {}
        self._observation = Observation(self._ranks)
        self._comparison = BatchComparison(self._ranks, options.compare_batches)
        with self._watch.region("making the pipeline"):
            raise_first(wrapper_problems(model))
            join_loss(model, options.loss)
            with readable(model):
                self._parts = Parts(model, self._ranks.mesh.labels)
            options = options.with_placements(self._parts.placements)
            self._options = options
            schedule = choose_schedule(options, self._ranks.count)
            self._compiled = StepPrograms(model, options, self._ranks, schedule, saved)
            self._forwards = ForwardPrograms(model, options, engine, self._compiled)
            self._layout = BatchLayout(model, options, self._compiled)
            self._optimizers = Optimizers(model, self._ranks, self._parts, self._compiled)

    if not TYPE_CHECKING:  # with it, type checkers would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                raise AttributeError(
                    f"a pipeline has no attribute {name}. Options are fixed once it is made: pass them to "
                    "zbcompile.pipeline."
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            says = f"a pipeline has no attribute {name}"
            if not name.startswith("_") and hasattr(nn.Module, name):
                says += (
                    f", as it is no nn.Module: use model.{name}, before zbcompile.pipeline if it changes tensors. "
                    "pipe.step and pipe.eval run a batch"
                )
            raise AttributeError(f"{says}.", name=name, obj=self)

    def __getstate__(self) -> NoReturn:
        raise PipelineError(
            "a pipeline holds connections to other ranks, so it cannot be copied or pickled. Save what it trains "
            "(zbcompile.save_checkpoint, save_weights) or what it compiled (pipe.program.save)."
        )

    @property
    def options(self) -> Options:
        """What was asked for."""
        return self._options

    @property
    def program(self) -> Program:
        """The compiled program (of the first shapes that were compiled)."""
        if self._compiled.program is None:
            raise PipelineError(
                "the pipeline is not compiled yet, so it is unknown which parameters are this rank's. Call "
                "pipe.compile(*args, target=..., **kwargs) with a batch, or pass example=, or run a step first."
            )
        return self._compiled.program

    @property
    def model(self) -> nn.Module:
        """The module that the pipeline was made of. From the first step on it refuses to show what other processes
        train (docs/training.md)."""
        return self._model

    @property
    def loss(self) -> LossFunction | None:
        """The loss function that the pipeline was made with."""
        return self.options.loss

    @property
    def device(self) -> torch.device:
        """The device of this process's share of the model."""
        return self._ranks.device

    @property
    def is_first(self) -> bool:
        """Whether this process has the first rank of all: the one that speaks and writes for all."""
        return self._ranks.is_first

    @property
    def ranks(self) -> Ranks:
        """The ranks of this pipeline: `ranks.local` are those in this process, `ranks.count` how many there are."""
        return self._ranks

    @property
    def parts(self) -> Mapping[str, Part]:
        """What the plain tensors that the pipeline trains are parts of, by the first name of each DTensor."""
        return self._parts.parts

    @property
    def observation(self) -> Observation:
        """What looks at the steps: records, monitors."""
        return self._observation

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step that ran with `record = True`."""
        return self.observation.last_step

    @property
    def record(self) -> bool:
        """Whether steps are recorded; can be set."""
        return self.observation.record

    @record.setter
    def record(self, value: bool) -> None:
        self.observation.record = value

    def recording(self) -> AbstractContextManager[list[StepRecord]]:
        """Record the steps inside; the list that it gives fills with them. `zbcompile.trace` writes them to a file."""
        return self.observation.recording()

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The work of the backend on this process, for each program: how many graphs, how many distinct, compiled,
        loaded.

        Over all ranks, and with an empty cache, as many graphs are compiled as are distinct.
        """
        return tuple(self._compiled.compilations)

    def compile(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Given | None = None,
        return_outputs: bool | str = False,
        return_metrics: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Compile for the shapes of this batch (as `step` takes it) without running it."""
        with self._watch.region("compiling"), torch.inference_mode(False):
            self._parts.take_gradients()
            kind = kind_of(return_outputs, return_metrics)
            self._program_for(self._split(args, kwargs, target, microbatches, kind))
        return self

    def microbatches_of(self, *args: Any, target: Any = None, **kwargs: Any) -> int:
        """Into how many microbatches `step` splits this batch. Raises PipelineError if it cannot."""
        return len(self._split(args, kwargs, target).each)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer. Tied parameters appear once.

        `torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...)` is refused where other processes have gradients too.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        return OwnParameters(found) if self._is_part else iter(found)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's own names; DTensors if the model had them as such."""
        self._require_values()
        self._compiled.given_out = True
        found = {**self._compiled.parameters, **self._parts.parameters}
        return iter([(name, found[name]) for name in self._own_names()])

    def state_dict(self, full: bool = False, frozen: bool = True) -> dict[str, Any]:
        """Eager's state dict: this process's share, or with `full=True` all of it, on every rank; `frozen=False` then
        leaves out what is not trained, such as the base of adapters.

        Of an output layer sharded over several processes the share is a DTensor of this process's rows.
        """
        self._require_values()
        if not (full or frozen):
            raise PipelineError("state_dict(frozen=False) is for the whole model: pass full=True as well.")
        if not full:
            own = share_state(self._model, self._ranks, self.program, self._compiled.shards)
            return self._parts.shown(own, self.program.model.names)
        with self._watch.region("state_dict"):
            return self._parts.shown(dict(self._stream(frozen)), self.program.model.names)

    def stream_state_dict(self) -> Iterator[tuple[str, Any]]:
        """The names and whole tensors of eager's state dict, one after the other on every rank: an engine that
        generates takes them without the memory for all. Every rank must take all of them.

        >>> for name, tensor in pipe.stream_state_dict():                                # doctest: +SKIP
        ...     engine.load(name, tensor)
        """
        stream = self._stream()
        while (found := self._next_whole(stream)) is not None:
            yield found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this process's share of a full state dict; strict over the whole model."""
        self._require_values()
        state = self._parts.cut(state, self.program.model.names)
        load_state(self._model, self._ranks, self.program.holders, state)
        if self._compiled.shards is not None:
            self._compiled.shards.load(state)
        self._loaded(state)

    def resume(self, step: int, filled: Iterable[str]) -> None:
        """Continue with step number `step`, now that the tensors `filled` of this process's share have their values;
        `zbcompile.load_checkpoint` writes them in place."""
        self.step_index = step
        self._loaded(filled)

    def _loaded(self, names: Iterable[str]) -> None:
        self._compiled.share.filled(names)
        self._compiled.withhold()

    def attached(self, kind: type[Attached]) -> Attached:
        """The one `kind` of this pipeline, which is made at the first call and closed with the pipeline."""
        if kind not in self._attached:
            self._attached[kind] = kind()
        return cast("Attached", self._attached[kind])

    def close(self) -> None:
        """Stop watching other ranks and release the process group. Every rank calls it.

        Waits for a checkpoint that is still being written, and raises if that failed.

        After this, and `torch.distributed.destroy_process_group()`, a new process group and a new pipeline can be made
        in the same process. A pipeline that is garbage collected closes itself.
        """
        with ExitStack() as closing:
            closing.callback(self._ended)
            closing.callback(self._ranks.disconnect)
            for each in self._attached.values():
                closing.callback(each.close)

    def _next_whole(self, stream: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        with self._watch.region("stream_state_dict"):
            for name, tensor in stream:
                shown = self._parts.shown({name: tensor}, self.program.model.names)[name]
                return name, shown.full_tensor() if is_distributed(shown) else shown
        return None

    def _stream(self, frozen: bool = True) -> Iterator[tuple[str, Any]]:
        self._optimizers.arrive()
        return stream_state(self._model, self._ranks, self.program.holders, self._compiled.shards, frozen)

    def _require_values(self) -> None:
        """Raise before compiling; wait for the values of the last update."""
        self.program  # noqa: B018
        self._optimizers.arrive()

    @property
    def _is_part(self) -> bool:
        """Whether other processes train what this one does not, so that a norm of plain parameters here is a part."""
        ranks, hand = self._ranks, self.program.homes.keys() - self._parts.parts.keys()
        split = (self.program.placement(name) for name in hand)
        by_hand = any(ranks.mesh.size(*along(each, SHARD)) > 1 for each in split)
        return ranks.group is not None and (ranks.count > 1 or by_hand)

    def _own_names(self) -> list[str]:
        return [name for name, _ in owned_parameters(self._model, self._ranks, self.program.holders)]

    def _split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        given: Given | None = None,
        outputs: bool | str = False,
    ) -> Microbatches:
        self._compiled.require_step(outputs)
        self._compiled.outputs = outputs
        batches = split_batches(given, "step", bool(args or kwargs or target is not None)) if given is not None else []
        for each in batches:
            refuse_input_gradients(each)
            self._refuse_target(each.whole.example[2])
        if batches:
            return self._layout.fit([each.whole for each in batches])
        self._refuse_target(target)
        batch = flatten_batch(args, kwargs, target, self.options.split)
        refuse_input_gradients(batch)
        return self._layout.split(batch, self.is_first)

    def _refuse_target(self, target: Any) -> None:
        if self.options.loss is None and target is not None and self._compiled.saved is None:
            raise PipelineError(
                "step received target=, but the pipeline has no loss=; forward returns the loss itself."
            )

    def _program_for(self, step: Microbatches) -> Executable:
        found = self._compiled.get(step)
        self._parts.renew()
        self._optimizers.bind()
        return found
