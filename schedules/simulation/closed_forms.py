"""Closed forms: the length of a step and the peak memory of every named schedule as sympy
expressions.

They hold for equal stages, `m >= 2p` microbatches that `p` divides, `T_W <= T_F <= T_B`, `M_W <=
M_B`, and hops that a weight gradient covers twice (`2c <= T_W/v`). `ClosedForm.assumes` names what
a formula needs beyond that.
"""

from dataclasses import dataclass

import sympy
from sympy import Expr, Max, Min, Piecewise, Symbol, ceiling, floor

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule

p, m, v = sympy.symbols("p m v", integer=True, positive=True)
T_F, T_B, T_W, c, M_B, M_W = sympy.symbols("T_F T_B T_W c M_B M_W", nonnegative=True)
T = T_F + T_B + T_W


@dataclass(frozen=True)
class ClosedForm:
    """The formulas of one schedule; a length is None if the order depends on the costs.

    Symbols: `p` ranks, `m` microbatches, `v` stages per rank; `T_F`, `T_B`, `T_W` the times of one
    rank's whole share of the model, `c` one hop between ranks; `M_B` the memory of a microbatch on
    a rank from F to B, `M_W` from B to W.

    `cost` is the longest span of one rank, `makespan` the whole step (see `Timeline`),
    `peak_memory` that of the rank that holds most.

    >>> from zbcompile.schedules import Costs, build
    >>> values = symbol_values(build("1f1b", ranks=4, microbatches=8), Costs.uniform(4))
    >>> closed_form("1f1b").bubble.subs(values)
    3/11
    """

    name: str
    cost: Expr | None
    makespan: Expr | None
    peak_memory: Expr
    assumes: str = ""

    @property
    def bubble(self) -> Expr | None:
        """1 - work/makespan."""
        return None if self.makespan is None else 1 - m * T / self.makespan

    @property
    def cost_bubble(self) -> Expr | None:
        """1 - work/cost."""
        return None if self.cost is None else 1 - m * T / self.cost


def closed_form(name: str) -> ClosedForm:
    """Returns the formulas of the schedule called `name`, in any spelling.

    >>> closed_form("zb-h1").peak_memory
    M_B*Min(m, p)
    """
    canonical = find(name).name
    if canonical not in FORMS:
        hint = "its order is searched; see zbcompile.schedules.bound"
        raise ScheduleError(f"{canonical} has no closed form: {hint}")
    return ClosedForm(canonical, *FORMS[canonical])


def symbol_values(schedule: Schedule, costs: Costs) -> dict[Symbol, float]:
    """Returns the value of every symbol, for `Expr.subs`; `costs` are those of equal stages."""
    chunks = schedule.placement.chunks
    values = {p: schedule.ranks, m: schedule.microbatches, v: chunks, c: costs.comm}
    shares = costs.forward, costs.backward, costs.weight, costs.activation, costs.residue
    for symbol, share in zip((T_F, T_B, T_W, M_B, M_W), shares, strict=True):
        values[symbol] = chunks * share[0]
    return values


def _on_several_ranks(messages: Expr) -> Expr:
    return Piecewise((0, sympy.Eq(p, 1)), (messages, True))


def _circulation(count: Expr) -> Expr:
    """Returns the hops on the critical path if p microbatches circulate, of which `count` pay."""
    return 2 * (p - 1) + 2 * (count - 1 - ceiling((count - 1) / p))


EQUAL_TIMES, FREE = "T_F = T_B = T_W", "c = 0"
IDEAL = f"{EQUAL_TIMES}, {FREE}"
_GPIPE = (m + p - 1) * T + 2 * (p - 1) * c
_1F1B = (m + p - 1) * T + _circulation(m) * c
_OVERLAP = (m + p - 1) * T + _on_several_ranks(2 * (p - 1) + 2 * Max(0, floor(m / 2) - 1)) * c
_LOOPED = m * T + (p - 1) * T / v
_INTERLEAVED = _LOOPED + _on_several_ranks(2 * (v * p - 1)) * c
_BFS = _LOOPED + 2 * (p - 1) * c
_SPLIT = (m + p - 1) * (T_F + T_B) + Max(1, m - p + 1) * T_W
_H1, _LAZY = _SPLIT + _circulation(Min(m, p + 1)) * c, _SPLIT + _circulation(m) * c
_H2_BUBBLE = (p - 1) * (T_F + T_B - 2 * T_W)
_H2 = m * T + Max(0, _H2_BUBBLE), m * T + Max((p - 1) * T_F, _H2_BUBBLE)
_ZB_HOPS = _on_several_ranks(4 * (p - 1) + p * (v - 1))
_INTERLEAVED_ZB = m * T + (p - 1) * (T_F + T_B - T_W) / v + _ZB_HOPS * c
_ZB_V = m * T + (6 * p - 8) * c, m * T + (p - 1) * T_F / 2 + (5 * p - 7) * c
_V_HALF = m * T + (6 * floor((p - 1) / 2) - 1) * T_F / 2
_V_MIN = m * T + (4 * p - 5) * T_F / 2
_DUALPIPE = m * T + (p / 2 - 1) * (T + T_B - 2 * T_W)
_DUALPIPE_V = m * T + (p - 1) * (T + T_B - 2 * T_W) / 2

# cost, makespan, peak memory, further assumptions
FORMS: dict[str, tuple[Expr | None, Expr | None, Expr, str]] = {
    "gpipe": (_GPIPE, _GPIPE, m * M_B, ""),
    "1f1b": (_1F1B, _1F1B, Min(m, p) * M_B, ""),
    "1f1b-overlap": (_OVERLAP, _OVERLAP, Min(m, 2 * p) * M_B, ""),
    "interleaved-1f1b": (_INTERLEAVED, _INTERLEAVED, Min(v * m, v * p + p - 1) * M_B / v, ""),
    "interleaved-1f1b-overlap": (_LOOPED, _LOOPED, Min(v * m, v * p + p) * M_B / v, FREE),
    "looped-bfs": (_BFS, _BFS, m * M_B, ""),
    "zb-h1": (_H1, _H1, Min(m, p) * M_B, ""),
    "zb-h1-lazy": (_LAZY, _LAZY, Min(m, p) * M_B, ""),
    "zb-h2": (*_H2, Min(m, 2 * p - 1) * M_B, FREE),
    "zb-1p": (None, None, p * M_B, ""),  # the limit that its heuristic keeps
    "zb-2p": (None, None, 2 * p * M_B, ""),
    "interleaved-zb": (_INTERLEAVED_ZB, _INTERLEAVED_ZB, Min(m, p) * M_B, ""),
    "zb-v": (*_ZB_V, p * M_B, f"{EQUAL_TIMES}, p >= 2, 4c <= T_W"),
    "v-half": (_V_HALF, _V_HALF, floor((p + 2) / 2) * M_B, f"{IDEAL}, p >= 3"),
    "v-min": (_V_MIN, _V_MIN, floor((p + 4) / 3) * M_B, f"{IDEAL}, p = 4, 7, 10, ..."),
    "dualpipe": (_DUALPIPE, _DUALPIPE, (p + 1) * M_B, f"T_F = T_B, {FREE}"),
    "dualpipe-v": (_DUALPIPE_V, _DUALPIPE_V, (2 * p + 1) * M_B / 2, f"T_F = T_B, {FREE}"),
}
