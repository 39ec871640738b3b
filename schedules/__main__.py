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
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.interlaced import interlaced
from zbcompile.schedules.generators.registry import FAMILIES, find, names
from zbcompile.schedules.generators.vocabulary_insertion import textbook_costs, with_vocabulary
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES, load, save
from zbcompile.schedules.ir.schedule import Schedule, format_schedule
from zbcompile.schedules.lowering.lower import lower
from zbcompile.schedules.searching.by_name import build
from zbcompile.schedules.simulation.timeline import simulate
from zbcompile.schedules.visualization.step_tables import rank_table, step_table
from zbcompile.schedules.visualization.text import summary
from zbcompile.schedules.visualization.write import ENDINGS, write_comparison, write_picture
from zbcompile.tables import Figure, grid
from zbcompile.untrusted_text import read_json

EXAMPLES = """examples:
  python -m zbcompile.schedules list
  python -m zbcompile.schedules show zb-v --ranks 4 --microbatches 8
  python -m zbcompile.schedules show zb-h1 --ranks 4 --times 10,12,8 --comm 1 --picture step.html
  python -m zbcompile.schedules show edited.csv --lowered
  python -m zbcompile.schedules check edited.csv other.json --memory-limit 4
  python -m zbcompile.schedules compare 1f1b zb-h1 zb-v --ranks 8 --costs costs.json
  python -m zbcompile.schedules compare 1f1b zb-h1 zb-v --picture compared.svg
  python -m zbcompile.schedules compare 1f1b interlaced --barriers 1

A costs file is a JSON object with a list per stage, e.g.
{"forward": [1, 1], "backward": [1, 1], "weight": [1, 1], "comm": 0.1}; neighbours are merged, or
stages cut evenly, for schedules with another number of stages.
exit codes: 0 done, 1 an impossible schedule or an unreadable file, 2 wrong arguments
"""


def main(arguments: Sequence[str] | None = None, say: Say = silent) -> int:
    """Runs one command line and returns the exit code. `say` receives progress messages."""
    options = _parser().parse_args(arguments)
    say(f"zbcompile schedules {options.command.__name__.removeprefix('_')}")
    try:
        options.command(options)
    except BrokenPipeError:  # the reader of the pipe (`| head`) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ScheduleError, OSError) as error:
        print(f"zbcompile.schedules: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m zbcompile.schedules",
        description="Pipeline schedules: list, show, check and compare them, draw pictures.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _, show, checking, compare = parsers = [
        commands.add_parser(run.__name__[1:], help=text) for run, text in COMMANDS.items()
    ]
    for command, run in zip(parsers, COMMANDS, strict=True):
        command.set_defaults(command=run)
    show.add_argument("schedule", help="a name in any spelling, or a file (.csv, .json)")
    show.add_argument("--lowered", action="store_true", help="include SEND and RECV")
    pictures = f"write {', '.join(ENDINGS)}"
    show.add_argument("--picture", action="append", default=[], metavar="FILE", help=pictures)
    show.add_argument("--save", metavar="FILE", help="write the schedule itself: .csv or .json")
    checking.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a schedule")
    compare.add_argument("schedules", nargs="*", help="names or files (default: all names)")
    compare.add_argument(
        "--picture", metavar="FILE", help="all on one time axis: .txt, .svg, .html"
    )
    for command, options in (
        (show, OF_NAMES),
        (compare, OF_NAMES),
        *((c, OF_COSTS) for c in parsers[1:]),
    ):
        for name, convert, default, text in options:
            command.add_argument(f"--{name}", type=convert, default=default, help=text)
    return parser


def _times(text: str) -> list[float]:
    times = [float(part) for part in text.split(",")]
    if len(times) != 3:
        raise argparse.ArgumentTypeError(
            f"{text!r} has {len(times)} numbers; expected three: F,B,W"
        )
    return times


def _schedule_and_costs(text: str, options: argparse.Namespace) -> tuple[Schedule, Costs]:
    """Returns a schedule by its name or file, and the costs of the model on its stages."""
    if Path(text).suffix in ENDS_OF_SCHEDULES:
        schedule = load(text).compute_only()
        return schedule, _costs_of_model(options, schedule)
    counts = options.ranks, options.microbatches
    # no name of `build`: it needs vocabulary layers to interlace
    if is_interlaced := text == "interlaced":
        schedule = interlaced(*counts)
        costs = _costs_of_model(options, schedule)
    else:
        chunks = options.chunks if find(text).free_chunks else None
        costs = _costs_of_model(options, build(text, *counts, chunks=chunks))
        schedule = build(text, *counts, costs, options.memory_limit, chunks)
    if (is_interlaced or options.barriers) and not any(costs.vocab_s):
        textbook = textbook_costs(costs.stages)
        costs = replace(costs, vocab_s=textbook.vocab_s, vocab_t=textbook.vocab_t)
    if options.barriers and not is_interlaced:
        schedule = with_vocabulary(schedule, options.barriers, costs)
    return schedule, costs


