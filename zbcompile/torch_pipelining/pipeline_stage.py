"""The generated torch.distributed pipeline stage: torch's own schedules drive our graphs.

torch's zero-bubble schedules refuse compiled modules; they accept this stage, because its chunks
run compiled graphs without autograd. It keeps its own message buffers: the metadata interface of
torch's stage changes with every version, the methods overridden here do not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zbcompile.batches.batch import whole_batch
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import as_contiguous, packed, packed_buffer
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.stage import CompiledStage, StageRun
from zbcompile.errors import PipelineError
from zbcompile.model.model_info import module_with
from zbcompile.model.seeds import microbatch_seed
from zbcompile.passes import gpu
from zbcompile.passes.torch_names import dtype_named
from zbcompile.program.program import Program
from zbcompile.torch_private import group_between

Tensors = list[Tensor]


def generated_stages(
    program: Program,
    stages: Mapping[int, CompiledStage],
    ranks: Ranks,
    parameters: Mapping[str, nn.Parameter],
) -> "list[CompiledPipelineStage]":
    """The stages of this rank for torch's schedules. Raises PipelineError for what these cannot
    run."""
    dimensions = ranks.mesh.beside("pp", "dp")
    if ranks.group is None:
        raise PipelineError("stages() needs a process group: start the script with torchrun.")
    if program.vocabulary is not None:
        raise PipelineError(
            'torch\'s schedules have no vocabulary passes. Use pipe.step, or vocab="off".'
        )
    if program.shared:
        raise PipelineError(
            f"{sorted(program.shared)[0]} trains on several stages; torch's schedules cannot sum"
            " its gradients over them. Use pipe.step, or untie the parameter."
        )
    if dimensions:
        raise PipelineError(
            f'the mesh has several ranks along "{dimensions[0]}", and torch\'s schedules do not sum'
            " gradients over them. Use pipe.step."
        )
    if program.output is not None:
        raise PipelineError(
            "the step was compiled to return more than its loss, and torch's schedules return"
            " losses alone. Compile it without return_outputs= and return_metrics=; pipe.eval gives"
            " outputs."
        )
    return [
        CompiledPipelineStage(stage, program, ranks.group, parameters) for stage in stages.values()
    ]


class CompiledPipelineStage(PipelineStage):
    """One compiled stage behind torch's PipelineStage interface.

    Run it with the schedule's `loss_fn` set to `stage.loss`, since the loss is part of the graphs;
    so is 1/m, whatever `scale_grads` says. Inputs that later stages read must be keywords: torch
    hands positional arguments to the first stage only. `step` and `eval` of the schedule return an
    empty tuple on the last rank, because a compiled step keeps no outputs (`pipe.eval` gives them);
    `eval` computes the losses alone, with the training step's own forward.

    >>> Schedule1F1B(stage, 8, loss_fn=stage.loss).step(x, target=y)  # doctest: +SKIP
    """

    def __init__(
        self,
        stage: CompiledStage,
        program: Program,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        count = program.schedule.stages
        module = module_with({name: parameters[name] for name in stage.program.parameters}, "Stage")
        super().__init__(
            module, stage.index, count, stage.device, input_args=(), output_args=(), group=group
        )
        self.stage_index_to_group_rank = {i: program.rank_of(i) for i in range(count)}
        self._compiled, self._program, self._parameters = stage, program, parameters
        self._steps = self._finished = 0
        # whether the present run has a backward: an evaluation counts as no step
        self._trains = False
        self._run: StageRun | None = None
        self._arrived: dict[tuple[str, int], Tensors] = {}
        self._made: dict[tuple[str, int], Tensors] = {}

    def clear_runtime_states(self) -> None:
        """Called by torch's schedules when a step begins."""
        super().clear_runtime_states()
        if self._run is not None:
            self._run.check_empty()
            self._steps += self._trains
        self._run = None
        self._finished = 0

    def _begin(self) -> StageRun:
        self._trains = self.has_backward
        program, count = self._program, int(self.chunks or self._program.schedule.microbatches)
        one = torch.ones((), dtype=dtype_named(program.loss_dtype), device=self.device)
        return StageRun(
            [self._compiled] * count,
            Gradients(self._parameters, frozenset(), program.choices),
            [{} for _ in range(count)],
            one / count if program.step.loss_reduction == "mean" else one,
            [microbatch_seed(self._steps, i, program.step.seed) for i in range(count)],
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *more: Any,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Runs F of one microbatch. The last stage needs its target: there F runs inside `loss`."""
        self._run = self._run or self._begin()
        self._accept(self._run, fwd_chunk_id, args if self.is_first else (), kwargs or {}, None)
        if self.is_last:
            self.output_chunks.append(())  # torch merges these into the output of the whole batch
            return OutputToCome.of(fwd_chunk_id)
        self._forward(fwd_chunk_id)
        return tuple(self._made["F", fwd_chunk_id])

    def loss(self, output: Any, target: Any) -> Tensor:
        """Runs the last stage's F for the microbatch of the placeholder `output`. Returns the loss.
        This is the `loss_fn` for torch's schedules."""
        if self._run is None:
            raise PipelineError("loss was called outside a step of a torch schedule.")
        microbatch = output.microbatch
        if any(path.startswith("target") for _, path in self._compiled.inputs):
            self._accept(self._run, microbatch, (), {}, target)
        self._forward(microbatch)
        return self._run.losses[microbatch]

    def _accept(
        self, run: StageRun, microbatch: int, args: tuple[Any, ...], kwargs: Any, target: Any
    ) -> None:
        """Inputs of a microbatch: torch looks at no shape of a stage that says what it takes."""
        tensors = whole_batch(args, kwargs, target).whole.tensors
        for path, tensor in tensors.items():
            actual = tuple(tensor.shape), str(tensor.dtype)
            if actual != (expected := self._program.inputs.get(path, actual)):
                raise PipelineError(
                    f"{path} of microbatch {microbatch} has shape {list(actual[0])} and is"
                    f" {actual[1]}, and the stages were compiled for {list(expected[0])},"
                    f" {expected[1]}."
                    " Use pipe.step, or compile with such a batch and make the schedule again, of"
                    " the stages that pipe.stages() returns after that."
                )
        run.inputs[microbatch] |= tensors

    def _forward(self, microbatch: int) -> None:
        run = self._run
        assert run is not None
        missing = [path for _, path in self._compiled.inputs if path not in run.inputs[microbatch]]
        if missing:
            raise PipelineError(
                f"stage {self.stage_index} reads the input {missing[0]}, which did not reach it:"
                " torch's schedules pass positional arguments only to the first stage. Pass it to"
                " schedule.step as a keyword on every rank."
            )
        with gpu.forked_generators(self._compiled.device), torch.no_grad():
            self._made["F", microbatch] = run.run(
                "F", microbatch, self._arrived.pop(("F", microbatch), [])
            )
        if not self.has_backward:
            del run.frames[microbatch]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        *more: Any,
        **options: Any,
    ) -> None:
        """B, or with `full_backward` BW, of one microbatch; nothing in an evaluation, where torch
        calls it as well."""
        if self.has_backward:
            arrived = self._arrived.pop(("B", bwd_chunk_id), [])
            self._made["B", bwd_chunk_id] = self._compute(
                "BW" if full_backward else "B", bwd_chunk_id, arrived
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *more: Any, **options: Any) -> None:
        """W of one microbatch."""
        if self.has_backward:
            self._compute("W", bwd_chunk_id, [])

    def _compute(self, op: str, microbatch: int, arrived: Tensors) -> Tensors:
        """torch's schedules do not say when a step ends: it does with the last microbatch's weight
        gradients."""
        assert self._run is not None
        with torch.no_grad():
            results = self._run.run(op, microbatch, arrived)
        self._finished += op != "B"
        if self._finished == len(self._run.seeds):
            self._run.gradients.flush()
        return results

    def scale_grads(self, grad_scale_factor: int) -> None:
        """torch's division by the number of microbatches, which a loss that is a mean has in its
        graphs."""
        if self._program.step.loss_reduction != "mean":
            super().scale_grads(grad_scale_factor)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the activations, into buffers made now."""
        return self._receives("F", fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradients, into buffers made now."""
        return self._receives("B", bwd_chunk_id, self.stage_index + 1) if self.has_backward else []

    def _receives(self, op: str, microbatch: int, source: int) -> list[dist.P2POp]:
        buffers = [packed_buffer(spec, self.device) for spec in self._compiled.receives[op]]
        self._arrived[op, microbatch] = buffers
        return [self._operation(dist.irecv, buffer, source) for buffer in buffers]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the activations."""
        return [] if self.is_last else self._sends("F", fwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the input gradients."""
        return self._sends("B", bwd_chunk_id, self.stage_index - 1) if self.has_backward else []

    def _sends(self, op: str, microbatch: int, to: int) -> list[dist.P2POp]:
        return [
            self._operation(dist.isend, value, to) for value in self._made.pop((op, microbatch))
        ]

    def _operation(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        way = (self.stage_index, stage) if operation is dist.isend else (stage, self.stage_index)
        assert self.group is not None, "generated_stages refuses a pipeline without a process group"
        peer = dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])
        return dist.P2POp(operation, as_contiguous(packed(tensor)), peer, group_between(self, *way))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Nothing to warm up: torch 2.11 would make a V's turning rank send to itself, which gloo
        cannot."""
        return []

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Input gradients for a stage on the same rank."""
        return tuple(self._made.pop(("B", mb_index))) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients from a stage on the same rank."""
        self._arrived["B", mb_index] = list(next_stage_bwd_outputs)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Activations from a stage on the same rank; torch hands over what `forward_one_chunk`
        returned."""
        self._arrived["F", mb_index] = list(prev_stage_outputs)


class OutputToCome(Tensor):
    """A placeholder for the output of the last stage before the target of its microbatch is known.
    Only `loss` can read it."""

    microbatch: int

    @classmethod
    def of(cls, microbatch: int) -> "OutputToCome":
        output = torch.empty(0).as_subclass(cls)
        output.microbatch = microbatch
        return output

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PipelineError(
            "torch's schedule called a loss function of its own, and the loss is part of the last"
            " stage's graphs. Build it with loss_fn=stage.loss, stage the last one of"
            " pipe.stages()."
        )
