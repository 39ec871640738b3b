"""Write a timeline as a picture, by the ending of the file."""

from pathlib import Path

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.html_picture import to_html
from zbcompile.schedules.svg_picture import to_svg
from zbcompile.schedules.timeline import Timeline
from zbcompile.schedules.timeline_text import format_timeline
from zbcompile.schedules.trace_picture import to_chrome_trace

ENDINGS = (".txt", ".svg", ".html", ".json")


def write_picture(timeline: Timeline, path: str | Path) -> Path:
    """Write `path`: .txt, .svg, .html, or .json (Chrome / Perfetto trace). `ScheduleError` for any other ending."""
    path = Path(path)
    drawers = dict(zip(ENDINGS, (format_timeline, to_svg, to_html, to_chrome_trace), strict=True))
    if path.suffix not in drawers:
        raise ScheduleError(f"picture {path.name}: the ending says what to draw; expected one of {', '.join(ENDINGS)}")
    path.write_text(drawers[path.suffix](timeline) + "\n", encoding="utf-8")
    return path
