"""The steps of a pipeline, from a batch to gradients, losses and outputs, and its evaluations."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zbcompile.api.optimizers import Optimizers
from zbcompile.batches.batch import (
    Batch,
    Microbatch,
    Microbatches,
    SplitBatch,
    flatten_batch,
    refuse_input_gradients,
    require_divisible,
    split_batches,
)
from zbcompile.distributed.agreement import agree
from zbcompile.engine.executable import (
    BoundGraphs,
    Executable,
    Losses,
    StepInput,
    joined_outputs,
    joined_rows,
    keyword,
)
from zbcompile.engine.step import Engine
from zbcompile.errors import PipelineError
from zbcompile.options import PipelineOptions, checked, is_searched
from zbcompile.passes.torch_names import type_text
from zbcompile.planning.auto import compile_auto
from zbcompile.planning.choose_schedule import fit_to_batch, fit_to_count
from zbcompile.profiling.observation import Observation
from zbcompile.program_cache.programs import ProgramCache
from zbcompile.progress import LONG, Progress
from zbcompile.schedules import Schedule

OUTPUTS = ("all", "last")


@dataclass
class StepRunner:
    """Runs the steps and evaluations of a pipeline. The first batch decides the schedule.

    Attributes:
        unfitted: The schedule before the first step fits it to its batch.
        usual_rows: The samples of a usual microbatch.
    """

    options: PipelineOptions
    engine: Engine
    cache: ProgramCache
    optimizers: Optimizers
    observation: Observation
    unfitted: Schedule = field(init=False)
    usual_rows: int | None = None

    def __post_init__(self) -> None:
        self.unfitted = self.cache.schedule

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
            return self._split(batch)
        has_batch = bool(args or kwargs or target is not None)
        batches = split_batches(microbatches, "step", has_batch, static)
        for batch in batches:
            refuse_input_gradients(batch)
            self._refuse_target(batch.whole.example[2])
        return self._fit([batch.whole for batch in batches])

    def _split(self, batch: Batch) -> Microbatches:
        """Returns the microbatches of a batch. The first one fixes their number: `microbatches=`,
        or what a named schedule admits."""
        cache, trains = self.cache, self.cache.binding.trains
        if not trains:
            is_first = self.engine.ranks.is_first
            cache.schedule = fit_to_batch(self.unfitted, self.options, batch, is_first)
            if is_searched(self.options):
                require_divisible(batch, cache.schedule.microbatches)
                self._decide(batch.microbatch(0, cache.schedule.microbatches))
        count = cache.schedule.microbatches
        if trains and self.usual_rows is not None and not batch.divides_into(count):
            # the fewest with at most the usual rows; inputs of several lengths may have none
            counts = filter(batch.divides_into, range(1, batch.size + 1))
            count = next((n for n in counts if batch.size // n <= self.usual_rows), count)
        require_divisible(batch, count)
        if count == cache.schedule.microbatches:
            self.usual_rows = batch.rows(0, count)
        return batch.into(count)

    def _fit(self, microbatches: Sequence[Microbatch]) -> Microbatches:
        """Returns microbatches that are already split."""
        if not self.cache.binding.trains:
            self.cache.schedule = fit_to_count(self.unfitted, self.options, len(microbatches))
            if is_searched(self.options):
                self._decide(microbatches[0])
        signatures = {microbatch.signature for microbatch in microbatches}
        return Microbatches(tuple(microbatches), len(signatures) == 1)

    def _decide(self, microbatch: Microbatch) -> None:
        """Chooses the schedule by the predicted step, for the first batch's microbatches."""
        cache, options, what = self.cache, self.options, "choosing the schedule"
        usual = cache.schedule
        with cache.ranks.watch.position.turn_to(what), Progress(f"zbcompile: {what}", first=LONG):
            exported = cache.export(microbatch)
            make = partial(cache.make, microbatch, exported)
            program = compile_auto(
                make, options.choices, usual.ranks, usual.microbatches, options.chunks
            )
        cache.searched = exported, program
        cache.schedule, cache.decided = program.schedule, program.choices

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
        # replicas may have different shapes
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
        self.observation.last_step = None
        request = StepInput(
            microbatches=step.tensors,
            index=index,
            seed=self.options.seed,
            reduction=self.options.loss_reduction,
            recorder=self.observation if self.observation.record else None,
            slices=self.optimizers.parameters,
            updates=self.optimizers.updates,
            ahead=self.optimizers.all_overlap,
            outputs="last" if outputs == "last" else "all" if outputs else "",
        )
        # Without autocast: its casts are in the graphs, and it would add casts that the model does
        # not make.
        no_autocast = torch.autocast(ranks.device.type, enabled=False)
        with self._named(step, executable, outputs, index):
            try:
                with cache.drop_gradients_on_error(), self.optimizers.step(), no_autocast:
                    losses, values = self.engine.run_step(executable, request, binding.parameters)
            finally:
                if binding.parts.locals:
                    binding.parts.give_gradients()
            if not outputs or (outputs == "last" and not executable.ends_on(ranks.local)):
                return losses, None
            return losses, joined_outputs(values, executable, step.rows, request.reduction)

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
            recorder = self.observation if self.observation.record else None
            static = self.options.static_inputs
            if isinstance(microbatches, Sequence):
                count, has_batch = None, bool(args or kwargs or labels is not None)
                batches = split_batches(microbatches, computes, has_batch, static)
            else:
                if not args and not kwargs:
                    raise PipelineError(
                        f"{computes} runs a batch, and got no inputs besides labels=. For the modes"
                        " of the modules use model.eval()."
                    )
                count = checked("microbatches", microbatches)
                batches = [flatten_batch(args, kwargs, labels, self.options.split, True, static)]
            call = {
                "the call": computes,
                "outputs": outputs,
                "microbatches": count,
                "recording": recorder is not None,
                "the inputs": [
                    [f"{path} {type_text(t)}" for path, t in batch.whole.tensors.items()]
                    for batch in batches
                ],
            }
            # ranks that call different methods would wait for each other
            agree(
                ranks,
                call,
                "evaluate different things",
                "Every rank must make the same calls.",
                of_a_place=["the inputs"],
            )
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
            request = StepInput(inputs, step, self.options.seed, "sum", recorder, outputs=outputs)
            with torch.autocast(ranks.device.type, enabled=False):  # its casts are in the graphs
                _, values = self.engine.run_step(executable, request, {}, self.cache.schedule)
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
