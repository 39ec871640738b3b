"""An executable whose values lie at the places of a plan, so that each of its steps writes the same addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zbcompile.backends.placed import PlacedRun, place_in
from zbcompile.distributed.packing import Buffer, packed_buffer
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import ReceiveBuffers
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.runtime.executable import Executable
from zbcompile.runtime.memory_plan import MemoryPlan, plan_memory
from zbcompile.runtime.rank_plan import Instruction, instructions_of, plan_rank
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.runtime.step_memory import StepMemory, refuse
from zbcompile.schedules.ir.actions import Action


def require_recordable(executable: Executable, ranks: Ranks, loaded: bool) -> None:
    """Raise PipelineError for a step that one recording cannot hold."""
    program, graphs = executable.program, executable.graphs
    slots = {slot.kind for stage in program.stages for piece in stage.pieces.values() for slot in piece.outputs}
    reasons = {
        "it was loaded, and saved graphs do not say which of their values share memory": loaded,
        "its microbatches have several shapes or answers": any(each is not graphs[0] for each in graphs),
        "forward asks about the values of its inputs": program.guards is not None,
        "forward has an assert, which waits for its value": "check" in slots,
        "it may have to be done again with more room for the tokens of an expert": "fits" in slots,
        "it draws random numbers (dropout), which a recording would draw again": any(s.random for s in program.stages),
        'the output layer is sharded (pass vocab="off")': program.vocabulary is not None,
        "the mesh has replicas or other dimensions than the pipeline": len(ranks.members) > ranks.count,
        "it returns outputs besides its loss": program.output is not None,
    }
    refuse(reason for reason, holds in reasons.items() if holds)


def with_places(executable: Executable, device: torch.device, gradients: dict[str, torch.Tensor]) -> Executable:
    """`executable` with every value of this process's ranks at its place, and `.grad` at those in `gradients`, which it
    fills. Raises PipelineError if a value has no place."""
    program, graphs = executable.program, executable.graphs
    apart = [{i: stage.with_runs({}) for i, stage in each.stages.items()} for each in graphs]
    sums = executable.first.sums

    def stage_of(action: Action) -> CompiledStage:
        return apart[action.microbatch][action.stage]

    ordered = {plan.rank: instructions_of(program, plan.rank, stage_of) for plan in executable.plans}
    plans = {r: plan_memory(each, lambda a: stage_of(a).program, program.shared) for r, each in ordered.items()}
    blocks = {rank: torch.empty(plan.size, dtype=torch.uint8, device=device) for rank, plan in plans.items()}
    for rank, memory in plans.items():
        for action, made in memory.results.items():
            apart[action.microbatch][action.stage] = _with_run(stage_of(action), action, made, blocks[rank])
    buffers = ReceiveBuffers(device, placed=True)
    placed = tuple(replace(each, stages=own, buffers=buffers) for each, own in zip(graphs, apart, strict=True))
    found = []
    for rank in plans:
        plan, posts = plan_rank(program, rank, apart, sums), _Posts(plans[rank], blocks[rank], buffers)
        steps = tuple(tuple(map(posts.placed, step)) for step in plan.instructions)
        found.append(replace(plan, instructions=steps))
    kept = StepMemory(device, plans, blocks, gradients)
    return replace(executable, graphs=placed, plans=tuple(found), memory=kept, ordered={})


def _with_run(
    stage: CompiledStage, action: Action, made: Mapping[str, Sequence[int | None]], block: torch.Tensor
) -> CompiledStage:
    """`stage` with the pass of `action` writing its results into `block`."""
    piece = stage.program.pieces[action.op]
    values = {node.name: node.meta["val"] for node in piece.module.graph.nodes if node.name in made}
    places = {name: _places(values[name], offsets, block) for name, offsets in made.items()}
    return stage.with_runs({action.op: PlacedRun(piece, places)})


def _places(value: object, offsets: Sequence[int | None], block: torch.Tensor) -> list[torch.Tensor | None]:
    both = zip(tensors_of(value), offsets, strict=True)
    return [None if offset is None else place_in(block, like, offset) for like, offset in both]


@dataclass(frozen=True)
class _Posts:
    """Gives the receives of a rank the places of its plan; each has a buffer of its own."""

    plan: MemoryPlan
    block: torch.Tensor
    buffers: ReceiveBuffers

    def placed(self, instruction: Instruction) -> Instruction:
        offsets = self.plan.received.get(instruction.action, ())
        specs = [spec for spec, _ in instruction.buffers]
        return instruction._replace(buffers=tuple(map(self._buffer, specs, offsets)))

    def _buffer(self, spec: TensorSpec, offset: int) -> Buffer:
        buffer = Buffer(spec, len(self.buffers.made))
        self.buffers.made[buffer] = place_in(self.block, packed_buffer(spec, torch.device("meta")), offset)
        return buffer
