"""The training step as one module: forward, loss and the gradient of every trained parameter; for
an evaluation the forward alone."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.autocast_casts import AutocastRegions
from zbcompile.passes.capture.backward_marks import grad_fns_below, mark_backward_nodes
from zbcompile.passes.capture.batch_inputs import BatchStructure
from zbcompile.passes.capture.checkpoint_hints import checkpoint_hints
from zbcompile.passes.capture.dtensor_parameters import (
    local_gradient,
    named_tensors,
    shardings_of,
    tangent_like,
    to_dtensor,
    without_sharding,
)
from zbcompile.passes.capture.known_values import KnownValues
from zbcompile.passes.capture.losses import check_loss, loss_in, without_joined_loss
from zbcompile.passes.capture.parameter_hooks import grad_versions, traced_hooks
from zbcompile.passes.capture.python_effects import PythonEffects, TraceAgain
from zbcompile.passes.capture.refusals import InexactCalls, Questions, unseen_attribute
from zbcompile.passes.capture.structures import OutputStructure, flatten_output, vars_of
from zbcompile.passes.capture.unsupported import (
    NO_METRICS,
    REPLACES_A_BUFFER,
    RETURNS_NO_TENSOR,
    SPARSE_GRADIENT,
    WRITES_A_BUFFER_IN_BACKWARD,
    WRITES_A_PARAMETER,
    WRITES_GRAD,
)
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.source_location import LINE
from zbcompile.passes.torch_names import tensor_types, type_text
from zbcompile.passes.torch_private import (
    compiling,
    gradient_dtype,
    reparametrize_module,
    replaced,
    replaced_tolist,
    set_node_annotation,
    version_of,
)

LossFunction = Callable[[Any, Any], Any]
LOSS_MODULE = "loss_function"  # prefix of parameters that belong to a loss module


class TrainingStep(nn.Module):
    """A model with its loss and its backward.

    Args:
        model: The user's module.
        loss_fn: Maps `(output, target)` to the loss, or to `(loss, metrics)`. If None, the output
            is the loss, has an attribute or a key `loss`, or is a tuple that begins with it. In an
            evaluation it maps `(output, target)` to what is returned instead of the output.
        batch: The structure of the batch.
        trains: Whether there are a loss and a backward.
        path: The path of the model: "eager"; "traced", on which torch.jit.is_tracing() is True as
            well; or "export", with the flags of torch.compiler.
        static_inputs: Real tensors by the path of the batch input whose values the model may read.
        returns: What the step returns besides its loss: "outputs" (with the metrics of the loss,
            if there are any), "metrics" alone, or nothing if "".

    After a trace `python_effects` names the module state that forward changed, `inexact_calls` the
    calls whose bits differ from eager mode, `unused_outputs` what forward returns besides its loss,
    and `output_structure` rebuilds what the step returns from the traced outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        *,
        batch: BatchStructure,
        trains: bool,
        path: str,
        static_inputs: Mapping[str, Tensor],
        returns: str,
    ) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss_fn, nn.Module) and loss_fn in model.modules():
            vars(self)["loss_function"] = loss_fn  # its tensors have names in the model alone
        else:
            self.loss_function = loss_fn
        self.batch = batch
        self.trains = trains
        self.path = path
        self.static_inputs = static_inputs
        self.returns = returns
        self.tied = _tied_names(self)
        self.shardings = shardings_of(self)
        self.gradient_placements: dict[str, tuple[Any, ...]] = {}
        self.trained = tuple(
            name for name, param in self.named_parameters() if trains and param.requires_grad
        )
        self.python_effects = PythonEffects(model, loss_fn)
        self.output_structure: OutputStructure | None = None
        self.inexact_calls: list[str] = []
        self.unused_outputs: tuple[str, ...] = ()
        self.fits: list[Tensor] = []
        # torch.export restores lists and other containers, but no attributes of other objects.
        self.questions = Questions()
        self._progress = SimpleNamespace(call=f"torch.export of {type(model).__name__}", exist=None)
        self._progress.predicts = not self.shardings
        self._originals = {name: self._tensor(name) for name in self.trained}
        # those of other subclasses are their own, which their operations read
        tensors = [t for _, t in named_tensors(self) if type(t) in (Tensor, nn.Parameter)]
        known = {*dir(Tensor), "part_of", "_is_buffer", "_is_param"}
        self._unseen_attributes = {name for tensor in tensors for name in vars(tensor)} - known

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields every module under its first path: torch.export refuses a buffer with two names
        that the step writes."""
        return super().named_modules(memo, prefix)

    def forward(
        self, tensors: list[Tensor], tangent: Tensor | None = None
    ) -> tuple[Tensor | None, list[Tensor | None], list[Tensor], list[Tensor]]:
        """Returns the loss, one gradient per trained parameter (None if it has none), outputs, and
        whether tokens fit into exchanges between experts.

        `tangent` is the gradient of the loss; a pipeline of m microbatches passes 1/m. An
        evaluation has none, and returns outputs alone. `tensors` are those of the batch.
        """
        args, kwargs, target = self.batch.rebuild(tensors)
        loss, value, grads = None, None, list[Tensor | None]()
        with torch.set_grad_enabled(self.trains), self._tensors_of_eager_mode():
            buffers = {name: self._tensor(name) for name, _ in self.named_buffers()}
            parameters = {name: self._tensor(name) for name in self.trained}
            with self._model_context(tensors) as calls:
                returned = self._run_model(args, kwargs)
                if self.trains:
                    loss, metrics = self._loss_of(returned, target)
                    returned = self._returned(returned, metrics)
                elif self.loss_function is not None:
                    returned = self.loss_function(returned, target)
            self._refuse_replaced(parameters)
            outputs, self.output_structure = flatten_output(returned)
            outputs = [without_sharding(tensor).detach() for tensor in outputs]
            if loss is not None and tangent is not None:
                value = without_sharding(loss).detach()
                self._progress.call = f"the backward of {type(self.model).__name__}"
                with calls:
                    grads = self._gradients(loss, tangent)
                self._progress.call = f"torch.export of {type(self.model).__name__}"
            elif not outputs:
                raise CaptureError(RETURNS_NO_TENSOR.format(kind=type(returned).__name__))
            self._write_assigned_buffers(buffers)
        return value, grads, outputs, self.fits

    @property
    def running(self) -> str:
        """The call that the trace ran last, with the tensors that it received."""
        return str(self._progress.call)

    def _run_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = type(self.model).__name__
        self._progress.call = f"forward of {name}, called with {tensor_types(args, kwargs)},"
        with without_joined_loss(self.model):
            return self.model(*args, **kwargs)

    @contextlib.contextmanager
    def _model_context(self, tensors: Sequence[Tensor]) -> Iterator[InexactCalls]:
        """Context of the model and the loss: eager's path, known values and checkpoint hints.
        Yields the mode that the backward runs in as well."""
        known = KnownValues(self.questions)
        for path, tensor in zip(self.batch.paths, tensors, strict=True):
            known.declare(tensor, path, self.static_inputs.get(path))
        flags = (
            compiling(self.path == "export"),
            replaced(torch.jit, "is_tracing", lambda: self.path == "traced"),
        )
        regions = AutocastRegions()
        inexact = InexactCalls(known.routed, known.numbers_of, self.parameters(), regions)
        effects = self.python_effects.watched(known)
        tolist = replaced_tolist(known.value_for_python, known.routed.numbers)
        modes = (checkpoint_hints(), regions.numbered(), inexact, tolist, known)
        with contextlib.ExitStack() as stack:
            for name in self._unseen_attributes:
                setattr(Tensor, name, unseen_attribute(name))
                stack.callback(delattr, Tensor, name)
            for context in (effects, *flags, *modes):
                stack.enter_context(context)
            yield inexact
        set_node_annotation(LINE, "")  # the backward is of no line
        self.inexact_calls, self.fits = inexact.calls, inexact.fits

    def _refuse_replaced(self, parameters: Mapping[str, Tensor]) -> None:
        """Raises CaptureError if forward assigned a parameter or wrote its `.data`."""
        for name, parameter in parameters.items():
            if self._tensor(name) is not parameter or not parameter.requires_grad:
                raise CaptureError(WRITES_A_PARAMETER.format(line=public_name(name)))

    def _gradients(self, loss: Tensor, tangent: Tensor) -> list[Tensor | None]:
        params = {name: self._tensor(name) for name in self.trained}
        if self._progress.predicts and self._progress.exist is None:
            return self._predicted_gradients(loss, params)
        before = grad_versions(params)
        buffers = {name: (buffer, version_of(buffer)) for name, buffer in self.named_buffers()}
        mark_backward_nodes(loss)
        with (
            traced_hooks(self._originals, params),
            torch.autocast(loss.device.type, enabled=False),  # as recommended for eager mode
        ):
            grads = torch.autograd.grad(
                loss, list(params.values()), tangent_like(loss, tangent), allow_unused=True
            )
        for name, state in grad_versions(params).items():
            if state != before[name]:  # nothing of it would be in the graph
                raise CaptureError(WRITES_GRAD.format(name=public_name(name)))
        for name, (buffer, version) in buffers.items():
            if version_of(buffer) != version:
                name = public_name(name)
                raise CaptureError(WRITES_A_BUFFER_IN_BACKWARD.format(name=name))
        if self._progress.predicts and self._progress.exist != [grad is not None for grad in grads]:
            self._progress.predicts = False
            raise TraceAgain
        return [self._local_gradient(name, grad) for name, grad in zip(params, grads, strict=True)]

    def _predicted_gradients(
        self, loss: Tensor, params: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """Returns an empty gradient for each parameter that the loss depends on, else None.

        torch.export runs a module twice: once to see which outputs there are, and once to trace it.
        The first run saves its backward.
        """
        edges = {edge for grad_fn in grad_fns_below(loss) for edge in grad_fn.next_functions}
        edge_of = torch.autograd.graph.get_gradient_edge
        self._progress.exist = [tuple(edge_of(param)[:2]) in edges for param in params.values()]
        return [
            torch.empty_like(param, dtype=gradient_dtype(self._originals[name])) if exists else None
            for exists, (name, param) in zip(self._progress.exist, params.items(), strict=True)
        ]

    def _local_gradient(self, name: str, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(SPARSE_GRADIENT.format(name=public_name(name)))
        local, placements = local_gradient(gradient, self.shardings.get(name))
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
            before, now = type_text(original), type_text(assigned)
            if before != now:
                name = public_name(name)
                raise CaptureError(REPLACES_A_BUFFER.format(name=name, before=before, now=now))
            with torch.no_grad():
                original.copy_(assigned)
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, original)

    def _loss_of(self, output: Any, target: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns the loss, and the metrics if the loss function returns them with it."""
        metrics: tuple[Any, ...] = ()
        if self.loss_function is None:
            loss = loss_in(output)
            values = output if isinstance(output, Mapping) else vars_of(output)
            self.unused_outputs = tuple(
                str(n) for n, value in values.items() if value is not None and n != "loss"
            )
        else:
            name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
            types = tensor_types(output, target)
            self._progress.call = f"the loss {name}, called with {types},"
            loss = self.loss_function(output, target)
            if isinstance(loss, tuple) and len(loss) == 2:
                loss, metrics = loss[0], loss[1:]
        check_loss(loss)
        return loss, metrics

    def _returned(self, output: Any, metrics: tuple[Any, ...]) -> Any:
        if self.returns == "metrics":
            if not metrics:
                raise CaptureError(NO_METRICS)
            return metrics[0]
        if self.returns == "outputs":
            return (output, *metrics) if metrics else output
        return None

    def _tensor(self, name: str) -> Tensor:
        return operator.attrgetter(name)(self)  # type: ignore[no-any-return]

    def _tensors_of_eager_mode(self) -> contextlib.AbstractContextManager[None]:
        """Context in which DTensors are DTensors and tied tensors are one.

        torch.export takes local tensors, and makes one tensor per name.
        """
        tensors = {
            name: to_dtensor(self._tensor(name), sharding)
            for name, sharding in self.shardings.items()
            if name not in self.tied
        }
        for name in self.trained:
            dtype = gradient_dtype(self._originals[name])
            if name not in self.tied and dtype != self._tensor(name).dtype:
                tensors[name] = _leaf(tensors.get(name, self._tensor(name)), dtype)
        for name, first in self.tied.items():
            tensors[name] = tensors[first] if first in tensors else self._tensor(first)
        return reparametrize_module(self, tensors)


def _leaf(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a parameter whose gradients have another dtype: a trace loses `grad_dtype`, and sums
    would be rounded elsewhere than in eager mode."""
    leaf = parameter.detach().requires_grad_()
    leaf.grad_dtype = dtype
    return leaf


def public_name(name: str) -> str:
    """Returns the user's name of a tensor of a training step: without the prefix `model.`."""
    return name.removeprefix("model.")


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Maps every further name of a tied parameter or buffer to its first name."""
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in named_tensors(module):
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            tied[name] = first
    return tied
