"""`zbcompile.explain`: examine a model, report everything that is unsupported, and raise nothing."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from zbcompile.batches.batch import whole_batch
from zbcompile.compiler.compile_example import names_of_output
from zbcompile.compiler.torch_logs import silenced
from zbcompile.model.materialize import shortened
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.differentiability import (
    backward_failure,
    described,
    gradient_stops,
    loss_problems,
    mixed_dtypes,
    operations_without_backward,
)
from zbcompile.passes.capture.export import Captured, trace_training
from zbcompile.passes.capture.side_effects import EffectsSeen
from zbcompile.passes.capture.training_step import (
    LossFunction,
    check_loss,
    join_loss,
    loss_in,
    register_dataclasses,
)
from zbcompile.passes.capture.unsupported import training_problems
from zbcompile.passes.errors import CaptureError, CompileError
from zbcompile.passes.partition.liveness import Line, lay_out_line
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.passes.partition.stage_graphs import cut
from zbcompile.passes.pass_list.passes_in_order import canonicalise
from zbcompile.passes.split.joint_graph import trace_joint
from zbcompile.passes.torch_names import type_text
from zbcompile.tables import Figure, Table, facts, to_text
from zbcompile.torch_private import pytree

SHOWN = 15  # places that the printed form lists


@dataclass(frozen=True)
class CutPlace:
    """A position where the model can be cut.

    `after` is the operation before it with its module and source line, `bytes` what crosses per microbatch in each
    direction, `share` the part of the step's nominal time that lies before it.
    """

    operation: str
    after: str
    bytes: int
    share: float


@dataclass(frozen=True)
class Explanation:
    """What `zbcompile.pipeline` would do with a model. Empty `problems`: it compiles.

    `problems` are sentences that name what is unsupported, where, and the remedy; `notes` what a user should know.
    `places` is empty when the model could not be captured at all.
    """

    model: str
    inputs: tuple[str, ...]
    loss: str
    parameters: tuple[str, ...]
    places: tuple[CutPlace, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def supported(self) -> bool:
        return not self.problems

    def nearest_places(self, stages: int) -> tuple[CutPlace, ...]:
        """For each of the `stages - 1` even cuts the place whose share is nearest to it."""
        even = (k / stages for k in range(1, stages))
        return tuple(min(self.places, key=lambda place: abs(place.share - share)) for share in even)

    def __str__(self) -> str:
        return to_text(self.tables()).rstrip("\n")

    def tables(self) -> list[Table]:
        """The tables of the printed form; `zbcompile.tables` also writes them as JSON or HTML."""
        verdict = "can be compiled" if self.supported else f"cannot be compiled: {counted(self.problems, 'problem')}"
        subject = [Figure(name, getattr(self, name)) for name in ("inputs", "loss", "parameters")]
        shown = self.places if len(self.places) <= SHOWN else tuple(dict.fromkeys(self.nearest_places(SHOWN + 1)))
        hidden = len(self.places) - len(shown)
        title = f"It can be cut in {counted(self.places, 'place')}" + (f" ({hidden} not shown)" if hidden else "")
        rows = [
            [
                Figure("work before", place.share, "share"),
                Figure("crosses", place.bytes, "B", "microbatch"),
                Figure("after", place.after),
            ]
            for place in shown
        ]
        lists = ("Problems", self.problems), ("Notes", self.notes)
        return [
            facts("model", subject, f"{self.model} {verdict}."),
            Table("places", f"{title}:" if rows else "", rows),
            *(Table(name.lower(), f"{name}:" * bool(texts), notes=[f"- {t}" for t in texts]) for name, texts in lists),
        ]


def counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def explain(
    model: nn.Module, *args: Any, loss: LossFunction | None = None, target: Any = None, **kwargs: Any
) -> Explanation:
    """Describe what `model` would be compiled to for ONE microbatch `(*args, **kwargs)`; print and return it.

    `loss` and `target` are those of `zbcompile.pipeline` and `step`. If neither `loss` nor the model gives a loss, the
    sum of the outputs serves as one. Never raises because of the model; runs no step and changes nothing.

    >>> zbcompile.explain(model, tokens, loss=next_byte_loss, target=tokens)             # doctest: +SKIP
    """
    explanation = _Examination(model, args, kwargs, target, loss).explanation()
    print(explanation)
    return explanation


class _Examination:
    """Examines a model step by step. Every step adds to `problems` and `notes`, and passes its findings to the next."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss: LossFunction | None
    ) -> None:
        self.model, self.batch, self.loss = model, (args, kwargs, target), loss
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.places: tuple[CutPlace, ...] = ()
        self.found_loss = "unknown: the model could not be captured"

    def _join_loss(self) -> None:
        try:
            join_loss(self.model, self.loss)
        except CaptureError as error:
            self.problems.append(str(error))

    def explanation(self) -> Explanation:
        with silenced(), modules_restored(self.model):
            self._join_loss()
            self.problems += training_problems(self.model, self.loss)
            captured = self._capture()
            if captured is not None:
                self._examine(captured)
        return Explanation(
            model=type(self.model).__name__,
            inputs=tuple(_inputs(*self.batch)),
            loss=self.found_loss,
            parameters=tuple(_parameters(self.model)),
            places=self.places,
            problems=tuple(dict.fromkeys(self.problems)),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _capture(self) -> Captured | None:
        watch, captured = EffectsSeen(), None
        try:
            captured = trace_training(self.model, self.batch, self._loss_or_stand_in, watch)
            failure = []
        except CaptureError as error:
            failure = [str(error)]
        self.problems += [*watch.problems, *failure]  # problems seen before forward failed come first
        self.notes += watch.warnings
        return captured

    def _loss_or_stand_in(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of training, or if there is none, the sum of the outputs, through which each gets a gradient."""
        names = (name for name in names_of_output(output) if name != "loss")
        self.notes += [f"forward returns {name} as well, which training drops" for name in names]
        try:
            loss = check_loss(self.loss(output, target) if self.loss else loss_in(output))
        except CaptureError as error:
            self.problems.append(str(error))
            self.found_loss = "none; the rest of this report uses the sum of the outputs"
            return sum_of_floats(output)
        self.found_loss = f"a {str(loss.dtype).removeprefix('torch.')} scalar, " + (
            "from loss(output, target)" if self.loss else "returned by forward"
        )
        return loss

    def _examine(self, captured: Captured) -> None:
        self.notes += _notes(self.model, captured)
        try:
            canonical = canonicalise(captured)
        except CompileError as error:
            self.problems.append(str(error))
            return
        self.places = tuple(_places(lay_out_line(canonical)))
        self.notes += _updates_that_forbid_cuts(canonical)
        self.problems += [*mixed_dtypes(canonical), *operations_without_backward(canonical)]
        self._differentiate(canonical)

    def _differentiate(self, canonical: Canonical) -> None:
        """Trace the backward of the model in one piece, as exact as possible."""
        without_gradient = loss_problems(canonical)
        self.problems += without_gradient
        if without_gradient:
            return
        (loss,) = (node for slot, node in canonical.outputs if slot.kind == "loss")
        failures = [_backward_failure(canonical, loss, exact) for exact in (True, False)]
        if failures[1]:
            self.problems.append(failures[1])
        elif failures[0]:
            self.notes.append(f"exact=True is not possible: {failures[0]}")
        self.notes += gradient_stops(canonical)


def _backward_failure(canonical: Canonical, loss: Node, exact: bool) -> str:
    line = lay_out_line(canonical)
    (stage,) = cut(canonical, line, dict.fromkeys(line.nodes, 0), 1)
    try:
        trace_joint(stage, canonical.captured.trainable, {"loss": loss.meta["val"]}, exact)
    except CompileError as error:
        return str(error)
    except Exception as error:
        return backward_failure(canonical, error)
    return ""


def _places(line: Line) -> Iterator[CutPlace]:
    before = list(accumulate(predicted_seconds(line)))
    for i, node in enumerate(line.nodes):
        if line.allowed[i]:
            yield CutPlace(
                node.name, described(node), line.boundary_bytes(i), before[i] / before[-1] if before[-1] else 0.0
            )


def _updates_that_forbid_cuts(canonical: Canonical) -> list[str]:
    changing = sorted(slot.name for slot, _ in canonical.outputs if slot.kind == "mutation")
    if not changing:
        return []
    return [
        f"forward changes {shortened(changing)}: m microbatches change a buffer m times; the model is never cut "
        "between reading and changing one; dualpipe, which keeps two copies of the model, refuses it"
    ]


def _notes(model: nn.Module, captured: Captured) -> Iterator[str]:
    for line in dict.fromkeys(captured.guards.lines if captured.guards else ()):
        yield f"forward asks about the values of its inputs ({line}): a batch with another answer compiles once more"
    used = {slot.name for slot in captured.inputs if slot.kind == "parameter"}
    unused = sorted(
        name for name in dict.fromkeys(captured.names[n] for n, _ in model.named_parameters()) if name not in used
    )
    if unused:
        yield f"forward does not use {shortened(unused)}: no gradient, as in eager mode"


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Iterator[str]:
    for path, tensor in whole_batch(args, kwargs, target).whole.tensors.items():
        yield f"{path} {type_text(tensor)}"


def _parameters(model: nn.Module) -> Iterator[str]:
    named = dict(model.named_parameters())
    yield f"{sum(p.numel() for p in named.values()):,} in {counted(tuple(named), 'tensor')}"
    frozen = [name for name, p in named.items() if not p.requires_grad]
    if frozen:
        yield f"{len(frozen)} frozen"
    tied = len(list(model.named_parameters(remove_duplicate=False))) - len(named)
    if tied:
        yield f"{tied} tied to another"
    if any(p.is_meta for p in named.values()):
        yield "on the meta device"


def sum_of_floats(output: Any) -> torch.Tensor:
    """The sum of all tensors of an output through which gradients flow."""
    register_dataclasses(output)
    leaves = output if isinstance(output, torch.Tensor) else pytree.tree_leaves(_as_tree(output))
    floats = [
        t.float().sum() for t in pytree.tree_leaves(leaves) if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    if not floats:
        raise CaptureError(
            f"forward returns {type(output).__name__} without a floating-point tensor; nothing can be trained."
        )
    return torch.stack(floats).sum()


def _as_tree(output: Any) -> Any:
    """The attributes of an object that torch's pytrees do not know."""
    known = isinstance(output, torch.Tensor | Mapping | list | tuple) or type(output) in pytree.SUPPORTED_NODES
    return output if known or not hasattr(output, "__dict__") else vars(output)


@contextlib.contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """On exit, restore every module's attributes and hooks and every parameter's `requires_grad`.

    A forward counts calls, fills lists and installs hooks (transformers does when it first runs). Tensors written in
    place keep what was written.
    """
    undo = [_undo(module) for module in model.modules()]
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for each in undo:
            each()
        for parameter, before in trains:
            parameter.requires_grad_(before)


def _undo(module: nn.Module) -> Callable[[], None]:
    """A function that restores the attributes of `module`, and the contents of dicts and lists among them."""
    attributes = dict(vars(module))
    tables = [(value, dict(value)) for value in attributes.values() if type(value) in (dict, OrderedDict)]
    lists = [(value, list(value)) for value in attributes.values() if type(value) is list]

    def undo() -> None:
        vars(module).clear()
        vars(module).update(attributes)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        for values, elements in lists:
            values[:] = elements

    return undo
