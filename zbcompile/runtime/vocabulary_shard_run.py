"""Running one vocabulary shard: its graphs, what waits between them, and where its gradients go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.torch_private import boxed
from zbcompile.passes.vocabulary.shard_program import (
    COEFFICIENTS,
    GATHERED,
    GRADIENT,
    HIDDEN,
    LOOKED_UP,
    OF_LOOKUP,
    STATISTICS,
    TANGENT,
    VocabularyProgram as VocabularyGraphs,
)

Values = dict[Slot, torch.Tensor]


@dataclass(frozen=True)
class CompiledShard:
    """One shard ready to run; `resident` has its rows of the parameters and whatever data does not change."""

    rank: int
    program: VocabularyGraphs
    calls: Mapping[str, Run]
    resident: Mapping[Slot, torch.Tensor]


def prepare_shard(
    program: VocabularyGraphs, rank: int, resident: Mapping[Slot, torch.Tensor], runs: Mapping[str, Run] | None = None
) -> CompiledShard:
    """Bind a shard's graphs to its tensors. `runs` are what a backend made of them, by pass."""
    calls = runs or {name: boxed(piece.module).forward for name, piece in program.pieces[rank].items()}
    return CompiledShard(rank, program, calls, resident)


@dataclass
class ShardRun:
    """A shard during one step: `states[microbatch]` holds what waits for its next pass, `looked_up[microbatch]` the
    rows for the first stage, if that is here, `spreads[microbatch]` their gradient; `outputs[leaf]` the parts of the
    output of a forward alone, by microbatch.

    `accumulator` gives the tensor that the gradient of a parameter's rows is added into, `factor` is the tangent of a
    microbatch's loss.
    """

    shard: CompiledShard
    accumulator: Callable[[str], torch.Tensor]
    inputs: list[dict[str, torch.Tensor]]
    factor: torch.Tensor
    states: dict[int, Values] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    looked_up: dict[int, torch.Tensor] = field(default_factory=dict)
    spreads: dict[int, torch.Tensor] = field(default_factory=dict)

    def receive(self, microbatch: int, hidden: torch.Tensor) -> None:
        """Store the last stage's output, which has arrived or was made here."""
        self.states[microbatch] = {HIDDEN: hidden}

    def scan(self, microbatch: int) -> None:
        """S: logits and statistics of the shard's words."""
        self.states[microbatch] |= self._call("S", microbatch)

    def statistics(self, microbatch: int) -> torch.Tensor:
        """What this shard sends to all others [statistics, tokens]."""
        return self.states[microbatch].pop(STATISTICS)

    def combine(self, microbatch: int, gathered: torch.Tensor) -> torch.Tensor | None:
        """The statistics [shards, statistics, tokens] are here; with one barrier its part of the input gradient."""
        self.states[microbatch][GATHERED] = gathered
        made = self._call("STATS", microbatch)
        for slot, value in made.items():
            if slot.kind == "output":
                self.outputs.setdefault(slot.name, {})[microbatch] = value
            elif slot.kind == "loss":
                self.losses[microbatch] = value
        state, update = self.states.pop(microbatch), self.shard.program.pieces[self.shard.rank].get("T")
        if update is not None:
            kept = {slot: value for slot, value in state.items() if slot in set(update.inputs)}
            self.states[microbatch] = {**kept, COEFFICIENTS: made[COEFFICIENTS]}
        return made.get(GRADIENT)

    def update(self, microbatch: int) -> None:
        """T: the gradients of the shard's rows; with two barriers its part of the input gradient waits for `part`."""
        made = self._call("T", microbatch, last=True)
        if GRADIENT in made:
            self.states[microbatch] = {GRADIENT: made[GRADIENT]}

    def part(self, microbatch: int) -> torch.Tensor:
        """T's part of the input gradient."""
        return self.states.pop(microbatch)[GRADIENT]

    def look_up(self, microbatch: int) -> torch.Tensor:
        """LOOKUP: the rows of the embedding that are this shard's, zeros for all other tokens."""
        return self._call("LOOKUP", microbatch)[LOOKED_UP]

    def spread(self, microbatch: int) -> None:
        """SPREAD: add the gradient of this shard's rows of the embedding."""
        self._call("SPREAD", microbatch)
        del self.spreads[microbatch]

    def _call(self, name: str, microbatch: int, last: bool = False) -> Values:
        """Run a pass; the `last` one of a microbatch frees what it reads as it goes."""
        piece = self.shard.program.pieces[self.shard.rank][name]
        values = [self._value(slot, microbatch) for slot in piece.inputs]
        if last:
            del self.states[microbatch]
        results = self.shard.calls[name](values)
        return dict(zip(piece.outputs, results, strict=True))

    def _value(self, slot: Slot, microbatch: int) -> torch.Tensor:
        if slot == TANGENT:
            return self.factor
        if slot.kind == "accumulator":
            return self.accumulator(slot.name)
        if slot == OF_LOOKUP:
            return self.spreads[microbatch]
        if slot.kind == "input":
            return self.inputs[microbatch][slot.name]
        return self.shard.resident[slot] if slot in self.shard.resident else self.states[microbatch][slot]

    def live_bytes(self) -> int:
        """Bytes of the distinct storages that wait."""
        waiting = [value for state in [*self.states.values()] for value in [*state.values()]]
        waiting += [*self.looked_up.values(), *self.spreads.values()]
        return storage_bytes(waiting)

    def check_empty(self) -> None:
        """Require that no value waits after a step."""
        waiting = {*self.states, *self.looked_up, *self.spreads}
        if waiting:
            raise PipelineError(
                f"the vocabulary shard of rank {self.shard.rank} ended the step with microbatches "
                f"{sorted(waiting)} still waiting; the schedule must give every S its T, and every F its LOOKUP."
            )
