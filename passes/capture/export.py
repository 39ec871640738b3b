"""Exports a microbatch's training step and describes the inputs and outputs of the graph."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from zbcompile.passes.capture.autocast_casts import AUTOCAST
from zbcompile.passes.capture.backward_marks import BACKWARD_OF, trace_backward_to_forward
from zbcompile.passes.capture.batch_inputs import BatchStructure
from zbcompile.passes.capture.checkpoint_hints import CHECKPOINT, REENTRANT, reentrant_calls
from zbcompile.passes.capture.dtensor_parameters import (
    exportable_tensors,
    warn_of_random_numbers_on_shards,
)
from zbcompile.passes.capture.model_checks import model_problems, refuse
from zbcompile.passes.capture.python_effects import TraceAgain
from zbcompile.passes.capture.refusals import refusal_of, refuse_open_values
from zbcompile.passes.capture.training_step import (
    LOSS_MODULE,
    LossFunction,
    TrainingStep,
    public_name,
)
from zbcompile.passes.capture.unsupported import (
    LOSS_WRITES_ITS_BUFFER,
    WRITES_A_PARAMETER,
    WRITES_AN_INPUT,
)
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import operator_name, tensors_of
from zbcompile.passes.graph.process_groups import groups_of_meshes, name_process_groups
from zbcompile.passes.graph.source_location import LINE, line_of
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_collectives import functional_collectives
from zbcompile.passes.torch_private import (
    ANNOTATIONS,
    ASSERTIONS,
    DATA_DEPENDENT_ERRORS,
    TO_COPY,
    annotations_of,
)
from zbcompile.passes.torch_private_export import export_below_autograd

_ANNOTATIONS = (LINE, CHECKPOINT, REENTRANT, BACKWARD_OF, AUTOCAST)


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        static_inputs: Paths of batch inputs whose values the model may read in Python.
        returns: What the step returns besides its loss: "", "outputs" or "metrics".
        device: Device on which parameters of the meta device are traced; that of the other
            tensors, or the CPU, if None.
        process_groups: The mesh dimension of process groups that the model communicates over, by
            the group's name. The groups of DTensor parameters need not be named.
    """

    static_inputs: Sequence[str] = ()
    returns: str = ""
    device: torch.device | None = None
    process_groups: Mapping[str, str] = field(default_factory=dict)


# The paths of a model, in the order of the attempts: a model that reads values of its inputs often
# does not if it is traced, and computes as eager mode does otherwise.
PATHS = {"eager": "eager mode", "traced": "traces", "export": "compilers"}


def export_training_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    options: ExportOptions | None = None,
) -> StepGraph:
    """Returns the training step of `model` for one microbatch as a graph.

    The first attempt lets the model believe that it runs eagerly. Models such as those of
    transformers otherwise build explicit attention masks and lose the flash kernel. If that fails
    because the model reads the value of an input, the second attempt uses the path that the model
    has for traces, the third the one for compilers, and both warn.

    >>> step = export_training_step(nn.Linear(4, 2), (torch.randn(3, 4),),
    ...                             loss_fn=lambda output, target: output.sum())
    >>> list(step.gradients)
    ['weight', 'bias']
    """
    batch = (args, dict(kwargs or {}), target)
    return _export_step(model, loss_fn, batch, options or ExportOptions(), trains=True)


