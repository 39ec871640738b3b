"""The ten-line version of the search's clock, without torch: a test compares the two."""

from collections.abc import Sequence

from zbcompile.schedules.searching.problem import Problem, Words


def ends_of(problem: Problem, words: Words, time: Sequence[float], delay: Sequence[float]) -> list[float]:
    """`zbcompile.schedules.searching.clock`: when each pass of an order ends, after the pass before it on its rank and
    what it waits for; a collective, which stands in no order, once all have come."""
    before = {n: word[i - 1] for word in words for i, n in enumerate(word) if i}
    end: dict[int, float] = {}
    while len(end) < len(problem.waits):
        for n in (n for n in range(len(problem.waits)) if n not in end):
            arrive = [made for made, _ in problem.waits[n]]
            if (n in before and before[n] not in end) or not end.keys() >= set(arrive):
                continue
            arrived = max((end[made] + (delay[n] if n < len(problem.actions) else 0) for made in arrive), default=0.0)
            end[n] = max(arrived, end[before[n]] if n in before else 0.0) + (time[n] if n < len(problem.actions) else 0)
    return [end[n] for n in range(len(problem.waits))]
