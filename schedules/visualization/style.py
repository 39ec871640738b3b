"""How pictures look: the colour and hatching of every operation and cause of idle time, on light
and dark pages.

Colours are after Okabe and Ito, which colour-blind readers can distinguish; for print every
operation also has its own hatching and its letter, and every cause of idle time its own hatching,
fainter than that of work.
"""

from collections.abc import Iterator

# For every operation: its colour, and the strokes in a tile of 6 x 6 (SVG path data).
OP_STYLES = {
    "F": ("#56b4e9", ""),
    "B": ("#e69f00", "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2"),
    "W": ("#2bb58c", "M2,3 h2 M3,2 v2"),
    "BW": ("#e2722b", "M0,0 l6,6 M0,6 l6,-6"),
    "S": ("#d98cb8", "M0,3 h6"),
    "T": ("#f0e442", "M3,0 v6"),
    "REDUCE": ("#9e9e9e", "M0,2 h6 M0,4 h6"),
    "OPT": ("#b39ddb", "M0,3 h6 M3,0 v6"),
}
IDLE_STYLES = {  # strokes in a tile of 8 x 8: sparser and thinner than those of operations
    "warm-up": ("#999999", "M4,3 v2"),
    "cool-down": ("#999999", "M2,2 h4"),
    "wait": ("#d62728", "M0,0 l8,8"),
    "communication": ("#3b78c3", "M0,4 h8"),
    "overhead": ("#999999", "M2,2 v1"),
}
STYLE_SHEET = """
.zb text { font: 11px sans-serif; fill: #111 }
.zb .paper { fill: #fff }
.zb .label { text-anchor: end; dominant-baseline: central }
.zb .step { text-anchor: middle; dominant-baseline: central; pointer-events: none;
  paint-order: stroke; stroke: #fff; stroke-width: 2.5px; stroke-linejoin: round }
.zb .span { stroke: #333; stroke-width: .5 }
.zb .memory { fill: #999; fill-opacity: .35; stroke: #777; stroke-width: .8 }
.zb .axis { stroke: #999; stroke-width: .5 }
.zb .idle { stroke: #999; stroke-width: .3; opacity: .45 }
.zb .saved { stroke: #777; stroke-width: 1; stroke-dasharray: 4 3 }
@media screen and (prefers-color-scheme: dark) {
  .zb text { fill: #ddd }
  .zb .step { fill: #111 }
  .zb .paper { fill: #1c1c1f }
}
"""


def patterns() -> Iterator[str]:
    """Yields a hatched tile for every operation and cause of idle time, and a pale one for every
    operation."""
    yield "<defs>"
    for cause, (colour, path) in IDLE_STYLES.items():
        yield _pattern(
            f"idle-{cause}", 8, f'fill="{colour}" fill-opacity=".13"', path, f'stroke="{colour}"'
        )
    for op, (colour, path) in OP_STYLES.items():
        stroke = 'stroke="#000" stroke-opacity=".45" stroke-width=".8"'
        # halfway to white
        pale = "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
        yield _pattern(op, 6, f'fill="{colour}"', path, stroke)
        yield _pattern(f"pale-{op}", 6, f'fill="{pale}"', path, stroke)
    yield "</defs>"


def _pattern(name: str, size: int, fill: str, path: str, stroke: str) -> str:
    sizes = f'width="{size}" height="{size}"'
    tile = f'<rect {sizes} {fill}/><path d="{path}" {stroke} fill="none"/>'
    return f'<pattern id="{name}" {sizes} patternUnits="userSpaceOnUse">{tile}</pattern>'