def export_forward(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    function: LossFunction | None = None,
    options: ExportOptions | None = None,
) -> StepGraph:
    """Returns the forward of `model` in eval mode for one microbatch as a graph.

    `step.output_structure` rebuilds the output, or what `function` returned of
    `(output, target)`, such as the log-probabilities of labels.

    >>> step = export_forward(nn.Linear(4, 2), (torch.randn(3, 4),))
    >>> len(step.outputs), step.gradients
    (1, {})
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        batch = (args, dict(kwargs or {}), target)
        return _export_step(model, function, batch, options or ExportOptions(), trains=False)
    finally:
        for module in training:
            module.training = True


def _export_step(
    model: nn.Module,
    function: LossFunction | None,
    batch: tuple[Any, ...],
    options: ExportOptions,
    trains: bool,
) -> StepGraph:
    """Exports a step by up to three attempts, and returns its graph."""
    refuse(model_problems(model))
    if isinstance(function, nn.Module):
        refuse(model_problems(function))
    structure = BatchStructure.of(batch)
    tensors = tensors_of(batch)
    static_inputs = {
        path: tensor.detach().cpu().clone()  # before the trace, in which a clone is fake
        for path, tensor in zip(structure.paths, tensors, strict=True)
        if path in _static_paths(options.static_inputs)
    }
    device = options.device or _device_of(model, tensors)
    example = (tensors, torch.ones((), device=device)) if trains else (tensors,)
    failures, running = list[Exception](), ""
    for path in PATHS:
        step = TrainingStep(
            model,
            function,
            batch=structure,
            trains=trains,
            path=path,
            static_inputs=static_inputs,
            returns=options.returns,
        )
        try:
            program = _export(step, example, device)
            break
        except Exception as error:  # torch.cond, for one, needs the flags of an export
            if isinstance(error, CaptureError) and path != "traced":
                raise
            failures.append(error)
            running = running or step.running
    else:
        is_question = isinstance(failures[-1], DATA_DEPENDENT_ERRORS)
        cause = failures[-1] if is_question else failures[0]
        raise refusal_of(cause, running, step.questions) from failures[0]
    if failures:
        first_line = next(iter(str(failures[0]).splitlines()), "")
        warnings.warn(
            f"the model was captured on the path that it has for {PATHS[step.path]}, because it "
            "reads values of its inputs in Python: results may differ from eager mode in the last "
            f"bits. Without that path: {type(failures[0]).__name__}: {first_line}",
            stacklevel=3,
        )
    for sentence in step.python_effects.warnings:
        warnings.warn(sentence, stacklevel=3)
    described = describe(program, step)
    meshes = [sharding.mesh for sharding in step.shardings.values()]
    dimensions = {**groups_of_meshes(meshes), **options.process_groups}
    described.process_groups = name_process_groups(described.module, dimensions)
    warn_of_random_numbers_on_shards(described)
    return described


def _export(step: TrainingStep, example: tuple[Any, ...], device: torch.device) -> ExportedProgram:
    with exportable_tensors(step, step.tied), functional_collectives():
        while True:
            with contextlib.suppress(TraceAgain):
                return export_below_autograd(step, example, device)


def describe(program: ExportedProgram, step: TrainingStep) -> StepGraph:
    """Returns the step graph of an exported training step: every input and output by its role."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    _refuse_writes(program, step, nodes)

    def named(names: Mapping[str, str]) -> dict[str, Node]:
        return {public_name(name): nodes[node_name] for node_name, name in names.items()}

    buffers, updates = named(signature.inputs_to_buffers), named(signature.buffers_to_mutate)
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {name: nodes[node_name] for node_name, name in lifted.items()}
    constant_values = {name: program.constants[name] for name in constants}
    for name in [name for name in buffers if _name_in_loss(name) and name not in step.tied]:
        # A step reads its present value. It belongs to no stage.
        if name in updates:
            raise CaptureError(LOSS_WRITES_ITS_BUFFER.format(name=_name_in_loss(name)))
        constants[name], constant_values[name] = buffers.pop(name), step.get_buffer(name)
    inputs = [nodes[str(name)] for name in signature.user_inputs]
    values = signature.user_outputs
    results = [_copied_value(nodes[v]) if isinstance(v, str) else None for v in values]
    loss, trained, fits = results[0], len(step.trained) + 1, len(results) - len(step.fits)
    tangent = inputs.pop() if step.trains else None
    if tangent is not None and loss is not None:
        _cast_outside(tangent, loss.meta["val"].dtype)
    described = StepGraph(
        module=program.graph_module,
        parameters=named(signature.inputs_to_parameters),
        buffers=buffers,
        constants=constants,
        constant_values=constant_values,
        batch_inputs=dict(zip(step.batch.paths, inputs, strict=True)),
        tangent=tangent,
        loss=loss,
        gradients=dict(zip(map(public_name, step.trained), results[1:trained], strict=True)),
        buffer_updates=updates,
        outputs=[node for node in results[trained:fits] if node is not None],
        fits=[node for node in results[fits:] if node is not None],
        output_structure=step.output_structure,
        tied_names={public_name(a): public_name(b) for a, b in step.tied.items()},
        changed_state=step.python_effects.changed,
        inexact_calls=tuple(step.inexact_calls),
        unused_outputs=step.unused_outputs,
        shardings={public_name(name): value for name, value in step.shardings.items()},
        gradient_placements={public_name(n): x for n, x in step.gradient_placements.items()},
    )
    _clean(described)
    refuse_open_values(described.calls(), step.questions)
    described.inexact_calls += tuple(reentrant_calls(described))
    return described


