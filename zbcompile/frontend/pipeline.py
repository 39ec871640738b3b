"""The pipeline object: a model's training step, compiled for the shapes it meets."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import nn

from zbcompile.backends.backend import Compilation
from zbcompile.compiler.inference import Computation
from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.mesh import BATCHES
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.frontend.choose_schedule import choose_schedule, fit_to_batch
from zbcompile.frontend.evaluation import MODES, OUTPUTS, Asked, Forwards, split_batches
from zbcompile.frontend.executables import Executables
from zbcompile.frontend.grad_clip import total_norm
from zbcompile.frontend.optimizers import Optimizers
from zbcompile.frontend.options import Options, checked
from zbcompile.frontend.state_dict import load_state, owned_parameters, share_state, stream_state
from zbcompile.model.batch import Batch, flatten_batch, refuse_input_gradients, require_divisible
from zbcompile.model.distributed_tensors import Part, Parts, is_distributed
from zbcompile.optimizer.parameter_groups import Predicate
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer, Wanted
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.profiling.step_record import StepRecord
from zbcompile.program.program import Program
from zbcompile.runtime.engine import Engine, Executable, StepInput
from zbcompile.runtime.shared_gradients import total_loss

if TYPE_CHECKING:  # torch's pipelining takes a second to import
    from zbcompile.torch_pipelining.as_schedule import ScheduleLike
    from zbcompile.torch_pipelining.pipeline_stage import CompiledPipelineStage


class Closing(Protocol):
    """What a pipeline closes when it is closed itself."""

    def close(self) -> None: ...


Attached = TypeVar("Attached", bound=Closing)


class Pipeline:
    """A model as a pipeline; made by `zbcompile.pipeline`. Not an nn.Module: it holds this process's share of one.

    The first `step` compiles for the shapes of its microbatches. `record = True` makes `last_step` hold the measured
    spans of the next steps. `step_index` counts steps; it enters `zbcompile.microbatch_seed`.
    """

    record: bool = False
    step_index: int = 0
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, model: nn.Module, options: Options, engine: Engine) -> None:
        self._options = options
        self._model = model
        self._engine = engine
        self._ranks = engine.ranks
        self._watch = self._ranks.watch
        self._ended = weakref.finalize(self, self._watch.close)
        self._attached: dict[type, Closing] = {}
        self._records: list[StepRecord] | None = None
        with self._watch.region("making the pipeline"):
            schedule = choose_schedule(options, self._ranks.count)
            self._parts = Parts(model, self._ranks.mesh.labels)
            options = options.with_placements(self._parts.placements)
            self._options = options
            self._compiled = Executables(model, options, self._ranks, schedule)
            self._optimizers = Optimizers(model, self._ranks, self._parts, self._compiled)
        self.take_forwards(Forwards)

    if not TYPE_CHECKING:  # with it, type checkers would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                raise AttributeError(
                    f"a pipeline has no attribute {name}. Options are fixed once it is made: pass them to "
                    "zbcompile.pipeline."
                )
            super().__setattr__(name, value)

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
    def last_step(self) -> StepRecord | None:
        """The record of the last step that ran with `record = True`."""
        return self._engine.last_step

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The work of the backend on this process, for each program: how many graphs, how many distinct, compiled,
        loaded.

        Over all ranks, and with an empty cache, as many graphs are compiled as are distinct.
        """
        return tuple(self._compiled.compilations)

    def compile(self, *args: Any, target: Any = None, **kwargs: Any) -> "Pipeline":
        """Compile for the shapes of this batch (as `step` takes it) without running it."""
        with self._watch.region("compiling"), torch.inference_mode(False):
            self._parts.take_gradients()
            self._program_for(self._split(args, kwargs, target))
        return self

    def adopt(self, program: Program) -> Executable:
        """Run `program`, which was compiled elsewhere, with this pipeline's parameters; see `zbcompile.load`."""
        return self._compiled.adopt(program)

    def take_forwards(self, make: Callable[..., Forwards]) -> None:
        """Evaluate by what `make` makes of the model, the options, the engine and the executables."""
        self._forwards = make(self._model, self.options, self._engine, self._compiled)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch: gradients accumulate into `.grad`, the loss is returned on every rank.

        Every rank passes the same whole batch, along "dp" and "ep" of a mesh a batch of its own. Raises PipelineError
        for a batch that cannot be split.
        """
        return total_loss(self.step_losses(*args, target=target, **kwargs), self.options.loss_reduction)

    def step_losses(self, *args: Any, target: Any = None, **kwargs: Any) -> list[torch.Tensor]:
        """As `step`, but returns the loss of every microbatch, not yet divided by their number."""
        with self._watch.region(f"step {self.step_index}"):
            if torch.is_inference_mode_enabled():
                raise PipelineError("step is inside torch.inference_mode(), which has no gradients. Call it outside.")
            batch = self._split(args, kwargs, target)
            self._parts.take_gradients()
            executable = self._program_for(batch)
            self._compiled.share.require_filled()
            self._compiled.require_equal_shares()
            given = self._step_input(batch, executable.program)
            try:
                with self._as_captured(), self._compiled.void_if_it_fails(), self._optimizers.step():
                    losses = self._engine.step(executable, given, self._compiled.parameters)
            finally:
                self._parts.give_gradients()
        self.step_index += 1
        self._note_record()
        return losses

    def _step_input(self, batch: Batch, program: Program) -> StepInput:
        count = program.schedule.microbatches
        return StepInput(
            microbatches=[batch.microbatch(i, count).tensors for i in range(count)],
            index=self.step_index,
            seed=self.options.seed,
            reduction=self.options.loss_reduction,
            record=self.record,
            scale=None if self.scaler is None else self.scaler.scale,
            sharded=self._optimizers.sharded,
        )

    def eval(
        self,
        *args: Any,
        microbatches: int | Sequence[tuple[Any, ...]] | None = None,
        mode: str = "eval",
        outputs: str = "all",
        **kwargs: Any,
    ) -> Any:
        """The model's output without gradients, on every rank. Nothing of the pipeline or the model changes.

        Args:
            microbatches: how many microbatches at most (default: those of a step); the last one may be smaller. Or
                microbatches that are already split, `[(args, kwargs), ...]`, of any shapes; gives a list of outputs.
            mode: "eval", or "train": each microbatch as the next step's forward computes it, with the modules in the
                modes that they are in and the same random numbers.
            outputs: "all", or "last": only the rank of the last stage gets them, others None.

        An output without a row per sample (a loss) is computed on the whole batch. Raises PipelineError and
        CompileError.
        """
        asked = self._asked("eval", mode, outputs, microbatches)
        with self._watch.region("eval"), torch.inference_mode(False):
            return self._forward(args, kwargs, None, microbatches, asked)

    def log_probs(
        self,
        *args: Any,
        labels: torch.Tensor | None = None,
        entropies: bool = False,
        microbatches: int | Sequence[tuple[Any, ...]] | None = None,
        mode: str = "eval",
        outputs: str = "all",
        **kwargs: Any,
    ) -> Any:
        """The log-probability of every label, `log p(labels[b, t] | logits[b, t])`, without gradients; with `entropies`
        also the entropy (in nats) of every token's distribution.

        The model's output for `args` and `kwargs` are the logits [..., words], or has them under `logits`; `labels` has
        their shape without the words, and nothing is shifted: for the next token pass labels that begin one token
        later. Label -100 gives 0. Results have the labels' shape and, like the normalisation, at least fp32. They are
        computed where the logits are, which no other rank sees: that rank holds one microbatch's logits and, beside
        them, its log-probabilities.

        `microbatches`, `mode` and `outputs` as for `eval`; microbatches that are already split are
        `[(args, kwargs, labels), ...]`. Raises PipelineError and CompileError: for an output without logits, for labels
        of another shape or beyond the words.

        >>> logp = pipe.log_probs(tokens[:, :-1], labels=tokens[:, 1:])                  # doctest: +SKIP
        """
        asked = self._asked("entropies" if entropies else "log_probs", mode, outputs, microbatches)
        with self._watch.region("log_probs"), torch.inference_mode(False):
            found = self._forward(args, kwargs, labels, microbatches, asked)
        return [_without_words(each) for each in found] if isinstance(found, list) else _without_words(found)

    def _asked(self, computes: str, mode: str, outputs: str, microbatches: Any) -> Asked:
        if mode not in MODES or outputs not in OUTPUTS:
            raise PipelineError(f"mode={mode!r}, outputs={outputs!r}; expected one of {MODES}, and of {OUTPUTS}.")
        count = None if isinstance(microbatches, Sequence) else checked("microbatches", microbatches)
        return Asked(Computation(computes, mode == "train"), outputs, count, self.step_index, self.record)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Any, given: Any, asked: Asked) -> Any:
        split = None
        if isinstance(given, Sequence):
            split = split_batches(given, asked.wanted.computes, beside=bool(args or kwargs or labels is not None))
        self._require_place(args, kwargs)
        self._optimizers.arrive()
        if split is not None:
            found = self._forwards.of_microbatches(split, asked)
        else:
            found = self._forwards.of_batch(flatten_batch(args, kwargs, labels, self.options.split, True), asked)
        if self.record:
            self._note_record()
        return found

    def _note_record(self) -> None:
        if self._records is not None and self.last_step is not None:
            self._records.append(self.last_step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside accumulate into `.grad` without summing over ranks of the mesh; the first step after it does.

        Inside, `.grad` holds this rank's part. Without a mesh beyond "pp" it changes nothing.
        """
        replicas = self._ranks.replicas
        before, replicas.synchronise = replicas.synchronise, False
        try:
            yield
        finally:
            replicas.synchronise = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over the whole model: every rank clips its share by the norm of all
        gradients, tied parameters counted once, and returns that norm."""
        self._optimizers.require_whole_gradients("clip_grad_norm_")
        self._parts.take_gradients()
        with self._watch.region("clip_grad_norm_"):
            rows = frozenset(self._compiled.shards.own) if self._compiled.shards else frozenset()
            held = self._compiled.parameters
            norm = total_norm(
                self.program, self._compiled.trained, rows, held, self._ranks, norm_type, error_if_nonfinite
            )
        nn.utils.clip_grads_with_norm_([held[name] for name in self._own_names()], max_norm, norm)
        return norm

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        *,
        params: Predicate | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        zero: int = 0,
        clip: float | None = None,
        early: bool = False,
        validate: str = "before",
        **options: Any,
    ) -> PipelineOptimizer:
        """An optimizer over this pipeline's parameters; it can be made before or after compiling. Every rank calls it.

        docs/optimizer.md says more. `torch.optim.AdamW(pipe.parameters())` works as well, without what this adds.

        Args:
            kind: a class of torch optimizers; `options` are its own, such as `lr`.
            params: a predicate of a parameter's name and the parameter: those that this optimizer trains, default all.
            groups: as torch's, but "params" is a predicate. The first group that takes a parameter has it; the others
                are in a last group with `options`.
            zero: 0, or with "dp" in the mesh 1 to divide the optimizer's state among replicas, 2 its gradients too.
            clip: the norm to which `optimizer.step()` clips all its gradients, None for no limit.
            early: update each stage within `pipe.step`. Not available yet.
            validate: "before", or "after" to check the norm behind the updates. Not available yet.

        Raises PipelineError, on every rank.

        >>> optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3, clip=1.0)            # doctest: +SKIP
        >>> pipe.step(inputs, target=targets); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
        """
        wanted = Wanted(kind, options, params, groups, zero, clip, early, validate)
        return self._optimizers.make(wanted)

    def _require_values(self) -> None:
        """Raise before compiling; wait for the values of the last update."""
        self.program  # noqa: B018
        self._optimizers.arrive()

    def _own_names(self) -> list[str]:
        return [name for name, _ in owned_parameters(self._model, self._ranks, self.program.holders)]

    @contextmanager
    def recording(self) -> Iterator[list[StepRecord]]:
        """Record the steps inside; the list that it gives fills with them. `zbcompile.trace` writes them to a file."""
        before = self.record, self._records
        self.record, self._records = True, []
        try:
            yield self._records
        finally:
            self.record, self._records = before

    def from_replicas(self, value: Any) -> list[Any]:
        """What the first rank of every replica passes as `value`, on every rank; every rank must call it."""
        mesh = self._ranks.mesh
        own = {mesh.index(*BATCHES): value} if 0 in self._ranks.local and mesh.index("tp", "cp") == 0 else {}
        with self._watch.region("from_replicas"):
            found = {number: each for part in gathered(self._ranks, own) for number, each in part.items()}
        return [found[number] for number in sorted(found)]

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' and replicas' values, on each of them."""
        with self._watch.region("largest"), self._watch.position.waiting("the exchange"):
            self._ranks.largest(value)
        return value

    def stages(self) -> "list[CompiledPipelineStage]":
        """This rank's stages as torch.distributed.pipelining stages, for torch's own schedules.

        Raises PipelineError in one process (torch's stage needs a process group) and if a parameter trains on
        several stages: torch's schedules have no place to sum its gradients.
        """
        from zbcompile.torch_pipelining.pipeline_stage import StageContext, generated_stages

        self._optimizers.require_whole_gradients("a stage for torch's schedules")
        options, parameters = self.options, self._compiled.parameters
        beside = self._ranks.mesh.beside("pp", "dp")
        context = StageContext(
            self.program, self._ranks.group, parameters, options.loss_reduction, options.seed, beside
        )
        return generated_stages(context, self._compiled.first().stages)

    def as_schedule(self) -> "ScheduleLike":
        """This pipeline behind the calls of a torch.distributed.pipelining schedule: `step(*args, target=, losses=)`,
        `eval`."""
        from zbcompile.torch_pipelining.as_schedule import ScheduleLike

        return ScheduleLike(self)

    @property
    def parts(self) -> Mapping[str, Part]:
        """What the plain tensors that the pipeline trains are parts of, by the first name of each DTensor."""
        return self._parts.parts

    @property
    def ranks(self) -> Ranks:
        """The ranks of this pipeline: `ranks.local` are those in this process, `ranks.count` how many there are."""
        return self._ranks

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer. Tied parameters appear once."""
        return iter([parameter for _, parameter in self.named_parameters()])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's own names; DTensors if the model had them as such."""
        self._require_values()
        found = {**self._compiled.parameters, **self._parts.parameters}
        return iter([(name, found[name]) for name in self._own_names()])

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """Eager's state dict: this process's share, or with `full=True` all of it, on every rank.

        Of an output layer sharded over several processes the share is a DTensor of this process's rows.
        """
        self._require_values()
        if not full:
            own = share_state(self._model, self._ranks, self.program, self._compiled.shards)
            return self._parts.shown(own, self.program.model.names)
        with self._watch.region("state_dict"):
            return self._parts.shown(dict(self._stream()), self.program.model.names)

    def stream_state_dict(self) -> Iterator[tuple[str, Any]]:
        """The names and whole tensors of eager's state dict, one after the other on every rank: an engine that
        generates takes them without the memory for all. Every rank must take all of them.

        >>> for name, tensor in pipe.stream_state_dict():                                # doctest: +SKIP
        ...     engine.load(name, tensor)
        """
        stream = self._stream()
        while (found := self._next_whole(stream)) is not None:
            yield found

    def _next_whole(self, stream: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        with self._watch.region("stream_state_dict"):
            for name, tensor in stream:
                shown = self._parts.shown({name: tensor}, self.program.model.names)[name]
                return name, shown.full_tensor() if is_distributed(shown) else shown
        return None

    def _stream(self) -> Iterator[tuple[str, Any]]:
        self._optimizers.arrive()
        return stream_state(self._model, self._ranks, self.program.holders, self._compiled.shards)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this process's share of a full state dict; strict over the whole model."""
        self._require_values()
        state = self._parts.cut(state, self.program.model.names)
        load_state(self._model, self._ranks, self.program.holders, state)
        if self._compiled.shards is not None:
            self._compiled.shards.load(state)
        self._compiled.share.filled(state)

    def resume(self, step: int, filled: Iterable[str]) -> None:
        """Continue with step number `step`, now that the tensors `filled` of this process's share have their values;
        `zbcompile.load_checkpoint` writes them in place."""
        self.step_index = step
        self._compiled.share.filled(filled)

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

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        if self.options.loss is None and target is not None:
            raise PipelineError(
                "step received target=, but the pipeline has no loss=; forward returns the loss itself."
            )
        batch = flatten_batch(args, kwargs, target, self.options.split)
        refuse_input_gradients(batch)
        if self._compiled.program is None:
            self._compiled.schedule = fit_to_batch(self._compiled.schedule, self.options, batch.size, self.is_first)
        require_divisible(batch, self._compiled.schedule.microbatches)
        return batch

    def _require_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first evaluation, every parameter has its place: where it trains. Inputs of a forward that gives
        the loss suffice to compile the step; a model that trains nothing is placed by its first evaluation."""
        trains = any(parameter.requires_grad for parameter in self._model.parameters())
        if self._compiled.program is None and trains:
            if self.options.loss is not None:
                self.program  # noqa: B018  raises
            try:
                batch = self._split(args, kwargs, None)
            except PipelineError as error:
                raise PipelineError(
                    "the first evaluation compiles the training step, too, and its inputs are no batch of a step: "
                    f"{error} Or call pipe.compile with a batch first."
                ) from None
            self._program_for(batch)

    def _program_for(self, batch: Batch) -> Executable:
        found = self._compiled.get(batch)
        self._optimizers.bind()
        return found

    def _as_captured(self) -> torch.autocast:
        """Turn autocast off: the casts are in the graphs, and autocast would add casts that the model does not make."""
        return torch.autocast(self._ranks.device.type, enabled=False)


def _without_words(found: Any) -> Any:
    """Results without the number of words behind them: one tensor, or log-probabilities and entropies."""
    return found if found is None else found[0] if len(found) == 2 else found[:-1]
