"""Capture: an nn.Module and one microbatch become a functional ATen graph whose inputs and outputs have roles.

`torch.export` (non-strict) followed by `run_decompositions({})`: the empty table functionalises, inlines autocast and
keeps composite operations (linear, attention, cross entropy) whole; it runs for one of equal operations.
"""

import contextlib
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Graph, GraphModule

from zbcompile.passes.capture.autocast import number_autocast_regions
from zbcompile.passes.capture.decompose import decomposed
from zbcompile.passes.capture.distributed_regions import regions_of
from zbcompile.passes.capture.eagers_answers import untraced
from zbcompile.passes.capture.guards import Guards, separate_guards
from zbcompile.passes.capture.joined_loss import without_joined_loss
from zbcompile.passes.capture.mutations import detach_no_grad_regions, separate_written
from zbcompile.passes.capture.opaque_calls import OpaqueCall
from zbcompile.passes.capture.questions import ForeignAnswers, Questions
from zbcompile.passes.capture.side_effects import EffectsSeen, HooksInstalled
from zbcompile.passes.capture.torch_private import (
    eagers_kernels,
    own_functions,
    quick_decompositions,
    release_shapes,
    unchecked_distributions,
    whole_regions,
)
from zbcompile.passes.capture.training_step import Inference, Kept, LossFunction, Read, TrainingStep, failing_loss
from zbcompile.passes.capture.unsupported import problems_of, raise_first, training_problems
from zbcompile.passes.capture_refusals import Refusal, explanation
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.graph.roles import Kind, Slot
from zbcompile.passes.graph.source_location import failing_line, is_own
from zbcompile.passes.graph.strides import copy_with_strides
from zbcompile.passes.meta_device import as_if_on
from zbcompile.passes.module_state import ModuleState
from zbcompile.passes.torch_private import numbered_checkpoints, pytree, set_stack_trace

Example = tuple[tuple[Any, ...], dict[str, Any], Any]  # (args, kwargs, target) of one microbatch
Traced = TrainingStep | Inference
_WRITTEN = {
    OutputKind.USER_INPUT_MUTATION: Refusal.INPUT_WRITTEN,
    OutputKind.PARAMETER_MUTATION: Refusal.PARAMETER_WRITTEN,
}


@dataclass(frozen=True)
class Captured:
    """A functional graph of the whole model; `inputs` and `outputs` give its placeholders and results their roles.

    `names` maps every parameter and buffer FQN to the first FQN of the same tensor (tied parameters share it).
    A training graph has the one output `loss`; of an inference graph `structure` rebuilds the model's output from its
    leaves, some of which may be `constant_leaves` (None, numbers). `dimensions` has the dimension of the
    mesh of each of its process groups, by this process's name of the group; `groups` these names by what the graph
    calls the groups once it is canonical (`zbcompile.passes.graph.process_groups`).
    `functions` are the calls that the graph has as operators, which run only while these live. The graph is right
    only for microbatches that answer `guards` alike, if forward asked about the values of its inputs, and as long as
    the module state is what it was, but for `changed_state`: what forward itself changes.
    """

    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    names: Mapping[str, str]
    trainable: frozenset[str]
    constants: Mapping[str, torch.Tensor]
    structure: Any
    constant_leaves: Mapping[str, Any]
    dimensions: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    functions: tuple[OpaqueCall, ...] = ()
    guards: Guards | None = None
    changed_state: frozenset[str] = frozenset()


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any = None,
    loss: LossFunction | None = None,
    given: ForeignAnswers | None = None,
    keep: Kept = "",
) -> Captured:
    """Capture the training step of `model` for ONE microbatch, in the mode (train or eval) its modules are in; with
    `keep` also what is kept besides the loss. Where forward asks about the values of its inputs, the answers are the
    microbatch's own, or those `given`.

    Raises CaptureError for what cannot be captured or would lose gradients.
    """
    raise_first(training_problems(model, loss))
    watch = EffectsSeen(questions=Questions(given=given))
    with _judged(watch):
        captured = trace_training(model, (args, kwargs, target), loss, watch, keep)
    for text in watch.warnings:
        warnings.warn(f"zbcompile: {text}", stacklevel=2)
    return captured


