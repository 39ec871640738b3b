"""Shapes as text, of which SVG files and pages consist, and the picture around them."""

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from zbcompile.schedules.visualization.looks import DARK, STYLE, in_the_dark

NAMESPACE = "http://www.w3.org/2000/svg"  # of files; pages need none


def shape(tag: str, kind: str = "", text: str = "", title: str = "", **attributes: float | str) -> str:
    """One element; `kind` is its class, `title` its text on hover. An underscore in a name stands for a hyphen.

    >>> shape("text", "label", "rank 0", x=54, text_anchor="end")
    '<text class="label" x="54" text-anchor="end">rank 0</text>'
    """
    given = {"class": kind, **attributes} if kind else attributes
    written = {name: value if isinstance(value, str) else f"{value:.10g}" for name, value in given.items()}
    start = "".join(f" {name.replace('_', '-')}={quoteattr(value)}" for name, value in written.items())
    inside = f"<title>{escape(title)}</title>" * bool(title) + escape(text)
    return f"<{tag}{start}>{inside}</{tag}>" if inside else f"<{tag}{start}/>"


def window(width: float, height: float, left: float = 0, top: float = 0, more: str = "") -> str:
    """The beginning of an `svg` element that shows that part of a picture."""
    size = f'width="{width:g}" height="{height:g}" viewBox="{left:g} {top:g} {width:g} {height:g}"'
    return f'<svg {size} class="zb"{more}>'


def picture(width: float, height: float, shapes: Iterable[str], style: str = "") -> str:
    """A complete SVG file, which shrinks to fit a narrower window and follows the reader's light or dark setting."""
    return "\n".join(
        (
            window(width, height, more=f' xmlns="{NAMESPACE}" style="max-width: 100%; height: auto"'),
            f"<style>{STYLE}{style}{in_the_dark(*DARK)}</style>",
            shape("rect", "paper", width=width, height=height),
            *shapes,
            "</svg>",
        )
    )
