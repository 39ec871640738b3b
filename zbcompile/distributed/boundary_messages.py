"""What travels between stages, and the buffers that it arrives in."""

from typing import NamedTuple

from zbcompile.passes.graph.roles import TensorSpec

HIDDEN_MESSAGE = "HIDDEN"  # the last stage's output, on its way to the vocabulary shards
ROWS_MESSAGE = "ROWS"  # the gradient of what these have looked up for the first stage


class Message(NamedTuple):
    """The `F` or `B` values that arrive at `stage` for `microbatch`, or a collective of the vocabulary passes."""

    kind: str
    stage: int
    microbatch: int


class Buffer(NamedTuple):
    """A receive buffer: the `number`-th of its shape. Number -1 is a fresh one: what arrives is passed on to other
    stages."""

    spec: TensorSpec
    number: int
