"""The request of an inspect command line, and its subject: an example or a directory, compiled and
predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from zbcompile.batches.example import Example
from zbcompile.cli.compile_arguments import Plan, compiled, example_of, schedule_of
from zbcompile.compiler.compile_example import CompiledExample, read_saved
from zbcompile.errors import PipelineError
from zbcompile.inspection.measured_report import StepComparison, compare_step
from zbcompile.passes.compile_step import Observer, no_observer
from zbcompile.passes.machine.hardware import Hardware
from zbcompile.prediction.predict import Basis, basis_of, hardware_of, require_costs
from zbcompile.program.directory import MANIFEST
from zbcompile.program.program import Program
from zbcompile.program.step_record import StepRecord, read_record
from zbcompile.progress import Say
from zbcompile.schedules import Schedule, Timeline, simulate
from zbcompile.schedules.visualization.write import ENDINGS

SCHEMA = "zbcompile.inspect/3"


@dataclass(frozen=True)
class Request(Plan):
    """The arguments of the command line; `python -m zbcompile.inspect --help` explains them."""

    costs: str
    graph: str | None
    graphs: Path | None
    passes: bool
    compare: str | None
    critical_path: bool
    timeline: Path | None
    measured: Path | None
    json: bool
    say: Say

    def __post_init__(self) -> None:
        """Raise for files that cannot be written or read, before anything is compiled."""
        if self.fake and self.costs == "measured":
            raise PipelineError("--costs measured runs the graphs for real; leave out --fake.")
        if self.graphs:
            self.graphs.mkdir(parents=True, exist_ok=True)
        if self.timeline and self.timeline.suffix not in ENDINGS:
            raise PipelineError(
                f"--timeline {self.timeline}: expected a file that ends in {', '.join(ENDINGS)}."
            )
        if self.timeline and not self.timeline.exists():
            self.timeline.touch()
            self.timeline.unlink()
        require_costs(self.costs)


@dataclass(frozen=True)
class Prediction:
    """A simulated step under the costs of `basis`. `speed`: FLOP/s of the nominal device whose
    seconds mean nothing, so that times are shown in FLOPs; None if the costs are those of a
    machine, or passes."""

    basis: Basis
    timeline: Timeline
    speed: float | None = None

    @property
    def unit(self) -> str:
        """The unit of the times in `shown`."""
        return "FLOP" if self.speed else self.basis.unit

    @cached_property
    def shown(self) -> Timeline:
        if self.speed is None:
            return self.timeline
        return simulate(self.timeline.schedule, self.timeline.costs.scaled(self.speed, "FLOP"))

    def for_file(self, file: Path) -> Timeline:
        """The timeline in the units of a picture."""
        return self.timeline if file.suffix == ".json" else self.shown


def predicted(program: Program, request: Request, basis: Basis | None = None) -> Prediction:
    """The step under the requested costs, or under those of `basis` if they are known."""
    basis, nominal = basis or basis_of(program, request.costs), Hardware.find("cpu-core")
    is_nominal = request.costs == "flops" and hardware_of(program).name == nominal.name
    return Prediction(
        basis,
        simulate(program.schedule, basis.costs),
        nominal.peak["float32"] if is_nominal else None,
    )


def compile_for(
    example: Example, schedule: Schedule, request: Request, observe: Observer = no_observer
) -> CompiledExample:
    """Compile `example`. `observe` is called after each pass."""
    request.say(
        f"capturing {type(example.model).__name__} for {schedule.name}, {schedule.stages} stages"
    )
    found = compiled(example, schedule, request, request.say, observe)
    return replace(found, program=replace(found.program, step=request.options.step))


class Subject:
    """What a request is about; each part is made when it is first asked for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.record: StepRecord | None = read_record(request.measured) if request.measured else None

    @property
    def is_saved(self) -> bool:
        """Whether the subject is a saved program, whose model is not available."""
        return (Path(self.request.target) / MANIFEST).exists()

    def require_model(self, options: Sequence[str]) -> None:
        """Raise PipelineError if there are such options and no model."""
        if self.is_saved and options:
            raise PipelineError(
                f"{self.request.target} is a compiled program: {', '.join(options)} needs its"
                " model. Leave it out, or inspect the function that makes the model."
            )

    @cached_property
    def example(self) -> Example:
        return example_of(self.request)

    @cached_property
    def schedule(self) -> Schedule:
        """The requested schedule, or with a record that of the record unless another is
        requested."""
        if self.is_saved:
            return self.inspected.program.schedule
        of_record = self.record is not None and "schedule" not in self.request.given
        return schedule_of(
            self.request, self.record.schedule if of_record and self.record else None
        )

    @cached_property
    def inspected(self) -> CompiledExample:
        if self.is_saved:
            return read_saved(Path(self.request.target))
        return compile_for(self.example, self.schedule, self.request)

    @cached_property
    def prediction(self) -> Prediction:
        return predicted(self.inspected.program, self.request)

    @cached_property
    def comparison(self) -> StepComparison | None:
        """The record next to its prediction: of a machine whose speed is unknown, at the speed of
        the record."""
        if self.record is None:
            return None
        program, now = self.inspected.program, self.prediction
        return compare_step(
            self.record, now.timeline, now.basis, program.manifest, rescale=now.speed is not None
        )
