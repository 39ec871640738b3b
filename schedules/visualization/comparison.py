"""Several timelines one below another on one time axis, so that the eye compares their lengths."""

from collections.abc import Sequence

from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.figure import LARGEST
from zbcompile.schedules.visualization.svg import Drawing, natural_scale, to_svg
from zbcompile.schedules.visualization.text import format_timeline

GAP = 18  # pixels between two pictures


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


def compare_text(timelines: Sequence[Timeline], width: int = 100) -> str:
    """The timelines as text, all in the same number of characters per time."""
    longest = max(t.finish for t in timelines) or 1
    label = max(len(f"rank {t.schedule.ranks - 1}") for t in timelines) + 2
    rows = (format_timeline(t, label + max(1, int((width - label) * t.finish / longest))) for t in timelines)
    return "\n\n".join(rows)
