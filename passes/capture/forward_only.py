"""Evaluation: the forward of a model as a graph, captured like a training step but for the
backward."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.dtensor_parameters import without_sharding
from zbcompile.passes.capture.export import ExportOptions, export_step
from zbcompile.passes.capture.structures import flatten_output
from zbcompile.passes.capture.training_step import TrainingStep
from zbcompile.passes.capture.unsupported import RETURNS_NO_TENSOR
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.step_graph import StepGraph

Function = Callable[[Any, Any], Any]


class ForwardOnly(TrainingStep):
    """A model's forward as one module.

    `function` maps `(output, target)` to what is returned instead of the output, such as the
    log-probabilities of labels.
    """

    def __init__(self, model: nn.Module, function: Function | None = None, **options: Any) -> None:
        super().__init__(model, function, **options)
        self.trained = ()

    def forward(  # type: ignore[override]
        self, tensors: list[Tensor]
    ) -> list[Tensor]:
        """Returns the tensors of the output."""
        args, kwargs, target = self.batch.rebuild(tensors)
        with torch.no_grad(), self._tensors_of_eager_mode():
            buffers = {name: self._tensor(name) for name, _ in self.named_buffers()}
            with self._model_context(tensors):
                output = self._run_model(args, kwargs)
                if self.loss_function is not None:
                    output = self.loss_function(output, target)
            outputs, self.output_structure = flatten_output(output)
            if not outputs:
                raise CaptureError(RETURNS_NO_TENSOR.format(kind=type(output).__name__))
            outputs = [without_sharding(tensor).detach() for tensor in outputs]
            self._write_assigned_buffers(buffers)
        return outputs


def export_forward(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    function: Function | None = None,
    options: ExportOptions | None = None,
) -> StepGraph:
    """Returns the forward of `model` in eval mode for one microbatch as a graph.

    `step.output_structure` rebuilds the output, or what `function` returned.

    >>> step = export_forward(nn.Linear(4, 2), (torch.randn(3, 4),))
    >>> len(step.outputs), step.gradients
    (1, {})
    """
    with _eval_mode(model):
        batch = (args, dict(kwargs or {}), target)
        return export_step(ForwardOnly, model, function, batch, options or ExportOptions())


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Context in which every module is in eval mode, whatever its mode was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
