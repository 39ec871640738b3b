"""The request of an inspect command line, and the steps that its commands share: compiling, predicting."""

from dataclasses import dataclass, replace
from pathlib import Path

from zbcompile.cli.compile_arguments import Plan, compiled
from zbcompile.compiler.compile_example import Inspected
from zbcompile.errors import PipelineError
from zbcompile.inspection.idle_report import require_rank
from zbcompile.model.example import Example
from zbcompile.passes.pass_list.run_passes import Observer
from zbcompile.prediction.predict import Basis, basis_of, require_costs
from zbcompile.progress import Say
from zbcompile.schedules import Schedule, Timeline, simulate
from zbcompile.schedules.visualization.write import ENDINGS

FORMATS = ("text", "json", "dot", "html")


@dataclass(frozen=True)
class Request(Plan):
    """The arguments of the command line; `python -m zbcompile.inspect --help` explains them."""

    costs: str
    fused: bool
    replicas: int
    zero: int
    graph: str | None
    graphs: Path | None
    diff: list[str] | None
    passes: bool
    stage: int | None
    compare: str | None
    explain_idle: int | None
    critical_path: bool
    timeline: Path | None
    measured: Path | None
    quick: bool
    thorough: bool
    format: str
    json: bool
    say: Say


def refuse_combinations(request: Request) -> None:
    """Raise PipelineError for options that do not go together."""
    causes = request.explain_idle is not None or request.critical_path or request.diff or request.passes
    if request.stage is not None and not request.diff:
        raise PipelineError("--stage says which stage --diff shows; for one graph use --graph STAGE.PASS.")
    if request.json and (request.graph or request.graphs or request.timeline or (causes and not request.passes)):
        raise PipelineError("--json writes the summary, the comparison or --passes; leave out one of the two.")
    if request.format != "text" and not (request.graph or request.graphs):
        raise PipelineError(f"--format {request.format} is for --graph or --graphs; the summary has --json.")
    if request.format == "html" and request.graph:
        raise PipelineError("--format html shows all graphs on one page; ask for it with --graphs DIR.")
    if request.fake and request.costs == "measured":
        raise PipelineError("--costs measured runs the graphs for real; leave out --fake.")
    if request.measured and (request.graph or request.graphs or request.diff or request.passes or request.compare):
        raise PipelineError("--measured shows a recorded step: alone, or with --timeline, --explain-idle or --json.")
    if request.timeline and (request.graph or request.graphs or causes):
        raise PipelineError("--timeline draws the step, or with --compare several; leave out one of the two.")


def refuse_files(request: Request) -> None:
    """Raise for files that cannot be written or read, before anything is compiled; make the directory of --graphs."""
    if request.graphs:
        request.graphs.mkdir(parents=True, exist_ok=True)
    if request.timeline and request.timeline.suffix not in ENDINGS:
        raise PipelineError(f"--timeline {request.timeline}: expected a file that ends in {', '.join(ENDINGS)}.")
    if request.timeline and not request.timeline.exists():
        request.timeline.touch()
        request.timeline.unlink()
    require_costs(request.costs)


def refuse_places(request: Request, schedule: Schedule, graph: tuple[int, str] | None) -> None:
    """Raise PipelineError if `schedule` does not have the stage or rank."""
    stage = request.stage if graph is None else graph[0]
    if stage is not None:
        require_stage(schedule, stage)
    if request.explain_idle is not None:
        require_rank(schedule, request.explain_idle)


def require_stage(schedule: Schedule, stage: int) -> None:
    """Raise PipelineError if the stage does not exist."""
    if not 0 <= stage < schedule.stages:
        raise PipelineError(
            f"stage {stage} does not exist: {schedule.name} on {schedule.ranks} ranks has stages 0 to "
            f"{schedule.stages - 1}."
        )


def compile_for(example: Example, schedule: Schedule, request: Request, observe: Observer | None = None) -> Inspected:
    """Compile `example`. `observe` sees what each pass makes."""
    request.say(f"capturing {type(example.model).__name__} for {schedule.name}, {schedule.stages} stages")
    found = compiled(example, schedule, request, request.say, observe)
    return replace(found, program=replace(found.program, step=request.options.step))


def predicted(inspected: Inspected, request: Request) -> tuple[Timeline, Basis]:
    """The step under the costs that were asked for."""
    basis = basis_of(inspected.program, request.costs, request.fused)
    return simulate(inspected.program.schedule, basis.costs), basis
