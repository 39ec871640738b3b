"""A pass graph: what one stage computes in one pass (F, B, W, BW or E) for one microbatch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch.fx import GraphModule, Node

from zbcompile.passes.graph.fx import graph_text, tensors_of
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.node_cost import node_flops

# Roles of inputs.
PARAMETER, BUFFER, CONSTANT, BATCH, TANGENT = "parameter", "buffer", "constant", "batch", "tangent"
# Roles of inputs that are outputs of other passes.
ACTIVATION = "activation"  # from F of the stage before
GRADIENT = "gradient"  # from B of the stage behind
SAVED = "saved"  # from an earlier pass of this stage
PART = "part"  # from any stage: part of a gradient that is added at the end of the step
ACCUMULATOR = "accumulator"  # a gradient buffer, which the pass adds to
# Roles of results.
WEIGHT_GRADIENT, BUFFER_UPDATE = "weight_gradient", "buffer_update"
LOSS, OUTPUT = "loss", "output"
FITS = "fits"  # whether tokens have room in an exchange between experts
KINDS = ("F", "B", "W", "BW", "E")


class Slot(NamedTuple):
    """An input or output of a pass graph: its role and its name.

    Parameters and buffers have the user's names, batch inputs their path. Other values have a name
    that is unique in the step.
    """

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


@dataclass(frozen=True)
class PassGraph:
    """A graph with a description of its inputs and outputs.

    The graph itself contains no names: placeholders are numbered, so equal layers have equal
    graphs.

    Attributes:
        stage: Number of the stage.
        kind: "F", "B", "W", "BW" or "E".
        module: Takes the values of `inputs` and returns those of `outputs`.
        readers: For each saved or part output, the kinds of the passes that read it.
    """

    stage: int
    kind: str
    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    readers: Mapping[Slot, frozenset[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.kind}"

    @property
    def placeholders(self) -> list[Node]:
        return list(self.module.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> list[Node]:
        return list(self.module.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def calls(self) -> list[Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @cached_property
    def flops(self) -> int:
        return sum(map(node_flops, self.calls))

    def output_bytes(self, role: str) -> int:
        """Returns the bytes of the outputs of one role."""
        pairs = zip(self.outputs, self.results, strict=True)
        return _bytes_of(role, [node for slot, node in pairs if slot.role == role])

    @cached_property
    def fingerprint(self) -> str:
        """A text that equal graphs share."""
        return graph_text(self.module)


def _bytes_of(role: str, nodes: list[Node]) -> int:
    """Returns the bytes of values: messages by element, other values by distinct storage."""
    if role not in (ACTIVATION, GRADIENT):
        return storage_bytes(nodes)
    return sum(t.numel() * t.element_size() for node in nodes for t in tensors_of(node))
