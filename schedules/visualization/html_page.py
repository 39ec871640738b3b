"""Timelines as an HTML page: their SVG picture in a document that loads nothing from anywhere."""

from collections.abc import Sequence
from html import escape

from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.svg import compare_svg, to_svg

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 16px; color-scheme: light dark }}</style>
{svg}
</html>
"""


def to_html(timeline: Timeline, width: int | None = None) -> str:
    """Returns the page as text; `width` as for `to_svg`.

    >>> from zbcompile.schedules import build, simulate
    >>> to_html(simulate(build("gpipe", 1, 1))).startswith("<!doctype html>")
    True
    """
    return PAGE.format(title=escape(timeline.schedule.name), svg=to_svg(timeline, width))


def compare_html(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """Returns one page with the pictures of all timelines on one time axis; `width` as for `compare_svg`."""
    title = escape(" / ".join(t.schedule.name for t in timelines))
    return PAGE.format(title=title, svg=compare_svg(timelines, width))
