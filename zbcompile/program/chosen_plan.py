"""What `schedule="auto"` chose, and why: saved with the program."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChosenPlan:
    """The layout of a program that was searched, not named: `pipe.program.plan`.

    * `layout`: placement, number of microbatches and recomputation; `origin`: the order that the found one was made
      from;
    * `seconds`: the predicted step, `bound`: what no order of this layout can be shorter than, both from `basis`;
    * `best_name`: the named schedule that comes nearest on this layout, with its seconds, or None if none fits;
    * `others`: the other layouts with their steps (at nominal speeds, as `nominal`, that of the chosen one), the
      runner-up first;
    * `tried`: what was tried on the ranks, as `way`, with the measured seconds of a step, this plan first.
    """

    layout: str
    origin: str
    seconds: float
    bound: float
    basis: str
    best_name: tuple[str, float] | None
    nominal: float
    others: tuple[tuple[str, float], ...]
    tried: tuple[tuple[str, float], ...] = ()

    @property
    def way(self) -> str:
        """The layout and the order."""
        return f"{self.layout}, from {self.origin}"

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "ChosenPlan":
        """From what `dataclasses.asdict` made, through JSON."""
        best, lists = data["best_name"], {name: tuple(map(tuple, data.get(name, ()))) for name in ("others", "tried")}
        return cls(**{**data, "best_name": None if best is None else tuple(best), **lists})

    def __str__(self) -> str:
        """
        >>> print(ChosenPlan("placement v", "zb-v", 1.0, 0.96, "measured passes", ("zb-v", 1.05), 0.9, ()))
        auto: placement v; step 1 s by measured passes, 4.2 % above the bound, from zb-v
        the best name, zb-v: 5.0 % longer
        """
        above = self.seconds / self.bound - 1 if self.bound else 0.0
        left = f"{100 * above:.1f} % above the bound" if above > 1e-9 else "proven optimal"
        lines = [f"auto: {self.layout}; step {self.seconds:.4g} s by {self.basis}, {left}, from {self.origin}"]
        if self.best_name is not None:
            name, seconds = self.best_name
            lines.append(f"the best name, {name}: {_longer(seconds, self.seconds)}")
        if self.tried:
            (_, own), *rest = self.tried
            lines.append(f"on trial a step took {own:.4g} s")
            lines += [f"  {_longer(seconds, own)}: {text}" for text, seconds in rest]
        if self.others:
            text, seconds = self.others[0]
            lines.append(f"the runner-up, {text}: {_longer(seconds, self.nominal)} at nominal speeds")
        return "\n".join(lines)


def _longer(seconds: float, than: float) -> str:
    more = 100 * (seconds / than - 1)
    return f"{abs(more):.1f} % {'longer' if more >= 0 else 'shorter'}"
