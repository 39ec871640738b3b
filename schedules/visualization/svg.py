"""A timeline as a self-contained SVG: steps, idle time with its cause on hover, and the memory curve of every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10
from statistics import median

from zbcompile.amounts import plain
from zbcompile.schedules.ir.actions import Action, flatten
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, OPTIMIZER_OPS
from zbcompile.schedules.simulation.critical_path import critical_path
from zbcompile.schedules.simulation.timeline import Span, Timeline
from zbcompile.schedules.visualization.looks import IDLE_LOOKS, patterns
from zbcompile.schedules.visualization.shapes import picture, shape, window
from zbcompile.schedules.visualization.text import format_amount, summary

LARGEST = 6000  # pixels of the longest time axis
READABLE = 1200  # pixels of an SVG, which shrinks to its window with all of its letters
GAP = 18  # pixels between two pictures
COMPACT = 20_000  # number of steps beyond which boxes have no text


def natural_scale(timeline: Timeline) -> float:
    """Pixels per unit of time at which the steps of a timeline can be read."""
    return StepPicture(timeline, None).scale


def saving(timelines: Sequence[Timeline]) -> str:
    """The shortest of several steps compared with the first one, in words; empty if it is the first.

    >>> from zbcompile.schedules import build, simulate
    >>> saving([simulate(build(name, 4, 8)) for name in ("1f1b", "zb-h1")])
    '1f1b 33 \u2192 zb-h1 27: \u221218.2%'
    """
    first, best = timelines[0], min(timelines, key=lambda t: t.finish)
    if not best.finish < first.finish:
        return ""
    before, after = (f"{t.schedule.name} {format_amount(t.finish, t.costs.time_unit)}" for t in (first, best))
    return f"{before} \u2192 {after}: \u2212{1 - best.finish / first.finish:.1%}"


def to_svg(timeline: Timeline, width: int | None = None, also: Sequence[str] = ()) -> str:
    """The picture as text, which shrinks to a window that is narrower; `width` in pixels (default: wide enough to read
    the steps, at most 1,200); `also` may have "messages" and "critical", the critical path.

    Beyond 20,000 steps the boxes have no label and no text on hover; idle intervals keep theirs.

    >>> from zbcompile.schedules import build, simulate
    >>> to_svg(simulate(build("zb-h1", ranks=2, microbatches=4))).startswith("<svg")
    True
    """
    step = StepPicture(timeline, width or min(READABLE, round(StepPicture(timeline, None).width)), also)
    entries = step.legend(legend_of([timeline]))
    return picture(step.width, step.height, [*patterns(), *entries, *step.lines()])


def compare_svg(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """One SVG with the picture of every timeline under one legend, and what the shortest saves; `width` in pixels is
    that of the longest one's axis. A dashed line shows the end of the first one.

    >>> from zbcompile.schedules import build, simulate
    >>> compare_svg([simulate(build(name, 2, 4)) for name in ("1f1b", "zb-h1")]).count("<svg")
    3
    """
    longest = max(t.finish for t in timelines)
    natural = min(max(map(natural_scale, timelines)), READABLE / (longest or 1))
    scale = natural if width is None else max(1, width - StepPicture.MARGINS) / (longest or 1)
    pictures = [StepPicture(t, round(StepPicture.MARGINS + t.finish * scale), top=38) for t in timelines]
    widest, told = max(d.width for d in pictures), saving(timelines)
    y = 34.0 * bool(told)
    lines = [*patterns()]
    lines += [shape("text", text=told, x=8, y=26, style="font-size: 22px; font-weight: bold")] * bool(told)
    lines += pictures[0].legend(legend_of(timelines), y + 8)
    end, y = pictures[0].x(timelines[0].finish), y + 26
    for step in pictures:
        lines.append(window(step.width, step.height, more=f' y="{y:g}" overflow="visible"'))
        lines += step.lines()
        if step.x(step.timeline.finish) < end:
            lines.append(shape("path", "saved", d=f"M{end:g},{step.top}V{step.height - 24:g}", fill="none"))
        lines.append("</svg>")
        y += step.height + GAP
    return picture(widest, y, lines)


def legend_of(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """The fill and the text of each entry: what any of the timelines has."""
    spans = [(t, action) for t in timelines for span in t.spans for action in flatten((span.step,))]
    ops, causes = {action.op for _, action in spans}, {gap.cause for t in timelines for gap in t.idle}
    meanings = {op: each.meaning for op, each in COMPUTE_OPS.items()}
    meanings |= {op: each.meaning for op, each in OPTIMIZER_OPS.items()}
    entries = [(op, f"{op} {meaning}") for op, meaning in meanings.items() if op in ops]
    entries += [(f"idle-{cause}", f"idle: {cause}") for cause in IDLE_LOOKS if cause in causes]
    second = {"model copy" if t.schedule.placement.copies > 1 else "chunk" for t, a in spans if is_second(t, a)}
    return entries + [("", f"pale: every second {' or '.join(sorted(second))}")] * bool(second)


def is_second(timeline: Timeline, action: Action) -> bool:
    """Whether an action is shown pale: every other chunk, or the second copy of the model."""
    schedule = timeline.schedule
    return bool(schedule.copy_of(action.microbatch) or (action.stage // schedule.ranks) % 2)


def swatch(fill: str, x: float = 0, y: float = 0) -> str:
    """The sample of an entry of the legend."""
    kind = "idle" if fill.startswith("idle") else "span"
    return shape("rect", kind, fill=f"url(#{fill})", x=x, y=y, width=18, height=14)


@dataclass(frozen=True)
class StepPicture:
    """The parts of a picture."""

    timeline: Timeline
    wanted_width: int | None
    also: Sequence[str] = ()
    top: float = 62  # pixels above the first rank: title and legend

    LEFT, RIGHT = 62, 74
    MARGINS = LEFT + RIGHT  # pixels left and right of the time axis

    @cached_property
    def bar(self) -> float:
        """Height of the steps of a rank."""
        return 22 if self.timeline.schedule.ranks <= 16 else 16 if self.timeline.schedule.ranks <= 32 else 12

    @cached_property
    def curve(self) -> float:
        """Height of the memory curve under them."""
        return round(0.8 * self.bar)

    @property
    def row(self) -> float:
        return self.bar + self.curve + 5

    @cached_property
    def scale(self) -> float:
        """Pixels per unit of time."""
        finish = self.timeline.finish or 1
        if self.wanted_width is not None:
            return max(1, self.wanted_width - self.LEFT - self.RIGHT) / finish
        times = [span.end - span.start for span in self.timeline.spans if span.end > span.start]
        return min(max(900, 28 * finish / median(times or [1])), LARGEST) / finish

    @property
    def width(self) -> float:
        return max(1180, self.LEFT + self.timeline.finish * self.scale + self.RIGHT)  # the legend needs that much

    @property
    def height(self) -> float:
        return self.top + self.timeline.schedule.ranks * self.row + 24

    def x(self, time: float) -> float:
        return round(self.LEFT + time * self.scale, 2)

    def y(self, rank: int) -> float:
        return self.top + rank * self.row

    def lines(self) -> Iterator[str]:
        """Under the legend: the title, the names of the ranks and their steps."""
        yield shape("text", text=summary(self.timeline), x=8, y=18, style="font-weight:bold")
        yield from (*self.labels(), *self.shapes())

    def labels(self) -> Iterator[str]:
        for rank in range(self.timeline.schedule.ranks):
            yield shape("text", "label", f"rank {rank}", x=self.LEFT - 8, y=self.middle(rank))

    def shapes(self) -> Iterator[str]:
        yield from self.axis()
        for rank in range(self.timeline.schedule.ranks):
            yield from self.memory(rank)
        yield from self.idle()
        spans = self.timeline.spans
        yield from self.compact() if len(spans) > COMPACT else (line for span in spans for line in self.span(span))
        if "messages" in self.also:
            yield shape("path", "also wide messages", d="".join(self.messages()))
        if "critical" in self.also:
            yield shape("path", "also wide critical", d="".join(self.critical()))

    def messages(self) -> Iterator[str]:
        """A line per message, from the end of the step that makes it to the beginning of the one that takes it."""
        rank, timeline = self.timeline.graph.rank, self.timeline
        for source, node in timeline.messages():
            start, end = self.x(timeline.end[source]), self.x(timeline.start[node])
            yield f"M{start:g},{self.middle(rank(source)):g}L{end:g},{self.middle(rank(node)):g}"

    def critical(self) -> Iterator[str]:
        """One line through the steps of the critical path."""
        for number, leg in enumerate(critical_path(self.timeline)):
            y = self.y(leg.rank) + self.bar - 2  # under the letters
            yield f"{'L' if number else 'M'}{self.x(leg.start):g},{y:g}H{self.x(leg.end):g}"

    def middle(self, rank: int) -> float:
        return self.y(rank) + self.bar / 2

    def boxes(self, span: Span) -> Iterator[tuple[Action, float, float, float, float]]:
        """Actions with x, y, width and height; a pair is shown as two halves, one above the other."""
        x, width = self.x(span.start), max(0.3, round((span.end - span.start) * self.scale, 2))
        actions = flatten((span.step,))
        height = self.bar / len(actions)
        for half, action in enumerate(actions):
            yield action, x, self.y(span.rank) + half * height, width, height

    def compact(self) -> Iterator[str]:
        """One path for all steps of a rank with the same look: viewers stall on 50,000 boxes, but draw one long path at
        once."""
        paths: dict[tuple[int, str], list[str]] = {}
        for span in self.timeline.spans:
            for action, x, y, width, height in self.boxes(span):
                box = f"M{x:g},{y:g}h{width:g}v{height:g}h-{width:g}z"
                paths.setdefault((span.rank, self.fill(action)), []).append(box)
        for (_, fill), boxes in paths.items():
            yield shape("path", "span wide", fill=f"url(#{fill})", d="".join(boxes))

    def span(self, span: Span) -> Iterator[str]:
        title = f"{span.step} on rank {span.rank}: {plain(span.start)} to {plain(span.end)}"
        for action, x, y, width, height in self.boxes(span):
            fill = f"url(#{self.fill(action)})"
            yield shape("rect", "span", title=title, fill=fill, x=x, y=y, width=width, height=height)
            yield from self.step_label(action, x + width / 2, y + height / 2, width, height)

    def step_label(self, action: Action, x: float, y: float, width: float, height: float) -> Iterator[str]:
        size = min(11, height - 1)
        whole = f"{action.op}{action.microbatch}"
        shown = next((text for text in (whole, action.op) if len(text) * size * 0.62 + 3 <= width), "")
        at: dict[str, float | str] = {"x": x, "y": y, "style": f"font-size:{size:g}px"}
        if shown:
            yield shape("text", "step", shown, "", **at)

    def fill(self, action: Action) -> str:
        return f"pale-{action.op}" if is_second(self.timeline, action) else action.op

    def idle(self) -> Iterator[str]:
        for gap in self.timeline.idle:
            x, y = self.x(gap.start), self.y(gap.rank)
            width, fill = round(self.x(gap.end) - x, 2), f"url(#idle-{gap.cause})"
            yield shape("rect", "idle", title=str(gap), fill=fill, x=x, y=y, width=width, height=self.bar)

    def memory(self, rank: int) -> Iterator[str]:
        """The curve on a scale common to all ranks, so that they can be compared; the peak at its end, and the limit
        as a line."""
        top = max(*self.timeline.peak_memory, *self.timeline.memory_limits, 0) or 1
        base = self.y(rank) + self.bar + self.curve + 1
        path = [f"M{self.LEFT},{base:g}"]
        for time, amount in self.timeline.memory_curve(rank):
            path.append(f"H{self.x(time):g}V{base - self.curve * amount / top:.2f}")
        peak = format_amount(self.timeline.peak_memory[rank], self.timeline.costs.memory_unit)
        yield shape("path", "memory wide", title=f"memory of rank {rank}, peak {peak}", d=f"{''.join(path)}Z")
        for limit in self.timeline.memory_limits[rank : rank + 1]:
            title = f"memory limit {format_amount(limit, self.timeline.costs.memory_unit)}"
            line = f"M{self.LEFT},{base - self.curve * limit / top:.2f}H{self.x(self.timeline.finish):g}"
            yield shape("path", "limit wide", title=title, d=line)
        x, label = self.x(self.timeline.finish) + 6, peak if self.timeline.costs.memory_unit else f"peak {peak}"
        yield shape("text", text=label, x=x, y=base - 2, style=f"font-size:{min(11, self.curve + 1):g}px")

    def axis(self) -> Iterator[str]:
        bottom = self.height - 20
        step = round_step(self.timeline.finish / 12)
        for tick in range(int(self.timeline.finish / step) + 1):
            time = tick * step
            x = self.x(time)
            anchor, label = "middle" if tick else "start", format_amount(time, self.timeline.costs.time_unit)
            yield shape("line", "axis", x1=x, x2=x, y1=self.top - 4, y2=bottom)
            yield shape("text", text=label, x=x, y=bottom + 13, text_anchor=anchor)

    def legend(self, entries: Sequence[tuple[str, str]], y: float = 28) -> Iterator[str]:
        x = 8.0
        for fill, text in entries:
            if fill:
                yield swatch(fill, x, y)
            yield shape("text", text=text, x=x + 22 * bool(fill), y=y + 11)
            x += 36 + 6.2 * len(text)


def round_step(least: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
