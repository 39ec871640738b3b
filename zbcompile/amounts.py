"""Formats times, shares, sizes and counts for every report and message."""

import math
from decimal import Decimal


def plain(value: float, digits: int = 6) -> str:
    """A number or fraction, rounded to `digits` digits and without an exponent.

    >>> plain(33), plain(1.578e6), plain(7.38265, 4), plain(2e-5)
    ('33', '1578000', '7.383', '0.00002')
    """
    return f"{Decimal(f'{float(value):.{digits}g}'):f}"


def format_bytes(count: float) -> str:
    """Bytes with a binary unit.

    >>> format_bytes(512), format_bytes(16384)
    ('512 B', '16.0 KiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 5)
    return f"{count / 1024**power:.1f} {' KMGTP'[power]}iB"


def format_count(count: float, billion: str = "G") -> str:
    """A number with a decimal unit; people count parameters in billions, not in giga.

    >>> format_count(999), format_count(10485760), format_count(7e10, "B")
    ('999', '10.5M', '70.0B')
    """
    for unit in ("", "k", "M", billion, "T"):
        if count < 999.95 or (not unit and count < 1000):
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f}P"


def format_share(share: float) -> str:
    """A share of the whole in per cent; a value that rounds to zero has no sign.

    >>> format_share(0.125), format_share(-1e-16)
    ('12.5%', '0.0%')
    """
    return f"{round(share, 3) + 0.0:.1%}"


def format_time(value: float, unit: str) -> str:
    """A time in the unit of a prediction.

    >>> format_time(0.0123, "s"), format_time(33, "passes"), format_time(6.7e8, "FLOP")
    ('12.3 ms', '33 passes', '670.0M FLOP')
    """
    if unit == "FLOP":
        return f"{format_count(value)} FLOP"
    if unit != "s":
        return f"{value:g} {unit}"
    if value >= 1000:
        return f"{value:,.0f} s"
    for scale, name in ((1, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value * 1e6:.3g} us"
