"""Random numbers of ranks that share a microbatch, along "tp" and "cp" of the mesh: ranks that compute the same values
draw the same numbers; ranks that compute different parts of a value draw different ones.

All generators begin in the same state. An operation that draws for a part stands between two more: `begin_apart` takes
one number from the common sequence, and seeds the generator by that number and the rank's place; `end_apart` returns to
the common sequence. So that moves by as much on every rank, whatever the sizes of their parts.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from zbcompile.passes import gpu
from zbcompile.passes.graph.fx import copied, is_random, output_values, with_graph
from zbcompile.passes.graph.process_groups import group_of, is_under_way
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import content_of, tensors_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import FakeTensorMode

LEAVE_EQUAL = ("all_reduce", "all_gather", "broadcast")  # collectives after which all ranks have the same
UNKNOWN = -1  # a place, before a process has bound the graph

_OPERATORS = torch.library.Library("zbcompile", "FRAGMENT")
_DRAWS = (torch.Tag.nondeterministic_seeded,)
_OPERATORS.define("begin_apart(str dimension, int place, Device device) -> Tensor", tags=_DRAWS)
_OPERATORS.define("end_apart(Tensor state, Device device) -> ()", tags=_DRAWS)
BEGIN, END = torch.ops.zbcompile.begin_apart.default, torch.ops.zbcompile.end_apart.default


def _begin(dimension: str, place: int, device: torch.device) -> torch.Tensor:
    if gpu.is_gpu(device):
        state = gpu.generator_state(device)
        words = state.view(torch.int64)
        mixed = _mixed(dimension, place, words.tolist())
        words[1] += 4
        gpu.set_generator(device, mixed, 0)
        return state
    number = int(torch.randint(2**62, ()))
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(_mixed(dimension, place, number))
    return state


def _mixed(*values: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7])


def _end(state: torch.Tensor, device: torch.device) -> None:
    gpu.restore_generator(device, state)


_OPERATORS.impl("begin_apart", _begin, "CompositeExplicitAutograd")
_OPERATORS.impl("end_apart", _end, "CompositeExplicitAutograd")
torch.library.register_fake("zbcompile::begin_apart", lambda dimension, place, device: _state_like(device))
torch.library.register_fake("zbcompile::end_apart", lambda state, device: None)


def _state_like(device: torch.device) -> torch.Tensor:
    return torch.empty(gpu.GENERATOR_BYTES if gpu.is_gpu(device) else 5056, dtype=torch.uint8)


def drawing(piece: Piece) -> list[Node]:
    """The operations of a piece that draw random numbers, in order."""
    return [node for node in piece.module.graph.nodes if is_random(node)]


@dataclass
class Shares:
    """What ranks along `dimension` of the mesh share: of a value that all of them have, a text that is equal on all;
    "" for one rank's part. `is_part(name)` says which parameters and buffers are parts."""

    dimension: str
    is_part: Callable[[str], bool]
    constants: Mapping[str, torch.Tensor]
    values: dict[str, str] = field(default_factory=dict)  # activations of earlier stages
    exchanges: int = 0

    def of_draws(self, forward: Piece) -> list[str]:
        """The text of what each operation of a stage draws for; stages in their order."""
        held: dict[Node, str] = {}
        inputs = iter(forward.inputs)
        for node in forward.module.graph.nodes:
            if node.op == "placeholder":
                held[node] = self._of_input(next(inputs))
            elif node.op != "output":
                held[node] = self._of_operation(node, held, forward)
        for slot, node in zip(forward.outputs, output_values(forward.module.graph), strict=True):
            if slot.kind == "activation":
                self.values[slot.name] = held[node]
        return [held[node] for node in drawing(forward)]

    def _of_input(self, slot: Slot) -> str:
        if slot.kind == "activation":  # those that no stage makes are looked up in a sharded vocabulary
            return self.values.get(slot.name, str(slot))
        if slot.kind == "constant":
            return _text_of(self.constants[slot.name])
        return "" if slot.kind in ("parameter", "buffer") and self.is_part(slot.name) else str(slot)

    def _of_operation(self, node: Node, held: Mapping[Node, str], forward: Piece) -> str:
        if node.target is torch.ops.aten.copy.default:  # what an exchange in place gives
            return held[node.args[1]]  # type: ignore[index]
        sources = [held[each] for each in node.all_input_nodes]
        if group_of(node) == self.dimension and (found := self._of_collective(node, all(sources))) is not None:
            return found
        attribute = getattr(forward.module, str(node.target)) if node.op == "get_attr" else None
        what = _text_of(attribute) if isinstance(attribute, torch.Tensor) else str(node.target)
        given = map_arg((node.args, node.kwargs), held.__getitem__)  # type: ignore[arg-type]
        return _hashed(what, given) if all(sources) else ""

    def _of_collective(self, node: Node, shared: bool) -> str | None:
        """None: what an operation on the same values gives. A custom operator, whose kind is not known, gathers or sums
        unless its result is smaller than what it takes, or has the size of a part but another shape."""
        self.exchanges += 1
        equal = f"exchange {self.exchanges}"
        if is_under_way(node):
            return equal if node.target.overloadpacket.__name__.startswith(LEAVE_EQUAL) else ""  # type: ignore[union-attr]
        taken = [value for each in node.all_input_nodes for value in tensors_of(each.meta.get("val"))]
        made = tensors_of(node.meta.get("val"))
        before, after = (sum(value.numel() for value in values) for values in (taken, made))
        if before == after and shared:
            return None
        same = [value.shape for value in taken] == [value.shape for value in made]
        return equal if after > before or (after == before and same) else ""


def _text_of(tensor: torch.Tensor) -> str:
    return _hashed(tensor.dtype, content_of(tensor))


def _hashed(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def with_draws_apart(forward: Piece, dimensions: Sequence[Sequence[str]]) -> Piece:
    """The piece with different random numbers on ranks along a dimension of the mesh; `dimensions` gives those of each
    operation that draws."""
    of_draw = dict(zip(drawing(forward), dimensions, strict=True))
    graph, copies = Graph(), dict[Node, Node]()
    for node in forward.module.graph.nodes:
        if node.op == "output":
            continue
        begun = [_begun(graph, name, tensors_of(node.meta["val"])[0].device) for name in of_draw.get(node, ())]
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for state in reversed(begun):
            graph.call_function(END, (state, state.args[-1])).meta = {"val": None, "pass": "draws"}
    graph.output([copies[node] for node in output_values(forward.module.graph)])
    return replace(forward, module=with_graph(forward.module, graph))


def _begun(graph: Graph, dimension: str, device: torch.device) -> Node:
    node = graph.call_function(BEGIN, (dimension, UNKNOWN, device))
    with FakeTensorMode():
        node.meta = {"val": _state_like(device), "pass": "draws"}
    return node


def is_apart(piece: Piece) -> bool:
    """Whether some operation of a piece draws different numbers on the ranks."""
    return any(node.target is BEGIN for node in piece.module.graph.nodes)


def with_places(piece: Piece, places: Mapping[str, int]) -> Piece:
    """The piece for a rank at these places, by dimension of the mesh."""
    if not is_apart(piece):
        return piece
    graph = copied(piece.module.graph)
    for node in (node for node in graph.nodes if node.target is BEGIN):
        node.update_arg(1, places[str(node.args[0])])
    return replace(piece, module=with_graph(piece.module, graph))
