"""Write a timeline as a picture, by the ending of the file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace
from zbcompile.schedules.visualization.comparison import compare_html, compare_svg, compare_text
from zbcompile.schedules.visualization.html import to_html
from zbcompile.schedules.visualization.svg import to_svg
from zbcompile.schedules.visualization.text import format_timeline

ENDINGS = (".txt", ".svg", ".html", ".json")


def write_picture(timeline: Timeline, path: str | Path) -> Path:
    """Write `path`: .txt, .svg, .html, or .json (Chrome / Perfetto trace). `ScheduleError` for any other ending."""
    path = Path(path)
    drawers = dict(zip(ENDINGS, (format_timeline, to_svg, to_html, to_chrome_trace), strict=True))
    if path.suffix not in drawers:
        raise ScheduleError(_unknown(path, ENDINGS))
    path.write_text(drawers[path.suffix](timeline) + "\n", encoding="utf-8")
    return path


def write_comparison(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Write the timelines under each other on one time axis: .txt, .svg or .html; `ScheduleError` for other endings."""
    path = Path(path)
    drawers = dict(zip(ENDINGS, (compare_text, compare_svg, compare_html), strict=False))
    if path.suffix not in drawers or not timelines:
        raise ScheduleError(_unknown(path, drawers) if timelines else f"picture {path.name}: nothing to draw")
    path.write_text(drawers[path.suffix](timelines) + "\n", encoding="utf-8")
    return path


def _unknown(path: Path, endings: Iterable[str]) -> str:
    svg = path.with_suffix(".svg").name
    way = f"for pixels write {svg}, then `rsvg-convert {svg} -o {path.stem}.png`, or open it in a browser"
    return f"picture {path.name}: the ending selects the format; expected one of {', '.join(endings)}; {way}"
