"""The steps of a pipeline, from a batch to gradients, losses and outputs, and its evaluations."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.api.optimizers import Optimizers
from zbcompile.batches.batch import (
    Batch,
    Microbatches,
    SplitBatch,
    flatten_batch,
    refuse_input_gradients,
    split_batches,
)
from zbcompile.batches.losses import Losses
from zbcompile.distributed.agreement import agree
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import BoundGraphs, Executable, StepInput
from zbcompile.engine.step import Engine
from zbcompile.errors import PipelineError
from zbcompile.options import PipelineOptions, checked
from zbcompile.passes.torch_names import type_text
from zbcompile.planning.batch_layout import BatchLayout
from zbcompile.profiling.observation import Observation
from zbcompile.program_cache.programs import ProgramCache
from zbcompile.program_cache.step_outputs import joined_outputs, joined_rows, keyword

OUTPUTS = ("all", "last")


@dataclass(frozen=True)
class StepRunner:
    """Runs the steps and evaluations of a pipeline."""

    options: PipelineOptions
    engine: Engine
    cache: ProgramCache
    layout: BatchLayout
    optimizers: Optimizers
    observation: Observation

    def split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        microbatches: SplitBatch | None = None,
        outputs: bool | str = False,
    ) -> Microbatches:
        """Returns the microbatches of a step that returns `outputs` besides its loss. Raises
        PipelineError for a batch that cannot be split."""
        self.cache.require_step(outputs)
        self.cache.outputs = outputs
        static = self.options.static_inputs
        if microbatches is None:
            self._refuse_target(target)
            batch = flatten_batch(args, kwargs, target, self.options.split, static_inputs=static)
            refuse_input_gradients(batch)
            return self.layout.split(batch, self.engine.ranks.is_first)
        has_batch = bool(args or kwargs or target is not None)
        batches = split_batches(microbatches, "step", has_batch, static)
        for batch in batches:
            refuse_input_gradients(batch)
            self._refuse_target(batch.whole.example[2])
        return self.layout.fit([batch.whole for batch in batches])

    def _refuse_target(self, target: Any) -> None:
        if self.options.loss is None and target is not None and self.cache.saved is None:
            raise PipelineError(
                "step received target=, but the pipeline has no loss=; forward returns the loss"
                " itself."
            )

    def compile(self, step: Microbatches) -> Executable:
        """Returns the executable of a step of these microbatches, compiled if there is none."""
        executable = self.cache.get(step)
        self.optimizers.bind()
        return executable

    def _named(
        self, step: Microbatches, executable: Executable, outputs: bool | str, index: int
    ) -> AbstractContextManager[None]:
        """Ranks that call different steps wait for each other; this names the step in the error."""
        count, differences = len(step.each), []
        if count != self.cache.schedule.microbatches:
            differences.append(f" in {count} microbatches")
        is_first = executable.first.number == self.cache.first().number
        # Replicas may have different shapes.
        if self.engine.ranks.replicas.count == 1 and not (is_first and step.alike):
            number, shapes = executable.first.number + 1, "; ".join(step.shapes())
            differences.append(f" of program {number} for {shapes}")
        if outputs:
            differences.append(f" with {keyword(outputs)}")
        if not differences:
            return nullcontext()
        return self.engine.ranks.watch.position.turn_to(f"step {index}{''.join(differences)}")

    def run(self, step: Microbatches, outputs: bool | str, index: int) -> tuple[Losses, Any]:
        """Runs step number `index`. Returns the losses of all microbatches, and what else the step
        returns."""
        cache, binding, ranks = self.cache, self.cache.binding, self.engine.ranks
        executable = self.compile(step)
        binding.require_values()
        request = StepInput(
            microbatches=step.tensors,
            index=index,
            seed=self.options.seed,
            reduction=self.options.loss_reduction,
            recorder=self.observation.of_step(),
            slices=self.optimizers.parameters,
            actions=self.optimizers.actions(),
            ahead=self.optimizers.all_overlap,
            outputs="last" if outputs == "last" else "all" if outputs else "",
            agreement=cache.agreement,
        )
        # Without autocast: its casts are in the graphs, and it would add casts that the model does
        # not make.
        no_autocast = torch.autocast(ranks.device.type, enabled=False)
        with self._named(step, executable, outputs, index):
            try:
                with cache.drop_gradients_on_error(), self.optimizers.step(), no_autocast:
                    losses, values = self.engine.run_step(executable, request, binding.parameters)
            finally:
                binding.parts.give_gradients()
            if not outputs or (outputs == "last" and not executable.ends_on(ranks.local)):
                return losses, None
            reduction = self.options.loss_reduction
            return losses, joined_outputs(values, executable, step.rows, reduction)

    def evaluate(
        self,
        computes: str,
        outputs: str,
        step: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: Any,
        microbatches: int | Sequence[tuple[Any, ...]] | None,
    ) -> Any:
        """Returns the results of evaluating a batch in the state before step number `step`. For
        microbatches that are split already they are a list with one result for each."""
        ranks = self.engine.ranks
        with ranks.watch.region(computes), torch.inference_mode(False):
            if outputs not in OUTPUTS:
                raise PipelineError(f"outputs={outputs!r}; expected one of {OUTPUTS}.")
            recorder, static = self.observation.of_forward(), self.options.static_inputs
            if isinstance(microbatches, Sequence):
                count, has_batch = None, bool(args or kwargs or labels is not None)
                batches = split_batches(microbatches, computes, has_batch, static)
            else:
                count = checked("microbatches", microbatches)
                batches = [flatten_batch(args, kwargs, labels, self.options.split, True, static)]
            _require_same_calls(ranks, computes, outputs, count, recorder is not None, batches)
            self.optimizers.wait()
            graphs, inputs, groups = list[BoundGraphs](), list[dict[str, torch.Tensor]](), []
            for batch in batches:
                most = 1 if isinstance(microbatches, Sequence) else count
                parts = self.cache.forwards(batch, computes, most)
                groups.append(range(len(graphs), len(graphs) + len(parts)))
                graphs += parts
                inputs += [batch.microbatch(i, len(parts)).tensors for i in range(len(parts))]
            self.cache.binding.require_values()
            executable = self.cache.evaluation(graphs)
            seed = self.options.seed
            request = StepInput(inputs, step, seed, "sum", recorder, outputs=outputs)
            with torch.autocast(ranks.device.type, enabled=False):  # its casts are in the graphs
                schedule = self.cache.schedule
                values = self.engine.run_step(executable, request, {}, schedule).outputs
            self.observation.done()
        if outputs == "last" and not executable.ends_on(ranks.local):
            results: list[Any] = [None] * len(batches)
        else:
            results = [
                joined_rows(values, {i: graphs[i].program.returns for i in group})
                for group in groups
            ]
            if computes != "eval":  # log-probabilities, and the number of words
                results = [result[0] for result in results]
        return results if isinstance(microbatches, Sequence) else results[0]


def _require_same_calls(
    ranks: Ranks,
    computes: str,
    outputs: str,
    count: int | None,
    recorded: bool,
    batches: Sequence[Batch],
) -> None:
    """Raises PipelineError, on every rank, if ranks call different methods: they would wait for
    each other."""
    tensors = [batch.whole.tensors.items() for batch in batches]
    values = {
        "the call": computes,
        "outputs": outputs,
        "microbatches": count,
        "recording": recorded,
        "the inputs": [
            ", ".join(f"{path} {type_text(t)}" for path, t in group) for group in tensors
        ],
    }
    remedy = "Every rank must make the same calls."
    agree(ranks, values, "evaluate different things", remedy, of_a_place=("the inputs",))
