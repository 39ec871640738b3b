"""How pictures look: the colour and hatching of every operation and cause of idle time, on light and dark pages.

Colours are after Okabe and Ito, which colour-blind readers can tell apart; for print every operation also has its own
hatching and its letter, and every cause of idle time its own hatching, fainter than that of work.
"""

from collections.abc import Iterator

# For every operation: its colour, the strokes in a tile of 6 x 6 (SVG path data), and the width of the strokes.
PEN = 'stroke-width=".8"'
LOOKS = {
    "F": ("#56b4e9", "", PEN),
    "B": ("#e69f00", "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", PEN),
    "W": ("#2bb58c", "M3,3 h.01", 'stroke-width="2" stroke-linecap="round"'),
    "BW": ("#e2722b", "M0,0 l6,6 M0,6 l6,-6", PEN),
    "S": ("#d98cb8", "M0,3 h6", PEN),
    "T": ("#f0e442", "M3,0 v6", PEN),
    "VALIDATE": ("#c8c8c8", "M0,0 l6,6", PEN),
    "GATHER": ("#8dd3c7", "M0,6 l6,-6", PEN),
    "REDUCE": ("#9e9e9e", "M0,2 h6 M0,4 h6", PEN),
    "OPT": ("#b39ddb", "M0,3 h6 M3,0 v6", PEN),
}
IDLE_LOOKS = {  # strokes in a tile of 8 x 8: sparser and thinner than those of operations
    "warm-up": ("#999999", "M4,3 v2"),
    "cool-down": ("#999999", "M2,2 h4"),
    "wait": ("#d62728", "M0,0 l8,8"),
    "communication": ("#3b78c3", "M0,4 h8"),
    "overhead": ("#999999", ""),
}
STYLE = """
.zb text { font: 11px sans-serif; fill: #111 }
.zb .paper { fill: #fff }
.zb .label { text-anchor: end; dominant-baseline: central }
.zb .step { text-anchor: middle; dominant-baseline: central; pointer-events: none;
  paint-order: stroke; stroke: #fff; stroke-width: 2.5px; stroke-linejoin: round }
.zb .span { stroke: #333; stroke-width: .5 }
.zb .memory { fill: #999; fill-opacity: .35; stroke: #777; stroke-width: .8 }
.zb .limit { fill: none; stroke: #c00; stroke-width: 1; stroke-dasharray: 5 3; vector-effect: non-scaling-stroke }
.zb .axis { stroke: #999; stroke-width: .5 }
.zb .idle { stroke: #999; stroke-width: .3; opacity: .45 }
.zb .saved { stroke: #777; stroke-width: 1; stroke-dasharray: 4 3 }
.zb .also { fill: none; pointer-events: none; vector-effect: non-scaling-stroke }
.zb .messages { stroke: #0072b2; stroke-width: 1 }
.zb .critical { stroke: #d00; stroke-width: 2.5 }
"""
DARK = ((".zb text", "fill: #ddd"), (".zb .step", "fill: #111"), (".zb .paper", "fill: #1c1c1f"))


def in_the_dark(*rules: tuple[str, str]) -> str:
    """The rules for dark pages, by the system's setting; never on paper."""
    dark = "\n".join(f"  {selector} {{ {rule} }}" for selector, rule in rules)
    return f"@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def patterns() -> Iterator[str]:
    """A hatched tile for every operation, and a pale one; for every cause of idle time one on which the paper shows."""
    yield "<defs>"
    for cause, (colour, path) in IDLE_LOOKS.items():
        strokes = f'<rect width="8" height="8" fill="{colour}" fill-opacity=".13"/>' * bool(path)
        strokes += f'<path d="{path}" stroke="{colour}" fill="none"/>' * bool(path)
        yield f'<pattern id="idle-{cause}" width="8" height="8" patternUnits="userSpaceOnUse">{strokes}</pattern>'
    for op, (colour, path, pen) in LOOKS.items():
        strokes = f'<path d="{path}" stroke="#000" stroke-opacity=".45" fill="none" {pen}/>' if path else ""
        for name, fill in ((op, colour), (f"pale-{op}", _pale(colour))):
            tile = f'<rect width="6" height="6" fill="{fill}"/>{strokes}'
            yield f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{tile}</pattern>'
    yield "</defs>"


def _pale(colour: str) -> str:
    """A colour halfway between `colour` and white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
