"""The optimizers of a pipeline: made before or after it is compiled, and called around each of its
steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.optimizer_parameters import OptimizerParameters
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Parts
from zbcompile.model.tensor_shard import Chunk, chunk_of
from zbcompile.optimizer.optimizer_config import OptimizerConfig
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.optimizer.trained_parameters import TrainedParameters, accumulate_in_float32
from zbcompile.program_cache.bound_programs import BoundPrograms


@dataclass
class Optimizers:
    """The optimizers that `pipe.optimizer` has made."""

    model: nn.Module
    ranks: Ranks
    parts: Parts
    bound: BoundPrograms
    made: list[PipelineOptimizer] = field(default_factory=list)

    def make(self, config: OptimizerConfig) -> PipelineOptimizer:
        """One more."""
        found = PipelineOptimizer(config, self.ranks, self.made)
        if self.bound.trains:
            with self.ranks.watch.region("making the optimizer"):
                self._bind(found)
        else:  # the step will be compiled for the dtype of these gradients
            takes = config.params or (lambda name, parameter: True)
            chosen = [
                each
                for name, each in self.model.named_parameters()
                if each.requires_grad and takes(name, each)
            ]
            accumulate_in_float32(*chosen)
        return found

    def bind(self) -> None:
        """Give new optimizers the pipeline's parameters, once it is compiled."""
        for each in [each for each in self.made if not each.bound]:
            self._bind(each)

    def _bind(self, optimizer: PipelineOptimizer) -> None:
        optimizer.bind(self._trained())

    @property
    def slices(self) -> list[OptimizerParameters]:
        """The parameters that each optimizer updates."""
        return [each.parameters for each in self.made if each.bound]

    @property
    def divided(self) -> list[OptimizerParameters]:
        """Those that are divided among replicas."""
        return [each for each in self.slices if each.zero]

    def arrive(self) -> None:
        """Wait until the parameters have the values of the last updates."""
        for each in self.made:
            each.wait()

    def require_whole_gradients(self, what: str) -> None:
        """Raises PipelineError if replicas hold parts of the gradients, or a step drops them."""
        if self.divided:
            raise PipelineError(
                f"{what} needs whole gradients, and pipe.optimizer(zero=1) keeps this replica's"
                " part. Pass clip= to pipe.optimizer to clip, or zero=0."
            )
        if any(each.config.overlaps_step for each in self.made):
            raise PipelineError(
                f'{what} needs gradients after a step, and with overlap=True or validate="after"'
                " pipe.step has updated and dropped them. Pass clip= to pipe.optimizer to clip."
            )

    @property
    def actions(self) -> Mapping[str, Sequence[Callable[[int], None]]]:
        """The functions that the next step calls for a stage, by kind of action: correct its last
        update, wait for its parameters, update them (not inside `no_sync`)."""
        early = [
            each
            for each in self.made
            if each.config.overlaps_step and self.ranks.replicas.synchronise
        ]
        return {
            "VALIDATE": [each.settle for each in self.made if each.config.post_validates],
            "GATHER": [each.wait for each in self.divided],
            "OPT": [each.update for each in early],
        }

    @property
    def all_early(self) -> bool:
        """Whether a rank that ends a step before another one would not update any more if that one
        fails."""
        return bool(self.made) and all(each.config.overlaps_step for each in self.made)

    def begin_step(self) -> None:
        """Before a step of the pipeline. Raises PipelineError if updates inside of it cannot follow
        the last ones."""
        for each in self.made:
            each.begin_step()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the pipeline: its gradients go to the optimizers, unless it fails."""
        try:
            yield
        except BaseException:
            for each in self.made:
                each.fail_step()
            raise
        for each in self.made:
            each.end_step()

    def _trained(self) -> TrainedParameters:
        program, rows = self.bound.program, self.bound.shards
        assert program is not None
        own = {name: self.bound.parameters[name] for name in self.bound.own_names}
        return TrainedParameters(
            program=program,
            ranks=self.ranks,
            model={**dict(self.model.named_parameters()), **self.parts.parameters},
            local=own,
            user_parameters={
                **own,
                **{name: p for name, p in self.parts.parameters.items() if name in own},
            },
            rows=frozenset(rows.own) if rows else frozenset(),
            take_gradients=self.parts.take_gradients,
            chunk=self._chunk,
        )

    def _chunk(self, name: str) -> Chunk | None:
        rows = self.bound.shards
        if rows is not None and name in rows.own:
            return rows.chunk(name)
        return chunk_of(self.parts.parameters.get(name))
