"""Evaluation: the model's own output from forward passes alone, on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zbcompile.backends.types import Run
from zbcompile.compiler.pass_pipeline import Inference, compile_inference
from zbcompile.distributed.messages import Buffer, Message
from zbcompile.distributed.packing import laid_out
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import ReceiveBuffers, Transport
from zbcompile.model.batch import Batch
from zbcompile.model.seeds import undisturbed
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.stage_program import inference_piece, tensor_spec
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program
from zbcompile.runtime.nan_check import Checked
from zbcompile.runtime.stage_run import run_forward_only
from zbcompile.schedules.ir.actions import Action
from zbcompile.torch_private import pytree


@dataclass(frozen=True)
class EvaluationPlan:
    """How one shape of batch is evaluated: as `count` equal chunks, each through `inference`, under inspection if
    `inspect`. `runs` are the stages that ran here, ready to run again."""

    inference: Inference
    count: int
    inspect: bool
    runs: dict[int, Run] = field(default_factory=dict)

    def run(self, stage: int) -> Run:
        """The forward of a stage, as a function of one list."""
        if stage not in self.runs:
            piece = inference_piece(self.inference.stages[stage])
            self.runs[stage] = Checked(stage, piece) if self.inspect else boxed(piece.module).forward
        return self.runs[stage]


def plan_evaluation(model: nn.Module, batch: Batch, program: Program, inspect: bool) -> EvaluationPlan:
    """Compile the forward for this batch; `inspect` as `debug_nan` of `zbcompile.pipeline`.

    It runs in microbatches when every output has one row per sample; an output of another kind (a loss, say) is
    computed on the whole batch, so that it is what the model itself returns. So is a forward that changes buffers,
    which a batch changes once.
    """
    whole = compile_inference(model, batch.whole, program)
    wanted = program.schedule.microbatches
    count = max(n for n in range(1, wanted + 1) if batch.divides_into(n))
    if count == 1 or not _has_rows(whole, batch.size) or _changes_buffers(whole):
        return EvaluationPlan(whole, 1, inspect)
    chunk = compile_inference(model, batch.microbatch(0, count), program)
    fits = _has_rows(chunk, batch.size // count) and _rest(chunk) == _rest(whole)
    return EvaluationPlan(chunk, count, inspect) if fits else EvaluationPlan(whole, 1, inspect)


def _values(inference: Inference) -> dict[str, torch.Tensor]:
    """The fake tensor of every output leaf, by its index."""
    found: dict[str, torch.Tensor] = {}
    for stage in inference.stages:
        for slot, node in zip(stage.outputs, output_values(stage.module.graph), strict=True):
            if slot.kind == "output":
                found[slot.name] = node.meta["val"]
    return found


def _changes_buffers(inference: Inference) -> bool:
    return any(slot.kind == "mutation" for slot in inference.captured.outputs)


def _has_rows(inference: Inference, size: int) -> bool:
    return all(value.ndim > 0 and value.shape[0] == size for value in _values(inference).values())


def _rest(inference: Inference) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[1:]) for name, value in _values(inference).items()}


def evaluate(
    plan: EvaluationPlan, batch: Batch, program: Program, ranks: Ranks, resident: Mapping[Slot, torch.Tensor]
) -> Any:
    """Run the plan; every rank returns the model's output for the whole batch."""
    inputs = [batch.microbatch(i, plan.count).tensors for i in range(plan.count)]
    made: dict[str, list[torch.Tensor]] = {}
    transport = ranks.transport(program.schedule, plan.count, ReceiveBuffers(ranks.device))
    with undisturbed(ranks.device):
        for stage, microbatch in _order(program, ranks, plan.count):
            _forward(plan, program, ranks, transport, resident, inputs, made, stage, microbatch)
    with ranks.watch.position.waiting("the last sends"):
        transport.finish()
    leaves = {name: torch.cat(parts) if plan.count > 1 else parts[0] for name, parts in made.items()}
    with ranks.watch.position.waiting("the exchange of outputs"):
        return _rebuild(plan, _everywhere(plan, program, ranks, leaves))


