"""The table and the picture of `python -m zbcompile.plan`."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from zbcompile.inspection.report import format_share, format_time, table
from zbcompile.passes.stage.print_python import format_bytes
from zbcompile.planning.factorisations import Row

WIDTH, HEIGHT, MARGIN = 640, 360, 70
STYLE = (
    "text { font: 11px sans-serif; fill: #111 } .best { fill: #0072b2 } .other { fill: #bbb } "
    ".front { fill: none; stroke: #0072b2 } .axis { stroke: #999 } rect { fill: #fff }"
)


def format_plan(rows: Sequence[Row], shown: int) -> str:
    """The best rows, and the fastest others up to `shown`; a star marks the Pareto front of rate and memory."""
    kept = [row for index, row in enumerate(rows) if row.best or index < shown]
    headers = ["", "dp", "pp", "placement", "m", "recompute", "step", "rows/s", "bubble", "peak memory"]
    return table([_cells(row) for row in kept], headers, left=("", "placement", "recompute"))


def _cells(row: Row) -> list[str]:
    layout = row.layout
    return [
        "*" if row.best else "",
        str(row.replicas),
        str(row.ranks),
        layout.placement,
        str(layout.microbatches),
        str(layout.choices.recompute),
        format_time(layout.seconds, "s"),
        f"{row.rate:.3g}",
        format_share(layout.found.simulation.bubble),
        format_bytes(row.peak),
    ]


def to_picture(rows: Sequence[Row]) -> str:
    """Rate against memory as a self-contained SVG; what nothing beats in both is joined by a line.

    Every point tells its row on hover.
    """
    most_bytes, most = max(row.peak for row in rows), max(row.rate for row in rows)
    places = [
        (
            MARGIN + row.peak / most_bytes * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - row.rate / most * (HEIGHT - 2 * MARGIN),
        )
        for row in rows
    ]
    front = " ".join(f"{x:.1f},{y:.1f}" for row, (x, y) in zip(rows, places, strict=True) if row.best)
    points = [
        f'<circle class="{"best" if row.best else "other"}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{escape(', '.join(filter(None, _cells(row))))}</title></circle>"
        for row, (x, y) in zip(rows, places, strict=True)
    ]
    low, left = HEIGHT - MARGIN, MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"><style>{STYLE}</style>',
            f'<rect width="{WIDTH}" height="{HEIGHT}"/>',
            f'<path class="axis" d="M{left} {MARGIN}V{low}H{WIDTH - MARGIN}" fill="none"/>',
            f'<text x="{left}" y="{MARGIN - 10}">rows/s, up to {most:.3g}</text>',
            f'<text x="{WIDTH - 2 * MARGIN}" y="{low + 20}">peak memory, up to {format_bytes(most_bytes)}</text>',
            f'<polyline class="front" points="{front}"/>',
            *points,
            "</svg>",
        ]
    )
