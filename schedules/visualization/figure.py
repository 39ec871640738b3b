"""Timelines under each other on one time axis, as HTML for pages and notebooks that loads nothing from anywhere.

Rank names and legends stay while a wide axis scrolls; it fits the window, and zooms on time alone. Without scripts (a
notebook that is not trusted) it scrolls and shows.
"""

from collections.abc import Iterator, Sequence
from html import escape

from zbcompile.schedules.simulation.timeline import Timeline, simulate
from zbcompile.schedules.visualization.looks import DARK, STYLE, in_the_dark, patterns
from zbcompile.schedules.visualization.shapes import window
from zbcompile.schedules.visualization.step_tables import rank_table
from zbcompile.schedules.visualization.svg import (
    ALSO,
    COMPACT,
    LARGEST,
    StepPicture,
    legend_of,
    natural_scale,
    saving,
    swatch,
)
from zbcompile.schedules.visualization.text import summary
from zbcompile.tables import to_html as to_tables

_STYLE = """
.zb-figure { font: 14px sans-serif; color: #111; background: #fff; position: relative }
.zb-figure .zb-saving { font-size: 26px; font-weight: bold; padding: 2px 0 }
.zb-figure .zb-tools { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; padding: 4px 0 }
.zb-figure .zb-scroll { overflow-x: auto; border: 1px solid #8888; position: relative }
.zb-figure .zb-cursor { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1px dashed #d00;
  display: none; pointer-events: none; z-index: 1 }
.zb-figure .zb-cursor span { position: sticky; top: 0; padding: 0 4px; font-size: 12px; background: #fff }
.zb-figure .zb-head { position: sticky; left: 0; width: min(100%, 100vw - 60px);
  padding: 6px 8px 0; box-sizing: border-box }
.zb-figure .zb-head b { font-size: 13px }
.zb-figure .zb-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin-top: 3px }
.zb-figure .zb-legend svg { vertical-align: -2px; margin-right: 4px }
.zb-figure .zb-row { display: flex; width: max-content }
.zb-figure .zb-row > svg { flex: none; display: block }
.zb-figure .zb-row > svg:first-child { position: sticky; left: 0; background: #fff; z-index: 1 }
.zb-figure .zb-tip { position: fixed; display: none; background: #fff; border: 1px solid #777;
  padding: 3px 7px; z-index: 2 }
.zb-figure table { border-collapse: collapse; margin-top: 16px; color: inherit; font-size: 13px }
.zb-figure .zb-table { overflow-x: auto }
.zb-figure .dense .span { stroke: none }
.zb-figure td, .zb-figure th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #8886 }
.zb-figure:not(:has([value=messages]:checked)) .messages { display: none }
.zb-figure:not(:has([value=critical]:checked)) .critical { display: none }
@media print { .zb-figure .zb-saving { font-size: 26px; font-weight: bold; padding: 2px 0 }
.zb-figure .zb-tools { display: none } .zb-figure .zb-scroll { overflow: hidden } }
"""
_PAPERS = ("", " .zb-row > svg:first-child", " .zb-tip", " .zb-cursor span")
_DARK = tuple((f".zb-figure{part}", "color: #ddd; background: #1c1c1f") for part in _PAPERS)

