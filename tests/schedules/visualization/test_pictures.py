"""Pictures hold what the timeline holds, load nothing from anywhere and are well-formed."""

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zbcompile.schedules import Costs, ScheduleError, build, simulate
from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace
from zbcompile.schedules.visualization.style import IDLE_STYLES, OP_STYLES
from zbcompile.schedules.visualization.svg import compare_svg, to_svg
from zbcompile.schedules.visualization.text import format_timeline
from zbcompile.schedules.visualization.write import to_html, write_comparison, write_picture

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str = "zb-v") -> Timeline:
    schedule = build(name, 4, 8)
    return simulate(schedule, Costs.uniform(schedule.stages, 10, 12, 8, 1))


def titles(svg: str, kind: str) -> list[str]:
    """The texts on hover of all boxes of one class."""
    boxes = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    elements = (box.find(f"{SVG}title") for box in boxes if box.get("class") == kind)
    return [title.text or "" for title in elements if title is not None]


@pytest.mark.parametrize("name", ["zb-v", "dualpipe"])
def test_svg_shows_every_step_and_every_idle_interval(name: str) -> None:
    t = timeline(name)
    svg = to_svg(t)
    assert len(titles(svg, "span")) == len(t.spans) + sum(len(span.step) == 2 for span in t.spans)
    assert titles(svg, "idle") == [str(gap) for gap in t.idle]
    for rank in range(4):
        assert f"memory of rank {rank}, peak {t.peak_memory[rank]:g}" in svg
    assert float(ElementTree.fromstring(to_svg(t, width=2000)).get("width", "0")) == 2000


def test_nothing_is_told_by_colour_alone() -> None:
    colours, strokes = ({look[place] for look in OP_STYLES.values()} for place in range(2))
    assert len(colours) == len(strokes) == len(OP_STYLES)
    assert len({path for _, path in IDLE_STYLES.values()}) == len(IDLE_STYLES)
    svg = to_svg(timeline())
    assert all(f'fill="url(#idle-{gap.cause})"' in svg for gap in timeline().idle)
    assert "prefers-color-scheme: dark" in svg


def test_html_is_the_picture_and_loads_nothing() -> None:
    page = to_html(timeline())
    assert to_svg(timeline()) in page
    assert all(reference not in page for reference in ("src=", "href=", "@import", "<script"))


def test_chrome_trace_has_every_step_idle_interval_and_memory_change() -> None:
    t = timeline()
    events = json.loads(to_chrome_trace(t))["traceEvents"]
    changes = sum(len(t.memory_curve(r)) for r in range(4))
    kinds = {"M": 9, "X": len(t.spans) + len(t.idle), "s": 3 * 32, "f": 3 * 32, "C": changes}
    assert Counter(event["ph"] for event in events) == kinds
    steps = [event for event in events if event["ph"] == "X" and event["cat"] != "idle"]
    assert max(event["ts"] + event["dur"] for event in steps) == 1000 * t.finish
    assert steps[0]["args"]["actions"] == [{"op": "F", "stage": 0, "microbatch": 0}]


def test_text_is_true_to_time() -> None:
    t = simulate(build("zb-h1", ranks=2, microbatches=3))
    assert format_timeline(t).splitlines()[1:] == [
        "rank 0  F0.0 F0.1 .....B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2",
        "rank 1  .....F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2",
    ]
    narrow = ["rank 0  F F ..B W F B W B W", "rank 1  ..F B F B W F B W W"]
    assert format_timeline(t, width=28).splitlines()[1:] == narrow


def test_compared_timelines_share_one_axis(tmp_path: Path) -> None:
    """The same time is as long in every picture."""
    timelines = [timeline(name) for name in ("1f1b", "zb-h1", "zb-v")]
    inner = ElementTree.fromstring(compare_svg(timelines)).findall(f"{SVG}svg")
    scales = set()
    for svg, t in zip(inner, timelines, strict=True):
        boxes = [b for b in svg.iter(f"{SVG}rect") if b.get("class") == "span" and len(b)]
        for box, span in zip(boxes, t.spans, strict=True):
            scales.add(round(float(box.get("width", 0)) / (span.end - span.start), 1))
    assert len(scales) == 1
    for ending in (".txt", ".svg", ".html"):
        assert write_comparison(timelines, tmp_path / f"all{ending}").stat().st_size > 500
    with pytest.raises(ScheduleError, match=r"expected one of \.txt, \.svg, \.html"):
        write_comparison(timelines, tmp_path / "all.json")
    with pytest.raises(ScheduleError, match=r"expected one of .txt, .svg, .html, .json"):
        write_picture(timeline(), tmp_path / "step.png")
