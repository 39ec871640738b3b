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
from zbcompile.schedules.generators.registry import FAMILIES, find, names
from zbcompile.schedules.generators.vocabulary_insertion import textbook_costs, with_vocabulary
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES, load, save
from zbcompile.schedules.ir.schedule import Schedule, format_schedule
from zbcompile.schedules.lowering.lower import lower
from zbcompile.schedules.searching.by_name import build
from zbcompile.schedules.simulation.timeline import simulate
from zbcompile.schedules.visualization.step_tables import rank_table, step_table
from zbcompile.schedules.visualization.text import format_timeline, summary
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
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m zbcompile.schedules",
        description=(
            "Pipeline schedules: list them, show one, check files, compare several, draw pictures."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list all schedules and what each requires")
    show = commands.add_parser(
        "show", help="one schedule: its orders, its figures, where its time goes"
    )
    add = show.add_argument
    add("schedule", help="a name in any spelling, or a file (.csv, .json)")
    add("--lowered", action="store_true", help="include SEND and RECV")
    add(
        "--weight-order", action="store_true", help="the order in which weight gradients accumulate"
    )
    add("--time", action="store_true", help="draw to a time scale instead of step by step")
    add(
        "--picture", action="append", default=[], metavar="FILE", help=f"write {', '.join(ENDINGS)}"
    )
    add("--save", metavar="FILE", help="write the schedule itself: .csv or .json")
    checking = commands.add_parser(
        "check", help="prove that orders in files are complete, legal and free of deadlock"
    )
    add = checking.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a schedule, or one with its messages")
    add(
        "--memory-limit",
        type=float,
        metavar="X",
        help="for activations, in their unit in the costs",
    )
    compare = commands.add_parser("compare", help="a table of several schedules on the same model")
    add = compare.add_argument
    add("schedules", nargs="*", metavar="schedule", help="names or files (default: all names)")
    add("--picture", metavar="FILE", help="draw all on one time axis: .txt, .svg or .html")
    add("--sort", choices=("given", "makespan", "cost", "memory"), default="given")
    for command in (show, compare):
        add = command.add_argument
        add("--ranks", type=_count, default=4, metavar="N", help="default 4")
        add("--microbatches", type=_count, default=8, metavar="N", help="default 8")
        add(
            "--memory-limit",
            type=float,
            metavar="X",
            help="for zb-1p and zb-2p, in units of activation",
        )
        add(
            "--chunks",
            type=_count,
            metavar="N",
            help="stages per rank, for the interleaved schedules",
        )
        add(
            "--barriers",
            type=int,
            choices=(1, 2),
            help="insert vocabulary passes S and T with this many barriers",
        )
    for command in (show, checking, compare):
        add = command.add_argument
        add(
            "--costs",
            type=Path,
            metavar="FILE",
            help="per stage, as JSON (`--help` without a command)",
        )
        add(
            "--times",
            type=_times,
            default=[1, 1, 1],
            metavar="F,B,W",
            help="times of a rank's share of the model",
        )
        add(
            "--comm",
            type=float,
            default=0,
            metavar="X",
            help="time of a hop between ranks; default 0",
        )
        add(
            "--residue",
            type=float,
            metavar="X",
            help="memory kept from B to W, if F to B keeps 1; default 1",
        )
    for command, run in ((listing, _list), (show, _show), (checking, _check), (compare, _compare)):
        command.set_defaults(command=run)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


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
    chunks = None
    # no name of `build`: it needs vocabulary layers to interlace
    if is_interlaced := text == "interlaced":
        schedule = interlaced(options.ranks, options.microbatches)
    else:
        chunks = options.chunks if find(text).free_chunks else None
        schedule = build(text, options.ranks, options.microbatches, chunks=chunks)
    costs = _costs_of_model(options, schedule)
    if not is_interlaced:
        schedule = build(
            text, options.ranks, options.microbatches, costs, options.memory_limit, chunks
        )
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
        sizes = {"comm": options.comm, "residue": options.residue}
        costs = Costs.uniform(schedule.ranks, forward, backward, weight, **sizes)
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
    report = check(lowered)
    timeline = simulate(schedule, costs)
    printed = lowered if options.lowered else schedule
    width = None if not sys.stdout.isatty() else os.get_terminal_size().columns
    if options.time:
        print(format_timeline(timeline, width))
    else:
        print(format_schedule(printed, width=width))
        print(summary(timeline))
    print("\n" + grid(rank_table(timeline, receive_buffers=report.receive_buffers or ()).rows))
    if options.weight_order:
        orders = (
            (stage, " ".join(map(str, schedule.weight_order(stage))))
            for stage in range(schedule.stages)
        )
        print(
            "\n"
            + grid(
                [
                    [Figure("stage", stage), Figure("weight gradients accumulate", o)]
                    for stage, o in orders
                ]
            )
        )
    limits = () if options.memory_limit is None else (options.memory_limit,) * schedule.ranks
    for path in options.picture:
        print(f"wrote {write_picture(replace(timeline, memory_limits=limits), path)}")
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
            report = check(
                program if program.is_lowered else lower(schedule), costs, options.memory_limit
            )
        except ScheduleError as error:
            raise ScheduleError(f"{file}: {error}") from None
        memory, buffers = max(report.peak_memory), max(report.receive_buffers or (0,))
        size = (
            f"{schedule.ranks} ranks, {schedule.microbatches} microbatches, {schedule.placement}"
            " placement"
        )
        needs = f"peak memory {plain(memory, 5)}, at most {buffers} receives at once"
        print(f"{file}: complete, legal and free of deadlock: {size}, {needs}")


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
    key = {
        "makespan": lambda t: t.makespan,
        "cost": lambda t: t.cost,
        "memory": lambda t: max(t.peak_memory),
    }
    printed = timelines if options.sort == "given" else sorted(timelines, key=key[options.sort])
    print(grid(step_table(printed).rows))
    for reason in refused:
        print(f"left out: {reason}")
    if options.picture:
        print(f"wrote {write_comparison(timelines, options.picture)}")


if __name__ == "__main__":
    with Progress("zbcompile schedules") as report:
        status = main(None, report)
    sys.exit(status)
