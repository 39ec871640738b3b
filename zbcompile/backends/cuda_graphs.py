"""cuda_graphs=True: every pass recorded as a CUDA graph, so that the host launches it as a whole.

A recording reads and writes fixed addresses. Tensors that have one (parameters, buffers, gradient
buffers) are used in place; everything else is copied into buffers of the recording, and results are
copied out of it, because several microbatches are under way at once. If a gradient buffer has
moved, the pass is recorded again.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

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
    inputs: dict[int, torch.Tensor]
    results: tuple[torch.Tensor, ...]

    def fill(self, values: list[torch.Tensor]) -> None:
        for place, buffer in self.inputs.items():
            buffer.copy_(values[place])

    def replay(self) -> list[torch.Tensor]:
        self.graph.replay()
        return [copy_with_strides(result) for result in self.results]


@dataclass
class RecordedPass:
    """A pass that records itself at its first call, called `title` in messages.

    `staying` are the positions of inputs that keep their addresses, `written` those of them that it
    adds into; `pool` is memory that all recordings share, which is safe because they run in turn
    and their results are copied out.
    """

    title: str
    run: Run
    staying: tuple[int, ...]
    written: frozenset[int]
    pool: Any
    recordings: dict[tuple[int, ...], Recording] = field(default_factory=dict)
    moved: bool = False

    def __call__(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with gpu.as_current(values[0].device):  # whose streams are recorded
            return self._replayed(values)

    def _replayed(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        addresses = tuple(values[place].data_ptr() for place in self.staying)
        recording = self.recordings.get(addresses)
        if recording is not None:
            recording.fill(values)
        elif len(self.recordings) == PLACES:
            self._say_that_it_moved()
            return self.run(values)
        else:
            recording = self.recordings[addresses] = self._record(values)
        values.clear()
        return recording.replay()

    def _record(self, values: list[torch.Tensor]) -> Recording:
        """A recording whose buffers hold `values`."""
        self._require_on_gpu(value for i, value in enumerate(values) if i not in self.staying)
        buffers = {
            i: copy_with_strides(value) for i, value in enumerate(values) if i not in self.staying
        }
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

    def _require_on_gpu(self, values: Iterable[torch.Tensor]) -> None:
        """Refuse tensors of the host: replays would use their present value for ever."""
        for value in values:
            if not gpu.is_gpu(value.device):
                raise PipelineError(
                    f"cuda_graphs: {self.title} reads a tensor of shape {list(value.shape)} on"
                    f" {value.device}, which a recording would not read again. Move it to the GPU,"
                    " or use cuda_graphs=False."
                )

    def _warm_up(self, inputs: list[torch.Tensor]) -> None:
        """Run on a separate stream; sums are added into copies."""
        device = inputs[0].device
        current, aside = gpu.current_stream(device), gpu.new_stream(device)
        aside.wait_stream(current)
        with gpu.on_stream(aside):
            for _ in range(WARM_UP):
                self.run(
                    [
                        copy_with_strides(value) if i in self.written else value
                        for i, value in enumerate(inputs)
                    ]
                )
        current.wait_stream(aside)

    def _say_that_it_moved(self) -> None:
        if not self.moved:
            self.moved = True
            warnings.warn(
                f"cuda_graphs: {self.title} was recorded for {PLACES} places of its gradients and"
                " now runs without a graph if they are elsewhere. Keep gradients in place:"
                " optimizer.zero_grad(set_to_none=False).",
                stacklevel=2,
            )


def record(title: str, run: Run, piece: PassGraph, pool: Any) -> Run:
    """`run`, which is what a backend made of `piece`, as a recording; `pool` is a
    `gpu.graph_pool()`. A pass that reads nothing stays as it is, such as the B of a first stage
    whose only layer has its gradient in W.
    """
    if not piece.inputs:
        return run
    kinds = [slot.role for slot in piece.inputs]
    staying = tuple(i for i, kind in enumerate(kinds) if kind in STAYING)
    return RecordedPass(
        title, run, staying, frozenset(i for i in staying if kinds[i] == "accumulator"), pool
    )


def check_cuda_graphs(wanted: bool, device: torch.device) -> None:
    """Raise PipelineError if there is no device to record on."""
    if wanted and not gpu.is_gpu(device):
        raise PipelineError(
            f"cuda_graphs=True records passes on a GPU, but the pipeline is on {device}. Move the"
            " model to a GPU, or leave it out."
        )
