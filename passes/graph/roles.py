"""What a graph's inputs and outputs mean. Passes and runtime find values by slot, never by
position."""

import math
from typing import Literal, NamedTuple

from zbcompile.passes.torch_names import dtype_named

Kind = Literal[
    "parameter",  # name: the model's FQN (the first one if parameters are tied)
    "buffer",  # name: the model's FQN
    "constant",  # name: torch.export's name of a lifted tensor
    "input",  # name: the user's input path, such as args[0] or kwargs['mask']
    "activation",  # name: the node that makes a value which crosses a stage boundary
    "tangent",  # name: the activation (or "loss") whose gradient arrives
    "input_gradient",  # name: the activation whose gradient leaves towards the previous stage
    # name: the first activation that a stage computes from parameters alone; no piece returns it
    "virtual_gradient",
    "gradient",  # name: the FQN of the parameter
    "accumulator",  # name: the FQN of the parameter whose gradient buffer is added into
    "part",  # name: the node whose value is a part of a gradient that several stages compute
    "saved",  # name: the node whose value F keeps for B or W, or B for W
    "mutation",  # name: the FQN of the buffer that takes this value
    "loss",
    "output",  # name: the index of the leaf in the model's output
    # name: the number of an `assert` of forward, in their order; the value is whether it holds
    "check",
    # name: as of a check; the value is whether the tokens of an exchange between experts fit into
    # it
    "fits",
]


class Slot(NamedTuple):
    """One input or output of a graph, identified by its meaning."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()

    def called(self, name: str) -> "Slot":
        """The same slot under another name."""
        return self._replace(name=name)

    @property
    def identifier(self) -> str:
        """The name of its placeholder in a graph."""
        return "".join(c if c.isalnum() else "_" for c in str(self))


class TensorSpec(NamedTuple):
    """Shape, dtype, strides and device of a tensor: enough to allocate one that a graph accepts."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    needs_gradient: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(dtype_named(self.dtype).itemsize)
