"""`python -m zbcompile.schedules`: list schedules, show, check, compare. No torch, no GPU."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zbcompile.amounts import plain
from zbcompile.progress import Progress, Say, silent
from zbcompile.schedules.checking.schedule_rules import check
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.interlaced import interlaced
from zbcompile.schedules.generators.registry import AUTO, FAMILIES, find, names
from zbcompile.schedules.generators.vocabulary_insertion import textbook_costs, with_vocabulary
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES, load, save
from zbcompile.schedules.ir.schedule import Schedule, format_schedule
from zbcompile.schedules.lowering.lower import lower
from zbcompile.schedules.searching.by_name import build
from zbcompile.schedules.simulation.timeline import Timeline, simulate
from zbcompile.schedules.visualization.step_tables import rank_table, step_table
from zbcompile.schedules.visualization.text import format_timeline, summary
from zbcompile.schedules.visualization.write import ENDINGS, write_comparison, write_picture
from zbcompile.tables import Figure, grid
from zbcompile.untrusted_text import read_json

INTERLACED = "interlaced"  # no name of `build`: it needs vocabulary layers to interlace
EXAMPLES = """examples:
  python -m zbcompile.schedules list
  python -m zbcompile.schedules show zb-v --ranks 4 --microbatches 8
  python -m zbcompile.schedules show zb-h1 --ranks 4 --microbatches 8 --times 10,12,8 --comm 1 --picture step.html
  python -m zbcompile.schedules show edited.csv --lowered
  python -m zbcompile.schedules check edited.csv other.json --memory-limit 4
  python -m zbcompile.schedules compare 1f1b zb-h1 zb-v --ranks 8 --microbatches 24 --costs costs.json
  python -m zbcompile.schedules compare 1f1b zb-h1 zb-v --picture compared.svg
  python -m zbcompile.schedules compare 1f1b interlaced --barriers 1

A costs file is a JSON object with a list per stage, e.g. {"forward": [1, 1], "backward": [1, 1], "weight": [1, 1],
"comm": 0.1}; neighbours are merged, or stages cut evenly, for schedules with another number of stages.
exit codes: 0 done, 1 an impossible schedule or an unreadable file, 2 wrong arguments
"""


def main(arguments: Sequence[str] | None = None, say: Say = silent) -> int:
    """Run one command line and return the exit code. `say` receives progress messages."""
    options = _parser().parse_args(arguments)
    say(f"zbcompile schedules {options.command.__name__.removeprefix('_')}")
    try:
        options.command(options)
    except BrokenPipeError:  # the reader of the pipe (`| head`) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ScheduleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m zbcompile.schedules",
        description="Pipeline schedules: list them, show one, check files, compare several, draw pictures.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list all schedules and what each requires")
    listing.set_defaults(command=_list)
    show = commands.add_parser("show", help="one schedule: its orders, its figures, where its time goes")
    show.add_argument("schedule", help="a name in any spelling, or a file (.csv, .json)")
    show.add_argument("--lowered", action="store_true", help="include SEND and RECV")
    show.add_argument("--weight-order", action="store_true", help="the order in which weight gradients accumulate")
    show.add_argument("--time", action="store_true", help="draw to a time scale instead of step by step")
    show.set_defaults(command=_show)
    checking = commands.add_parser("check", help="prove that orders in files are complete, legal and free of deadlock")
    checking.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a schedule, or one with its messages")
    checking.add_argument("--memory-limit", type=float, metavar="X", help="for activations, in their unit in the costs")
    checking.set_defaults(command=_check)
    compare = commands.add_parser("compare", help="a table of several schedules on the same model")
    compare.add_argument("schedules", nargs="*", metavar="schedule", help="names or files (default: all names)")
    compare.add_argument("--picture", metavar="FILE", help="draw all on one time axis: .txt, .svg or .html")
    compare.add_argument("--sort", choices=("given", "makespan", "cost", "memory"), default="given")
    compare.set_defaults(command=_compare)
    show.add_argument("--picture", action="append", default=[], metavar="FILE", help=f"write {', '.join(ENDINGS)}")
    show.add_argument("--save", metavar="FILE", help="write the schedule itself: .csv or .json")
    for command in (show, compare):
        add = command.add_argument
        add("--ranks", type=_count, default=4, metavar="N", help="default 4")
        add("--microbatches", type=_count, default=8, metavar="N", help="default 8")
        add("--memory-limit", type=float, metavar="X", help="for zb-1p and zb-2p, in units of activation")
        add("--chunks", type=_count, metavar="N", help="stages per rank, for the interleaved schedules")
        add("--barriers", type=int, choices=(1, 2), help="insert vocabulary passes S and T with this many barriers")
    for command in (show, checking, compare):
        _add_model_arguments(command)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--costs", type=Path, metavar="FILE", help="per stage, as JSON (`--help` without a command)")
    add("--times", type=_times, default=(1, 1, 1), metavar="F,B,W", help="times of a rank's share of the model")
    add("--comm", type=float, default=0, metavar="X", help="time of a hop between ranks; default 0")
    add("--residue", type=float, metavar="X", help="memory kept from B to W, if F to B keeps 1; default 1")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _times(text: str) -> tuple[float, float, float]:
    parts = [float(part) for part in text.split(",")]
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} numbers; expected three: F,B,W")
    forward, backward, weight = parts
    return forward, backward, weight


def _step(text: str, options: argparse.Namespace) -> tuple[Schedule, Costs]:
    """A schedule by its name or file, and the costs of the model on its stages."""
    if Path(text).suffix in ENDS_OF_SCHEDULES:
        schedule = load(text).compute_only()
        return schedule, _model(options, schedule.ranks).resized(schedule.stages)
    if text == INTERLACED:
        schedule = interlaced(options.ranks, options.microbatches)
        return schedule, _with_shards(_model(options, options.ranks).resized(schedule.stages))
    chunks = options.chunks if find(text).free_chunks else None
    stages = build(text, options.ranks, options.microbatches, chunks=chunks).stages
    costs = _model(options, options.ranks).resized(stages)
    schedule = build(text, options.ranks, options.microbatches, costs, options.memory_limit, chunks)
    if options.barriers is None:
        return schedule, costs
    costs = _with_shards(costs)
    return with_vocabulary(schedule, options.barriers, costs), costs


def _with_shards(costs: Costs) -> Costs:
    """The textbook's times of S and T, if the costs have none."""
    if any(costs.vocab_s):
        return costs
    textbook = textbook_costs(costs.stages)
    return replace(costs, vocab_s=textbook.vocab_s, vocab_t=textbook.vocab_t)


