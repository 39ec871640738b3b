"""How long a search takes, and the line that says how far it is."""

import sys
import time
from collections.abc import Callable

SEEDS = 0.2  # share of the seconds for orders to start from


class Progress:
    """One line on a terminal that says how far a search is; nothing elsewhere."""

    def __init__(self) -> None:
        self.shown, self.due = sys.stderr.isatty(), 0.0

    def show(self, best: float, bound: float, spent: float) -> None:
        if self.shown and spent >= self.due:
            self.due = spent + 0.5
            left = f", {best / bound - 1:.1%} above the bound" if bound > 0 else ""
            print(f"\rsearch: {best:.6g}{left}, {spent:.0f} s ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown and self.due:
            print(file=sys.stderr)


class Budget:
    """So many seconds from now on, and so many moves (`None`: as many as fit)."""

    def __init__(self, seconds: float, moves: int | None) -> None:
        self.start, self.seconds, self.moves = time.monotonic(), seconds, moves
        self.used = 0.0  # share

    def part(self, of_seconds: float, of_moves: float) -> "Budget":
        """A share of the seconds that are left, from now on, and of the moves."""
        moves = None if self.moves is None else int(self.moves * of_moves)
        return Budget(max(0.0, self.seconds - self.spent) * of_seconds, moves)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def seeds_spent(self, tried: int) -> bool:
        """Whether so many rules are enough; a rule is worth some hundred moves."""
        return self.spent > SEEDS * self.seconds or (self.moves is not None and tried * 100 > self.moves)

    @property
    def over(self) -> bool:
        return self.spent >= self.seconds

    def slice(self, share: float, each: float = 0.0) -> Callable[[int], float]:
        """How much of a share of what is left for moves is done, by the moves made. It is asked before each round of
        them, and ends what another round would carry beyond the seconds; the first one takes about `each`."""
        begin = before = self.spent
        if not self.used:
            self.rest = max(0.0, self.seconds - begin)
        self.used += share
        until = self.seconds - self.rest * (1 - min(1, self.used))
        moves = None if self.moves is None else max(1, round(self.moves * share))

        def done(made: int) -> float:
            nonlocal before, each
            now = self.spent
            before, each = now, now - before if made else each
            if now >= until or now + each > self.seconds:
                return 1.0
            return (now - begin) / (until - begin) if moves is None else made / moves

        return done
