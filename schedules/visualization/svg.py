"""A timeline as a self-contained SVG: steps, idle time with its cause on hover, and the memory
curve of every rank."""

from collections.abc import Iterator, Sequence
from math import floor, log10
from xml.sax.saxutils import escape, quoteattr

from zbcompile.amounts import plain
from zbcompile.schedules.ir.actions import Action, flatten
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, OPTIMIZER_OPS
from zbcompile.schedules.simulation.timeline import Span, Timeline
from zbcompile.schedules.visualization.style import IDLE_STYLES, STYLE_SHEET, patterns
from zbcompile.schedules.visualization.text import format_amount, summary

READABLE = 1200  # pixels of an SVG, which shrinks to its window with all of its letters
LEGEND = 1180  # pixels that the legend needs
LEFT, RIGHT = 62, 74  # pixels beside the time axis
GAP = 18  # pixels between two pictures
COMPACT = 20_000  # number of steps beyond which boxes have no text


def to_svg(timeline: Timeline, width: int = READABLE) -> str:
    """Returns the picture as text, which shrinks to a window that is narrower.

    `width` in pixels. Beyond 20,000 steps the boxes have no label and no text on hover; idle
    intervals keep theirs.

    >>> from zbcompile.schedules import build, simulate
    >>> to_svg(simulate(build("zb-h1", ranks=2, microbatches=4))).startswith("<svg")
    True
    """
    step = _StepPicture(timeline, max(1, width - LEFT - RIGHT) / (timeline.finish or 1))
    return _document(step.width, step.height, [*_legend([timeline], 28), *step.lines()])


def compare_svg(timelines: Sequence[Timeline], width: int = READABLE) -> str:
    """Returns one SVG with the picture of every timeline under one legend, and what the shortest
    saves.

    `width` in pixels is that of the longest one's axis. A dashed line shows the end of the first
    one.

    >>> from zbcompile.schedules import build, simulate
    >>> compare_svg([simulate(build(name, 2, 4)) for name in ("1f1b", "zb-h1")]).count("<svg")
    3
    """
    longest = max(timeline.finish for timeline in timelines) or 1
    scale = max(1, width - LEFT - RIGHT) / longest
    pictures = [_StepPicture(timeline, scale, top=38) for timeline in timelines]
    first, best = timelines[0], min(timelines, key=lambda timeline: timeline.finish)
    lines, y = list[str](), 8.0
    if best.finish < first.finish:
        before, after = (
            f"{t.schedule.name} {format_amount(t.finish, t.costs.time_unit)}" for t in (first, best)
        )
        text = f"{before} \u2192 {after}: \u2212{1 - best.finish / first.finish:.1%}"
        style = "font-size: 22px; font-weight: bold"
        lines.append(_shape("text", text=text, x=8, y=26, style=style))
        y = 42.0
    lines += _legend(timelines, y)
    end, y = pictures[0].x(first.finish), y + 18
    for step in pictures:
        lines.append(
            f'<svg class="zb" y="{y:g}" width="{step.width:g}" height="{step.height:g}"'
            ' overflow="visible">'
        )
        lines += step.lines()
        if step.x(step.timeline.finish) < end:
            lines.append(
                _shape("path", "saved", d=f"M{end:g},{step.top}V{step.height - 24:g}", fill="none")
            )
        lines.append("</svg>")
        y += step.height + GAP
    return _document(max(step.width for step in pictures), y, lines)


