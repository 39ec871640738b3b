"""Writes a timeline as a picture, by the ending of the file."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace
from zbcompile.schedules.visualization.svg import compare_svg, to_svg
from zbcompile.schedules.visualization.text import compare_text, format_timeline

ENDINGS = (".txt", ".svg", ".html", ".json")
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 16px; color-scheme: light dark }}</style>
{svg}
</html>
"""


def to_html(timeline: Timeline) -> str:
    """Returns a page with the SVG picture that loads nothing from anywhere.

    >>> from zbcompile.schedules import build, simulate
    >>> to_html(simulate(build("gpipe", 1, 1))).startswith("<!doctype html>")
    True
    """
    return PAGE.format(title=escape(timeline.schedule.name), svg=to_svg(timeline))


def write_picture(timeline: Timeline, path: str | Path) -> Path:
    """Writes `path`: .txt, .svg, .html, or .json (Chrome / Perfetto trace). `ScheduleError` for any
    other ending."""
    return _write(Path(path), timeline, (format_timeline, to_svg, to_html, to_chrome_trace))


def write_comparison(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Writes the timelines under each other on one time axis: .txt, .svg or .html; `ScheduleError`
    for others."""
    if not timelines:
        raise ScheduleError(f"picture {Path(path).name}: nothing to draw")
    title = escape(" / ".join(timeline.schedule.name for timeline in timelines))
    return _write(
        Path(path),
        timelines,
        (compare_text, compare_svg, lambda ts: PAGE.format(title=title, svg=compare_svg(ts))),
    )


def _write(path: Path, timelines: Any, by_ending: Sequence[Callable[[Any], str]]) -> Path:
    writers = dict(zip(ENDINGS, by_ending, strict=False))
    if path.suffix not in writers:
        svg = path.with_suffix(".svg").name
        hint = f"write {svg}, then `rsvg-convert {svg} -o {path.stem}.png`, or open it in a browser"
        expected = f"the ending selects the format; expected one of {', '.join(writers)}"
        raise ScheduleError(f"picture {path.name}: {expected}; for pixels {hint}")
    path.write_text(writers[path.suffix](timelines) + "\n", encoding="utf-8")
    return path
