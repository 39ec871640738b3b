"""A timeline as a self-contained SVG: steps, idle time with its cause on hover, and the memory curve of every rank.

Colours are after Okabe and Ito, which colour-blind readers can tell apart; for print every operation also has its own
hatching and its letter, and every cause of idle time its own hatching. On a dark page the paper is dark.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10
from statistics import median
from xml.sax.saxutils import escape

from zbcompile.schedules.ir.actions import COMPUTE, Action, flatten
from zbcompile.schedules.ir.costs import plain
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.simulation.critical_path import critical_path
from zbcompile.schedules.simulation.message_slack import messages
from zbcompile.schedules.simulation.timeline import Span, Timeline
from zbcompile.schedules.visualization.text import format_amount, summary

# Of every operation its colour, strokes in a tile of 6 x 6 (SVG path data), and the pen that draws them.
PEN = 'stroke-width=".8"'
_LOOKS = {
    "F": ("#56b4e9", "", PEN),
    "B": ("#e69f00", "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", PEN),
    "W": ("#2bb58c", "M3,3 h.01", 'stroke-width="2" stroke-linecap="round"'),
    "BW": ("#e2722b", "M0,0 l6,6 M0,6 l6,-6", PEN),
    "S": ("#d98cb8", "M0,3 h6", PEN),
    "T": ("#f0e442", "M3,0 v6", PEN),
    "VALIDATE": ("#c8c8c8", "M0,0 l6,6", PEN),
    "GATHER": ("#8dd3c7", "M0,6 l6,-6", PEN),
    "REDUCE": ("#9e9e9e", "M0,2 h6 M0,4 h6", PEN),
    "OPT": ("#b39ddb", "M0,3 h6 M3,0 v6", PEN),
}
LOOKS = {op: _LOOKS.get(op, ("#bbbbbb", "M0,0 h6", PEN)) for op in KINDS if op in COMPUTE}
IDLE_LOOKS = {  # strokes in a tile of 8 x 8: sparser and thinner than those of operations
    "warm-up": ("#999999", "M4,3 v2"),
    "cool-down": ("#999999", "M2,2 h4"),
    "wait": ("#d62728", "M0,0 l8,8"),
    "communication": ("#3b78c3", "M0,4 h8"),
    "imbalance": ("#a8860a", "M4,0 v8"),
    "overhead": ("#999999", ""),
}
LARGEST = 6000  # pixels of the longest time axis, before anybody zooms
GAP = 18  # pixels between two pictures
COMPACT = 20_000  # number of steps beyond which boxes have no text
STYLE = """
.zb text { font: 11px sans-serif; fill: #111 }
.zb .paper { fill: #fff }
.zb .label { text-anchor: end; dominant-baseline: central }
.zb .step { text-anchor: middle; dominant-baseline: central; pointer-events: none;
  paint-order: stroke; stroke: #fff; stroke-width: 2.5px; stroke-linejoin: round }
.zb .span { stroke: #333; stroke-width: .5 }
.zb .memory { fill: #999; fill-opacity: .35; stroke: #777; stroke-width: .8 }
.zb .axis { stroke: #999; stroke-width: .5 }
.zb .idle { stroke: #999; stroke-width: .3 }
.zb .also { fill: none; pointer-events: none; vector-effect: non-scaling-stroke }
.zb .messages { stroke: #0072b2; stroke-width: 1 }
.zb .critical { stroke: #d00; stroke-width: 2.5 }
"""
DARK = ((".zb text", "fill: #ddd"), (".zb .step", "fill: #111"), (".zb .paper", "fill: #1c1c1f"))
ALSO = {"messages": "messages", "critical": "critical path"}  # what is drawn on demand


def in_the_dark(*rules: tuple[str, str]) -> str:
    """The rules for dark pages: by the system's setting, of JupyterLab, of VS Code; never on paper."""
    dark = "\n".join(f"  {selector} {{ {rule} }}" for selector, rule in rules)
    themes = ('[data-jp-theme-light="false"]', ".vscode-dark")
    notebooks = "\n".join(f"  {theme} {selector} {{ {rule} }}" for theme in themes for selector, rule in rules)
    return f"@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n@media screen {{\n{notebooks}\n}}\n"


def natural_scale(timeline: Timeline) -> float:
    """Pixels per unit of time at which the steps of a timeline can be read."""
    return Drawing(timeline, None).scale


def to_svg(timeline: Timeline, width: int | None = None, also: Sequence[str] = ()) -> str:
    """The picture as text; `width` in pixels (default: wide enough to read the steps, at most 6,000); `also` may have
    "messages" and "critical", the critical path.

    Beyond 20,000 steps the boxes have no label and no text on hover; idle intervals keep theirs.

    >>> from zbcompile.schedules import build, simulate
    >>> to_svg(simulate(build("zb-h1", ranks=2, microbatches=4))).startswith("<svg")
    True
    """
    return "\n".join(Drawing(timeline, width, also).lines())


def compare_svg(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """One SVG with the picture of every timeline; `width` in pixels is that of the longest one's axis.

    >>> from zbcompile.schedules import build, simulate
    >>> compare_svg([simulate(build(name, 2, 4)) for name in ("1f1b", "zb-h1")]).count("<svg")
    3
    """
    longest = max(t.finish for t in timelines)
    natural = min(max(map(natural_scale, timelines)), LARGEST / (longest or 1))
    scale = natural if width is None else max(1, width - Drawing.MARGINS) / (longest or 1)
    pictures = [to_svg(t, round(Drawing.MARGINS + t.finish * scale)) for t in timelines]
    sizes = [_size(picture) for picture in pictures]
    whole = max(w for w, _ in sizes), sum(h + GAP for _, h in sizes)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole[0]:g}" height="{whole[1]:g}"']
    lines[0] += f' viewBox="0 0 {whole[0]:g} {whole[1]:g}">'
    y = 0.0
    for picture, (_, height) in zip(pictures, sizes, strict=True):
        lines.append(picture.replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += height + GAP
    return "\n".join([*lines, "</svg>"])


def _size(picture: str) -> tuple[float, float]:
    """Width and height as the first line of an SVG of ours gives them."""
    parts = picture.split('"', 8)
    return float(parts[3]), float(parts[5])


@dataclass(frozen=True)
class Drawing:
    """The parts of a picture; `names` and `plot` are pictures of their own, one beside the other."""

    timeline: Timeline
    wanted_width: int | None
    also: Sequence[str] = ()
    zooms: bool = False

    LEFT, RIGHT, TOP = 62, 74, 62
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
        return self.TOP + self.timeline.schedule.ranks * self.row + 24

    def x(self, time: float) -> float:
        return round(self.LEFT + time * self.scale, 2)

    def y(self, rank: int) -> float:
        return self.TOP + rank * self.row

    def lines(self) -> Iterator[str]:
        yield self.opened(0, self.width, 0)
        yield f"<style>{STYLE}{in_the_dark(*DARK)}</style>"
        yield from patterns()
        yield f'<rect class="paper" width="{self.width:g}" height="{self.height:g}"/>'
        yield f'<text x="8" y="18" style="font-weight:bold">{escape(summary(self.timeline))}</text>'
        yield from self.legend()
        yield from self.labels()
        yield from self.shapes()
        yield "</svg>"

    def names(self) -> Iterator[str]:
        """The names of the ranks alone."""
        yield self.opened(0, self.LEFT, self.TOP - 6)
        yield from (*self.labels(), "</svg>")

    def plot(self) -> Iterator[str]:
        """All but the names, the title and the legend."""
        yield self.opened(self.LEFT, self.timeline.finish * self.scale + self.RIGHT, self.TOP - 6)
        yield from (*self.shapes(), "</svg>")

    def opened(self, left: float, width: float, top: float) -> str:
        height = self.height - top
        size = f'width="{width:g}" height="{height:g}" viewBox="{left:g} {top:g} {width:g} {height:g}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="zb">'

    def labels(self) -> Iterator[str]:
        for rank in range(self.timeline.schedule.ranks):
            label_y = self.y(rank) + self.bar / 2
            yield f'<text class="label" x="{self.LEFT - 8}" y="{label_y:g}">rank {rank}</text>'

    def shapes(self) -> Iterator[str]:
        yield from self.axis()
        for rank in range(self.timeline.schedule.ranks):
            yield from self.memory(rank)
        yield from self.idle()
        spans = self.timeline.spans
        yield from self.compact() if len(spans) > COMPACT else (line for span in spans for line in self.span(span))
        if "messages" in self.also:
            yield f'<path class="also wide messages" d="{"".join(self.messages())}"/>'
        if "critical" in self.also:
            yield f'<path class="also wide critical" d="{"".join(self.critical())}"/>'

    def messages(self) -> Iterator[str]:
        """A line per message, from the end of the step that makes it to the beginning of the one that takes it."""
        run = self.timeline.run
        for rank, index, needed in messages(self.timeline):
            start, end = self.x(run.end[needed.rank][needed.step]), self.x(run.begin[rank][index])
            yield f"M{start:g},{self.middle(needed.rank):g}L{end:g},{self.middle(rank):g}"

    def critical(self) -> Iterator[str]:
        """One line through the steps of the critical path."""
        for number, leg in enumerate(critical_path(self.timeline)):
            y = self.y(leg.rank) + self.bar - 2  # under the letters
            yield f"{'L' if number else 'M'}{self.x(leg.start):g},{y:g}H{self.x(leg.end):g}"

    def middle(self, rank: int) -> float:
        return self.y(rank) + self.bar / 2

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
            yield f'<path class="span wide" fill="url(#{fill})" d="{"".join(boxes)}"/>'

    def span(self, span: Span) -> Iterator[str]:
        title = f"{span.step} on rank {span.rank}: {plain(span.start)} to {plain(span.end)}"
        for action, x, y, width, height in self.boxes(span):
            box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            yield f'<rect class="span" fill="url(#{self.fill(action)})" {box}><title>{escape(title)}</title></rect>'
            yield from self.step_label(action, x + width / 2, y + height / 2, width, height)

    def step_label(self, action: Action, x: float, y: float, width: float, height: float) -> Iterator[str]:
        size = min(11, height - 1)
        whole = f"{action.op}{action.microbatch}"
        shown = next((text for text in (whole, action.op) if len(text) * size * 0.62 + 3 <= width), "")
        data = f' data-w="{width:g}"' + f' data-t="{whole}"' * (shown != whole) if self.zooms else ""
        if shown or self.zooms:
            yield f'<text class="step" x="{x:g}" y="{y:g}" style="font-size:{size:g}px"{data}>{shown}</text>'

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
            yield f'<rect class="idle" fill="url(#idle-{gap.cause})" {box}><title>{escape(str(gap))}</title></rect>'

    def memory(self, rank: int) -> Iterator[str]:
        """The curve on a scale common to all ranks, so that they can be compared; the peak at its end."""
        top = max(self.timeline.peak_memory) or 1
        base = self.y(rank) + self.bar + self.curve + 1
        path = [f"M{self.LEFT},{base:g}"]
        for time, amount in self.timeline.memory_curve(rank):
            path.append(f"H{self.x(time):g}V{base - self.curve * amount / top:.2f}")
        peak = format_amount(self.timeline.peak_memory[rank], self.timeline.costs.memory_unit)
        yield f'<path class="memory wide" d="{"".join(path)}Z"><title>memory of rank {rank}, peak {peak}</title></path>'
        x, label = self.x(self.timeline.finish) + 6, peak if self.timeline.costs.memory_unit else f"peak {peak}"
        yield f'<text x="{x:g}" y="{base - 2:g}" style="font-size:{min(11, self.curve + 1):g}px">{label}</text>'

    def axis(self) -> Iterator[str]:
        bottom = self.height - 20
        step = _round_step(self.timeline.finish / 12)
        tenths = 10 if self.zooms else 1  # for those who zoom
        for tick in range(int(self.timeline.finish / step * tenths) + 1):
            time = tick * step / tenths
            x = self.x(time)
            anchor = "middle" if tick else "start"
            fine = ' class="fine" display="none"' if tick % tenths else ""
            yield f"<g{fine}>"
            yield f'<line class="axis" x1="{x:g}" x2="{x:g}" y1="{self.TOP - 4}" y2="{bottom:g}"/>'
            unit = self.timeline.costs.time_unit
            yield f'<text x="{x:g}" y="{bottom + 13:g}" text-anchor="{anchor}">{format_amount(time, unit)}</text></g>'

    def entries(self) -> list[tuple[str, str]]:
        """The fill and the text of each entry of the legend."""
        ops = {action.op for span in self.timeline.spans for action in flatten((span.step,))}
        entries = [(op, f"{op} {kind.meaning}") for op, kind in KINDS.items() if op in ops]
        causes = {gap.cause for gap in self.timeline.idle}
        entries += [(f"idle-{cause}", f"idle: {cause}") for cause in IDLE_LOOKS if cause in causes]
        if any(self.is_second(action) for span in self.timeline.spans for action in flatten((span.step,))):
            second = "model copy" if self.timeline.schedule.placement.kind == "dual" else "chunk"
            entries.append(("", f"pale: every second {second}"))
        return entries

    def legend(self) -> Iterator[str]:
        x = 8.0
        for fill, text in self.entries():
            if fill:
                yield f'<rect class="span" fill="url(#{fill})" x="{x:g}" y="28" width="18" height="14"/>'
            yield f'<text x="{x + 22 * bool(fill):g}" y="39">{text}</text>'
            x += 36 + 6.2 * len(text)


def _round_step(least: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def patterns() -> Iterator[str]:
    """A hatched tile for every operation, and a pale one; for every cause of idle time one on which the paper shows."""
    yield "<defs>"
    for cause, (colour, path) in IDLE_LOOKS.items():
        strokes = f'<rect width="8" height="8" fill="{colour}" fill-opacity=".13"/>' * bool(path)
        strokes += f'<path d="{path}" stroke="{colour}" fill="none"/>' * bool(path)
        yield f'<pattern id="idle-{cause}" width="8" height="8" patternUnits="userSpaceOnUse">{strokes}</pattern>'
    for op, (colour, path, pen) in LOOKS.items():
        strokes = f'<path d="{path}" stroke="#000" stroke-opacity=".45" fill="none" {pen}/>' if path else ""
        for name, fill in ((op, colour), (f"pale-{op}", _pale(colour))):
            tile = f'<rect width="6" height="6" fill="{fill}"/>{strokes}'
            yield f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{tile}</pattern>'
    yield "</defs>"


def _pale(colour: str) -> str:
    """Halfway to white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
