"""What a step at fixed addresses keeps for the next one: the block that its values lie in, its batch, its gradients,
and the recording of it as one CUDA graph."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zbcompile.batches.losses import Losses
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.passes.graph.strides import copy_with_strides
from zbcompile.runtime.gradient_sums import Gradients
from zbcompile.runtime.memory_plan import MemoryPlan

Inputs = list[dict[str, torch.Tensor]]
UNRECORDED = 2  # steps before the recording: what cannot be made in one is made in them, such as communicators


def refuse(reasons: Iterable[str]) -> None:
    """Raise PipelineError for the first reason why a step cannot be recorded."""
    for reason in reasons:
        raise PipelineError(
            f'cuda_graphs="step" cannot record this step: {reason}. Use cuda_graphs=True, which records each pass.'
        )


@dataclass
class StepMemory:
    """The memory of one executable: by rank the plan of its values and the block that they lie in, the tensors of the
    batch, and the gradients by parameter. `losses` are those of the last step, `graph` is the
    recorded one; `holding` lives as long, because the recording reads it; `steps` counts those that ran without it.
    """

    device: torch.device
    plans: Mapping[int, MemoryPlan]
    blocks: Mapping[int, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    inputs: Inputs = field(default_factory=list)
    graph: gpu.Graph | None = None
    losses: Losses = field(default_factory=lambda: Losses(()))
    holding: object = None
    steps: int = 0

    def stage(self, batch: Inputs) -> Inputs:
        """The tensors of a batch, of the shapes of the first one, where those were."""
        if not self.inputs:
            refuse(
                f"its input {path} is on {value.device}, and the pipeline on {self.device}"
                for each in batch
                for path, value in each.items()
                if value.device != self.device
            )
            copies = {id(value): copy_with_strides(value) for each in batch for value in each.values()}
            self.inputs.extend({path: copies[id(value)] for path, value in each.items()} for each in batch)
        both = zip(self.inputs, batch, strict=True)
        copied = {id(kept[path]): (kept[path], value) for kept, given in both for path, value in given.items()}
        for kept, value in copied.values():
            kept.copy_(value)
        return self.inputs

    def hold(self, gradients: Gradients, trained: Iterable[str]) -> None:
        """Let `.grad` of what a rank trains, and its sums, be where they were in the first step."""
        if gradients.staying is None:
            gradients.staying = {}
        for name in trained:
            if name not in self.gradients:
                self.gradients[name] = gradients[name].new_gradient()
            gradients[name].stay_in(self.gradients[name])

    def read_out(self) -> Losses:
        """The losses of the last step, which the next one does not overwrite."""
        return Losses([loss.clone() for loss in self.losses.read()])

    def replay(self) -> Losses:
        assert self.graph is not None
        with gpu.as_current(self.device):
            self.graph.replay()
        return self.read_out()

    def records(self) -> bool:
        """Whether the step that now begins is recorded."""
        self.steps += 1
        return gpu.is_gpu(self.device) and self.steps > UNRECORDED

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the actions of a step, which become `graph`; a replay carries them out."""
        graph = gpu.Graph()
        try:
            with gpu.as_current(self.device), gpu.recorded(graph, gpu.graph_pool()):
                yield
        except PipelineError:
            raise
        except RuntimeError as error:
            raise PipelineError(
                f'cuda_graphs="step": the step cannot be recorded ({error}). Use cuda_graphs=True.'
            ) from error
        self.graph = graph
