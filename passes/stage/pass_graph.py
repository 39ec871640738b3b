"""A pass graph: what one stage computes in one pass (F, B, W, BW or E) for one microbatch."""

from dataclasses import dataclass
from functools import cached_property

from torch.fx import GraphModule, Node

from zbcompile.passes.cost.node_cost import node_flops
from zbcompile.passes.graph.roles import Slot


@dataclass(frozen=True)
class PassGraph:
    """A graph with a description of its inputs and outputs.

    The graph itself contains no names: placeholders are numbered, so equal layers have equal
    graphs.

    Attributes:
        stage: Number of the stage; of a vocabulary shard, of its rank.
        kind: "F", "B", "W", "BW" or "E"; of a shard "S", "STATS", "T", "EMBED" or "EMBED_GRAD".
        module: Takes the values of `inputs` and returns those of `outputs`.
    """

    stage: int
    kind: str
    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.kind}"

    @property
    def title(self) -> str:
        """The class name of the module, such as F2."""
        return f"{self.kind}{self.stage}"

    @property
    def empty(self) -> bool:
        """Returns True if the graph computes nothing."""
        return not self.calls

    @property
    def placeholders(self) -> list[Node]:
        return list(self.module.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> list[Node]:
        return list(self.module.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def arguments(self) -> list[tuple[Slot, Node]]:
        """Returns the slot and the placeholder of every input."""
        return list(zip(self.inputs, self.placeholders, strict=True))

    @property
    def returns(self) -> list[tuple[Slot, Node]]:
        """Returns the slot and the node of every output."""
        return list(zip(self.outputs, self.results, strict=True))

    @property
    def calls(self) -> list[Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @cached_property
    def flops(self) -> int:
        return sum(map(node_flops, self.calls))
