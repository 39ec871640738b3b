"""A timeline as a self-contained SVG: steps, idle time with its cause on hover, and the memory curve of every rank.

Colours are after Okabe and Ito, which colour-blind readers can tell apart; for print every operation also has its own
hatching and its letter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10
from statistics import median
from xml.sax.saxutils import escape

from zbcompile.schedules.ir.actions import COMPUTE, Action, flatten
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.simulation.timeline import Span, Timeline
from zbcompile.schedules.visualization.text import format_amount, summary

COLOURS = {op: kind.look.colour for op, kind in KINDS.items() if op in COMPUTE}
IDLE_COLOURS = {
    "warm-up": "#ececec",
    "cool-down": "#dcdcdc",
    "wait": "#f7b6b6",
    "communication": "#c6d8f2",
    "imbalance": "#f3e3a8",
    "overhead": "#fff",
}
COMPACT = 20_000  # number of steps beyond which boxes have no text
STYLE = """
text { font: 11px sans-serif; fill: #111 }
.label { text-anchor: end; dominant-baseline: central }
.step { text-anchor: middle; dominant-baseline: central; pointer-events: none;
  paint-order: stroke; stroke: #fff; stroke-width: 2.5px; stroke-linejoin: round }
.span { stroke: #333; stroke-width: .5 }
.memory { fill: #999; fill-opacity: .35; stroke: #444; stroke-width: .8 }
.axis { stroke: #999; stroke-width: .5 }
"""


MARGIN = 62 + 74  # pixels left and right of the time axis


def natural_scale(timeline: Timeline) -> float:
    """Pixels per unit of time at which the steps of a timeline can be read."""
    return _Drawing(timeline, None).scale


def to_svg(timeline: Timeline, width: int | None = None) -> str:
    """The picture as text; `width` in pixels (default: wide enough to read the steps, at most 6,000).

    Beyond 20,000 steps the boxes have no label and no text on hover; idle intervals keep theirs.

    >>> from zbcompile.schedules import build, simulate
    >>> to_svg(simulate(build("zb-h1", ranks=2, microbatches=4))).startswith("<svg")
    True
    """
    return "\n".join(_Drawing(timeline, width).lines())


@dataclass(frozen=True)
class _Drawing:
    timeline: Timeline
    wanted_width: int | None

    LEFT, RIGHT, TOP = 62, MARGIN - 62, 62

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
        return min(max(900, 28 * finish / median(times or [1])), 6000) / finish

    @property
    def width(self) -> float:
        return max(1180, self.LEFT + self.timeline.finish * self.scale + self.RIGHT)  # the legend needs that much

    @property
    def height(self) -> float:
        return self.TOP + self.timeline.schedule.ranks * self.row + 24

    def x(self, time: float) -> float:
        return round(self.LEFT + time * self.scale, 2)

    def y(self, rank: int) -> float:
        return self.TOP + rank * self.row

    def lines(self) -> Iterator[str]:
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        yield f"<style>{STYLE}</style>"
        yield from _patterns()
        yield f'<rect width="{self.width:g}" height="{self.height:g}" fill="#fff"/>'
        yield f'<text x="8" y="18" style="font-weight:bold">{escape(summary(self.timeline))}</text>'
        yield from self.legend()
        yield from self.axis()
        for rank in range(self.timeline.schedule.ranks):
            label_y = self.y(rank) + self.bar / 2
            yield f'<text class="label" x="{self.LEFT - 8}" y="{label_y:g}">rank {rank}</text>'
            yield from self.memory(rank)
        yield from self.idle()
        spans = self.timeline.spans
        yield from self.compact() if len(spans) > COMPACT else (line for span in spans for line in self.span(span))
        yield "</svg>"

    def boxes(self, span: Span) -> Iterator[tuple[Action, float, float, float, float]]:
        """Actions with x, y, width and height; a pair is drawn as two halves, one above the other."""
        x, width = self.x(span.start), max(0.3, round((span.end - span.start) * self.scale, 2))
        actions = flatten((span.step,))
        height = self.bar / len(actions)
        for half, action in enumerate(actions):
            yield action, x, self.y(span.rank) + half * height, width, height

    def compact(self) -> Iterator[str]:
        """One path for all steps of a rank that look alike: a viewer that stalls on 50,000 boxes draws this at once."""
        paths: dict[tuple[int, str], list[str]] = {}
        for span in self.timeline.spans:
            for action, x, y, width, height in self.boxes(span):
                box = f"M{x:g},{y:g}h{width:g}v{height:g}h-{width:g}z"
                paths.setdefault((span.rank, self.fill(action)), []).append(box)
        for (_, fill), boxes in paths.items():
            yield f'<path class="span" fill="url(#{fill})" d="{"".join(boxes)}"/>'

    def span(self, span: Span) -> Iterator[str]:
        title = f"{span.step} on rank {span.rank}: {span.start:g} to {span.end:g}"
        for action, x, y, width, height in self.boxes(span):
            box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            yield f'<rect class="span" fill="url(#{self.fill(action)})" {box}><title>{escape(title)}</title></rect>'
            yield from self.step_label(action, x + width / 2, y + height / 2, width, height)

    def step_label(self, action: Action, x: float, y: float, width: float, height: float) -> Iterator[str]:
        size = min(11, height - 1)
        for text in (f"{action.op}{action.microbatch}", action.op):
            if len(text) * size * 0.62 + 3 <= width:
                yield f'<text class="step" x="{x:g}" y="{y:g}" style="font-size:{size:g}px">{text}</text>'
                return

    def fill(self, action: Action) -> str:
        return f"pale-{action.op}" if self.is_second(action) else action.op

    def is_second(self, action: Action) -> bool:
        """Every other chunk, or the second copy of the model, is pale."""
        schedule = self.timeline.schedule
        return bool(schedule.copy_of(action.microbatch) or (action.stage // schedule.ranks) % 2)

    def idle(self) -> Iterator[str]:
        for gap in self.timeline.idle:
            x, y = self.x(gap.start), self.y(gap.rank)
            box = f'x="{x:g}" y="{y:g}" width="{self.x(gap.end) - x:.2f}" height="{self.bar:g}"'
            yield f'<rect class="idle" fill="{IDLE_COLOURS[gap.cause]}" {box}><title>{escape(str(gap))}</title></rect>'

    def memory(self, rank: int) -> Iterator[str]:
        """The curve on a scale common to all ranks, so that they can be compared; the peak at its end."""
        top = max(self.timeline.peak_memory) or 1
        base = self.y(rank) + self.bar + self.curve + 1
        path = [f"M{self.LEFT},{base:g}"]
        for time, amount in self.timeline.memory_curve(rank):
            path.append(f"H{self.x(time):g}V{base - self.curve * amount / top:.2f}")
        peak = format_amount(self.timeline.peak_memory[rank], self.timeline.costs.memory_unit)
        yield f'<path class="memory" d="{"".join(path)}Z"><title>memory of rank {rank}, peak {peak}</title></path>'
        x, label = self.x(self.timeline.finish) + 6, peak if self.timeline.costs.memory_unit else f"peak {peak}"
        yield f'<text x="{x:g}" y="{base - 2:g}" style="font-size:{min(11, self.curve + 1):g}px">{label}</text>'

    def axis(self) -> Iterator[str]:
        bottom = self.height - 20
        step = _round_step(self.timeline.finish / 12)
        for tick in range(int(self.timeline.finish / step) + 1):
            time = tick * step
            x = self.x(time)
            yield f'<line class="axis" x1="{x:g}" x2="{x:g}" y1="{self.TOP - 4}" y2="{bottom:g}"/>'
            unit = f" {self.timeline.costs.time_unit}".rstrip()
            yield f'<text x="{x:g}" y="{bottom + 13:g}" text-anchor="middle">{time:.4g}{unit}</text>'

    def legend(self) -> Iterator[str]:
        ops = {action.op for span in self.timeline.spans for action in flatten((span.step,))}
        entries = [(f"url(#{op})", f"{op} {kind.meaning}") for op, kind in KINDS.items() if op in ops]
        causes = {gap.cause for gap in self.timeline.idle}
        entries += [(colour, f"idle: {cause}") for cause, colour in IDLE_COLOURS.items() if cause in causes]
        x = 8.0
        for fill, text in entries:
            yield f'<rect class="span" fill="{fill}" x="{x:g}" y="28" width="18" height="14"/>'
            yield f'<text x="{x + 22:g}" y="39">{text}</text>'
            x += 36 + 6.2 * len(text)
        if any(self.is_second(action) for span in self.timeline.spans for action in flatten((span.step,))):
            second = "model copy" if self.timeline.schedule.placement.kind == "dual" else "chunk"
            yield f'<text x="{x:g}" y="39">pale: every second {second}</text>'


def _round_step(least: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _patterns() -> Iterator[str]:
    """A hatched tile for every operation, and a pale one."""
    yield "<defs>"
    for op, colour in COLOURS.items():
        _, path, pen = KINDS[op].look
        strokes = f'<path d="{path}" stroke="#000" stroke-opacity=".45" fill="none" {pen}/>' if path else ""
        for name, fill in ((op, colour), (f"pale-{op}", _pale(colour))):
            tile = f'<rect width="6" height="6" fill="{fill}"/>{strokes}'
            yield f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{tile}</pattern>'
    yield "</defs>"


def _pale(colour: str) -> str:
    """Halfway to white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