def trace_training(
    model: nn.Module, batch: Example, loss: LossFunction | None, watch: EffectsSeen, keep: Kept = ""
) -> Captured:
    """As `capture`, but the caller judges what `watch` has seen. Raises CaptureError if no graph could be made."""
    captured = _export(TrainingStep(model, loss, watch, keep), watch, batch)
    as_loss = {Slot("output", "0"): Slot("loss")}
    structure = captured.structure.child(1) if keep else None
    return replace(captured, outputs=tuple(as_loss.get(s, s) for s in captured.outputs), structure=structure)


def capture_inference(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any = None,
    read: Read | None = None,
    given: ForeignAnswers | None = None,
) -> Captured:
    """Capture the model's forward alone, in eval mode: its output, or `read(output, target)`. Every module's mode is
    restored. `given` as for `capture`."""
    raise_first(problems_of(model))
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # of nn.TransformerEncoderLayer: one operation, which no cut divides
    watch = EffectsSeen(questions=Questions(given=given))
    model.eval()
    try:
        with torch.no_grad(), _judged(watch):
            return _export(Inference(model, read, watch), watch, (args, kwargs, target))
    finally:
        for module, mode in modes.items():
            module.training = mode
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _judged(watch: EffectsSeen) -> Iterator[None]:
    """Raise what was noted during a trace, also if it failed: that explains the failure better than torch's error."""
    try:
        yield
    except CaptureError:
        raise_first(watch.problems)
        raise
    raise_first(watch.problems)


def _export(wrapper: Traced, watch: EffectsSeen, batch: Example) -> Captured:
    # Copies: torch.export silently merges inputs that are the same object.
    example = pytree.tree_map_only(torch.Tensor, copy_with_strides, batch)
    watch.questions.example = pytree.tree_leaves(example)
    with as_if_on(wrapper.model, _device_of(example)) as adapted:
        traced = pytree.tree_map_only(torch.Tensor, adapted, example)
        program = _exported(wrapper, watch, traced)
        captured = _with_roles(program, wrapper, example, watch)
    watch.refuse_unreported()
    _check_answers(captured.guards, watch.questions, example)
    return replace(captured, functions=tuple(watch.calls.values()))


def _check_answers(guards: Guards | None, questions: Questions, example: Any) -> None:
    """The answers were computed operation by operation, as forward asked; the graph that asks later must agree."""
    if guards is None:
        return
    if questions.given is None:
        paths, leaves, _ = flatten_inputs(example)
        wrong = guards.different(dict(zip(paths, leaves, strict=True)))
    else:
        wrong = guards.lines[0] if questions.given != guards.given else ""
    if wrong:
        raise Refusal.UNREPEATABLE_QUESTION.error(line=wrong)


def _exported(wrapper: Traced, watch: EffectsSeen, example: Any) -> ExportedProgram:
    aside = _without_wider_gradients(wrapper.model)
    with eagers_kernels(), kernels_layouts(), aside, _diagnosed(wrapper.model, watch):
        program = _exported_on_eagers_path(wrapper, watch, example)
        number_autocast_regions(program.graph_module, _device_of(example).type)
        detach_no_grad_regions(program.graph_module)
        if isinstance(wrapper, TrainingStep):
            separate_written(program)
        _keep_source_lines(program.graph_module)
        with _without_torchs_warnings(), quick_decompositions():
            functional = decomposed(program)
        release_shapes(program.graph)
        return functional


