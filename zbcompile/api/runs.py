"""The steps of a pipeline, from a batch to gradients, losses and outputs, and its evaluations, of
forwards alone."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.api.optimizers import Optimizers
from zbcompile.api.partial_norms import PartialNorms
from zbcompile.batches.batch import (
    Batch,
    Given,
    Microbatches,
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
from zbcompile.model.distributed_tensors import Parts
from zbcompile.options import PipelineOptions, checked
from zbcompile.passes.torch_names import type_text
from zbcompile.planning.batch_layout import BatchLayout
from zbcompile.profiling.observation import Observation
from zbcompile.program_cache.programs import Programs
from zbcompile.program_cache.step_outputs import joined_outputs, joined_rows, keyword

OUTPUTS = ("all", "last")


@dataclass(frozen=True)
class Runs:
    """Runs steps and evaluations. Holds what they need: compiled programs, optimizers, observers,
    and the model's exchanges between experts."""

    options: PipelineOptions
    engine: Engine
    parts: Parts
    compiled: Programs
    layout: BatchLayout
    optimizers: Optimizers
    norms: PartialNorms
    observation: Observation

    def split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        given: Given | None = None,
        outputs: bool | str = False,
    ) -> Microbatches:
        """The microbatches of a step that returns `outputs` besides its loss. Raises PipelineError
        for a batch that cannot be split."""
        self.compiled.require_step(outputs)
        self.compiled.outputs = outputs
        static, has_others = self.options.static_inputs, bool(args or kwargs or target is not None)
        batches = split_batches(given, "step", has_others, static) if given is not None else []
        for each in batches:
            refuse_input_gradients(each)
            self._refuse_target(each.whole.example[2])
        if batches:
            return self.layout.fit([each.whole for each in batches])
        self._refuse_target(target)
        batch = flatten_batch(args, kwargs, target, self.options.split, static_inputs=static)
        refuse_input_gradients(batch)
        return self.layout.split(batch, self.engine.ranks.is_first)

    def _refuse_target(self, target: Any) -> None:
        if self.options.loss is None and target is not None and self.compiled.saved is None:
            raise PipelineError(
                "step received target=, but the pipeline has no loss=; forward returns the loss"
                " itself."
            )

    def program_for(self, step: Microbatches) -> Executable:
        """The executable of a step of these microbatches; compiled if it is not there."""
        found = self.compiled.get(step)
        self.parts.renew()
        self.optimizers.bind()
        if self.norms.program is not self.compiled.bound.program:
            self.norms.note()
        return found

    def _named(
        self, step: Microbatches, executable: Executable, outputs: bool | str, index: int
    ) -> AbstractContextManager[None]:
        """If ranks call different steps they deadlock; this names the step in the error."""
        count, of_first = len(step.each), executable.first.number == self.compiled.first().number
        unlike = (
            [f" in {count} microbatches"] if count != self.compiled.schedule.microbatches else []
        )
        if self.engine.ranks.replicas.count == 1 and not (
            of_first and step.alike
        ):  # replicas may have different shapes
            unlike += [f" of program {executable.first.number + 1} for {'; '.join(step.shapes())}"]
        unlike += [f" with {keyword(outputs)}"] if outputs else []
        if not unlike:
            return nullcontext()
        return self.engine.ranks.watch.position.turn_to(f"step {index}{''.join(unlike)}")

    def run(self, step: Microbatches, outputs: bool | str, index: int) -> tuple[Losses, Any]:
        """Run step number `index`: the losses of all microbatches, and what else it returns."""
        compiled = self.compiled
        executable = self.program_for(step)
        compiled.bound.require_values()
        compiled.bound.withhold(executable.program)
        given = StepInput(
            microbatches=step.tensors,
            index=index,
            seed=self.options.seed,
            reduction=self.options.loss_reduction,
            recorder=self.observation.of_step(),
            slices=self.optimizers.slices,
            actions=self.optimizers.actions,
            ahead=self.optimizers.all_early,
            outputs="last" if outputs == "last" else "all" if outputs else "",
            agreement=self.compiled.agreement,
        )
        with self._named(step, executable, outputs, index):
            try:
                # without autocast: its casts are in the graphs, and it would add casts that the
                # model does not make
                no_autocast = torch.autocast(self.engine.ranks.device.type, enabled=False)
                with compiled.void_if_it_fails(), self.optimizers.step(), no_autocast:
                    losses, made = self.engine.run_step(
                        executable, given, compiled.bound.parameters
                    )
            finally:
                self.parts.give_gradients()
            if not outputs:
                return losses, None
            if outputs == "last" and not executable.ends_on(self.engine.ranks.local):
                return losses, None
            return losses, joined_outputs(made, executable, step.rows, self.options.loss_reduction)

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
        """The results of evaluating a batch in the state before step number `step`; for
        microbatches that are split already, a list with one result for each."""
        with (
            self.engine.ranks.watch.region("eval" if computes == "eval" else "log_probs"),
            torch.inference_mode(False),
        ):
            if outputs not in OUTPUTS:
                raise PipelineError(f"outputs={outputs!r}; expected one of {OUTPUTS}.")
            recorder = self.observation.of_forward()
            count = (
                None
                if isinstance(microbatches, Sequence)
                else checked("microbatches", microbatches)
            )
            static = self.options.static_inputs
            if isinstance(microbatches, Sequence):
                batches = split_batches(
                    microbatches, computes, bool(args or kwargs or labels is not None), static
                )
            else:
                batches = [flatten_batch(args, kwargs, labels, self.options.split, True, static)]
            _require_same_calls(
                self.engine.ranks, computes, outputs, count, recorder is not None, batches
            )
            self.optimizers.arrive()
            own, inputs, groups = (
                list[BoundGraphs](),
                list[dict[str, torch.Tensor]](),
                list[range](),
            )
            for batch in batches:
                graphs = self.compiled.forwards(
                    batch, computes, 1 if isinstance(microbatches, Sequence) else count
                )
                groups.append(range(len(own), len(own) + len(graphs)))
                own += graphs
                inputs += [batch.microbatch(i, len(graphs)).tensors for i in range(len(graphs))]
            self.compiled.bound.require_values()
            executable = self.compiled.evaluation(own)
            given = StepInput(inputs, step, self.options.seed, "sum", recorder, outputs=outputs)
            with torch.autocast(
                self.engine.ranks.device.type, enabled=False
            ):  # its casts are in the graphs
                made = self.engine.run_step(executable, given, {}, self.compiled.schedule).outputs
            self.parts.renew()
            self.observation.done()
        if outputs == "last" and not executable.ends_on(self.engine.ranks.local):
            found: list[Any] = [None] * len(batches)
        else:
            found = [
                joined_rows(made, {i: own[i].program.returns for i in group}) for group in groups
            ]
            found = found if computes == "eval" else list(map(_without_words, found))
        return found if isinstance(microbatches, Sequence) else found[0]


def _require_same_calls(
    ranks: Ranks,
    computes: str,
    outputs: str,
    count: int | None,
    recorded: bool,
    batches: Sequence[Batch],
) -> None:
    """Raise PipelineError, on every rank, if ranks call different methods: they would wait for each
    other."""
    given = [batch.whole.tensors.items() for batch in batches]
    inputs = [", ".join(f"{path} {type_text(tensor)}" for path, tensor in each) for each in given]
    notes = {
        "the call": computes,
        "outputs": outputs,
        "microbatches": count,
        "recording": recorded,
        "the inputs": inputs,
    }
    remedy = "Every rank must make the same calls."
    agree(ranks, notes, "evaluate different things", remedy, of_a_place=("the inputs",))


def _without_words(found: tuple[Any, ...]) -> Any:
    """Log-probabilities without the number of words behind them."""
    return found[0]
