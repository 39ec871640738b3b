"""Running a forward-only program: the actions, messages and buffers are those of any step, and nothing waits for B."""

import torch

from zbcompile.distributed.ranks import Ranks
from zbcompile.program.output import Output
from zbcompile.runtime.engine import Executable, Made, StepInput, StepRuns, outputs_of
from zbcompile.runtime.engines import Engine
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.schedules.ir.schedule import Schedule


def run_forward(executable: Executable, given: StepInput, engine: Engine, channels: Schedule) -> Made:
    """The leaves of the output that this process's stages make. `channels` is the schedule of the training step, if
    there is one: channels that are opened now must serve it, too."""
    ranks, program = engine.ranks, executable.program
    recorder = engine.begin_recording(program, program.schedule) if given.record else None
    transport = ranks.transport(channels, program.schedule.microbatches, executable.buffers, executable.number)
    begin = StepRuns(executable, given, ranks, transport, recorder)
    runs = [begin.run_of(plan, Gradients({}, frozenset(), program.choices)) for plan in executable.plans]
    engine.carry_out(runs)
    if recorder is not None:
        engine.end_recording(recorder)
    shards = [run.vocabulary.shard for run in runs if run.vocabulary is not None]
    return outputs_of(runs) | {name: parts for shard in shards for name, parts in shard.outputs.items()}


def joined(made: Made, outputs: dict[int, Output]) -> dict[str, torch.Tensor]:
    """The leaves of `made` over these microbatches, whose rows are one batch; each program says what it returns."""
    chosen = {name: [parts[i] for i in outputs] for name, parts in made.items()}
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in chosen.items()}


def exchanged(
    own: dict[str, torch.Tensor], outputs: dict[int, Output], executable: Executable, ranks: Ranks, everywhere: bool
) -> dict[str, torch.Tensor] | None:
    """All leaves, on every rank or only on that of the last stage (None on others)."""
    program = executable.program
    if ranks.group is None:
        return own
    if program.vocabulary is not None and everywhere:
        return own  # every shard has made all of it
    last = program.rank_of(program.schedule.stages - 1)
    for name, (stage, _) in sorted(next(iter(outputs.values())).made.items()):
        source = program.rank_of(stage)
        if everywhere or source != last:
            own[name] = own[name].contiguous() if name in own else _empty(name, outputs, ranks)
            ranks.broadcast(own[name], source)
    return own if everywhere or ranks.rank == last else None


def _empty(name: str, outputs: dict[int, Output], ranks: Ranks) -> torch.Tensor:
    specs = [output.made[name][1] for output in outputs.values()]
    shape = specs[0].shape
    if len(specs) > 1:
        shape = (sum(spec.shape[0] for spec in specs), *shape[1:])
    return torch.empty(shape, dtype=getattr(torch, specs[0].dtype), device=ranks.device)