@contextlib.contextmanager
def _diagnosed(model: nn.Module, watch: EffectsSeen) -> Iterator[None]:
    """Turn whatever torch.export raises into an error in terms of the model."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise not_exported(model, error, watch.shape_from_data) from error


def not_exported(model: nn.Module, error: BaseException, shape_from_data: str = "") -> CaptureError:
    """The error for an export that failed: what failed, where in the user's code, and the remedy if one is known.
    `shape_from_data` is the line that made the first tensor whose shape depends on the data, if there is one: the
    failure often comes much later."""
    place = shape_from_data or failing_line(error)
    names = {"model": f"{failing_loss(error)}{type(model).__name__}", "place": f"{place} " if place else ""}
    return Refusal.NOT_EXPORTED.error(**names, why=explanation(error))


def _exported_on_eagers_path(wrapper: Traced, watch: EffectsSeen, example: Any) -> ExportedProgram:
    """Export as in eager mode. Numbers that forward reads from its inputs are left open, since one that is only logged
    decides nothing, and what only reports something runs; if the model cannot be captured so, it is traced once more,
    gets the numbers, and its reports are left out."""
    given = watch.questions.given
    watch.questions.gives_numbers = given is not None and given.with_numbers
    while True:
        watch.begin()
        try:
            program = _traced(wrapper, watch, example)
            if not watch.unanswered:
                return program
            if not watch.questions.left_open:
                raise CaptureError(watch.unanswered)
        except HooksInstalled:
            watch.settled = True
            continue
        except Exception as error:
            innermost = traceback.extract_tb(error.__traceback__)[-1].filename
            is_ours = is_own(innermost) and not failing_line(error)  # a fault that a second trace would hide
            if isinstance(error, CaptureError) or is_ours or not watch.questions.left_open:
                raise
        watch.questions.gives_numbers = True


def _traced(wrapper: Traced, watch: EffectsSeen, example: Any) -> ExportedProgram:
    with without_joined_loss(wrapper.model):
        regions = regions_of(wrapper.model, *example[:2])  # told the truth: without values it cannot decide as eager
    with contextlib.ExitStack() as around:
        around.enter_context(untraced(watch.leaves_out))
        around.enter_context(watch.functions(wrapper, regions))
        for each in (numbered_checkpoints, whole_regions, own_functions, unchecked_distributions):
            around.enter_context(each())
        around.enter_context(_without_torchs_warnings())
        around.enter_context(_own_containers(wrapper.model))
        return torch.export.export(wrapper, example, strict=False)


@contextlib.contextmanager
def _without_wider_gradients(model: nn.Module) -> Iterator[None]:
    """Set aside gradients whose dtype is not their parameter's (float32 sums of a bfloat16 model, before the
    update): torch.export makes a fake parameter of the same dtype as its gradient only."""
    wider = [(p, p.grad) for p in model.parameters() if p.grad is not None and p.grad.dtype != p.dtype]
    try:
        for parameter, _ in wider:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in wider:
            parameter.grad = gradient


@contextlib.contextmanager
def _own_containers(model: nn.Module) -> Iterator[None]:
    """Let modules keep their own lists and mappings: torch.export leaves copies of them, which are not shared with
    other owners."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for own, stored in before:
            for name, value in stored.items():
                if isinstance(value, list | tuple | dict) and own.get(name, value) is not value:
                    own[name] = value


def _device_of(example: Any) -> torch.device:
    """The device of a batch, on which a model now on the meta device will run."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def _without_torchs_warnings() -> Iterator[None]:
    """Suppress torch's warnings about its own doings, and about attributes, which `EffectsSeen` judges."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*assigned during export.*")
        warnings.filterwarnings("ignore", message=".*custom op marked with CompositeImplicitAutograd.*")
        yield


def _keep_source_lines(module: GraphModule) -> None:
    """Make regions (no_grad, autocast) run node by node, not as generated code, so that their source lines survive."""
    for child in module.modules():
        if isinstance(child, GraphModule) and child is not module:
            child.forward = torch.fx.Interpreter(child).run  # type: ignore[method-assign]


def _with_roles(program: ExportedProgram, wrapper: Traced, example: Any, watch: EffectsSeen) -> Captured:
    model = wrapper.model
    names, questions = first_names(model), watch.questions
    inputs, constants = _input_slots(program, names, example), _constants(program, names)
    memories = ModuleState(model, getattr(wrapper, "loss", None)).memories
    guards = separate_guards(program.graph_module, inputs, questions, constants, memories)
    outputs, constant_leaves = _output_slots(program, names)
    return Captured(
        module=program.graph_module,
        inputs=inputs,
        outputs=(*outputs[: len(outputs) - len(questions.results)], *_check_slots(program.graph, questions)),
        names=names,
        trainable=frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        constants=constants,
        structure=program.call_spec.out_spec.child(0),
        constant_leaves=constant_leaves,
        guards=guards,
        changed_state=watch.changed,
    )


