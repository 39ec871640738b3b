"""The flow of gradients through a stage: which value of the forward each gradient of a joint graph belongs to.

Every grad_fn that the forward makes gets a hook, which notes while the backward is traced what arrives and what leaves.
A value of the forward is known by its grad_fn and the number of the result; the operations of Python code, those inside
of modules with DTensors too, say which operation of the joint graph made it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node as GradFn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.torch_private import local_part, pytree, traced_node


@dataclass(frozen=True)
class BackwardStep:
    """One grad_fn: of each result of its operation the number and the gradient that arrived, of each argument the
    number, what this step adds to its gradient, and the dimensions of the mesh along which that is replicated as a
    DTensor."""

    results: tuple[tuple[int, Node], ...]
    arguments: tuple[tuple[int, Node, frozenset[str]], ...]

    def moved(self, copies: Mapping[Node, Node]) -> "BackwardStep":
        """The same step in a copy of its graph."""
        results = tuple((number, copies[node]) for number, node in self.results)
        return BackwardStep(results, tuple((number, copies[node], along) for number, node, along in self.arguments))


@dataclass(frozen=True)
class GradientFlow:
    """`made` has the operation of the joint graph that computes a value, by number; `leaves` the values that are inputs
    of the stage, `roots` what the gradients of its outputs arrive for. `steps` are in the order of the backward."""

    module: GraphModule
    inputs: tuple[tuple[Slot, Node], ...]
    outputs: tuple[tuple[Slot, Node], ...]
    steps: tuple[BackwardStep, ...]
    made: Mapping[int, Node]
    leaves: tuple[tuple[int, Slot], ...]
    roots: tuple[tuple[int, Slot], ...]

    def moved(self, module: GraphModule, copies: Mapping[Node, Node], slot: Callable[[Slot], Slot]) -> "GradientFlow":
        """The same flow in a copy of its graph, whose inputs and outputs have other names."""
        return GradientFlow(
            module=module,
            inputs=tuple((slot(each), copies[node]) for each, node in self.inputs),
            outputs=tuple((slot(each), copies[node]) for each, node in self.outputs),
            steps=tuple(step.moved(copies) for step in self.steps),
            made={number: copies[node] for number, node in self.made.items()},
            leaves=tuple((number, slot(each)) for number, each in self.leaves),
            roots=tuple((number, slot(each)) for number, each in self.roots),
        )


@dataclass
class FlowRecorder(TorchFunctionMode):
    """Records the flow of gradients while a stage is traced. `dimensions` maps the name of each process group to its
    dimension of the mesh."""

    dimensions: Mapping[str, str]
    numbers: dict[tuple[GradFn | int, int], int] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    made: dict[int, Node] = field(default_factory=dict)
    steps: list[BackwardStep] = field(default_factory=list)
    leaves: list[tuple[int, Slot]] = field(default_factory=list)
    roots: list[tuple[int, Slot]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            self.note(leaf)
        return result

    def note(self, value: Any) -> None:
        """Record which operation of the traced graph made `value`, if gradients flow to it."""
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            found = traced_node(local_part(value))
            if found is not None:
                self.made.setdefault(self.number(value), found[0])

    def number(self, value: torch.Tensor) -> int:
        """The number of a value. torch's own function for gradient edges would put a view into the trace."""
        if value.grad_fn is not None:
            return self._of_edge(value.grad_fn, value.output_nr)
        self.kept.append(value)  # so that no other tensor gets its id
        return self.numbers.setdefault((id(value), 0), len(self.numbers))

    def _of_edge(self, grad_fn: GradFn | None, result: int) -> int:
        leaf = getattr(grad_fn, "variable", None)
        key = (id(None) if grad_fn is None else grad_fn, result)
        return self.number(leaf) if leaf is not None else self.numbers.setdefault(key, len(self.numbers))

    def watch(self, grad_fn: GradFn) -> None:
        """Record the gradients that a grad_fn receives, before its code may overwrite them, and those that it
        returns."""
        received: list[tuple[int, Node]] = []
        grad_fn.register_prehook(lambda gets: received.extend((i, node) for i, node, _ in _nodes(gets)))
        grad_fn.register_hook(lambda gives, gets: self._note_step(grad_fn, gives, received))

    def _note_step(self, grad_fn: GradFn, gives: Any, received: list[tuple[int, Node]]) -> None:
        results = [(self._of_edge(grad_fn, i), node) for i, node in received]
        edges = grad_fn.next_functions
        given = [(i, node, self._replicated(each)) for i, node, each in _nodes(gives) if edges[i][0] is not None]
        arguments = [(self._of_edge(*edges[i]), node, along) for i, node, along in given]
        self.steps.append(BackwardStep(tuple(results), tuple(arguments)))

    def _replicated(self, gradient: Any) -> frozenset[str]:
        mesh = getattr(gradient, "device_mesh", None)
        if mesh is None:
            return frozenset()
        names = [mesh.get_group(i).group_name for i, each in enumerate(gradient.placements) if each.is_replicate()]
        return frozenset(self.dimensions[name] for name in names if name in self.dimensions)

    def of(self, module: GraphModule, inputs: Any, outputs: Any) -> GradientFlow:
        """The recorded flow, with the roles of the traced graph."""
        return GradientFlow(
            module, inputs, outputs, tuple(self.steps), dict(self.made), tuple(self.leaves), tuple(self.roots)
        )


def _nodes(gradients: Any) -> list[tuple[int, Node, torch.Tensor]]:
    """The gradients of a tuple that are there, with their places and their nodes."""
    given = gradients if isinstance(gradients, tuple | list) else (gradients,)
    tensors = [(i, each, traced_node(local_part(each))) for i, each in enumerate(given) if each is not None]
    return [(i, found[0], each) for i, each, found in tensors if found is not None]
