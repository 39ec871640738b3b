"""The pipeline object: a model's training step, compiled for the shapes it meets."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
from torch import nn

from zbcompile.api.model_state import ModelState
from zbcompile.api.optimizers import Optimizers
from zbcompile.api.step_runner import StepRunner
from zbcompile.backends.backend import Compilation
from zbcompile.batches.batch import SplitBatch
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import kind_of
from zbcompile.engine.step import Engine
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Parts, TensorPart
from zbcompile.optimizer.optimizer_config import OptimizerConfig, Predicate
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.options import PipelineOptions
from zbcompile.passes.capture.losses import join_loss
from zbcompile.passes.capture.model_checks import refuse, wrappers
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.planning.choose_schedule import choose_schedule
from zbcompile.profiling.observation import Observation
from zbcompile.program.program import Program
from zbcompile.program.step_record import StepRecord
from zbcompile.program_cache.binding import ModelBinding
from zbcompile.program_cache.programs import ProgramCache

if TYPE_CHECKING:  # torch's pipelining takes a second to import
    from zbcompile.torch_pipelining.pipeline_stage import CompiledPipelineStage


T = TypeVar("T")


class Pipeline(ModelState):
    """A model as a pipeline; made by `zbcompile.pipeline`. Not an nn.Module: it holds this
    process's share of one.

    The first `step` compiles for the shapes of its microbatches. `record = True` makes `last_step`
    hold the measured spans of the next steps. `step_index` counts steps; it enters
    `zbcompile.microbatch_seed`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: PipelineOptions,
        engine: Engine,
        saved: Program | None = None,
    ) -> None:
        self._model, self._ranks, self._watch = model, engine.ranks, engine.ranks.watch
        self._ended = weakref.finalize(self, self._watch.close)
        self._attached: dict[type, Any] = {}
        self._observation = Observation(self._ranks)
        with self._watch.region("making the pipeline"):
            refuse(wrappers(model))
            join_loss(model, options.loss)
            schedule = choose_schedule(options, self._ranks.count)
            parts = Parts(model, self._ranks.mesh.labels)
            if parts.placements:
                placements = {**(options.placements or {}), **parts.placements}
                options = replace(options, placements=placements)
            self._options = options
            self._binding = ModelBinding(model, parts, options, self._ranks)
            self._compiled = ProgramCache(model, options, self._binding, schedule, saved)
            self._optimizers = Optimizers(self._binding)
            self._runner = StepRunner(
                options, engine, self._compiled, self._optimizers, self._observation
            )

    if not TYPE_CHECKING:  # with it, type checkers would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                raise AttributeError(
                    f"a pipeline has no attribute {name}. Options are fixed once it is made: pass"
                    " them to zbcompile.pipeline."
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            text = f"a pipeline has no attribute {name}"
            if not name.startswith("_") and hasattr(nn.Module, name):
                text += (
                    f", as it is no nn.Module: use model.{name}, before zbcompile.pipeline if it"
                    " changes tensors. pipe.step and pipe.eval run a batch"
                )
            raise AttributeError(f"{text}.", name=name, obj=self)

    def __getstate__(self) -> NoReturn:
        raise PipelineError(
            "a pipeline holds connections to other ranks, so it cannot be copied or pickled. Save"
            " what it trains (zbcompile.save_checkpoint, save_weights) or what it compiled"
            " (pipe.program.save)."
        )

    @property
    def options(self) -> PipelineOptions:
        """The options that the pipeline was made with."""
        return self._options

    @property
    def model(self) -> nn.Module:
        """The module that the pipeline was made of. Once it is compiled, parameters and buffers of
        other processes are on the meta device in it (docs/training.md)."""
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
        """True if this process has the first rank of all, which prints and writes files."""
        return self._ranks.is_first

    @property
    def ranks(self) -> Ranks:
        """The ranks of this pipeline: `ranks.local` are those in this process, `ranks.count` how
        many there are."""
        return self._ranks

    @property
    def parts(self) -> Mapping[str, TensorPart]:
        """The layout of each DTensor that the pipeline trains as a plain local tensor, by its first
        name."""
        return self._binding.parts.parts

    @property
    def observation(self) -> Observation:
        """The recorder of steps."""
        return self._observation

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step that ran with `record = True`."""
        return self.observation.last_step

    @property
    def record(self) -> bool:
        """True if steps are recorded. Can be set."""
        return self.observation.record

    @record.setter
    def record(self, value: bool) -> None:
        self.observation.record = value

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The work of the backend on this process, for each program: how many graphs, how many
        distinct, compiled, loaded.

        Over all ranks, and with an empty cache, as many graphs are compiled as are distinct.
        """
        return tuple(self._binding.compilations)

    def compile(
        self,
        *args: Any,
        target: Any = None,
        microbatches: SplitBatch | None = None,
        return_outputs: bool | str = False,
        return_metrics: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Compile for the shapes of this batch (as `step` takes it) without running it."""
        with self._watch.region("compiling"), torch.inference_mode(False):
            self._binding.parts.take_gradients()
            kind = kind_of(return_outputs, return_metrics)
            self._runner.compile(self._runner.split(args, kwargs, target, microbatches, kind))
        return self

    def microbatches_of(self, *args: Any, target: Any = None, **kwargs: Any) -> int:
        """The number of microbatches into which `step` splits this batch. Raises PipelineError if
        it cannot."""
        return len(self._runner.split(args, kwargs, target).each)

    def step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: SplitBatch | None = None,
        return_outputs: bool | str = False,
        return_metrics: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs forward and backward of one batch and returns the loss on every rank.

        Gradients accumulate into `.grad`. The loss is detached: the backward has run, and there is
        no `loss.backward()` to call.

        Every rank passes the same whole batch; ranks along "dp" and "ep" of a mesh pass different
        ones. A batch that the usual number of microbatches does not divide runs in as many equal
        ones as have no more samples than usual, if the schedule has a name that admits that many.
        `microbatches=[(args, kwargs, target), ...]` are split already: any number that the schedule
        admits, each with separate shapes (packed sequences, say); `max_shapes` programs are kept.

        `return_outputs=True` returns `(loss, outputs)`: what the model returned, without gradients,
        on every rank ("last": only on that of the last stage, None on others), or `(outputs,
        metrics)` if the loss function returns `(loss, metrics)`. Leaves with a row per sample are
        joined to those of the batch, floating scalars combined as the loss is; others are lists
        with an entry per microbatch. `return_metrics=True` returns `(loss, metrics)`, joined in the
        same way, without the memory that outputs take. Raises PipelineError for a batch that cannot
        be split.

        >>> loss, logits = pipe.step(inputs, target=targets, return_outputs=True)  # doctest: +SKIP
        >>> pipe.step(microbatches=[((part,), {}, goal) for part, goal in packed])  # doctest: +SKIP
        """
        kind = kind_of(return_outputs, return_metrics)
        with self._watch.region(f"step {self.step_index}"):
            if torch.is_inference_mode_enabled():
                raise PipelineError(
                    "step is inside torch.inference_mode(), which has no gradients. Call it"
                    " outside."
                )
            self._optimizers.begin_step()
            if self._binding.parts.locals:
                self._binding.parts.take_gradients()
            batch = self._runner.split(args, kwargs, target, microbatches, kind)
            losses, outputs = self._runner.run(batch, kind, self.step_index)
        self.step_index += 1
        loss = losses.total(self.options.loss_reduction)
        return (loss, outputs) if kind else loss

    def eval(
        self,
        *args: Any,
        microbatches: int | Sequence[tuple[Any, ...]] | None = None,
        outputs: str = "all",
        **kwargs: Any,
    ) -> Any:
        """The model's output without gradients, on every rank. Nothing of the pipeline or the model
        changes.

        Args:
            microbatches: how many microbatches at most (default: those of a step); the last one may
                be smaller. Or microbatches that are already split, `[(args, kwargs), ...]`, of any
                shapes; gives a list of outputs.
            outputs: "all", or "last": only the rank of the last stage gets them, others None.

        An output without a row per sample (a loss) is computed on the whole batch. Raises
        PipelineError and CompileError.
        """
        return self._runner.evaluate(
            "eval", outputs, self.step_index, args, kwargs, None, microbatches
        )

    def log_probs(
        self,
        *args: Any,
        labels: torch.Tensor | None = None,
        microbatches: int | Sequence[tuple[Any, ...]] | None = None,
        outputs: str = "all",
        **kwargs: Any,
    ) -> Any:
        """The log-probability of every label, `log p(labels[b, t] | logits[b, t])`, without
        gradients.

        The model's output for `args` and `kwargs` are the logits [..., words], or has them under
        `logits`; `labels` has their shape without the words, and nothing is shifted: for the next
        token pass labels that begin one token later. Label -100 gives 0. Results have the labels'
        shape and, like the normalisation, at least fp32. They are computed where the logits are,
        which no other rank sees: that rank holds one microbatch's logits, and its
        log-probabilities.

        `microbatches` and `outputs` as for `eval`; microbatches that are already split are `[(args,
        kwargs, labels), ...]`. Raises PipelineError and CompileError: for an output without logits,
        for labels of another shape or beyond the words.

        >>> logp = pipe.log_probs(tokens[:, :-1], labels=tokens[:, 1:])  # doctest: +SKIP
        """
        return self._runner.evaluate(
            "log_probs", outputs, self.step_index, args, kwargs, labels, microbatches
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises PipelineError: a pipeline has no call that autograd could go back through."""
        raise PipelineError(
            "a pipeline is not called: pipe.step(inputs, target=targets) runs forward and backward,"
            " pipe.eval(inputs) gives outputs without gradients."
        )

    def train(self, mode: bool = True) -> Self:
        """Sets the modes of the modules for the next steps, like `model.train(mode)`."""
        self._model.train(mode)
        return self

    def recompile(self) -> None:
        """Drops all programs, so that the next step and evaluation compile: after a change of
        Python state that is not compared, such as a class attribute or a function that forward
        calls. Every rank calls it.
        """
        with self._watch.region("recompile"):
            self._compiled.recompile()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside accumulate into `.grad` without summing over ranks of the mesh; the first
        step after it does.

        Inside, `.grad` holds this rank's part. Without a mesh beyond "pp" it changes nothing.
        """
        replicas = self._ranks.replicas
        before, replicas.synchronise = replicas.synchronise, False
        try:
            yield
        finally:
            replicas.synchronise = before

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        *,
        params: Predicate | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        zero: int = 0,
        clip: float | None = None,
        overlap: bool = False,
        validate: str = "before",
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> PipelineOptimizer:
        """An optimizer over this pipeline's parameters; it can be made before or after compiling.
        Every rank calls it.

        docs/optimizer.md says more. `torch.optim.AdamW(pipe.parameters())` works as well, without
        what this adds.

        Args:
            kind: a class of torch optimizers; `options` are its own, such as `lr`.
            params: a predicate of a parameter's name and the parameter: those that this optimizer
                trains, default all.
            groups: as torch's, but "params" is a predicate. The first group that takes a parameter
                has it; the others are in a last group with `options`.
            zero: 0, or with "dp" in the mesh 1 to divide the optimizer's state among replicas.
            clip: the norm to which `optimizer.step()` clips all its gradients, None for no limit.
            overlap: `pipe.step` updates each stage as soon as its gradients are complete, and
                `optimizer.step()` does nothing. The step returns before other ranks have ended it:
                the loss is completed when it is read, which blocks until they have.
            validate: "before", or "after" to overlap although `clip` needs the norm of all
                gradients, and to correct the update once it is known.
            reduce_dtype: the dtype in which gradients are sent between replicas and summed over
                them. None: their own.

        Raises PipelineError, on every rank.

        >>> optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3, clip=1.0)  # doctest: +SKIP
        >>> pipe.step(inputs, target=targets)  # doctest: +SKIP
        >>> optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
        """
        config = OptimizerConfig(
            kind, options, params, groups, zero, clip, overlap, validate, reduce_dtype
        )
        return self._optimizers.create(config)

    def stages(self) -> "list[CompiledPipelineStage]":
        """This rank's stages as torch.distributed.pipelining stages, for torch's own schedules.

        Raises PipelineError in one process (torch's stage needs a process group) and if a parameter
        trains on several stages: torch's schedules have no place to sum its gradients.
        """
        from zbcompile.torch_pipelining.pipeline_stage import generated_stages

        binding = self._binding
        self._optimizers.require_whole_gradients("a stage for torch's schedules")
        if not binding.trains:
            raise PipelineError(
                "no step is compiled yet. Call pipe.compile with a batch of a step, or run one,"
                " first."
            )
        program = replace(
            self.program, step=self.options.step
        )  # a loaded one may have got another seed
        return generated_stages(
            program, self._compiled.first().stages, self._ranks, binding.parameters
        )

    def attached(self, kind: type[T]) -> T:
        """Returns the one `kind` of this pipeline, which is created at the first call and closed
        with the pipeline."""
        if kind not in self._attached:
            self._attached[kind] = kind()
        return self._attached[kind]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stops watching other ranks and releases the process group. Every rank calls it.

        Blocks until a checkpoint that is still being written is complete, and raises if it failed.

        After this, and `torch.distributed.destroy_process_group()`, a new process group and a new
        pipeline can be made in the same process. A pipeline that is garbage collected closes
        itself.
        """
        with ExitStack() as closing:
            closing.callback(self._ended)
            closing.callback(self._ranks.disconnect)
            closing.callback(self._binding.close)
            for resource in self._attached.values():
                closing.callback(resource.close)
