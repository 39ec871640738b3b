"""The pages that people look at, opened in a real browser: no script error, nothing loaded, text that can be read, and
nothing wider than the window."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from zbcompile.program.step_record import read_record
from zbcompile.schedules import Costs, build, simulate, to_html
from zbcompile.schedules.visualization.figure import compare_html
from zbcompile.schedules.visualization.units import in_units

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

# Runs in the page: the heights of all visible texts.
PROBE = """
<script>
window.addEventListener("load", () => {
  const seen = [...document.querySelectorAll("text, p, td, th, summary, h1, h2")].filter(e => e.textContent.trim());
  const heights = seen.map(e => e.getBoundingClientRect().height).filter(h => h > 0);
  const report = { heights, boxes: document.querySelectorAll("rect").length };
  const wide = e => e.scrollWidth - e.clientWidth;
  report.overflow = [...document.querySelectorAll("html, .zb-head, .zb-legend, .zb-tools")].map(wide);
  const slider = document.querySelector("[type=range]"), scroll = document.querySelector(".zb-scroll");
  if (slider) {
    const size = selector => document.querySelector(selector).getBoundingClientRect();
    slider.oninput();
    report.fits = scroll.scrollWidth <= scroll.clientWidth;
    const last = [...document.querySelectorAll(".zb-row .span")].pop(), clientX = last.getBoundingClientRect().left;
    last.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX }));
    report.cursor = parseFloat(document.querySelector(".zb-cursor").textContent);
    const before = size(".zb-row .span");
    slider.value = 3; slider.oninput(); scroll.scrollLeft = 700;
    const after = size(".zb-row .span");
    report.zoomed = [after.width / before.width, after.height / before.height];
    report.moved = size(".zb-row svg").left - scroll.getBoundingClientRect().left;
    report.hidden = getComputedStyle(document.querySelector(".messages")).display;
    document.querySelector("[value=messages]").checked = true;
    report.shown = getComputedStyle(document.querySelector(".messages")).display;
  }
  const out = document.createElement("pre");
  out.id = "report"; out.textContent = JSON.stringify(report);
  document.body.append(out);
});
</script>
"""


def look(page: str, folder: Path, width: int = 1400) -> dict[str, Any]:
    """Open `page` in the browser; returns what the probe saw. Fails on any error in the console, and if the page, a
    heading or a legend is wider than the window."""
    file = folder / "page.html"
    file.write_text(page.replace("</html>", PROBE + "</html>"), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not re.search(r"CONSOLE.*(Error|Refused|Failed)", outcome.stderr), outcome.stderr
    report = re.search(r'<pre id="report">(.*?)</pre>', outcome.stdout, re.DOTALL)
    assert report, outcome.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(report[1]))
    assert max(seen["overflow"]) <= 0
    return seen


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("ranks", "width"), [(2, 800), (8, 1400), (32, 800)])
def test_a_timeline(ranks: int, width: int, tmp_path: Path) -> None:
    schedule = build("zb-v", ranks, 2 * ranks)
    timeline = simulate(schedule, Costs.uniform(schedule.stages, 10, 12, 8, 1))
    seen = look(to_html(timeline), tmp_path, width)
    assert min(seen["heights"]) >= 9
    assert seen["boxes"] >= len(timeline.spans) + len(timeline.idle)
    assert seen["fits"]
    assert seen["cursor"] == pytest.approx(timeline.spans[-1].start, rel=0.01)  # three digits
    assert seen["zoomed"] == pytest.approx([8, 1], rel=0.02)
    assert seen["moved"] == pytest.approx(1)  # the names stay where they were, inside of the border
    assert (seen["hidden"], seen["shown"]) == ("none", "inline")


@pytest.mark.slow
def test_compared_timelines(tmp_path: Path) -> None:
    timelines = [simulate(build(name, 4, 8)) for name in ("1f1b", "zb-h1", "zb-v")]
    seen = look(compare_html(timelines), tmp_path)
    assert min(seen["heights"]) >= 9
    assert seen["boxes"] >= sum(len(timeline.spans) for timeline in timelines)


@pytest.mark.slow
def test_a_recorded_step_below_a_prediction(tmp_path: Path) -> None:
    """In milliseconds, with the overhead of the host as a cause of its own."""
    record = read_record("tests/golden/recorded_gpt.json")
    timelines = in_units([simulate(record.schedule, record.costs), record.timeline])
    page = compare_html(timelines)
    seen = look(page, tmp_path, 800)
    assert min(seen["heights"]) >= 9
    assert seen["boxes"] >= sum(len(timeline.spans) for timeline in timelines)
    assert "idle: overhead" in page
    assert " ms (bubble" in page
