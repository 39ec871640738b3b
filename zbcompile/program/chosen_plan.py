"""What `schedule="auto"` chose, and why: saved with the program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChosenPlan:
    """The layout of a program that was searched, not named: `pipe.program.plan`.

    * `layout`: placement, number of microbatches and recomputation; `origin`: the order that the found one was made
      from;
    * `seconds`: the predicted step, `bound`: what no order of this layout can be shorter than, both from `basis`;
    * `best_name`: the named schedule that comes nearest on this layout, with its seconds, or None if none fits;
    * `others`: the other layouts with their steps (at nominal speeds, as `nominal`, that of the chosen one), the
      runner-up first;
    * `tried`: what was tried on the ranks, as `way`, with the measured seconds of a step (median, shortest, longest),
      this plan first. Passes are timed alone, so a step on trial takes longer than predicted; the trial decides.
    """

    layout: str
    origin: str
    seconds: float
    bound: float
    basis: str
    best_name: tuple[str, float] | None
    nominal: float
    others: tuple[tuple[str, float], ...]
    tried: tuple[tuple[str, float, float, float], ...] = ()

    @property
    def way(self) -> str:
        """The layout and the order."""
        return f"{self.layout}, from {self.origin}"

    def __str__(self) -> str:
        """What was chosen, what was predicted of it, and what decided.

        >>> tried = (("v, from zb-v", 1.5, 1.4, 1.8), ("v, zb-v", 1.6, 1.4, 1.7))
        >>> print(ChosenPlan("placement v", "zb-v", 1.0, 0.96, "measured passes", ("zb-v", 1.05), 0.9, (), tried))
        auto: placement v; from zb-v
        predicted by measured passes: step 1 s, 4.2 % above the bound
        tried on the ranks, which decided: step 1.5 s (1.4 to 1.8 s); 1.6 s (1.4 to 1.7 s, as good) with v, zb-v
        """
        above = self.seconds / self.bound - 1 if self.bound else 0.0
        left = f"{100 * above:.1f} % above the bound" if above > 1e-9 else "proven optimal"
        predicted = f"predicted by {self.basis}: step {self.seconds:.4g} s, {left}"
        lines = [f"auto: {self.layout}; from {self.origin}", predicted]
        if self.tried:  # what was predicted of others no longer counts
            return "\n".join([*lines, self._trial()])
        if self.best_name is not None:
            name, seconds = self.best_name
            lines[1] += f"; the best name, {name}: {_longer(seconds, self.seconds)}"
        if self.others:
            text, seconds = self.others[0]
            lines.append(f"predicted at nominal speeds, the runner-up: {_longer(seconds, self.nominal)}: {text}")
        return "\n".join(lines)

    def _trial(self) -> str:
        """The measured step beside that of the next best, which is as good if the ranges of both overlap."""
        (_, own, shortest, longest), *rest = self.tried
        line = f"tried on the ranks, which decided: step {own:.4g} s ({shortest:.4g} to {longest:.4g} s)"
        if not rest:
            return line
        text, seconds, least, most = min(rest, key=lambda each: each[1])
        verdict = "as good" if least <= longest and shortest <= most else _longer(seconds, own)
        return f"{line}; {seconds:.4g} s ({least:.4g} to {most:.4g} s, {verdict}) with {text}"


def _longer(seconds: float, than: float) -> str:
    more = 100 * (seconds / than - 1)
    if abs(more) < 0.05:
        return "as long"
    return f"{abs(more):.1f} % {'longer' if more >= 0 else 'shorter'}"
