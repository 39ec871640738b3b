"""Timelines as one HTML file, which loads nothing from anywhere."""

from collections.abc import Sequence
from html import escape

from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.figure import figure
from zbcompile.schedules.visualization.svg import in_the_dark

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 16px; background: #fff; color-scheme: light dark }}
{dark}</style>
{figure}
</html>
"""


def to_html(timeline: Timeline, width: int | None = None) -> str:
    """The page as text. `width` as for `figure`.

    >>> from zbcompile.schedules import build, simulate
    >>> to_html(simulate(build("gpipe", 1, 1))).startswith("<!doctype html>")
    True
    """
    return compare_html([timeline], width)


def compare_html(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """One page with the pictures of all, and a table for each."""
    title = escape(" / ".join(t.schedule.name for t in timelines))
    dark = in_the_dark(("body", "background: #1c1c1f"))
    return PAGE.format(title=title, dark=dark, figure=figure(timelines, width))
