"""`python -m zbcompile.schedules search`: the order, the bound, the names beside it, and a certificate if asked for."""

import argparse

from tabulate import tabulate

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.noise import Noise
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.searching.certificate import certify
from zbcompile.schedules.searching.order_search import Found, search
from zbcompile.schedules.searching.problem import Problem
from zbcompile.schedules.searching.question import problems_of

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
CUT = 4  # stages per rank of a model without a costs file
ROUNDED = 1e-3  # share up to which the solver's whole numbers are no difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="N", help="default 4")
    add("--microbatches", type=int, default=8, metavar="N", help="default 8")
    add("--memory", type=_sizes, metavar="X[,X...]", help="for activations, of every rank or one each; 40GiB works too")
    add("--placements", type=lambda text: text.split(","), metavar="P,...", help="of linear, looped:N, v, dual")
    add("--no-barrier", action="store_true", help="the longest own span of a rank counts, not the whole step")
    add("--seconds", type=float, default=20, metavar="X", help="at most; default 20")
    add("--moves", type=int, metavar="N", help="so many, for the same order every time")
    add("--seed", type=int, default=0, metavar="N", help="of the moves; default 0")
    add("--noise", type=float, metavar="X", help="judge by the ninth of ten steps whose passes spread by this share")
    add("--late", type=float, default=0.0, metavar="X", help="with --noise: messages are late by this share on average")
    add("--barriers", type=int, choices=(1, 2), default=1, help="of vocabulary passes, if the costs have them")
    add("--certify", action="store_true", help="let OR-Tools confirm or improve it (small cases)")


def _sizes(text: str) -> float | list[float]:
    parts = [(part, next((unit for unit in UNITS if part.endswith(unit)), "")) for part in text.split(",")]
    found = [float(part.removesuffix(unit)) * UNITS.get(unit, 1) for part, unit in parts]
    return found if len(found) > 1 else found[0]


def searched(options: argparse.Namespace, model: Costs) -> Found:
    """Search as the command line asks, print what was found."""
    costs = model if options.costs else model.resized(CUT * options.ranks)
    noise = None if options.noise is None else Noise(options.noise, options.late)
    given = (costs, options.ranks, options.microbatches, options.memory, options.placements, not options.no_barrier)
    found = search(*given, options.seconds, options.moves, options.seed, noise, options.barriers)
    print(f"{found}\n\n{_table(found)}")
    if options.certify:
        (problem,) = problems_of(*given[:4], (found.schedule.placement,), given[5], options.barriers)
        found = _certified(found, problem, options.seconds)
    return found


def _table(found: Found) -> str:
    """Placement by placement."""
    rows = []
    for placement, (least, value) in found.placements.items():
        names = {name: takes for (name, where), takes in found.names.items() if where == placement}
        best = min(names, key=names.__getitem__, default="none fits")
        rows.append((placement, least, value, best, names.get(best)))
    return tabulate(rows, headers=("placement", "bound", "searched", "best name", "takes"), floatfmt=".6g")


def _certified(found: Found, problem: Problem, seconds: float) -> Found:
    """The order, or a shorter one of the solver; prints what the solver says about this placement."""
    if found.simulation.noise is not None:
        raise ScheduleError("a certificate knows the costs as they are; leave out --noise")
    proof = certify(problem, problem.words(found.schedule), seconds)
    better = None if proof.words is None else found.improved(problem, proof.words, "CP-SAT")
    where = f"\nCP-SAT on placement {problem.placement}"
    if better is not None and better.objective < found.objective * (1 - ROUNDED):
        print(f"{where}: a shorter order, {better.objective:.6g}")
        found = better
    if found.objective <= proof.bound * (1 + ROUNDED):
        print(f"{where}: confirmed, no order there is shorter than {proof.bound:.6g} (to {ROUNDED:.1%})")
    else:
        print(f"{where}: not decided in {seconds:g} s; no order there is shorter than {proof.bound:.6g}")
    return found
