"""The pipeline object: a model's training step, compiled for the shapes it meets."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from zbcompile.api.forward_calls import ForwardCalls
from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.mesh import BATCHES
from zbcompile.errors import PipelineError
from zbcompile.model.batch import Given, Microbatches
from zbcompile.model.losses import Losses
from zbcompile.optimizer.gradient_norm import total_norm
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.optimizer.wanted import Predicate, Wanted
from zbcompile.program_cache.step_outputs import joined_outputs, keyword, kind_of
from zbcompile.runtime.engine import Executable, StepInput

if TYPE_CHECKING:  # torch's pipelining takes a second to import
    from zbcompile.torch_pipelining.as_schedule import ScheduleLike
    from zbcompile.torch_pipelining.pipeline_stage import CompiledPipelineStage


class Pipeline(ForwardCalls):
    """A model as a pipeline; made by `zbcompile.pipeline`. Not an nn.Module: it holds this process's share of one.

    The first `step` compiles for the shapes of its microbatches. `record = True` makes `last_step` hold the measured
    spans of the next steps. `step_index` counts steps; it enters `zbcompile.microbatch_seed`.
    """

    def step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Given | None = None,
        return_outputs: bool | str = False,
        return_metrics: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch: gradients accumulate into `.grad`, the loss is returned on every rank. It
        is detached: the backward has run, and there is no `loss.backward()` to call.

        Every rank passes the same whole batch, along "dp" and "ep" of a mesh a batch of its own. A batch that the usual
        number of microbatches does not divide runs in as many equal ones as have no more samples than usual, if the
        schedule has a name that admits so many. `microbatches=[(args, kwargs, target), ...]` are split already: any
        number that the schedule admits, each of its own shapes (packed sequences, say); `max_shapes` programs are kept.

        `return_outputs=True` returns `(loss, outputs)`: what the model returned, without gradients, on every rank
        ("last": only on that of the last stage, None on others), or `(outputs, metrics)` if the loss function returns
        `(loss, metrics)`. Leaves with a row per sample are joined to those of the batch, floating scalars combined as
        the loss is; others are lists with an entry per microbatch. `return_metrics=True` returns `(loss, metrics)`,
        joined in the same way, without the memory that outputs take. Raises PipelineError for a batch that cannot be
        split.

        >>> loss, logits = pipe.step(inputs, target=targets, return_outputs=True)        # doctest: +SKIP
        >>> pipe.step(microbatches=[((part,), {}, goal) for part, goal in packed])       # doctest: +SKIP
        """
        kind = kind_of(return_outputs, return_metrics)
        found, outputs = self._run_step(args, kwargs, target, microbatches, kind)
        loss = found.total(self.options.loss_reduction)
        return (loss, outputs) if kind else loss

    def step_losses(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Given | None = None,
        return_outputs: bool | str = False,
        **kwargs: Any,
    ) -> tuple[list[torch.Tensor], Any]:
        """As `step`, but returns the loss of every microbatch, undivided; and the outputs, None if not asked for."""
        kind = kind_of(return_outputs, False)
        found, outputs = self._run_step(args, kwargs, target, microbatches, kind)
        return found.read(), outputs

    def _run_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, given: Given | None, outputs: bool | str
    ) -> tuple[Losses, Any]:
        with self._watch.region(f"step {self.step_index}"):
            if torch.is_inference_mode_enabled():
                raise PipelineError("step is inside torch.inference_mode(), which has no gradients. Call it outside.")
            self._optimizers.begin_step(self.scaler)
            self._parts.take_gradients()
            step = self._split(args, kwargs, target, given, outputs)
            losses, found = self._run(step, outputs)
        self.step_index += 1
        self.observation.step_done(self.step_index, step)
        return losses, found

    def _named(self, step: Microbatches, executable: Executable, outputs: bool | str) -> AbstractContextManager[None]:
        """Around a step that is unlike the first one: a rank that takes another step waits in vain for this one."""
        count, of_first = len(step.each), executable.first.number == self._compiled.first().number
        unlike = [f" in {count} microbatches"] if count != self._compiled.schedule.microbatches else []
        if self._ranks.replicas.count == 1 and not (of_first and step.alike):  # replicas may have different shapes
            unlike += [f" of program {executable.first.number + 1} for {'; '.join(step.shapes())}"]
        unlike += [f" with {keyword(outputs)}"] if outputs else []
        if not unlike:
            return nullcontext()
        return self._watch.position.turn_to(f"step {self.step_index}{''.join(unlike)}")

    def _run(self, step: Microbatches, outputs: bool | str) -> tuple[Losses, Any]:
        executable = self._program_for(step)
        self._compiled.require_values()
        self._compiled.withhold(executable.program)
        self._comparison.begin_step(step)
        tensors = self._step_input(step, outputs)
        with self._named(step, executable, outputs):
            try:  # without autocast: its casts are in the graphs, and it would add casts that the model does not make
                with (
                    torch.autocast(self.device.type, enabled=False),
                    self._compiled.void_if_it_fails(),
                    self._optimizers.step(),
                ):
                    losses, made = self._engine.run(executable, tensors, self._compiled.parameters)
            finally:
                self._parts.give_gradients()
            if not outputs:
                return losses, None
            if outputs == "last" and not executable.ends_on(self._ranks.local):
                return losses, None
            return losses, joined_outputs(made, executable, step.rows, self.options.loss_reduction)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises PipelineError: a pipeline has no call that autograd could go back through."""
        raise PipelineError(
            "a pipeline is not called: pipe.step(inputs, target=targets) runs forward and backward, pipe.eval(inputs) "
            "gives outputs without gradients."
        )

    def train(self, mode: bool = True) -> Self:
        """As `model.train(mode)`: the modes of the modules in the next steps."""
        self._model.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `model.zero_grad`, for this process's parameters."""
        for parameter in self.parameters():
            if parameter.grad is not None and not set_to_none:
                parameter.grad.zero_()
            elif set_to_none:
                parameter.grad = None

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Raises PipelineError: a pipeline's tensors stay where they are, and of their dtype."""
        raise PipelineError(
            "the tensors of a pipeline stay where they are, and of their dtype: call model.to(...) before "
            "zbcompile.pipeline."
        )

    def _step_input(self, step: Microbatches, outputs: bool | str) -> StepInput:
        return StepInput(
            microbatches=step.tensors,
            index=self.step_index,
            seed=self.options.seed,
            reduction=self.options.loss_reduction,
            recorder=self.observation.of_step(self.step_index + 1),
            scale=None if self.scaler is None else self.scaler.scale,
            sharded=self._optimizers.sharded,
            early=self._optimizers.early,
            validating=self._optimizers.validating,
            ahead=self._optimizers.all_early,
            outputs="last" if outputs == "last" else "all" if outputs else "",
        )

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
            early: update each stage within `pipe.step`, which then returns before other ranks have ended it: the loss
                is completed when it is read, which waits for them.
            validate: "before", or "after" to update early although the norm is known later, and to correct the update.

        Raises PipelineError, on every rank.

        >>> optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3, clip=1.0)            # doctest: +SKIP
        >>> pipe.step(inputs, target=targets); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
        """
        wanted = Wanted(kind, options, params, groups, zero, clip, early, validate)
        return self._optimizers.make(wanted)

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
        if not self._compiled.trains:
            raise PipelineError("no step is compiled yet. Call pipe.compile with a batch of a step, or run one, first.")
        self._compiled.withhold(self.program)
        options, parameters = self.options, self._compiled.parameters
        beside = self._ranks.mesh.beside("pp", "dp")
        context = StageContext(
            self.program, self._ranks.group, parameters, options.loss_reduction, options.seed, beside
        )
        return generated_stages(context, self._compiled.first().stages)

    def as_schedule(self) -> "ScheduleLike":
        """This pipeline behind the calls of a torch.distributed.pipelining schedule: `step`, `eval`."""
        from zbcompile.torch_pipelining.as_schedule import ScheduleLike

        return ScheduleLike(self)