def _model(options: argparse.Namespace, ranks: int) -> Costs:
    """The costs that all schedules run under: those of the file, or equal stages for every rank."""
    if options.costs is not None:
        return Costs.from_dict(read_json(options.costs, ScheduleError))
    forward, backward, weight = options.times
    return Costs.uniform(ranks, forward, backward, weight, comm=options.comm, residue=options.residue)


def _list(options: argparse.Namespace) -> None:
    rows = [(f.name, f.placement, f"{f.chunks}{' or more' * f.free_chunks}", f.rule.text) for f in FAMILIES]
    rows.append((AUTO.name, "any", "1 or more", AUTO.rule.text))
    heads = ("schedule", "placement", "stages per rank", "microbatches")
    print(grid([[*map(Figure, heads, row)] for row in rows]))
    print(f"\n`show` and `compare` also know {INTERLACED}: 1F1B whose vocabulary layers all ranks run at the same time")


def _show(options: argparse.Namespace) -> None:
    schedule, costs = _step(options.schedule, options)
    check(schedule)  # says what is wrong with an order more exactly than `lower`
    lowered = lower(schedule)
    report = check(lowered)
    timeline = simulate(schedule, costs)
    width = None if not sys.stdout.isatty() else os.get_terminal_size().columns
    if options.time:
        print(format_timeline(timeline, width))
    else:
        print(format_schedule(lowered if options.lowered else schedule, width=width))
        print(summary(timeline))
    print()
    print(grid(rank_table(timeline, receive_buffers=report.receive_buffers or ()).rows))
    if options.weight_order:
        orders = ((stage, " ".join(map(str, schedule.weight_order(stage)))) for stage in range(schedule.stages))
        print("\n" + grid([[Figure("stage", stage), Figure("weight gradients accumulate", o)] for stage, o in orders]))
    limits = () if options.memory_limit is None else (options.memory_limit,) * schedule.ranks
    _write(replace(timeline, memory_limits=limits), lowered if options.lowered else schedule, options)


def _check(options: argparse.Namespace) -> None:
    for file in options.files:
        try:
            program = load(file)
            schedule = program.compute_only()
            costs = _model(options, schedule.ranks).resized(schedule.stages)
            check(schedule, costs, options.memory_limit)  # says what is wrong with an order more exactly than `lower`
            report = check(program if program.is_lowered else lower(schedule), costs, options.memory_limit)
        except ScheduleError as error:
            raise ScheduleError(f"{file}: {error}") from None
        memory, buffers = (max(each) for each in (report.peak_memory, report.receive_buffers or (0,)))
        size = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches, {schedule.placement} placement"
        needs = f"peak memory {plain(memory, 5)}, at most {buffers} receives at once"
        print(f"{file}: complete, legal and free of deadlock: {size}, {needs}")


def _write(timeline: Timeline, program: Schedule, options: argparse.Namespace) -> None:
    for path in options.picture:
        print(f"wrote {write_picture(timeline, path)}")
    if options.save:
        save(program, options.save)
        print(f"wrote {options.save}")


def _compare(options: argparse.Namespace) -> None:
    timelines, refused = [], []
    for text in options.schedules or names():
        try:
            schedule, costs = _step(text, options)
            check(schedule)
            timelines.append(simulate(schedule, costs))
        except ScheduleError as error:
            if options.schedules:
                raise
            refused.append(str(error))
    key = {"makespan": lambda t: t.makespan, "cost": lambda t: t.cost, "memory": lambda t: max(t.peak_memory)}
    shown = timelines if options.sort == "given" else sorted(timelines, key=key[options.sort])
    print(grid(step_table(shown).rows))
    for reason in refused:
        print(f"left out: {reason}")
    if options.picture:
        print(f"wrote {write_comparison(timelines, options.picture)}")


if __name__ == "__main__":
    with Progress("zbcompile schedules") as say:
        status = main(None, say)
    sys.exit(status)
