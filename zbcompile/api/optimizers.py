"""The optimizers of a pipeline: created before or after it is compiled, and called around each of
its steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zbcompile.engine.optimizer_parameters import OptimizerParameters
from zbcompile.errors import PipelineError
from zbcompile.optimizer.optimizer_config import OptimizerConfig
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.optimizer.trained_parameters import TrainedParameters, accumulate_in_float32
from zbcompile.program_cache.binding import ModelBinding


class Optimizers:
    """The optimizers that `pipe.optimizer` has created."""

    def __init__(self, binding: ModelBinding) -> None:
        self._binding, self._ranks = binding, binding.ranks
        self._optimizers: list[PipelineOptimizer] = []

    def create(self, config: OptimizerConfig) -> PipelineOptimizer:
        """Returns a new optimizer, which gets its parameters when the model is cut."""
        optimizer = PipelineOptimizer(config, self._ranks, self._optimizers)
        if self._binding.trains:
            with self._ranks.watch.region("making the optimizer"):
                optimizer.bind(self._trained())
        else:  # the step will be compiled for the dtype of these gradients
            for name, parameter in self._binding.model.named_parameters():
                selected = config.params is None or config.params(name, parameter)
                if parameter.requires_grad and selected:
                    accumulate_in_float32(parameter)
        return optimizer

    def bind(self) -> None:
        """Gives new optimizers the pipeline's parameters, once it is compiled."""
        for optimizer in self._optimizers:
            if not optimizer.bound:
                optimizer.bind(self._trained())

    @property
    def parameters(self) -> list[OptimizerParameters]:
        """The parameters that each optimizer updates."""
        return [optimizer.parameters for optimizer in self._optimizers if optimizer.bound]

    def wait(self) -> None:
        """Waits until the parameters have the values of the last updates."""
        for optimizer in self._optimizers:
            optimizer.wait()

    def require_whole_gradients(self, what: str) -> None:
        """Raises PipelineError if replicas hold parts of the gradients, or a step drops them."""
        if any(parameters.zero for parameters in self.parameters):
            raise PipelineError(
                f"{what} needs whole gradients, and pipe.optimizer(zero=1) keeps this replica's"
                " part. Pass clip= to pipe.optimizer to clip, or zero=0."
            )
        if any(optimizer.config.overlaps_step for optimizer in self._optimizers):
            raise PipelineError(
                f'{what} needs gradients after a step, and with overlap=True or validate="after"'
                " pipe.step has updated and dropped them. Pass clip= to pipe.optimizer to clip."
            )

    @property
    def updates(self) -> list[Callable[[int], None]]:
        """The functions that update a stage within the next step; none inside of `no_sync`."""
        optimizers = self._optimizers if self._ranks.replicas.synchronise else ()
        return [optimizer.update for optimizer in optimizers if optimizer.config.overlaps_step]

    @property
    def all_overlap(self) -> bool:
        """True if all updates are within a step: a rank that ends it before another one would not
        update any more if that one fails."""
        overlap = [optimizer.config.overlaps_step for optimizer in self._optimizers]
        return set(overlap) == {True}

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for a step of the pipeline. The optimizers take its gradients, unless it
        fails."""
        try:
            yield
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.fail_step()
            raise
        for optimizer in self._optimizers:
            optimizer.end_step()

    def begin_step(self) -> None:
        """Ends the last updates: corrects those that were not valid. Raises PipelineError if the
        next step cannot follow them."""
        for optimizer in self._optimizers:
            optimizer.begin_step()

    def _trained(self) -> TrainedParameters:
        binding = self._binding
        assert binding.program is not None
        return TrainedParameters(
            program=binding.program,
            ranks=self._ranks,
            model={**dict(binding.model.named_parameters()), **binding.parts.parameters},
            local={name: binding.parameters[name] for name in binding.local_names},
            parts=binding.parts,
            shards=binding.shards,
        )
