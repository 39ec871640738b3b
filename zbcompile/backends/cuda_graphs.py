"""CUDA graphs of passes, for cuda_graphs=True: the host launches each pass as one recording.

A recording reads and writes fixed addresses. Tensors that have one (parameters, buffers, gradient
buffers) are used in place; everything else is copied into buffers of the recording, and results are
copied out of it, because several microbatches are in flight. If a gradient buffer has moved, the
pass is recorded again.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.passes.graph.strides import copy_with_strides
from zbcompile.passes.stage.pass_graph import PassGraph

STAYING = ("parameter", "buffer", "constant", "accumulator")
# runs before a recording, which make what a recording cannot make: handles, work space, tuned
# kernels
WARM_UP = 3
PLACES = 8  # most recordings of one pass, one per set of gradient addresses


@dataclass(frozen=True)
class Recording:
    """One recorded pass: `inputs` are its buffers by position, `results` what a replay writes."""

    graph: gpu.Graph
    inputs: dict[int, Tensor]
    results: tuple[Tensor, ...]

    def fill(self, values: list[Tensor]) -> None:
        for place, buffer in self.inputs.items():
            buffer.copy_(values[place])

    def replay(self) -> list[Tensor]:
        self.graph.replay()
        return [copy_with_strides(result) for result in self.results]


@dataclass
class RecordedPass:
    """A pass that records itself at its first call.

    Attributes:
        title: Its name in messages.
        staying: The positions of inputs that keep their addresses.
        written: Those of them that it adds into.
        pool: Memory that all recordings share. They run one after the other, and their results are
            copied.
    """

    title: str
    run: Run
    staying: tuple[int, ...]
    written: frozenset[int]
    pool: Any
    recordings: dict[tuple[int, ...], Recording] = field(default_factory=dict)

    def __call__(self, values: list[Tensor]) -> Sequence[Tensor]:
        addresses = tuple(values[place].data_ptr() for place in self.staying)
        with gpu.as_current(values[0].device):  # whose streams are recorded
            recording = self.recordings.get(addresses)
            if recording is not None:
                recording.fill(values)
            elif len(self.recordings) == PLACES:
                warnings.warn(
                    f"cuda_graphs: {self.title} was recorded for {PLACES} places of its gradients"
                    " and now runs without a graph if they are elsewhere. Keep gradients in place:"
                    " optimizer.zero_grad(set_to_none=False).",
                    stacklevel=2,
                )
                return self.run(values)
            else:
                recording = self.recordings[addresses] = self._record(values)
            values.clear()
            return recording.replay()

    def _record(self, values: list[Tensor]) -> Recording:
        """Returns a recording with `values` in its buffers."""
        moving = {i: value for i, value in enumerate(values) if i not in self.staying}
        for value in moving.values():  # a replay would not read a tensor of the host again
            if not gpu.is_gpu(value.device):
                raise PipelineError(
                    f"cuda_graphs: {self.title} reads a tensor of shape {list(value.shape)} on"
                    f" {value.device}, which a recording would not read again. Move it to the GPU,"
                    " or use cuda_graphs=False."
                )
        buffers = {i: copy_with_strides(value) for i, value in moving.items()}
        inputs = [buffers.get(i, value) for i, value in enumerate(values)]
        device = inputs[0].device
        before = gpu.generator_state(device)
        try:
            self._warm_up(inputs)
            gpu.restore_generator(device, before)
            graph = gpu.Graph()
            with gpu.recorded(graph, self.pool):
                results = tuple(self.run(list(inputs)))
        except RuntimeError as error:
            raise PipelineError(
                f"cuda_graphs: {self.title} cannot be recorded ({error}). Use cuda_graphs=False."
            ) from error
        return Recording(graph, buffers, results)

    def _warm_up(self, inputs: list[Tensor]) -> None:
        """Runs the pass on a separate stream; sums are added into copies."""
        device = inputs[0].device
        current, stream = gpu.current_stream(device), gpu.new_stream(device)
        stream.wait_stream(current)
        with gpu.on_stream(stream):
            for _ in range(WARM_UP):
                self.run(
                    [
                        copy_with_strides(value) if i in self.written else value
                        for i, value in enumerate(inputs)
                    ]
                )
        current.wait_stream(stream)


def record(title: str, run: Run, piece: PassGraph, pool: Any) -> Run:
    """Returns `run`, a backend's code for `piece`, as a pass that records itself into `pool`.

    A pass without inputs is returned unchanged, such as the B of a first stage whose only layer has
    its gradient in W.
    """
    if not piece.inputs:
        return run
    roles = [slot.role for slot in piece.inputs]
    staying = tuple(i for i, role in enumerate(roles) if role in STAYING)
    written = frozenset(i for i in staying if roles[i] == "accumulator")
    return RecordedPass(title, run, staying, written, pool)


def check_cuda_graphs(enabled: bool, device: torch.device) -> None:
    """Raises PipelineError if passes cannot be recorded on the device."""
    if enabled and not gpu.is_gpu(device):
        raise PipelineError(
            f"cuda_graphs=True records passes on a GPU, but the pipeline is on {device}. Move the"
            " model to a GPU, or leave it out."
        )
