"""The types of a backend's arguments and results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

Run = Callable[
    [list[Any]], Sequence[torch.Tensor]
]  # takes its arguments out of the list, so that each can be freed early
GraphCompiler = Callable[
    [GraphModule, Sequence[torch.Tensor]], Callable[..., Any]
]  # as torch.compile's backends