def _cast_outside(tangent: Node, dtype: torch.dtype) -> None:
    """Makes the gradient of the loss an input in the dtype of the loss, as the engine passes it."""
    tangent.meta["val"] = tangent.meta["val"].to(dtype)
    for cast in [node for node in tangent.users if node.target is TO_COPY]:
        cast.replace_all_uses_with(tangent)


def _refuse_writes(program: ExportedProgram, step: TrainingStep, nodes: Mapping[str, Node]) -> None:
    """Raises CaptureError if the step writes a parameter or an input in place."""
    signature = program.graph_signature
    for output in signature.output_specs:
        line = line_of(nodes[output.arg.name]) if output.target else ""
        if output.kind.name == "PARAMETER_MUTATION":
            raise CaptureError(WRITES_A_PARAMETER.format(line=line or output.target))
        if output.kind.name == "USER_INPUT_MUTATION":
            path = step.batch.paths[list(signature.user_inputs).index(output.target)]
            raise CaptureError(WRITES_AN_INPUT.format(path=path, line=line))


def _name_in_loss(name: str) -> str:
    """Returns the name of a tensor in the loss module; "" for tensors of the model."""
    module, _, attribute = name.partition(".")
    return attribute if module == LOSS_MODULE else ""


def _clean(step: StepGraph) -> None:
    """Removes assertions on shapes and dead code, and makes the graph return results by role."""
    for node in step.calls():
        if node.target in ASSERTIONS:
            step.graph.erase_node(node)
        custom = annotations_of(node)
        node.meta[ANNOTATIONS] = {key: custom[key] for key in _ANNOTATIONS if key in custom}
    for name, update in step.buffer_updates.items():
        step.buffer_updates[name] = _copied_value(update)
    trace_backward_to_forward(step)
    step.refresh_output()
    for name, first in step.tied_names.items():
        tensors = {**step.parameters, **step.buffers}
        tied = tensors[name]
        tied.replace_all_uses_with(tensors[first])  # a module with two paths has the last tensor
        step.parameters.pop(name, None)
        step.buffers.pop(name, None)
        step.graph.erase_node(tied)
    step.remove_dead_nodes()


def _copied_value(node: Node) -> Node:
    """Returns the value that a node copies or detaches.

    No cut is possible between the reads of a buffer and the copy at the end of the step. If the
    model adds to its loss in place, the loss is detached behind the backward.
    """
    while operator_name(node) in ("copy", "detach", "alias"):
        source = node.args[operator_name(node) == "copy"]
        if not isinstance(source, Node) or source.op != "call_function":
            break
        before, after = source.meta["val"], node.meta["val"]
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            break
        node = source
    return node


def _static_paths(names: Sequence[str]) -> set[str]:
    """Returns the batch paths that names of static inputs may stand for."""
    return {path for name in names for path in (name, f"kwargs['{name}']", f"args[{name}]")}


def _device_of(model: nn.Module, batch: Sequence[Tensor]) -> torch.device:
    """Returns the device of the first tensor that is not on the meta device; else the CPU."""
    tensors = [*model.parameters(), *model.buffers(), *batch]
    devices = (tensor.device for tensor in tensors if not tensor.is_meta)
    return next(devices, torch.device("cpu"))
