"""The guards of a program as data, and back: the graph that asks, and the answers that the program was compiled for."""

from collections.abc import Collection
from typing import Any

import torch

from zbcompile.passes.capture.guards import Guards
from zbcompile.passes.capture.questions import ForeignAnswers
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import content_of
from zbcompile.passes.serialization.arguments import argument_from_data, argument_to_data
from zbcompile.passes.serialization.graph_modules import GraphReading, piece_from_data, piece_to_data
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_names import dtype_named

Data = dict[str, Any]


def guards_piece(guards: Guards) -> Piece:
    """The graph that asks, as a piece: one output per question."""
    outputs = tuple(Slot("output", str(number)) for number, _ in enumerate(guards.lines))
    return Piece("guards", guards.module, guards.inputs, outputs)


def guards_to_data(guards: Guards | None) -> Data | None:
    """Guards as JSON values. Raises CompileError for an operation or argument that has no such form."""
    if guards is None:
        return None
    return {
        "answers": [argument_to_data(answer) for answer in guards.given.answers],
        "lines": list(guards.lines),
        "constants": {name: _tensor_to_data(tensor) for name, tensor in guards.constants.items()},
        **piece_to_data(guards_piece(guards)),
    }


def guards_from_data(data: Data | None, device: torch.device, operators: Collection[str]) -> Guards | None:
    """The guards that `guards_to_data` wrote; `operators` of other libraries may be called."""
    if data is None:
        return None
    piece = piece_from_data("guards", data, GraphReading(device, {}, operators), "", "Guards")
    answers = tuple(argument_from_data(answer, {}, device) for answer in data["answers"])
    constants = {name: _tensor_from_data(each, device) for name, each in data["constants"].items()}
    return Guards(piece.module, piece.inputs, ForeignAnswers(False, answers), tuple(data["lines"]), constants)


def _tensor_to_data(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content_of(tensor).hex()]


def _tensor_from_data(data: list[Any], device: torch.device) -> torch.Tensor:
    dtype, shape, content = data
    flat = torch.tensor(list(bytes.fromhex(content)), dtype=torch.uint8)
    return flat.view(dtype_named(dtype)).reshape(shape).to(device)
