"""The closed forms of a schedule as text, with their conditions and, for given numbers, the simulator's values beside
theirs."""

from typing import Any

from zbcompile.schedules.ir.dependencies import count_messages
from zbcompile.schedules.simulation.closed_forms import T_P, ClosedForm, Formula
from zbcompile.schedules.simulation.timeline import Timeline

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
