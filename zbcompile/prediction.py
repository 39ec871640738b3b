"""What a step will take and hold, predicted from the compiled graphs without running them."""

from dataclasses import dataclass, replace
from pathlib import Path

from zbcompile.errors import PipelineError
from zbcompile.passes.costs import machine_for
from zbcompile.program import Program
from zbcompile.schedules import Costs, simulate
from zbcompile.schedules.actions import SEND_B, SEND_F, flatten
from zbcompile.schedules.timeline import Timeline
from zbcompile.vocabulary_compile import with_vocabulary_costs

NAMED_COSTS = ("flops", "uniform")


@dataclass(frozen=True)
class Basis:
    """Costs and where they are from: `unit` of the times ("s" or "passes"), `text` for a reader."""

    costs: Costs
    unit: str
    text: str


def basis_of(program: Program, source: str) -> Basis:
    """The costs called `source`: "flops", "uniform", or a JSON file as `Costs.to_json` writes it (times in seconds).

    Memory is always that of the graphs, in bytes. Raises PipelineError or ScheduleError for a file that does not fit.
    """
    if source == "flops":
        speed = machine_for(device_of(program)).flops_per_second
        return Basis(flop_costs(program), "s", f"from FLOPs at {speed / 1e9:g} GFLOP/s, messages free")
    if source == "uniform":
        return Basis(
            _with_memory(_equal_costs(program), program), "passes", "every pass takes 1 (empty ones 0), messages free"
        )
    return Basis(_with_memory(_from_file(source, len(program.stages)), program), "s", f"times from {source}")


def _equal_costs(program: Program) -> Costs:
    """Every pass takes 1; one whose graph computes nothing (a stage without parameters has no W) takes 0."""
    forward, backward, weight = (
        tuple(int(not stage.pieces[op].empty) for stage in program.stages) for op in ("F", "B", "W")
    )
    return Costs(forward, backward, weight)


def flop_costs(program: Program) -> Costs:
    """Seconds of F, B and W from their FLOPs at the machine's nominal speed; a pass without contractions takes 0."""
    speed = machine_for(device_of(program)).flops_per_second
    forward, backward, weight = (tuple(stage.flops[op] / speed for stage in program.stages) for op in ("F", "B", "W"))
    costs = _with_memory(Costs(forward, backward, weight), program)
    if program.vocabulary is None:
        return costs
    return with_vocabulary_costs(costs, program.schedule, program.vocabulary, speed)


def left_on_last(costs: Costs) -> Costs:
    """`costs` with the output layer whole on the last stage: what S and T of all shards take together, in thirds."""
    third = (sum(costs.vocab_s) + sum(costs.vocab_t)) / 3
    forward, backward, weight = (
        (*times[:-1], times[-1] + third) for times in (costs.forward, costs.backward, costs.weight)
    )
    none = (0.0,) * costs.stages
    return replace(
        costs, forward=forward, backward=backward, weight=weight, vocab_s=none, vocab_t=none, vocab_state=none
    )


def _with_memory(costs: Costs, program: Program) -> Costs:
    stages = program.stages
    return replace(
        costs,
        activation=tuple(stage.crossing.kept for stage in stages),
        residue=tuple(stage.crossing.residue for stage in stages),
        message=tuple(stage.send_bytes for stage in stages),
    )


def _from_file(path: str, stages: int) -> Costs:
    if not Path(path).is_file():
        raise PipelineError(f"--costs {path}: no such file; expected {', '.join(NAMED_COSTS)} or a JSON file of costs.")
    return Costs.from_json(Path(path).read_text(encoding="utf-8")).resized(stages)


def device_of(program: Program) -> str:
    """The device type that the graphs compute on."""
    return next(
        node.meta["val"].device.type for node in program.stages[0].pieces["F"].module.graph.find_nodes(op="placeholder")
    )


def predict(program: Program, costs: Costs) -> Timeline:
    """Simulate the program's schedule under `costs`."""
    return simulate(program.schedule, costs)


@dataclass(frozen=True)
class Messages:
    """How many messages all ranks send in a step, and how many bytes."""

    count: int
    bytes: int


def count_messages(program: Program) -> Messages:
    """The messages of one step between different ranks. One message may carry several tensors."""
    sends = [a for order in program.lowered.programs for a in flatten(order) if a.op in (SEND_F, SEND_B)]
    forward = [stage.send_bytes for stage in program.stages]
    backward = [sum(spec.bytes for spec in stage.gradients_out.values()) for stage in program.stages]
    return Messages(len(sends), sum((forward if a.op == SEND_F else backward)[a.stage] for a in sends))