def _constants(program: ExportedProgram, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Lifted tensors and the buffers of a loss module that belongs to no module of the model."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.target and (spec.kind is InputKind.CONSTANT_TENSOR or _of_loss(spec, names)):
            value = program.constants.get(spec.target, program.state_dict.get(spec.target))
            if not isinstance(value, torch.Tensor):
                raise Refusal.UNKNOWN_CONSTANT.error(name=spec.target)
            found[spec.target] = value.detach()
    return found


def _of_loss(spec: Any, names: Mapping[str, str]) -> bool:
    return spec.kind is InputKind.BUFFER and spec.target.removeprefix("model.") not in names


def first_names(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer FQN -> the first FQN of the same tensor, which is eager's name for it."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def flatten_inputs(example: Any) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    """The leaves of `(args, kwargs, target)`: their paths (such as args[0]), the leaves themselves, their tree
    structure."""
    pairs, structure = pytree.tree_flatten_with_path(example)
    top = ("args", "kwargs", "target")
    paths = tuple(top[path[0].idx] + pytree.keystr(path[1:]) for path, _ in pairs)  # type: ignore[attr-defined]
    return paths, tuple(leaf for _, leaf in pairs), structure


def _input_slots(program: ExportedProgram, names: Mapping[str, str], example: Any) -> tuple[Slot, ...]:
    paths = iter(flatten_inputs(example)[0])
    specs = program.graph_signature.input_specs
    return tuple(_input_slot(spec, names, paths, program.constants.get(spec.target)) for spec in specs)


def _input_slot(spec: Any, names: Mapping[str, str], paths: Iterator[str], held: Any) -> Slot:
    if spec.kind is InputKind.USER_INPUT:
        return Slot("input", next(paths))
    if spec.kind is InputKind.CONSTANT_TENSOR or _of_loss(spec, names):
        return Slot("constant", spec.target)
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        kind: Kind = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
        return Slot(kind, names[spec.target.removeprefix("model.")])
    if isinstance(held, torch.Generator):
        raise Refusal.GENERATOR.error()
    raise Refusal.UNKNOWN_INPUT.error(kind=spec.kind.name, name=spec.target)


def _output_slots(program: ExportedProgram, names: Mapping[str, str]) -> tuple[tuple[Slot, ...], dict[str, Any]]:
    slots: list[Slot] = []
    constant_leaves: dict[str, Any] = {}
    for spec in program.graph_signature.output_specs:
        leaf = str(sum(slot.kind == "output" for slot in slots))
        if spec.kind is OutputKind.BUFFER_MUTATION:
            name = (spec.target or "").removeprefix("model.")
            if name not in names:
                raise Refusal.LOSS_BUFFER.error(name=name.removeprefix("loss."))
            slots.append(Slot("mutation", names[name]))
        elif spec.kind is OutputKind.USER_OUTPUT:
            slots.append(Slot("output", leaf))
            if isinstance(spec.arg, ConstantArgument):
                constant_leaves[leaf] = spec.arg.value
        else:
            refusal = _WRITTEN.get(spec.kind, Refusal.UNKNOWN_OUTPUT)
            raise refusal.error(name=(spec.target or "").removeprefix("model."), kind=spec.kind.name)
    return tuple(slots), constant_leaves


def _check_slots(graph: Graph, questions: Questions) -> tuple[Slot, ...]:
    """The roles of the last results, which say whether assertions hold. They get the lines of these: torch.export notes
    only those of the forwards of modules."""
    checks = output_values(graph)[-len(questions.checks) :] if questions.checks else ()
    for node, each in zip(checks, questions.checks, strict=True):
        set_stack_trace(node, each.lines)
    return tuple(Slot(each.kind, str(number)) for number, each in enumerate(questions.checks))
