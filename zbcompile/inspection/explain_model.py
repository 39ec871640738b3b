"""`zbcompile.explain`: examine a model, report everything that is unsupported, and raise
nothing."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zbcompile.batches.batch import whole_batch
from zbcompile.compiler.compile_example import recorded_warnings
from zbcompile.compiler.torch_logs import silenced
from zbcompile.model.materialize import shortened
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.capture.model_checks import model_problems
from zbcompile.passes.capture.state_snapshot import StateSnapshot
from zbcompile.passes.capture.structures import flatten_output
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.errors import CompileError
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_names import type_text
from zbcompile.tables import Figure, Table, facts, to_text


@dataclass(frozen=True)
class Explanation:
    """A report of how `zbcompile.pipeline` compiles a model. With no `problems` it compiles.

    `problems` are sentences that name what is unsupported, where, and the remedy; `notes` what a
    user should know, `cuts` the number of places where the model can be cut.
    """

    model: str
    inputs: tuple[str, ...]
    loss: str
    parameters: tuple[str, ...]
    cuts: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def supported(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return to_text(self.tables()).rstrip("\n")

    def tables(self) -> list[Table]:
        """The tables of the printed form; `zbcompile.tables` also writes them as JSON."""
        verdict = (
            "can be compiled"
            if self.supported
            else f"cannot be compiled: {counted(self.problems, 'problem')}"
        )
        subject = [
            Figure(name, getattr(self, name)) for name in ("inputs", "loss", "parameters", "cuts")
        ]
        lists = ("Problems", self.problems), ("Notes", self.notes)
        return [
            facts("model", subject, f"{self.model} {verdict}."),
            *(
                Table(name.lower(), f"{name}:" * bool(texts), notes=[f"- {t}" for t in texts])
                for name, texts in lists
            ),
        ]


def counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def explain(
    model: nn.Module,
    *args: Any,
    loss: LossFunction | None = None,
    target: Any = None,
    **kwargs: Any,
) -> Explanation:
    """Describe what `model` would be compiled to for ONE microbatch `(*args, **kwargs)`; print and
    return it.

    `loss` and `target` are those of `zbcompile.pipeline` and `step`. If neither `loss` nor the
    model gives a loss, the sum of the outputs serves as one. Never raises because of the model;
    runs no step and changes nothing.

    A capture ends at the first operation that it refuses. Of several in forward the first is
    reported; the next one when that is mended.

    >>> zbcompile.explain(model, tokens, loss=next_byte_loss, target=tokens)  # doctest: +SKIP
    """
    batch, problems, notes = (args, kwargs, target), list[str](), list[str]()
    with silenced(), _unchanged(model, loss), recorded_warnings() as warned:
        for module in (model, loss):
            problems += model_problems(module) if isinstance(module, nn.Module) else ()
        step = _export(model, batch, loss, problems)
        source = "from loss(output, target)" if loss is not None else "returned by forward"
        if step is None:
            source = "a stand-in: the sum of the outputs"
            step = _export(model, batch, lambda output, target: sum_of_floats(output), problems)
        compiled = step and _compile(step, problems)
    if step is not None:
        notes += _notes(step, model)
    explanation = Explanation(
        model=type(model).__name__,
        inputs=tuple(_inputs(*batch)),
        loss=(
            f"a {_dtype(step)} scalar, {source}"
            if step
            else "unknown: the model could not be captured"
        ),
        parameters=tuple(_parameters(model)),
        cuts=len(compiled.line.cuts) if compiled else 0,
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(dict.fromkeys([*warned, *notes])),
    )
    print(explanation)
    return explanation


def _export(
    model: nn.Module, batch: tuple[Any, ...], loss: LossFunction | None, problems: list[str]
) -> StepGraph | None:
    """Returns the training step, or None with the reason added to `problems`."""
    try:
        args, kwargs, target = batch
        return export_training_step(model, args, kwargs, target, loss)
    except Exception as error:
        kind = "" if isinstance(error, CompileError) else f"{type(error).__name__}: "
        problems.append(kind + next(iter(str(error).splitlines()), ""))
        return None


def _compile(step: StepGraph, problems: list[str]) -> CompiledStep | None:
    """Returns the step compiled for one stage."""
    try:
        return compile_graph(step.copy(), ranks_of=(0,))
    except CompileError as error:
        problems.append(str(error))
        return None


def _notes(step: StepGraph, model: nn.Module) -> Iterator[str]:
    yield from (
        f"forward returns {name} as well, which training drops" for name in step.unused_outputs
    )
    yield from (
        f"exact=True is not possible: {call} differs from eager in the last bits"
        for call in step.inexact_calls
    )
    if step.buffer_updates:
        yield (
            f"forward changes {shortened(sorted(step.buffer_updates))}: m microbatches change a"
            " buffer m times; the model is never cut between reading and changing one; dualpipe,"
            " which keeps two copies of the model, refuses it"
        )
    names = [
        name
        for name, _ in model.named_parameters()
        if step.tied_names.get(name, name) not in step.parameters
    ]
    unused = [name for name in names if name not in step.tied_names]
    unused += [name for name, gradient in step.gradients.items() if gradient is None]
    if unused:
        yield (
            f"forward does not use {shortened(sorted(set(unused)))}: no gradient, as in eager mode"
        )


def _dtype(step: StepGraph) -> str:
    assert step.loss is not None
    return str(step.loss.meta["val"].dtype).removeprefix("torch.")


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Iterator[str]:
    for path, tensor in whole_batch(args, kwargs, target).whole.tensors.items():
        yield f"{path} {type_text(tensor)}"


def _parameters(model: nn.Module) -> Iterator[str]:
    every = dict(model.named_parameters())
    named = {name: p for name, p in every.items() if not is_lazy(p)}
    yield f"{sum(p.numel() for p in named.values()):,} in {counted(tuple(named), 'tensor')}"
    frozen = [name for name, p in named.items() if not p.requires_grad]
    if frozen:
        yield f"{len(frozen)} frozen"
    if len(named) < len(every):
        yield f"{len(every) - len(named)} lazy ones without a shape (call the model once first)"
    tied = len(list(model.named_parameters(remove_duplicate=False))) - len(every)
    if tied:
        yield f"{tied} tied to another"
    if any(p.is_meta for p in named.values()):
        yield "on the meta device"


def sum_of_floats(output: Any) -> torch.Tensor:
    """The sum of all floating-point tensors of an output."""
    floats = [
        tensor.float().sum() for tensor in flatten_output(output)[0] if tensor.is_floating_point()
    ]
    return torch.stack(floats).sum()


@contextlib.contextmanager
def _unchanged(model: nn.Module, loss: Any) -> Iterator[None]:
    """On exit, restore the attributes and hooks of all modules, every parameter's `requires_grad`,
    and the generator.

    A forward counts calls, fills lists and installs hooks (transformers does when it first runs).
    """
    snapshot = StateSnapshot(model, loss)
    every = (parameter for parameter in model.parameters() if not is_lazy(parameter))
    trains = [(parameter, parameter.requires_grad) for parameter in every]
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        snapshot.restore()
        for parameter, before in trains:
            parameter.requires_grad_(before)
