"""The training step as one module: forward, loss and the gradient of every trained parameter."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.exported.capture.autocast_casts import AutocastRegions
from zbcompile.passes.exported.capture.backward_marks import (
    grad_fns_below,
    mark_backward_nodes,
)
from zbcompile.passes.exported.capture.batch_inputs import BatchStructure
from zbcompile.passes.exported.capture.checkpoint_hints import checkpoint_hints
from zbcompile.passes.exported.capture.dtensor_parameters import (
    Sharding,
    local_gradient,
    shardings_of,
    tangent_like,
    without_sharding,
)
from zbcompile.passes.exported.capture.known_values import KnownValues
from zbcompile.passes.exported.capture.parameter_hooks import GradWrites, traced_hooks
from zbcompile.passes.exported.capture.python_effects import PythonEffects
from zbcompile.passes.exported.capture.unsupported import (
    LOSS_HAS_A_SHAPE,
    LOSS_IS_NO_TENSOR,
    NOTHING_TO_TRAIN,
    SPARSE_GRADIENT,
    WRITES_A_BUFFER_IN_BACKWARD,
    WRITES_A_PARAMETER,
    FunctionCalls,
)
from zbcompile.passes.exported.output_structure import Structure, flatten_output
from zbcompile.passes.exported.torch_private import (
    not_compiling,
    reparametrize_module,
    version_of,
)

LossFunction = Callable[[Any, Any], Any]
LOSS_MODULE = "loss_function"  # prefix of parameters that belong to a loss module
MODEL = "model"


class TrainingStep(nn.Module):
    """A model with its loss and its backward.

    Args:
        model: The user's module.
        loss_fn: Maps `(output, target)` to the loss, or to `(loss, metrics)`. If None, the output
            is the loss, has an attribute or a key `loss`, or is a tuple that begins with it.
        batch: The structure of the batch.
        eager_path: True if torch.compiler.is_compiling() is False inside of the model.
        static_inputs: Real tensors by the path of the batch input whose values the model may read.

    After a trace `python_effects` names the module state that forward changed, `inexact_calls` the
    calls whose bits differ from eager mode, and `rebuild_outputs` rebuilds the model's output and
    the metrics from the traced outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        *,
        batch: BatchStructure,
        eager_path: bool = True,
        static_inputs: Mapping[str, Tensor] | None = None,
        return_outputs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_function = loss_fn
        self.batch = batch
        self.eager_path = eager_path
        self.static_inputs = dict(static_inputs or {})
        self.return_outputs = return_outputs
        self.tied = _tied_names(self)
        self.shardings: dict[str, Sharding] = shardings_of(self)
        self.gradient_placements: dict[str, tuple[Any, ...]] = {}
        self.trained = tuple(name for name, param in self.named_parameters() if param.requires_grad)
        self.python_effects = PythonEffects(model, loss_fn)
        self.rebuild_outputs: Structure | None = None
        self.inexact_calls: list[str] = []
        self.prediction = GradientPrediction(enabled=not self.shardings)
        self._originals = {name: self._tensor(name) for name in self.trained}

    def forward(
        self, tangent: Tensor, tensors: list[Tensor]
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
        """Returns the loss, one gradient per trained parameter (None if it has none), outputs.

        `tangent` is the gradient of the loss; a pipeline of m microbatches passes 1/m. `tensors`
        are those of the batch.
        """
        args, kwargs, target = self.batch.rebuild(tensors)
        with torch.enable_grad(), self._tensors_of_eager_mode():
            buffers = {name: self._tensor(name) for name, _ in self.named_buffers()}
            parameters = {name: self._tensor(name) for name in self.trained}
            with self._model_context(tensors):
                output = self.model(*args, **kwargs)
                loss, metrics = self._loss_of(output, target)
            self._refuse_replaced(parameters)
            value = without_sharding(loss).detach()
            outputs, self.rebuild_outputs = flatten_output(
                (output, metrics) if self.return_outputs else (None, metrics)
            )
            outputs = [without_sharding(tensor).detach() for tensor in outputs]
            grads = self._gradients(loss, tangent)
            self._write_assigned_buffers(buffers)
        return value, grads, outputs

    @contextlib.contextmanager
    def _model_context(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context of the model and the loss: eager's path, known values and checkpoint hints."""
        known = KnownValues()
        for path, tensor in zip(self.batch.paths, tensors, strict=True):
            known.declare(tensor, path, self.static_inputs.get(path))
        flags = not_compiling() if self.eager_path else contextlib.nullcontext()
        calls = FunctionCalls(known.number_of)
        effects = self.python_effects.watched(known)
        with effects, flags, checkpoint_hints(), AutocastRegions().numbered(), calls, known:
            try:
                yield
            finally:
                self.python_effects.question = known.question
        self.inexact_calls = calls.inexact

    def _refuse_replaced(self, parameters: Mapping[str, Tensor]) -> None:
        """Raises CaptureError if forward assigned a parameter or wrote its `.data`."""
        for name, parameter in parameters.items():
            if self._tensor(name) is not parameter or not parameter.requires_grad:
                raise CaptureError(WRITES_A_PARAMETER.format(line=public_name(name)))

    def _gradients(self, loss: Tensor, tangent: Tensor) -> list[Tensor | None]:
        params = {name: self._tensor(name) for name in self.trained}
        if self.prediction.enabled and self.prediction.exists is None:
            return self.prediction.empty_gradients(loss, list(params.values()))
        writes = GradWrites(params)
        buffers = {name: (buffer, version_of(buffer)) for name, buffer in self.named_buffers()}
        mark_backward_nodes(loss)
        with (
            traced_hooks(self._originals, params),
            torch.autocast(loss.device.type, enabled=False),  # as recommended for eager mode
        ):
            grads = torch.autograd.grad(
                loss, list(params.values()), tangent_like(loss, tangent), allow_unused=True
            )
        writes.check()
        for name, (buffer, version) in buffers.items():
            if version_of(buffer) != version:
                name = public_name(name)
                raise CaptureError(WRITES_A_BUFFER_IN_BACKWARD.format(name=name))
        self.prediction.compare(grads)
        return [self._local_gradient(name, grad) for name, grad in zip(params, grads, strict=True)]

    def _local_gradient(self, name: str, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(SPARSE_GRADIENT.format(name=public_name(name)))
        local, placements = local_gradient(gradient)
        if placements is not None:
            self.gradient_placements[name] = placements
        return local

    def _write_assigned_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Writes buffers that forward assigned (`self.count = self.count + 1`) in place.

        torch.export would lose the assignment. The write comes after the backward, which may read
        the old value.
        """
        for name, original in buffers.items():
            assigned = self._tensor(name)
            if assigned is original:
                continue
            with torch.no_grad():
                original.copy_(assigned)
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, original)

    def _loss_of(self, output: Any, target: Any) -> tuple[Tensor, Any]:
        """Returns the loss and the metrics."""
        metrics = None
        if self.loss_function is not None:
            loss = self.loss_function(output, target)
            if isinstance(loss, tuple) and len(loss) == 2:
                loss, metrics = loss
        elif isinstance(output, Tensor):
            loss = output
        elif isinstance(output, Mapping):
            loss = output.get("loss")
        elif isinstance(output, tuple) and output:
            loss = getattr(output, "loss", output[0])
        else:
            loss = getattr(output, "loss", None)
        _check_loss(loss)
        return loss, metrics

    def _tensor(self, name: str) -> Tensor:
        return operator.attrgetter(name)(self)  # type: ignore[no-any-return]

    def _tensors_of_eager_mode(self) -> contextlib.AbstractContextManager[None]:
        """Context in which DTensors are DTensors and tied tensors are one.

        torch.export takes local tensors, and makes one tensor per name.
        """
        tensors = {
            name: sharding.wrap(self._tensor(name))
            for name, sharding in self.shardings.items()
            if name not in self.tied
        }
        for name, first in self.tied.items():
            tensors[name] = tensors[first] if first in tensors else self._tensor(first)
        return reparametrize_module(self, tensors)


class GradientPrediction:
    """Empty gradients for the first run of a step, which saves its backward.

    torch.export runs a module twice: once to see which outputs there are, and once to trace it. It
    restores the module's attributes in between, so what the first run finds is kept here.

    Attributes:
        exists: Whether the first run returned a gradient for each parameter; None before it.
        wrong: True if the trace returned other gradients than the first run.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.exists: list[bool] | None = None
        self.wrong = False

    def empty_gradients(self, loss: Tensor, params: list[Tensor]) -> list[Tensor | None]:
        """Returns an empty gradient for each parameter that the loss depends on, else None."""
        edges = {edge for grad_fn in grad_fns_below(loss) for edge in grad_fn.next_functions}
        edge_of = torch.autograd.graph.get_gradient_edge
        self.exists = [tuple(edge_of(param)[:2]) in edges for param in params]
        pairs = zip(params, self.exists, strict=True)
        return [torch.empty_like(param) if exists else None for param, exists in pairs]

    def compare(self, grads: Sequence[Tensor | None]) -> None:
        """Compares the gradients of the trace with those of the first run."""
        self.wrong = self.enabled and self.exists != [grad is not None for grad in grads]


def public_name(name: str) -> str:
    """Returns the user's name of a tensor of a training step: without the prefix `model.`."""
    return name.removeprefix(f"{MODEL}.")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise CaptureError(LOSS_IS_NO_TENSOR.format(kind=type(loss).__name__))
    if loss.numel() != 1:
        raise CaptureError(LOSS_HAS_A_SHAPE.format(shape=tuple(loss.shape)))
    if not loss.requires_grad:
        raise CaptureError(NOTHING_TO_TRAIN)


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Maps every further name of a tied parameter or buffer to its first name."""
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first = first_names.setdefault(id(tensor), name)
            if first != name:
                tied[name] = first
    return tied
