"""What is alive between actions is what the program says, byte for byte, and nothing else is."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zbcompile
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.distributed.transport import Transport
from zbcompile.engine.executable import BoundGraphs, plan_step
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.rank import RankRun
from zbcompile.engine.stage import StageRun, prepare_stage
from zbcompile.engine.step import interleave
from zbcompile.faults.rank_status import RankStatus
from zbcompile.model.seeds import undisturbed
from zbcompile.passes.graph.roles import Slot
from zbcompile.profiling.observation import ActionTimes
from zbcompile.program.program import Program
from zbcompile.schedules.ir.actions import Action

TARGETS = Path(__file__).parents[3] / "examples" / "targets.py"
MICROBATCHES, RANKS = 4, 2


class Births(TorchDispatchMode):
    """Notes every storage that any operation makes, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.born: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.born[_key(value)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> dict[int, int]:
        """Bytes of the storages that were born under this mode and live."""
        return {key: size for key, (storage, size) in self.born.items() if not storage.expired()}


def _key(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def storages(values: Iterable[Tensor | None]) -> dict[int, int]:
    return {_key(value): value.untyped_storage().nbytes() for value in values if value is not None}


@dataclass
class Auditor(ActionTimes):
    """After every action, or pair of them in one graph, compares what lives with what the program
    says."""

    births: Births = field(kw_only=True)
    mail: Transport = field(kw_only=True)
    ranks: list[RankRun] = field(default_factory=list)
    waiting: dict[tuple[int, int], str] = field(default_factory=dict)
    open_pair: Action | None = None
    checks: int = 0
    pairs: int = 0

    def begin(self, action: Action, rank: int) -> None:
        """Remembers that a pair has begun."""
        pairs = {pair[0]: pair[1] for pair in self.ranks[rank].program.merged}
        self.open_pair = pairs.get(action, self.open_pair)

    def end(self, action: Action, rank: int, held: int) -> None:
        """Checks what lives; what a pair sends in its middle is looked at when the pair is done."""
        if action.op in ("F", "B", "W", "BW"):
            self.waiting[action.stage, action.microbatch] = {"F": "kept", "B": "residue"}.get(
                action.op, ""
            )
        if action == self.open_pair:
            self.open_pair = None
            self.pairs += 1
        if self.open_pair is None:
            self._check([action])

    def _check(self, actions: Sequence[Action]) -> None:
        for rank in self.ranks:
            for stage in rank.runs.values():
                self._check_stage(stage)
        unknown = self.births.alive().keys() - self._known()
        assert not unknown, (
            f"after {actions} {[self.births.born[key][1] for key in unknown]} bytes live nowhere"
        )
        self.checks += 1

    def _check_stage(self, run: StageRun) -> None:
        """The registers of the microbatches that wait, against the manifest."""
        crossing = self.program.stages[run.index].crossing
        states = [state for (stage, _), state in self.waiting.items() if stage == run.index]
        expected = states.count("kept") * crossing.kept + states.count("residue") * crossing.residue
        everywhere = storages(
            [*run.stages[0].resident.values(), run.loss_factor, *_all(run.inputs)]
        )
        held = storages(value for frame in run.frames.values() for value in frame)
        assert sum(size for key, size in held.items() if key not in everywhere) == expected

    def _known(self) -> set[int]:
        """Storages that may live: the user's, those in registers and messages, losses, and
        gradients summed so far."""
        known: set[int] = set(
            storages(value for message in self.mail.boxes.values() for value in message)
        )
        for rank in self.ranks:
            known |= storages(value for values in rank.outbox.values() for value in values).keys()
            for run in rank.runs.values():
                known |= storages(value for frame in run.frames.values() for value in frame).keys()
                known |= storages([run.loss_factor, *run.losses.values()]).keys()
                known |= storages([*run.stages[0].resident.values(), *_all(run.inputs)]).keys()
                known |= storages(_sums(run.gradients)).keys()
        return known


def _all(inputs: Iterable[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    return (tensor for microbatch in inputs for tensor in microbatch.values())


def _sums(gradients: Gradients) -> Iterator[Tensor | None]:
    """Gradients that outlive a W: `.grad`, running sums, and of tied parameters one per microbatch
    in exact mode."""
    assert all(name in gradients.shared for name, each in gradients.items() if each.parts)
    yield from (parameter.grad for parameter in gradients.parameters.values())
    yield from (each.running for each in gradients.values())
    yield from (part for each in gradients.values() for part in each.parts.values())
    yield from (part for parts in gradients.parts.values() for part in parts.values())


@pytest.mark.mostly_slow(every=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("gpt", "zb-v", {"exact": True}),  # tied, with dropout
        ("gpt", "zb-h1", {"recompute": "full"}),
        ("llama", "zb-h1", {}),
        ("gpt", "dualpipe-v", {}),  # pairs: a forward and a backward in one graph
        ("unet", "1f1b", {}),
        ("unet", "zb-h1", {"exact": True}),
    ],
)
def test_nothing_lives_but_what_the_program_says(
    name: str, schedule: str, options: Mapping[str, Any]
) -> None:
    example = load_example(f"{TARGETS}:{name}")
    pipe = zbcompile.pipeline(
        example.model,
        schedule=schedule,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        loss=example.loss,
        **options,
    )
    batch = {key: torch.cat([value] * MICROBATCHES) for key, value in example.kwargs.items()}
    if example.loss is not None:
        batch["target"] = torch.cat([example.target] * MICROBATCHES)
    program = pipe.compile(
        *(torch.cat([value] * MICROBATCHES) for value in example.args), **batch
    ).program
    audited = audit(example, program)
    assert audited.checks >= 2 * RANKS * MICROBATCHES
    assert (audited.pairs > 0) == (schedule == "dualpipe-v")


def audit(example: zbcompile.Example, program: Program) -> Auditor:
    """Run a step of every rank in this process, each microbatch on the same inputs."""
    model, device = example.model, torch.device("cpu")
    resident = {Slot("constant", name): value for name, value in program.model.constants.items()}
    resident |= {Slot("parameter", name): value for name, value in model.named_parameters()}
    resident |= {Slot("buffer", name): value for name, value in model.named_buffers()}
    stages = {
        i: prepare_stage(stage, resident, device, program.random_until)
        for i, stage in enumerate(program.stages)
    }
    graphs = [BoundGraphs(program, stages)] * MICROBATCHES
    executable = plan_step(graphs, program.lowered, range(RANKS))
    inputs = [one_microbatch(example).tensors for _ in range(MICROBATCHES)]
    mail, births = Transport(), Births()
    order, plans = executable.ordered()
    auditor = Auditor(program, order, births=births, mail=mail)
    with births, undisturbed(device), torch.no_grad():
        factor = torch.ones(()) / MICROBATCHES
        for rank, plan in enumerate(plans):
            gradients = Gradients(dict(model.named_parameters()), program.shared, program.choices)
            runs = {
                i: StageRun(
                    [stages[i]] * MICROBATCHES, gradients, inputs, factor, list(range(MICROBATCHES))
                )
                for i in program.stages_of(rank)
            }
            auditor.ranks.append(RankRun(plan, runs, mail, RankStatus(), auditor))
        interleave(auditor.ranks)
    return auditor
