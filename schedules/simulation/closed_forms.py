"""The length, the memory and the traffic of each schedule as formulas, and their conditions.

All stages are equal here. `T_F`, `T_B`, `T_W` are the times of one rank's whole share of the model (a chunk takes 1/v
of it), `T_P` the time of an overlapped pair of chunks, `c` one hop between ranks; `M_B` is what a microbatch holds on
one rank from F to B, `M_W` what is left of it until W. Formulas that the literature states without conditions, or not
at all, were found with the simulator, and every one is tested against it over random costs inside its conditions.

The only module of this package that imports sympy.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# sympy's relations are annotated as unions with Integer, which its own And, Or and Piecewise do not accept.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import And, Eq, Expr, Ge, Le, Max, Min, Mod, Or, Piecewise, ceiling, floor, true
from sympy.logic.boolalg import Boolean

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import count_messages
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.simulation.timeline import Timeline

p, m, v = sympy.symbols("p m v", integer=True, positive=True)
T_F, T_B, T_W, T_P, c, M_B, M_W = sympy.symbols("T_F T_B T_W T_P c M_B M_W", nonnegative=True)
T = T_F + T_B + T_W


@dataclass(frozen=True)
class Formula:
    """`value` is exact where `valid` holds; `source` says where it comes from.

    >>> closed_form("1f1b").peak.value
    M_B*Min(m, p)
    """

    value: Expr
    valid: Boolean = true
    source: str = ""

    def holds(self, schedule: Schedule, costs: Costs) -> bool:
        """Whether the conditions are met."""
        return bool(self.valid.subs(values(schedule, costs)))

    def at(self, schedule: Schedule, costs: Costs) -> Any:
        """The value for a schedule and equal stages; `ScheduleError` outside the conditions."""
        if not self.holds(schedule, costs):
            raise ScheduleError(f"{schedule.name}: this closed form holds for {self.valid}; otherwise use `simulate`")
        return self.value.subs(values(schedule, costs))


@dataclass(frozen=True)
class ClosedForm:
    """The formulas of one schedule; `None` if there is none.

    * `cost`: the longest own span of a rank; `makespan`: the whole step (see `Timeline` for both).
    * `peak`: memory of the rank that needs most. `messages`: number of messages of one step, forward and backward.
    """

    name: str
    cost: Formula | None
    makespan: Formula | None
    peak: Formula
    messages: Formula

    @property
    def work(self) -> Expr:
        """The time that every rank computes in a step, if pairs hide nothing."""
        return m * T

    @property
    def bubble(self) -> Formula | None:
        """1 - work/makespan."""
        return self._bubble(self.makespan)

    @property
    def cost_bubble(self) -> Formula | None:
        """1 - work/cost."""
        return self._bubble(self.cost)

    def _bubble(self, length: Formula | None) -> Formula | None:
        if length is None:
            return None
        valid = And(length.valid, Eq(T_P, T / v)) if T_P in length.value.free_symbols else length.valid
        return Formula(1 - self.work / length.value.subs(T_P, T / v), valid, length.source)


def values(schedule: Schedule, costs: Costs) -> dict[Any, Any]:
    """The values of the symbols; raises `ScheduleError` unless all stages and all hops are equal."""
    equal = ("forward", "backward", "weight", "activation", "residue")
    if any(len(set(getattr(costs, name))) > 1 for name in equal) or costs.links or costs.pairs or costs.bandwidth:
        raise ScheduleError("closed forms exist for equal stages and hops only; use `simulate` for these costs")
    if any(costs.optimizer) or costs.barrier:
        raise ScheduleError("closed forms end with the last pass; leave out optimizer and barrier, or use `simulate`")
    chunks = schedule.placement.chunks
    return {
        p: schedule.ranks,
        m: schedule.microbatches,
        v: chunks,
        T_F: _exact(chunks * costs.forward[0]),
        T_B: _exact(chunks * costs.backward[0]),
        T_W: _exact(chunks * costs.weight[0]),
        T_P: _exact(costs.pair_time(0, 0)),
        c: _exact(costs.comm),
        M_B: _exact(chunks * costs.activation[0]),
        M_W: _exact(chunks * costs.residue[0]),
    }


def _exact(number: Any) -> sympy.Rational:
    return sympy.Rational(str(number))


def closed_form(name: str) -> ClosedForm:
    """The formulas of the schedule called `name` (any spelling, see `names`).

    >>> closed_form("zb-h1").peak.value
    M_B*Min(m, p)
    """
    canonical = find(name).name
    if canonical not in FORMS:
        raise ScheduleError(f"{canonical} has no closed form: its order is searched; see zbcompile.schedules.bound")
    return FORMS[canonical](canonical)


FREE_HOPS = Eq(c, 0)
SMALL_W = Le(T_W, T_F)  # W fits into the gap that F leaves on the next rank
W_FITS = Le(T_W, Min(T_F, T_B))
HOPS_HIDE = Le(2 * c, T_W)  # a W covers the way to the neighbour and back
EQUAL_TIMES = And(Eq(T_F, T_B), Eq(T_B, T_W))
FULL_GROUPS = Eq(Mod(m, p), 0)
CONTROLLABLE = "Qi et al., Controllable Memory, arXiv 2405.15362"
PAPER = "Qi et al., Zero Bubble, arXiv 2401.10241"
DUALPIPE = "DeepSeek-V3, arXiv 2412.19437, table 2; n pairs on the turning rank"
MEASURED = "found with the simulator"

LINEAR, LOOPED, VEE = 2 * (p - 1) * m, 2 * (v * p - 1) * m, 4 * (p - 1) * m


def _circulation(count: Any) -> Any:
    """Hops on the critical path when at most p microbatches circulate and `count` of them run."""
    return 2 * (p - 1) + 2 * (count - 1 - ceiling((count - 1) / p))


def _form(name: str, cost: Formula | None, peak: Formula, messages: Any, makespan: Formula | None = None) -> ClosedForm:
    count = Formula(Piecewise((0, Eq(p, 1)), (messages, true)), true, "one tensor for each boundary between ranks")
    return ClosedForm(name, cost, makespan or cost, peak, count)


def _gpipe(name: str) -> ClosedForm:
    length = Formula((m + p - 1) * T + 2 * (p - 1) * c, true, "Huang et al., GPipe, arXiv 1811.06965")
    return _form(name, length, Formula(m * M_B), LINEAR)


def _looped_bfs(name: str) -> ClosedForm:
    waits = Or(FREE_HOPS, Ge((m - p) * Min(T_F, T_B + T_W), v * p * c))  # a lap is back before its chunk is due
    length = Formula((m + (p - 1) / v) * T + 2 * (p - 1) * c, And(Ge(m, p), waits), "Lamy-Poirier, arXiv 2211.05953")
    return _form(name, length, Formula(m * M_B), LOOPED)


def _one_f_one_b(name: str) -> ClosedForm:
    """Only p microbatches circulate, so all but every p-th one pay for a way there and back."""
    length = Formula((m + p - 1) * T + _circulation(m) * c, true, MEASURED)
    return _form(name, length, Formula(Min(m, p) * M_B), LINEAR)


def _eager(name: str) -> ClosedForm:
    length = Formula((m + p - 1) * T + 2 * (p - 1) * c, Le(2 * c, T), MEASURED)
    return _form(name, length, Formula(Min(m, 2 * p - 1) * M_B), LINEAR)


def _overlap(name: str) -> ClosedForm:
    hops = Piecewise((0, Eq(p, 1)), (2 * (p - 1) + 2 * Max(0, floor(m / 2) - 1), true))
    length = Formula((m + p - 1) * T - (m - 1) * (T - T_P) + hops * c, Or(FREE_HOPS, Eq(T_P, T)), MEASURED)
    return _form(name, length, Formula(Min(m, 2 * p) * M_B), LINEAR)


def _interleaved(name: str) -> ClosedForm:
    valid = And(FULL_GROUPS, Or(FREE_HOPS, Le(2 * c, Min(T_F, T_B + T_W) / v)))
    hops = Piecewise((0, Eq(p, 1)), (2 * (v * p - 1), true))
    length = Formula(m * T + (p - 1) * T / v + hops * c, valid, f"Narayanan et al., arXiv 2104.04473; hops: {MEASURED}")
    peak = Formula(Min(v * m, v * p + p - 1) * M_B / v, FULL_GROUPS, MEASURED)
    return _form(name, length, peak, LOOPED)


def _interleaved_overlap(name: str) -> ClosedForm:
    valid = And(FULL_GROUPS, FREE_HOPS, Ge(m, 2 * p), Eq(T_P, T / v))
    length = Formula(m * T + (p - 1) * T / v, valid, MEASURED)
    peak = Formula(Min(v * m, v * p + p) * M_B / v, FULL_GROUPS, MEASURED)
    return _form(name, length, peak, LOOPED)


def _zb_h1(circulating: Any) -> Callable[[str], ClosedForm]:
    """`circulating`: the microbatches that pay for their hops (see `_circulation`)."""
    value = (m + p - 1) * (T_F + T_B) + Max(1, m - p + 1) * T_W + _circulation(circulating) * c
    valid = (And(fits, HOPS_HIDE | FREE_HOPS) for fits in (SMALL_W, W_FITS))
    cost, makespan = (Formula(value, each, f"{PAPER}; hops: {MEASURED}") for each in valid)
    return lambda name: _form(name, cost, Formula(Min(m, p) * M_B, Le(M_W, M_B)), LINEAR, makespan)


def _zb_h2(name: str) -> ClosedForm:
    full = Ge(m, 2 * p - 1)
    bubble = (p - 1) * (T_F + T_B - 2 * T_W)
    hidden = Or(And(FREE_HOPS, SMALL_W), And(W_FITS, HOPS_HIDE))
    cost = Formula(m * T + Max(0, bubble) + 2 * (p - 1) * c, And(full, hidden), PAPER)
    makespan = Formula(m * T + Max((p - 1) * T_F, bubble), And(full, FREE_HOPS, SMALL_W), MEASURED)
    return _form(name, cost, Formula(Min(m, 2 * p - 1) * M_B, Le(M_W, M_B)), LINEAR, makespan)


def _interleaved_zb(name: str) -> ClosedForm:
    hops = 4 * (p - 1) + p * (v - 1) - Piecewise((2, Eq(m, p)), (0, true))
    hops = Piecewise((0, Eq(p, 1)), (hops, true))
    value = m * T + (p - 1) * (T_F + T_B - T_W) / v + hops * c
    valid = And(FULL_GROUPS, Or(FREE_HOPS, Le(2 * c, T_W / v)))
    cost, makespan = (Formula(value, And(valid, fits), MEASURED) for fits in (SMALL_W, W_FITS))
    return _form(name, cost, Formula(Min(m, p) * M_B, And(FULL_GROUPS, Le(M_W, M_B))), LOOPED, makespan)


def _zb_v(name: str) -> ClosedForm:
    valid = And(Ge(m, 2 * p - 1), Ge(p, 2), EQUAL_TIMES, Le(4 * c, T_W))
    cost = Formula(m * T + (6 * p - 8) * c, valid, f"{CONTROLLABLE}; hops: {MEASURED}")
    makespan = Formula(m * T + (p - 1) * T_F / 2 + (5 * p - 7) * c, valid, MEASURED)
    return _form(name, cost, Formula(p * M_B, And(Ge(m, 2 * p - 1), EQUAL_TIMES, Le(M_W, M_B))), VEE, makespan)


def _v_half(name: str) -> ClosedForm:
    valid = And(EQUAL_TIMES, FREE_HOPS, Ge(p, 3), Ge(m, 2 * p))
    length = Formula(m * T + (6 * floor((p - 1) / 2) - 1) * T_F / 2, valid, f"{CONTROLLABLE}; exact bubble: {MEASURED}")
    return _form(name, length, Formula(floor((p + 2) / 2) * M_B, And(EQUAL_TIMES, Ge(m, 2 * p))), VEE)


def _v_min(name: str) -> ClosedForm:
    valid = And(EQUAL_TIMES, FREE_HOPS, Ge(p, 4), Eq(Mod(p, 3), 1), Ge(m, 2 * p))
    length = Formula(m * T + (4 * p - 5) * T_F / 2, valid, f"{CONTROLLABLE}; exact bubble: {MEASURED}")
    return _form(name, length, Formula(floor((p + 4) / 3) * M_B, And(EQUAL_TIMES, Ge(m, 2 * p))), VEE)


def _one_f_one_b_v(name: str) -> ClosedForm:
    valid = And(EQUAL_TIMES, FREE_HOPS, Ge(p, 4), Eq(Mod(p, 3), 1), Ge(m, 2 * p))
    length = Formula((m + p - 1) * T, valid, f"{CONTROLLABLE}; exact bubble: {MEASURED}")
    return _form(name, length, Formula(floor((2 * p + 3) / 3) * M_B, And(EQUAL_TIMES, Ge(m, 2 * p))), VEE)


def _dual_form(name: str, depth: Any, chunks: int, pairs: Any, messages: Any, peak: Any) -> ClosedForm:
    valid = And(Eq(T_F, T_B), Le(T_W, T_F), FREE_HOPS)
    idle = (depth - 1) * (T_P + (T_B - 2 * T_W) / chunks)
    value = m * T - pairs * (T / chunks - T_P) + idle
    return _form(name, Formula(value, valid, DUALPIPE), Formula(peak * M_B / chunks, Le(M_W, M_B), DUALPIPE), messages)


def _automatic(factor: int) -> Callable[[str], ClosedForm]:
    """No formula for the length: the order follows the costs. The peak is an upper bound, the limit of the schedule."""
    peak = Formula(factor * p * M_B, true, "an upper bound: the limit that the schedule keeps")
    return lambda name: _form(name, None, peak, LINEAR)


FORMS: Mapping[str, Callable[[str], ClosedForm]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "eager-1f1b": _eager,
    "1f1b-overlap": _overlap,
    "interleaved-1f1b": _interleaved,
    "interleaved-1f1b-overlap": _interleaved_overlap,
    "looped-bfs": _looped_bfs,
    "zb-h1": _zb_h1(Min(m, p + 1)),
    "zb-h1-lazy": _zb_h1(m),
    "zb-h2": _zb_h2,
    "zb-1p": _automatic(1),
    "zb-2p": _automatic(2),
    "interleaved-zb": _interleaved_zb,
    "zb-v": _zb_v,
    "v-half": _v_half,
    "v-min": _v_min,
    "1f1b-v": _one_f_one_b_v,
    "dualpipe": lambda name: _dual_form(name, p / 2, 1, m - p - 1, LINEAR, p + 1),
    "dualpipe-v": lambda name: _dual_form(name, p, 2, 2 * (m - p) - 1, VEE, 2 * p + 1),
}


SYMBOLS = """p ranks, m microbatches, v stages a rank; T_F, T_B, T_W: the times of a rank's share of the model; c: a hop
between ranks; M_B: memory of a microbatch on a rank from F to B, M_W: from B to W"""


def format_closed_form(form: ClosedForm, timeline: Timeline | None = None) -> str:
    """A block per figure: the formula, when it holds, where it is from, and the numbers of `timeline`, if given."""
    found = {"makespan": form.makespan, "bubble": form.bubble, "cost": form.cost, "cost bubble": form.cost_bubble}
    found |= {"peak memory": form.peak, "messages": form.messages}
    known = {figure: formula for figure, formula in found.items() if formula is not None}
    lines = [f"{form.name}: {SYMBOLS}"]
    if any(T_P in formula.value.free_symbols for formula in known.values()):
        lines.append("T_P: the time of an overlapped pair of stages")
    if "makespan" not in known:
        lines.append(f"{form.name} has no closed-form makespan: its order follows the costs; `show` simulates it")
    for figure, formula in known.items():
        bubble = f"1 - {form.work}/{'cost' if figure.startswith('cost') else 'makespan'}"
        always = formula.valid == True  # noqa: E712 sympy's true is not True
        condition = "always" if always else f"if {formula.valid}"
        lines += ["", f"{figure} = {bubble if 'bubble' in figure else formula.value}"]
        lines.append(f"    holds {condition}{'; ' * bool(formula.source)}{formula.source}")
        if timeline is not None:
            lines.append(f"    {_numbers(formula, timeline, figure)}")
    return "\n".join(lines)


def _numbers(formula: Formula, t: Timeline, figure: str) -> str:
    found = {"makespan": t.makespan, "bubble": t.bubble, "cost": t.cost, "cost bubble": t.cost_bubble}
    found |= {"peak memory": max(t.peak_memory), "messages": count_messages(t.schedule)}
    simulated = f"simulated {found[figure]:g}"
    if not formula.holds(t.schedule, t.costs):
        return f"{simulated}; the condition does not hold here"
    value: Any = formula.at(t.schedule, t.costs)
    return f"here {value}{'' if value.is_integer else f' = {float(value):g}'}, {simulated}"