def _document(width: float, height: float, lines: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    style = 'class="zb" xmlns="http://www.w3.org/2000/svg" style="max-width: 100%; height: auto"'
    head = f"<svg {size} {style}>", f"<style>{STYLE_SHEET}</style>", *patterns()
    return "\n".join((*head, _shape("rect", "paper", width=width, height=height), *lines, "</svg>"))


def _shape(
    tag: str, kind: str = "", text: str = "", title: str = "", **attributes: float | str
) -> str:
    """Returns one element; `kind` is its class, `title` its text on hover. Underscores become
    hyphens.

    >>> _shape("text", "label", "rank 0", x=54, text_anchor="end")
    '<text class="label" x="54" text-anchor="end">rank 0</text>'
    """
    values = {"class": kind, **attributes} if kind else attributes
    texts = {k: v if isinstance(v, str) else f"{v:.10g}" for k, v in values.items()}
    start = "".join(f" {k.replace('_', '-')}={quoteattr(text)}" for k, text in texts.items())
    content = f"<title>{escape(title)}</title>" * bool(title) + escape(text)
    return f"<{tag}{start}>{content}</{tag}>" if content else f"<{tag}{start}/>"


def _legend(timelines: Sequence[Timeline], y: float) -> Iterator[str]:
    """Yields a sample and a text for each operation and cause that any of the timelines has."""
    actions = [(t, a) for t in timelines for span in t.spans for a in flatten((span.step,))]
    ops = {action.op for _, action in actions}
    causes = {gap.cause for t in timelines for gap in t.idle}
    meanings = [(op, spec.meaning) for op, spec in COMPUTE_OPS.items()]
    meanings += [(op, spec.meaning) for op, spec in OPTIMIZER_OPS.items()]
    entries = [(op, "span", f"{op} {meaning}") for op, meaning in meanings if op in ops]
    entries += [(f"idle-{c}", "idle", f"idle: {c}") for c in IDLE_STYLES if c in causes]
    if any(_is_pale(t, action) for t, action in actions):
        entries.append(("", "", "pale: every second chunk, or the second copy of the model"))
    x = 8.0
    for fill, kind, text in entries:
        if fill:
            yield _shape("rect", kind, fill=f"url(#{fill})", x=x, y=y, width=18, height=14)
        yield _shape("text", text=text, x=x + 22 * bool(fill), y=y + 11)
        x += 36 + 6.2 * len(text)


def _is_pale(timeline: Timeline, action: Action) -> bool:
    """Returns whether an action is shown pale: every other chunk, or the second copy of the
    model."""
    schedule = timeline.schedule
    return bool(schedule.copy_of(action.microbatch) or (action.stage // schedule.ranks) % 2)


class _StepPicture:
    """The parts of the picture of one timeline, `scale` pixels per unit of time."""

    def __init__(self, timeline: Timeline, scale: float, top: float = 62) -> None:
        self.timeline, self.scale, self.top = timeline, scale, top  # top: title and legend
        ranks = timeline.schedule.ranks
        self.bar = 22 if ranks <= 16 else 16 if ranks <= 32 else 12  # height of the steps of a rank
        self.curve = round(0.8 * self.bar)  # height of the memory curve under them
        self.width = max(LEGEND, LEFT + timeline.finish * scale + RIGHT)
        self.height = top + ranks * (self.bar + self.curve + 5) + 24

    def x(self, time: float) -> float:
        return round(LEFT + time * self.scale, 2)

    def y(self, rank: int) -> float:
        return self.top + rank * (self.bar + self.curve + 5)

    def lines(self) -> Iterator[str]:
        """Yields the title, the names of the ranks and their steps."""
        timeline = self.timeline
        yield _shape("text", text=summary(timeline), x=8, y=18, style="font-weight:bold")
        yield from self._axis()
        for rank in range(timeline.schedule.ranks):
            yield _shape("text", "label", f"rank {rank}", x=LEFT - 8, y=self.y(rank) + self.bar / 2)
            yield from self._memory(rank)
        for gap in timeline.idle:
            x, y, fill = self.x(gap.start), self.y(gap.rank), f"url(#idle-{gap.cause})"
            width = round(self.x(gap.end) - x, 2)
            yield _shape(
                "rect", "idle", title=str(gap), fill=fill, x=x, y=y, width=width, height=self.bar
            )
        yield from self._compact_steps() if len(timeline.spans) > COMPACT else self._steps()

    def _boxes(self, span: Span) -> Iterator[tuple[Action, str, float, float, float, float]]:
        """Yields actions with fill, x, y, width and height; a pair is shown as two halves, one
        above the other."""
        x, width = self.x(span.start), max(0.3, round((span.end - span.start) * self.scale, 2))
        actions = flatten((span.step,))
        height = self.bar / len(actions)
        for half, action in enumerate(actions):
            fill = f"url(#{'pale-' * _is_pale(self.timeline, action)}{action.op})"
            yield action, fill, x, self.y(span.rank) + half * height, width, height

    def _compact_steps(self) -> Iterator[str]:
        """Yields one path for all steps of a rank with the same style: viewers stall on 50,000
        boxes."""
        paths: dict[tuple[int, str], list[str]] = {}
        for span in self.timeline.spans:
            for _, fill, x, y, width, height in self._boxes(span):
                paths.setdefault((span.rank, fill), []).append(
                    f"M{x:g},{y:g}h{width:g}v{height:g}h-{width:g}z"
                )
        for (_, fill), boxes in paths.items():
            yield _shape("path", "span wide", fill=fill, d="".join(boxes))

    def _steps(self) -> Iterator[str]:
        for span in self.timeline.spans:
            title = f"{span.step} on rank {span.rank}: {plain(span.start)} to {plain(span.end)}"
            for action, fill, x, y, width, height in self._boxes(span):
                yield _shape(
                    "rect", "span", title=title, fill=fill, x=x, y=y, width=width, height=height
                )
                size, style = min(11, height - 1), f"font-size:{min(11, height - 1):g}px"
                for text in (f"{action.op}{action.microbatch}", action.op):
                    if len(text) * size * 0.62 + 3 <= width:
                        yield _shape(
                            "text", "step", text, x=x + width / 2, y=y + height / 2, style=style
                        )
                        break

    def _memory(self, rank: int) -> Iterator[str]:
        """Yields the curve on a scale common to all ranks, so that they can be compared, and the
        peak."""
        timeline, unit = self.timeline, self.timeline.costs.memory_unit
        scale = self.curve / (max(timeline.peak_memory) or 1)
        base, end = self.y(rank) + self.bar + self.curve + 1, self.x(timeline.finish)
        curve = (
            f"H{self.x(time):g}V{base - scale * amount:.2f}"
            for time, amount in timeline.memory_curve(rank)
        )
        peak = format_amount(timeline.peak_memory[rank], unit)
        title = f"memory of rank {rank}, peak {peak}"
        yield _shape("path", "memory wide", title=title, d=f"M{LEFT},{base:g}{''.join(curve)}Z")
        style = f"font-size:{min(11, self.curve + 1):g}px"
        yield _shape(
            "text", text=peak if unit else f"peak {peak}", x=end + 6, y=base - 2, style=style
        )

    def _axis(self) -> Iterator[str]:
        finish, bottom = self.timeline.finish, self.height - 20
        power = 10.0 ** floor(log10(finish / 12)) if finish else 1.0
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= finish / 12)
        for tick in range(int(finish / step) + 1):
            x, label = (
                self.x(tick * step),
                format_amount(tick * step, self.timeline.costs.time_unit * bool(tick)),
            )
            yield _shape("line", "axis", x1=x, x2=x, y1=self.top - 4, y2=bottom)
            yield _shape(
                "text", text=label, x=x, y=bottom + 13, text_anchor="middle" if tick else "start"
            )