def _order(program: Program, ranks: Ranks, count: int) -> list[tuple[int, int]]:
    """Stage by stage: a rank's first chunk for all microbatches, then its next. In one process, all stages in turn."""
    local = set(ranks.local)
    stages = [stage for stage in range(program.schedule.stages) if program.rank_of(stage) in local]
    return [(stage, microbatch) for stage in stages for microbatch in range(count)]


def _forward(
    plan: EvaluationPlan,
    program: Program,
    ranks: Ranks,
    transport: Transport,
    resident: Mapping[Slot, torch.Tensor],
    inputs: list[dict[str, torch.Tensor]],
    made: dict[str, list[torch.Tensor]],
    stage: int,
    microbatch: int,
) -> None:
    graph = plan.inference.stages[stage]
    values: dict[Slot, Any] = {**resident, **{Slot("input", p): t for p, t in inputs[microbatch].items()}}
    arriving = [slot for slot in graph.inputs if slot.kind == "activation"]
    message = Message("F", stage, microbatch)
    if stage and program.rank_of(stage - 1) not in ranks.local:
        nodes = [n for n in graph.module.graph.find_nodes(op="placeholder") if _arrives(n)]
        fresh = [Buffer(tensor_spec(n.meta["val"]), -1) for n in nodes]
        transport.post(message, fresh, program.rank_of(stage - 1))
    if stage:
        with ranks.watch.position.waiting(f"F{stage}.{microbatch}"):
            transport.wait(message)
        values.update(zip(arriving, transport.take(message), strict=True))
    _locate(ranks, program, stage, microbatch)
    results = run_forward_only(inference_piece(graph), plan.run(stage), values)
    for slot, value in results.items():
        if slot.kind == "output":
            made.setdefault(slot.name, []).append(value)
        elif slot.kind == "mutation":
            resident[Slot("buffer", slot.name)].copy_(value)
    if stage + 1 < program.schedule.stages:
        _pass_on(plan, program, ranks, transport, results, stage, microbatch)


def _locate(ranks: Ranks, program: Program, stage: int, microbatch: int) -> None:
    """Say where this process is, for whoever asks after a failure."""
    position = ranks.watch.position
    position.action = Action("F", stage, microbatch)
    if ranks.rank is None:
        position.rank = program.rank_of(stage)


def _arrives(node: torch.fx.Node) -> bool:
    return node.meta["slot"].kind == "activation"


def _pass_on(
    plan: EvaluationPlan,
    program: Program,
    ranks: Ranks,
    transport: Transport,
    results: Mapping[Slot, torch.Tensor],
    stage: int,
    microbatch: int,
) -> None:
    following = plan.inference.stages[stage + 1]
    holders = [n for n in following.module.graph.find_nodes(op="placeholder") if _arrives(n)]
    values = [laid_out(results[n.meta["slot"]], tensor_spec(n.meta["val"])) for n in holders]
    message, peer = Message("F", stage + 1, microbatch), program.rank_of(stage + 1)
    if peer in ranks.local:
        transport.deliver(message, values)
    else:
        transport.send(message, values, peer)


def _everywhere(
    plan: EvaluationPlan, program: Program, ranks: Ranks, leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if ranks.group is None:
        return leaves
    shared = {}
    for name, fake in sorted(_values(plan.inference).items()):
        owner = program.rank_of(plan.inference.output_stage[name])
        shape = (fake.shape[0] * plan.count, *fake.shape[1:]) if plan.count > 1 else tuple(fake.shape)
        own = leaves.get(name)
        value = own.contiguous() if own is not None else torch.empty(shape, dtype=fake.dtype, device=ranks.device)
        ranks.broadcast(value, owner)
        shared[name] = value
    return shared


def _rebuild(plan: EvaluationPlan, leaves: Mapping[str, torch.Tensor]) -> Any:
    captured = plan.inference.captured
    constant = captured.constant_leaves
    names = [slot.name for slot in captured.outputs if slot.kind == "output"]
    return pytree.tree_unflatten([leaves.get(n, constant.get(n)) for n in names], captured.structure)