def _costs_of_model(options: argparse.Namespace, schedule: Schedule) -> Costs:
    """Returns the costs that all schedules run under: those of the file, or equal stages for every
    rank."""
    if options.costs is not None:
        costs = Costs.from_dict(read_json(options.costs, ScheduleError))
    else:
        forward, backward, weight = options.times
        costs = Costs.uniform(
            schedule.ranks, forward, backward, weight, options.comm, residue=options.residue
        )
    return costs.resized(schedule.stages)


def _list(options: argparse.Namespace) -> None:
    heads = ("schedule", "placement", "stages per rank", "microbatches")
    rows = [
        (f.name, f.placement, f"{f.chunks}{' or more' * f.free_chunks}", f.rule.text)
        for f in FAMILIES
    ]
    rows.append(("auto", "any", "1 or more", find("auto").rule.text))
    print(grid([[*map(Figure, heads, row)] for row in rows]))
    print(
        "\n`show` and `compare` also know interlaced: 1F1B whose vocabulary layers all ranks run at"
        " the same time"
    )


def _show(options: argparse.Namespace) -> None:
    schedule, costs = _schedule_and_costs(options.schedule, options)
    check(schedule)  # says what is wrong with an order more exactly than `lower`
    lowered = lower(schedule)
    check(lowered)
    timeline = simulate(schedule, costs)
    printed = lowered if options.lowered else schedule
    width = None if not sys.stdout.isatty() else os.get_terminal_size().columns
    print(format_schedule(printed, width=width))
    print(summary(timeline))
    print("\n" + grid(rank_table(timeline).rows))
    for path in options.picture:
        print(f"wrote {write_picture(timeline, path)}")
    if options.save:
        save(printed, options.save)
        print(f"wrote {options.save}")


def _check(options: argparse.Namespace) -> None:
    for file in options.files:
        try:
            program = load(file)
            schedule = program.compute_only()
            costs = _costs_of_model(options, schedule)
            # says what is wrong with an order more exactly than `lower`
            check(schedule, costs, options.memory_limit)
            check(program if program.is_lowered else lower(schedule))
        except ScheduleError as error:
            raise ScheduleError(f"{file}: {error}") from None
        peak = plain(max(peak_memory(schedule, costs)), 5)
        counts = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
        size = f"{counts}, {schedule.placement} placement, peak memory {peak}"
        print(f"{file}: complete, legal and free of deadlock: {size}")


def _compare(options: argparse.Namespace) -> None:
    timelines, refused = [], []
    for text in options.schedules or names():
        try:
            schedule, costs = _schedule_and_costs(text, options)
            check(schedule)
            timelines.append(simulate(schedule, costs))
        except ScheduleError as error:
            if options.schedules:
                raise
            refused.append(str(error))
    print(grid(step_table(timelines).rows))
    for reason in refused:
        print(f"left out: {reason}")
    if options.picture:
        print(f"wrote {write_comparison(timelines, options.picture)}")


COMMANDS = {
    _list: "list all schedules and what each requires",
    _show: "one schedule: its orders, its figures, where its time goes",
    _check: "prove that orders in files are complete, legal and free of deadlock",
    _compare: "a table of several schedules on the same model",
}
# options of schedules that are given by name, and those of every command
OF_NAMES = (
    ("ranks", int, 4, "default 4"),
    ("microbatches", int, 8, "default 8"),
    ("chunks", int, None, "stages per rank, for the interleaved schedules"),
    ("barriers", int, None, "insert vocabulary passes S and T with 1 or 2 barriers"),
)
OF_COSTS = (
    ("costs", Path, None, "file of costs per stage, as JSON (see --help without a command)"),
    ("times", _times, [1, 1, 1], "F,B,W: times of a rank's share of the model"),
    ("comm", float, 0, "time of a hop between ranks; default 0"),
    ("residue", float, None, "memory kept from B to W, if F to B keeps 1; default 1"),
    ("memory-limit", float, None, "memory of a rank, in units of activation"),
)

if __name__ == "__main__":
    with Progress("zbcompile schedules") as report:
        status = main(None, report)
    sys.exit(status)
