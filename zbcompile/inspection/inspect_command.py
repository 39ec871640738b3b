"""The inspect command: what zbcompile would compile a model to, without running it."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from zbcompile.batches.example import Example
from zbcompile.cli.command_line import split_options
from zbcompile.cli.compile_arguments import Plan, compiled, example_of, schedule_of
from zbcompile.compiler.compile_example import CompiledExample, read_saved
from zbcompile.errors import PipelineError
from zbcompile.inspection.compared_schedules import compare, compared_names
from zbcompile.inspection.graphs import (
    PassLog,
    graph_table,
    pass_table,
    require_stage,
    stage_and_pass,
    write_graphs,
)
from zbcompile.inspection.idle_report import critical_table
from zbcompile.inspection.measured_report import StepComparison, compare_step
from zbcompile.inspection.report import Summary
from zbcompile.passes.compile_step import Observer, no_observer
from zbcompile.prediction.predict import CostSource, load_costs, require_costs
from zbcompile.program.directory import MANIFEST
from zbcompile.program.step_record import StepRecord, read_record
from zbcompile.progress import Say
from zbcompile.schedules import Schedule, Timeline, simulate, write_comparison, write_picture
from zbcompile.schedules.visualization.write import ENDINGS
from zbcompile.tables import Figure, Table, to_data, to_text

SCHEMA = "zbcompile.inspect/4"


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
        """Raises for files that cannot be written or read, before anything is compiled."""
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


def run(args: argparse.Namespace, say: Say) -> None:
    """Prints the requested tables, or the summary."""
    request = Request(**split_options(args), say=say)
    tables = list(Inspection(request).tables())
    if request.json:
        print(json.dumps({"schema": SCHEMA, **to_data(tables)}, indent=1))
    else:
        print(to_text(tables).rstrip("\n"))


class Inspection:
    """The results that a request needs. Each one is computed at its first use."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.record: StepRecord | None = read_record(request.measured) if request.measured else None

    def tables(self) -> Iterator[Table]:
        """Yields the requested tables, or those of the summary."""
        request, record = self.request, self.record
        self._require_model(request.changed)
        self._require_model([f"--{name}" for name in ("passes", "compare") if vars(request)[name]])
        names = compared_names(request.compare or "")
        if request.graph:
            require_stage(self.schedule, stage_and_pass(request.graph)[0])
        if self.comparison is not None:
            yield from self.comparison.tables()
        if request.graph:
            yield graph_table(self.compiled, *stage_and_pass(request.graph))
        if request.graphs:
            yield _files(write_graphs(self.compiled, request.graphs))
        if request.passes:
            log = PassLog()
            self.compile(request, self.schedule, log)
            yield pass_table(log)
        if names:
            table, steps = compare(self.compile, request, names)
            yield table
            if request.timeline:
                yield _files([write_comparison(steps, request.timeline)])
        elif request.timeline:
            yield _files([self._draw(request.timeline)])
        if request.critical_path:
            yield critical_table(self.comparison.measured if self.comparison else self.timeline)
        sections = ("graph", "graphs", "passes", "compare", "timeline", "critical_path")
        if record is None and not any(vars(request)[name] for name in sections):
            yield from Summary(self.compiled, self.costs).tables()

    def _draw(self, file: Path) -> Path:
        """Draws the step, or a recorded step together with its prediction."""
        if self.comparison is None:
            return write_picture(self.timeline, file)
        if file.suffix == ".json":
            return write_picture(self.comparison.measured, file)
        return write_comparison([self.comparison.predicted, self.comparison.measured], file)

    @property
    def _is_saved(self) -> bool:
        """True for a saved program, whose model is not available."""
        return (Path(self.request.target) / MANIFEST).exists()

    def _require_model(self, options: Sequence[str]) -> None:
        if self._is_saved and options:
            raise PipelineError(
                f"{self.request.target} is a compiled program: {', '.join(options)} needs its"
                " model. Leave it out, or inspect the function that makes the model."
            )

    @cached_property
    def example(self) -> Example:
        return example_of(self.request)

    @cached_property
    def schedule(self) -> Schedule:
        """The requested schedule; that of a record unless another one is requested."""
        if self._is_saved:
            return self.compiled.program.schedule
        recorded = self.record is not None and "schedule" not in self.request.keywords
        return schedule_of(self.request, self.record.schedule if recorded and self.record else None)

    @cached_property
    def compiled(self) -> CompiledExample:
        if self._is_saved:
            return read_saved(Path(self.request.target))
        return self.compile(self.request, self.schedule)

    def compile(
        self, request: Plan, schedule: Schedule, observe: Observer = no_observer
    ) -> CompiledExample:
        """Compiles the example for a schedule. `observe` is called after each pass."""
        name, report = type(self.example.model).__name__, self.request.say
        report(f"capturing {name} for {schedule.name}, {schedule.stages} stages")
        example = compiled(self.example, schedule, request, report, observe)
        return replace(example, program=replace(example.program, step=request.options.step))

    @cached_property
    def costs(self) -> CostSource:
        return load_costs(self.compiled.program, self.request.costs)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.compiled.program.schedule, self.costs.costs)

    @cached_property
    def comparison(self) -> StepComparison | None:
        if self.record is None:
            return None
        manifest = self.compiled.program.manifest
        return compare_step(self.record, self.timeline, self.costs, manifest)


def _files(paths: Sequence[Path]) -> Table:
    rows = [[Figure("file", str(path))] for path in paths]
    return Table("files", rows=rows, picture="\n".join(map(str, paths)))
