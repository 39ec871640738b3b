"""Training a problem of the oracle, pipelined and in eager mode, so that the two can be compared
bit by bit."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import zbcompile
from tests.support.oracle import PROBLEMS, Batch, Gradients, Problem, eager_step, optimizer_of
from tests.support.random_models import RandomModel
from tests.support.shared_parameters import SHARED_PARAMETERS
from tests.support.zoo import ZOO
from zbcompile.compiler.compile_model import ExportedModel, compile_program, export_step
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.passes.compile_options import Recompute
from zbcompile.program.program import Program
from zbcompile.schedules import build

ROWS = 2  # samples in a microbatch


@dataclass(frozen=True)
class Case:
    """One training run. Where there is no process group, `ranks` of them run in this process."""

    problem: str
    schedule: str
    ranks: int
    microbatches: int
    exact: bool = True
    steps: int = 3
    recompute: Recompute = "hints"

    def __str__(self) -> str:
        return f"{self.problem} {self.schedule} ranks={self.ranks} m={self.microbatches}"


@dataclass(frozen=True)
class Trained:
    """The loss and the gradients of every step, and the state dict after the last optimizer
    step."""

    losses: list[Tensor]
    gradients: list[Gradients]
    state: dict[str, Tensor]


def rows(size: int) -> Batch:
    return Batch((torch.randn(size, RandomModel.width),), {}, torch.randn(size, RandomModel.width))


def problem_of(name: str) -> Problem:
    """Returns one of the oracle's problems, a model that shares parameters, a model of the zoo, or
    the random model of a seed, such as "random-7"."""
    if name.startswith("random-"):
        return Problem(partial(RandomModel, int(name.removeprefix("random-"))), F.mse_loss, rows)
    return {**ZOO, **SHARED_PARAMETERS, **PROBLEMS}[name]


def pipelined(case: Case) -> Trained:
    """Train this process's share."""
    return train(pipeline_of(case), case)


def train(pipe: zbcompile.Pipeline, case: Case) -> Trained:
    """Train the share of this process in `pipe`, a pipeline for `case`."""
    problem = problem_of(case.problem)
    losses, gradients, optimizer = [], [], None
    for batch in problem.batches(case.steps, case.microbatches * ROWS):
        target = {} if batch.target is None else {"target": batch.target}
        losses.append(pipe.step(*batch.args, **batch.kwargs, **target))
        optimizer = optimizer or optimizer_of(pipe.parameters())
        gradients.append(gradients_of(pipe))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients, dict(pipe.state_dict()))


def quickly(case: Case) -> Trained:
    """Like `pipelined`, but compiled once."""
    with compiled_once(case.problem, case.exact, case.recompute):
        return pipelined(case)


@contextmanager
def compiled_once(problem: str, exact: bool, recompute: Recompute = "hints") -> Iterator[None]:
    """Context for pipelines of a problem: it is exported once, and schedules with equal stages on
    equal ranks share one compilation."""

    def export_once(*inputs: Any, **more: Any) -> ExportedModel:
        if problem not in _EXPORTED:
            _EXPORTED[problem] = export_step(*inputs, **more)
        return _EXPORTED[problem]

    def compile_once(
        model: Any, microbatch: Any, exported: Any, schedule: Any, *rest: Any, **more: Any
    ) -> Program:
        key = (problem, exact, recompute, schedule.placement)
        if key not in _COMPILED:
            _COMPILED[key] = compile_program(model, microbatch, exported, schedule, *rest, **more)
        return in_order(_COMPILED[key], schedule)

    with mock.patch.multiple(
        "zbcompile.program_cache.programs", export_step=export_once, compile_program=compile_once
    ):
        yield


def compile_for_forks(case: Case) -> None:
    """Compiles here what processes that are forked later then find with `compiled_once`."""
    quickly(replace(case, steps=1))


def compiled_for(case: Case) -> Program:
    """The program that `quickly` has compiled for a case."""
    placement = build(case.schedule, case.ranks, case.microbatches).placement
    return _COMPILED[case.problem, case.exact, case.recompute, placement]


_EXPORTED: dict[str, ExportedModel] = {}
_COMPILED: dict[Any, Program] = {}


def pipeline_of(case: Case, **options: Any) -> zbcompile.Pipeline:
    """A pipeline with the schedule that `build` makes; test_auto.py has those that search their own
    layout."""
    problem = problem_of(case.problem)
    built = (
        build(case.schedule, case.ranks, case.microbatches)
        if case.schedule == "auto"
        else case.schedule
    )
    return zbcompile.pipeline(
        problem.model(),
        schedule=built,
        microbatches=case.microbatches,
        loss=problem.loss,
        exact=case.exact,
        recompute=case.recompute,
        ranks=None if dist.is_initialized() else case.ranks,
        **options,
    )


