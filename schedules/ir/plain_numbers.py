"""How numbers of any unit are written: some digits, and no exponent."""

from decimal import Decimal


def plain(value: float, digits: int = 6) -> str:
    """A number or fraction rounded to so many digits.

    >>> plain(33), plain(1.578e6), plain(7.38265, 4), plain(2e-5)
    ('33', '1578000', '7.383', '0.00002')
    """
    return f"{Decimal(f'{float(value):.{digits}g}'):f}"
