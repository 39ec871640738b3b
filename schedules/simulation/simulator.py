"""Predict a step: when everything runs, how long it takes, what every rank holds and why it waits."""

from dataclasses import replace

from zbcompile.schedules.execution.deadlock import require_finished
from zbcompile.schedules.execution.event_loop import parts, run, without_collector
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.execution.noise import Draw, Noise, as_noise
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Lowered, Schedule
from zbcompile.schedules.simulation.timeline import Timeline


@without_collector
def simulate(program: Schedule | Lowered, costs: Costs | None = None, noise: Noise | float | None = None) -> Timeline:
    """Run a schedule, or a lowered program, under `costs` (default: every pass takes 1, hops are free).

    With `noise` (a `Noise`, or the relative spread of every pass) the step is also run under drawn times: see
    `drawn` and `quantile` of the result, whose other figures are those of the costs as they are.

    Every rank runs its order; a step begins when its rank is free and what it needs has arrived. A result is available
    on another rank `costs.hop` after its pass has ended; a hop occupies neither rank. In a schedule messages are
    buffered without limit, in a lowered program a rank stands still at a SEND until its receive is posted. Raises
    `ScheduleError` if the orders do not run to their end; the other rules are left to `check`.

    >>> from zbcompile.schedules import build
    >>> t = simulate(build("1f1b", ranks=4, microbatches=8))
    >>> t.makespan, t.peak_memory
    (33, (4, 3, 2, 1))
    """
    schedule, _ = parts(program)
    costs = costs or Costs.uniform(schedule.stages)
    outcome = run(program, costs)
    require_finished(program, outcome)
    timeline = Timeline(program, costs, outcome, peak_memory(schedule, costs))
    noise = as_noise(noise)
    if noise is None:
        return timeline
    draws = (Draw(noise, number) for number in range(noise.draws))
    drawn = tuple(replace(timeline, run=run(program, costs, draw)) for draw in draws)
    return replace(timeline, noise=noise, drawn=drawn)
