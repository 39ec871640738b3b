"""A timeline as one HTML file: the SVG with quick tooltips and zoom, and a table of how every rank spends its time."""

from html import escape

from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.svg import to_svg
from zbcompile.schedules.visualization.text import summary

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 16px; color: #111 }}
#picture {{ overflow: auto; border: 1px solid #ccc }}
#tip {{ position: fixed; display: none; background: #fff; border: 1px solid #333; padding: 3px 7px; z-index: 1 }}
table {{ border-collapse: collapse; margin-top: 16px }}
td, th {{ padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd }}
@media print {{ #zoom {{ display: none }} }}
</style>
<h1 style="font-size: 18px">{title}</h1>
<p id="zoom"><label>zoom <input type="range" min="0.2" max="4" step="0.1" value="1"></label></p>
<div id="picture">{svg}</div>
<div id="tip"></div>
{table}
<script>
const svg = document.querySelector("svg"), tip = document.getElementById("tip");
const size = [svg.width.baseVal.value, svg.height.baseVal.value];
document.querySelector("input").oninput = event => {{
  svg.setAttribute("width", size[0] * event.target.value);
  svg.setAttribute("height", size[1] * event.target.value);
}};
svg.addEventListener("mousemove", event => {{
  const shape = event.target, title = shape.querySelector("title");
  if (title) {{ shape.dataset.tip = title.textContent; title.remove(); }}
  tip.style.display = shape.dataset.tip ? "block" : "none";
  tip.textContent = shape.dataset.tip || "";
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 14 + "px";
}});
svg.addEventListener("mouseleave", () => tip.style.display = "none");
</script>
</html>
"""


def to_html(timeline: Timeline, width: int | None = None) -> str:
    """The page as text; it loads nothing from anywhere. `width` as for `to_svg`."""
    title = escape(summary(timeline))
    return PAGE.format(title=title, svg=to_svg(timeline, width), table=rank_table(timeline))


def rank_table(timeline: Timeline) -> str:
    """What every rank spends its time on, as an HTML table."""
    idle = timeline.idle_by_cause
    heads = ("rank", "work", *(f"idle: {cause}" for cause in timeline.causes), "peak memory")
    rows = [
        (rank, timeline.busy[rank], *idle[rank].values(), timeline.peak_memory[rank])
        for rank in range(timeline.schedule.ranks)
    ]
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{value:g}</td>" for value in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
