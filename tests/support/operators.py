"""Operators of torch's own test list as a model of one stage, compiled and run against eager
autograd."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.pass_graph_runner import Runner, compile_step
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_private import pytree, replaced
from zbcompile.schedules.ir.actions import Action

TORCHS_LIST = "torch.testing._internal.common_methods_invocations"  # takes seconds to import
Gradients = dict[str, Tensor | None]
KINDS = ("bitwise", "eager fails", "eager differs from itself", "torch fails", "refused", "error")
KINDS += ("differs",)


def torchs_operators() -> list[Any]:
    """The OpInfos of torch's own tests."""
    return importlib.import_module(TORCHS_LIST).op_db


@dataclass(frozen=True)
class Case:
    """An operator and one of its samples (an OpInfo and a SampleInput of torch's tests)."""

    info: Any
    sample: Any

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.info.name, self.info.variant_test_name)))


def cases_of(info: Any, dtype: torch.dtype, count: int) -> list[Case]:
    """At most `count` of the samples of an OpInfo, spread evenly over its list; the same at every
    call."""
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    count = min(count, len(samples))
    return [Case(info, samples[i * len(samples) // count]) for i in range(count)]


class Operators(nn.Module):
    """The sum of what operators make of their samples, each result weighted by a parameter of its
    own, whose gradient is the result itself: gradients show the bits of the forward too."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList()
        self.calls = [(case.info.op, *self._without_tensors(case.sample)) for case in cases]
        with torch.no_grad():
            weights = [torch.rand_like(result) + 0.5 for result in self.results()]
        self.weights = nn.ParameterList(weights)

    def _without_tensors(self, sample: Any) -> tuple[list[Any], Any]:
        values, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        kept = [self._keep(v) if isinstance(v, Tensor) else (None, v) for v in values]
        return kept, structure

    def _keep(self, leaf: Tensor) -> tuple[int, None]:
        self.tensors.append(nn.Parameter(leaf.detach().clone(), leaf.requires_grad))
        return len(self.tensors) - 1, None

    def results(self) -> list[Tensor]:
        """Returns what can carry a gradient of what the operators return, complex results as pairs."""
        created: list[Tensor] = []
        for operator, tensors, structure in self.calls:
            values = [leaf if index is None else self.tensors[index] for index, leaf in tensors]
            first, args, kwargs = pytree.tree_unflatten(values, structure)
            with replaced(importlib.import_module(TORCHS_LIST), "wrapper_set_seed", _unseeded):
                result = operator(first, *args, **kwargs)
            created += [value for value in pytree.tree_leaves(result) if _real(value)]
        pairs = torch.view_as_real
        return [pairs(v.resolve_conj()) if v.is_complex() else v for v in created]

    def forward(self, one: Tensor) -> Tensor:
        weighted = zip(self.results(), self.weights, strict=True)
        return one * torch.stack([(r * weight).sum().float() for r, weight in weighted]).sum()


def _unseeded(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of what seeds before each random operator: the functions below set the seed."""
    return operator(*args, **kwargs)


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@dataclass(frozen=True)
class Outcome:
    """What came of an operator in a dtype: one of `KINDS`, and the reason or the differences."""

    kind: str
    why: str = ""


def eager_gradients(model: Operators) -> Gradients:
    """One microbatch in eager mode."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    result = torch.autograd.grad(model(torch.ones(())), list(named.values()), allow_unused=True)
    return dict(zip(named, result, strict=True))


def split_gradients(model: Operators) -> Gradients:
    """The same of one stage: F, then B, then W."""
    batch = ((torch.ones(()),), {}, None)
    compiled = compile_step(model, *batch, ranks_of=[0], exact=True)
    order = [Action(kind, 0, 0) for kind in ("F", "B", "W")]
    result = Runner(compiled, model, [batch], seed=1).run([order]).gradients
    return {name: result.get(name) for name, p in model.named_parameters() if p.requires_grad}


def differences(result: Gradients, expected: Gradients) -> list[tuple[float, str]]:
    """The gradients that differ in a bit, or in whether there is one: how far, relative to the
    largest entry."""
    pairs = ((name, result[name], gradient) for name, gradient in expected.items())
    return [(_relative(a, b), name) for name, a, b in pairs if not _equal(a, b)]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _relative(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    a, b = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (a, b))
    return float((a - b).abs().max() / b.abs().max())


def eagers_own(cases: Sequence[Case]) -> Outcome:
    """Returns whether eager computes gradients of `cases`, twice the same."""
    try:
        model = Operators(cases)
        same = not differences(eager_gradients(model), eager_gradients(model))
    except Exception as error:
        return Outcome("eager fails", _first_line(error))
    return Outcome("bitwise" if same else "eager differs from itself")


def outcome_of(cases: Sequence[Case]) -> Outcome:
    """Run `cases`, which eager can, as one model both ways."""
    try:
        model = Operators(cases)
        result = differences(split_gradients(model), eager_gradients(model))
    except CaptureError as error:
        return Outcome("refused" if error.__cause__ is None else "torch fails", _first_line(error))
    except Exception as error:
        return Outcome("error", _first_line(error))
    if not result:
        return Outcome("bitwise")
    return Outcome("differs", "{1} by {0:.1e}".format(*max(result)))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
