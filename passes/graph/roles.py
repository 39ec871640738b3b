"""The meaning of a graph's inputs and outputs. Passes and engine find values by their slots, never
by position."""

import math
from typing import Final, Literal, NamedTuple

from zbcompile.passes.torch_names import dtype_named

Role = Literal[
    "parameter",
    "buffer",
    "constant",
    "batch",
    "tangent",
    "activation",
    "gradient",
    "saved",
    "part",
    "accumulator",
    "weight_gradient",
    "buffer_update",
    "loss",
    "output",
    "fits",
]
# Roles of inputs. Parameters and buffers have the names that the user gave them, inputs of the
# batch their path, constants the name that torch.export gave them.
PARAMETER: Final = "parameter"
BUFFER: Final = "buffer"
CONSTANT: Final = "constant"
BATCH: Final = "batch"
TANGENT: Final = "tangent"  # the gradient of the loss
ACCUMULATOR: Final = "accumulator"  # the gradient buffer of a parameter, which the pass adds to
# Roles of outputs that are inputs of other passes. They have a name that is unique in the step.
ACTIVATION: Final = "activation"  # from F of the stage before
GRADIENT: Final = "gradient"  # from B of the stage behind
SAVED: Final = "saved"  # from an earlier pass of the stage
PART: Final = "part"  # from any stage: part of a gradient that is added at the end of the step
# Roles of results.
WEIGHT_GRADIENT: Final = "weight_gradient"
BUFFER_UPDATE: Final = "buffer_update"
LOSS: Final = "loss"
OUTPUT: Final = "output"  # the index of the leaf in the model's output
FITS: Final = "fits"  # whether tokens have room in an exchange between experts


class Slot(NamedTuple):
    """An input or output of a graph: its role and its name."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


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