def interpreted(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The smallest backend: the graph itself. To the pipeline it is opaque, so that a pair cannot
    be one graph."""
    return graph


def gradients_of(model: nn.Module | zbcompile.Pipeline) -> Gradients:
    """A copy of every `.grad`, by name."""
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


class AsEager:
    """A pipeline, every step of which is compared with a copy of its model in eager mode: losses,
    gradients and buffers, bit by bit."""

    def __init__(
        self,
        model: nn.Module,
        microbatches: int,
        loss: Any = F.mse_loss,
        eager: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.model, self.eager = model, eager or copy.deepcopy(model)
        self.loss, self.microbatches = loss, microbatches
        self.pipe: zbcompile.Pipeline = zbcompile.pipeline(
            model, loss=loss, microbatches=microbatches, exact=True, **options
        )

    def step(self, *args: Tensor, target: Tensor | None = None, **kwargs: Tensor) -> None:
        step, targets = self.pipe.step_index, {} if target is None else {"target": target}
        loss = self.pipe.step(*args, **kwargs, **targets)
        batch = Batch(args, kwargs, target)
        assert torch.equal(loss, eager_step(self.eager, self.loss, batch, self.microbatches, step))
        ours, theirs = gradients_of(self.pipe), gradients_of(self.eager)
        if dist.is_initialized():  # a rank has its own share
            theirs = {name: theirs[name] for name in ours}
        else:
            buffers = dict(self.model.named_buffers()), dict(self.eager.named_buffers())
            assert_same_tensors(*buffers, "buffer")
        assert_same_tensors(ours, theirs, "gradient of")


def step_as_eager(
    model: nn.Module, x: Tensor, target: Tensor, loss: Any = F.mse_loss, **options: Any
) -> zbcompile.Pipeline:
    """Returns a pipeline of two ranks that has trained one step with eager's bits."""
    options = {"schedule": "zb-h1", "ranks": 2, **options}
    compared = AsEager(model, options.pop("microbatches", 4), loss, **options)
    compared.step(x, target=target)
    return compared.pipe


@cache
def eager(problem: str, microbatches: int, steps: int = 3) -> Trained:
    """The same training by the oracle."""
    chosen = problem_of(problem)
    model = chosen.model()
    optimizer = optimizer_of(model.parameters())
    losses, gradients = [], []
    for step, batch in enumerate(chosen.batches(steps, microbatches * ROWS)):
        losses.append(eager_step(model, chosen.loss, batch, microbatches, step))
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients, dict(model.state_dict()))


def reference(case: Case) -> Trained:
    """The oracle's training for a case."""
    return eager(case.problem, case.microbatches, case.steps)


def join(shares: Sequence[Trained]) -> Trained:
    """The ranks' shares as one; what several ranks hold must be the same on all of them."""
    for share in shares:
        assert_same_tensors(share.losses, shares[0].losses, "loss of step")
    gradients = [
        _join([share.gradients[step] for share in shares])
        for step in range(len(shares[0].gradients))
    ]
    return Trained(shares[0].losses, gradients, _join([share.state for share in shares]))


def _join(shares: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor | None]:
    full: dict[str, Tensor | None] = {}
    for share in shares:
        both = share.keys() & full.keys()
        assert_same_tensors({k: share[k] for k in both}, {k: full[k] for k in both}, "held twice:")
        full.update(share)
    return full


def assert_bitwise(ours: Trained, theirs: Trained) -> None:
    """Every loss, every gradient and every entry of the state dict is equal under `torch.equal`."""
    assert_same_tensors(ours.losses, theirs.losses, "loss of step")
    for step, (our, their) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        assert_same_tensors(our, their, f"gradient in step {step} of")
    assert_same_tensors(ours.state, theirs.state, "state dict:")


def assert_same_tensors(
    ours: Sequence[Tensor] | Mapping[str, Tensor | None],
    theirs: Sequence[Tensor] | Mapping[str, Tensor | None],
    what: str,
) -> None:
    """Equal keys, None where the other is None, and equal bits; the message says how many differ
    and by how much."""
    our, their = _named(ours), _named(theirs)
    assert our.keys() == their.keys(), (
        f"{what} {sorted(our.keys() ^ their.keys())} on one side only"
    )
    wrong = [name for name in their if not _same(our[name], their[name])]
    assert not wrong, (
        f"{what} {len(wrong)} of {len(their)} differ:"
        f" {[_difference(n, our[n], their[n]) for n in wrong]}"
    )


def _named(tensors: Sequence[Tensor] | Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return (
        dict(tensors)
        if isinstance(tensors, Mapping)
        else {str(i): tensor for i, tensor in enumerate(tensors)}
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def _difference(name: str, one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None or one.shape != other.shape:
        return f"{name}: {_kind(one)} against {_kind(other)}"
    return (
        f"{name}: off by {(one - other).abs().max().item():.2g} of {other.abs().max().item():.2g}"
    )


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def assert_close(ours: Trained, theirs: Trained, bound: float = 1e-6) -> None:
    """The losses differ by at most `bound`, the gradients by at most `bound` of the largest entry
    of each."""
    for our, their in zip(ours.losses, theirs.losses, strict=True):
        torch.testing.assert_close(our, their, rtol=bound, atol=0)
    worst, name = worst_difference(ours, theirs)
    assert worst <= bound, f"{name} differs by {worst:.1e} of its largest entry"


def worst_difference(ours: Trained, theirs: Trained, rounding: float = 0.0) -> tuple[float, str]:
    """How far the gradient that differs most is from the other one, relative to its largest entry,
    and its name.

    Gradients below `rounding` of the largest of all (a key's bias, or one before a norm, has one
    that is zero but for rounding) count relative to that."""
    return max(
        (difference, name)
        for our, their in zip(ours.gradients, theirs.gradients, strict=True)
        for name, difference in _differences(our, their, rounding).items()
    )


def _differences(ours: Gradients, theirs: Gradients, rounding: float) -> dict[str, float]:
    sizes = {
        name: 0.0 if item is None else float(item.abs().max()) for name, item in theirs.items()
    }
    largest, result = max(sizes.values()), {}
    for name, their in theirs.items():
        our = ours[name]
        if our is None or their is None:
            assert our is their, f"{name}: {_kind(our)} against {_kind(their)}"
            continue
        scale = sizes[name] if sizes[name] >= rounding * largest else largest
        difference = float((our - their).abs().max())
        result[name] = difference and (difference / scale if scale else float("inf"))
    return result
