"""What a search may take, in seconds and in moves, and the line that shows its progress."""

import math
import sys
import time
from collections.abc import Callable


class SearchProgress:
    """One line on a terminal that says how far a search is; nothing elsewhere."""

    def __init__(self) -> None:
        self.shown, self.due = sys.stderr.isatty(), 0.0

    def show(self, best: float, bound: float, spent: float) -> None:
        if self.shown and spent >= self.due:
            self.due = spent + 0.5
            left = f", {float(best / bound) - 1:.1%} above the bound" if bound > 0 else ""
            print(f"\rsearch: {float(best):.6g}{left}, {spent:.0f} s ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown and self.due:
            print(file=sys.stderr)


class Budget:
    """A number of seconds from now on, and of moves (`None`: as many as fit). Seconds only end a search: what it does
    until then follows from the moves that it has made."""

    def __init__(self, seconds: float, moves: float | None) -> None:
        self.start, self.seconds = time.monotonic(), seconds
        self.moves, self.made = math.inf if moves is None else moves, 0

    def part(self, of_seconds: float, of_moves: float) -> "Budget":
        """A share of the seconds that are left, from now on, and of the moves."""
        return Budget(max(0.0, self.seconds - self.spent) * of_seconds, self.moves * of_moves)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    @property
    def late(self) -> bool:
        return self.spent >= self.seconds

    @property
    def over(self) -> bool:
        return self.late or self.made >= self.moves

    def slice(self, moves: float, each: float = 0.0) -> Callable[[int], float]:
        """A function from the moves made to the share that is done of `moves` further ones. Called before each round of
        moves, it returns 1 if another round would end late; the first round takes about `each` seconds."""
        before, begun = self.spent, self.made

        def done(made: int) -> float:
            nonlocal before, each
            now = self.spent
            before, each = now, now - before if made else each
            if now >= self.seconds or now + each > self.seconds or begun + made >= self.moves:
                return 1.0
            return made / max(1, moves)

        return done