# Every box moves by itself, so that hatching and letters keep their shape; long paths are stretched.
_SCRIPT = """
for (const figure of document.querySelectorAll(".zb-figure:not([data-ready])")) {
  figure.dataset.ready = "1";
  const find = selector => [...figure.querySelectorAll(selector)];
  const scroll = find(".zb-scroll")[0], slider = find("[type=range]")[0], tip = find(".zb-tip")[0];
  const cursor = find(".zb-cursor")[0], perUnit = +figure.dataset.scale, unit = figure.dataset.unit;
  const plots = find(".zb-row").map(row => {
    const svg = row.lastElementChild, box = svg.viewBox.baseVal, get = (e, name) => +e.getAttribute(name);
    return {
      svg, left: box.x, top: box.y, height: box.height,
      margin: +row.dataset.margin, length: box.width - row.dataset.margin,
      ranks: +row.dataset.ranks,
      names: row.firstElementChild.width.baseVal.value,
      rects: [...svg.querySelectorAll("rect")].map(e => [e, get(e, "x"), get(e, "width")]),
      texts: [...svg.querySelectorAll("text")].map(
        e => [e, get(e, "x"), e.dataset.t ?? e.textContent, +(e.dataset.w ?? 0)]),
      lines: [...svg.querySelectorAll("line")].map(e => [e, get(e, "x1")]),
      fine: [...svg.querySelectorAll(".fine")],
      wide: [...svg.querySelectorAll(".wide")],
    };
  });
  const fit = () => Math.min(...plots.map(p => (scroll.clientWidth - 2 - p.names - p.margin) / p.length));
  const drawn = (plot, z) => {
    const at = x => plot.left + (x - plot.left) * z, width = plot.length * z + plot.margin;
    for (const [e, x, w] of plot.rects) { e.setAttribute("x", at(x)); e.setAttribute("width", Math.max(w * z, .3)); }
    for (const [e, x] of plot.lines) { e.setAttribute("x1", at(x)); e.setAttribute("x2", at(x)); }
    for (const [e, x, text, room] of plot.texts) {
      e.setAttribute("x", at(x));
      const fits = t => t.length * 6.8 + 3 <= room * z;
      if (room) e.textContent = [text, text.replace(/\\d+$/, "")].find(fits) ?? "";
    }
    for (const e of plot.wide) e.setAttribute("transform", `translate(${plot.left * (1 - z)} 0) scale(${z} 1)`);
    for (const e of plot.fine) e.setAttribute("display", plot.length * z > 5000 ? "inline" : "none");
    plot.svg.classList.toggle("dense", z * plot.length * plot.ranks < 6 * plot.rects.length);
    plot.svg.setAttribute("width", width);
    plot.svg.setAttribute("viewBox", `${plot.left} ${plot.top} ${width} ${plot.height}`);
  };
  let now = 1;
  const zoom = (times, at) => {
    const z = fit() * times, middle = at ?? scroll.clientWidth / 2, names = plots[0].names;
    const time = (scroll.scrollLeft + middle - names) / now;
    plots.forEach(plot => drawn(plot, z));
    now = z;
    scroll.scrollLeft = time * z - middle + names;
  };
  const most = 7;  // doublings
  slider.max = most;
  slider.oninput = () => zoom(2 ** slider.value);
  scroll.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    slider.value = Math.min(most, Math.max(0, +slider.value - event.deltaY / 250));
    zoom(2 ** slider.value, event.clientX - scroll.getBoundingClientRect().left);
  }, { passive: false });
  let width = 0;
  new ResizeObserver(() => {
    if (scroll.clientWidth && scroll.clientWidth !== width) { width = scroll.clientWidth; zoom(2 ** slider.value); }
  }).observe(scroll);
  scroll.addEventListener("mousemove", event => {
    const shape = event.target, title = shape.querySelector("title");
    if (title && title.parentNode === shape) { shape.dataset.tip = title.textContent; title.remove(); }
    tip.style.display = shape.dataset.tip ? "block" : "none";
    tip.textContent = shape.dataset.tip || "";
    tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
    const x = event.clientX - scroll.getBoundingClientRect().left - scroll.clientLeft + scroll.scrollLeft;
    const time = (x - plots[0].names) / (now * perUnit);  // one line through all steps, which share the axis
    cursor.style.display = time >= 0 ? "block" : "none";
    cursor.style.left = x + "px";
    cursor.firstElementChild.textContent = +time.toPrecision(3) + unit;
  });
  scroll.addEventListener("mouseleave", () => { tip.style.display = cursor.style.display = "none"; });
}
"""


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


def figure(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """The piece of HTML; `width` in pixels is that of the longest time axis where no script runs.

    >>> from zbcompile.schedules import build, simulate
    >>> figure([simulate(build(name, 2, 4)) for name in ("1f1b", "zb-h1")]).count('class="zb-row"')
    2
    """
    longest = max(t.finish for t in timelines) or 1
    natural = min(max(map(natural_scale, timelines)), LARGEST / longest)
    scale = natural if width is None else width / longest
    boxes = "".join(f'<label><input type="checkbox" value="{name}"> {text}</label>' for name, text in ALSO.items())
    zoom = '<label>zoom <input type="range" min="0" max="7" step="0.1" value="0"></label>'
    rows = [line for t in timelines for line in _row(t, round(StepPicture.MARGINS + t.finish * scale))]
    told, unit = saving(timelines), timelines[0].costs.time_unit and f" {timelines[0].costs.time_unit}"
    return "\n".join(
        (
            f'<div class="zb-figure" data-scale="{scale:g}" data-unit="{escape(unit)}">',
            f"<style>{STYLE}{_STYLE}{in_the_dark(*DARK, *_DARK)}</style>",
            f'<svg width="0" height="0" style="position: absolute">{"".join(patterns())}</svg>',
            f'<div class="zb-saving">{escape(told)}</div>' * bool(told),
            f'<div class="zb-tools">{zoom}{boxes}</div>',
            f'<div class="zb-legend">{"".join(_legend(timelines))}</div>',
            '<div class="zb-scroll">',
            *rows,
            '<div class="zb-cursor"><span></span></div></div><div class="zb-tip"></div>',
            to_tables(rank_table(t) for t in timelines),
            f"<script>{_SCRIPT}</script>",
            "</div>",
        )
    )


def timeline_of(shown: object) -> Timeline:
    """The timeline itself, or the timeline of a schedule whose passes all take the same time."""
    return shown if isinstance(shown, Timeline) else simulate(shown)  # type: ignore[arg-type]


def _row(timeline: Timeline, width: int) -> Iterator[str]:
    step = StepPicture(timeline, width, tuple(ALSO) if len(timeline.spans) <= COMPACT else ("critical",), zooms=True)
    yield f'<div class="zb-head"><b>{escape(summary(timeline))}</b></div>'
    yield f'<div class="zb-row" data-margin="{step.RIGHT}" data-ranks="{timeline.schedule.ranks}">'
    yield from (*step.names(), *step.plot(), "</div>")


def _legend(timelines: Sequence[Timeline]) -> Iterator[str]:
    for fill, text in legend_of(timelines):
        svg = f"{window(18, 14)}{swatch(fill)}</svg>" if fill else ""
        yield f"<span>{svg}{escape(text)}</span>"


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
