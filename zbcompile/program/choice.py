"""How a step is laid out, and in which order: `Layout` and `Choice`, what every search of a plan passes on."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zbcompile.passes.compile_options import Barriers, Choices, Recompute
from zbcompile.schedules import Placement, Schedule


@dataclass(frozen=True)
class Layout:
    """What is compiled: the `placement` of stages, as text, on `ranks` ranks; the `microbatches` of a step of one
    pipeline; `edges`, the number of operations before each cut, one fewer than stages (none before the line is cut);
    what B recomputes, in all stages or, as a tuple, in each; how the output layer is sharded (`vocab`); `replicas`
    pipelines, each of `ranks` times `tensor` ranks that share every matrix.

    >>> Layout("v", ranks=2, microbatches=4, edges=(10, 20, 30)).parsed.stages
    4
    """

    placement: str
    ranks: int
    microbatches: int
    edges: tuple[int, ...] = ()
    recompute: Recompute = "hints"
    vocab: Barriers = "off"
    replicas: int = 1
    tensor: int = 1

    @property
    def parsed(self) -> Placement:
        """The placement on these ranks. Raises ScheduleError for a text that is none."""
        return Placement.parse(self.placement, self.ranks)

    @property
    def barriers(self) -> int:
        """Barriers between the last stage's forward and its backward, if the output layer is sharded."""
        return self.vocab if isinstance(self.vocab, int) else 1

    def within(self, choices: Choices) -> Choices:
        """The user's choices with what this layout decides."""
        return replace(choices, recompute=self.recompute, vocab=self.vocab)

    def __str__(self) -> str:
        sharded = f", vocab={self.vocab}" if self.vocab != "off" else ""
        policies = ",".join(map(str, self.recompute)) if isinstance(self.recompute, tuple) else self.recompute
        return f"placement {self.placement}, {self.microbatches} microbatches, recompute={policies}{sharded}"


@dataclass(frozen=True)
class Choice:
    """A layout, the order found for it, and why it was chosen: `pipe.program.plan` of a schedule that was searched.

    * `order`: of large steps that are only planned, of their first microbatches; `origin`: what it was made from;
    * `seconds`: the predicted step, `bound`: what no order of this layout can be shorter than, both from `basis`;
    * `resident`, `peak`: bytes that each rank holds all the time, and at most;
    * `bubble`: the share of the step, from 0 to 1, in which its busiest rank waits;
    * `best_name`: the named schedule that comes nearest on this layout, with its seconds, or None if none fits;
    * `others`: the other layouts with their steps (at nominal speeds, as `nominal`, that of the chosen one), the
      runner-up first;
    * `tried`: what was tried on the ranks, as `way`, with the measured seconds of a step (median, shortest, longest),
      this choice first. Passes are timed alone, so a trial step takes longer than predicted; the trial decides.
    """

    layout: Layout
    order: Schedule = field(repr=False, compare=False)  # in a file it is the program's
    origin: str
    seconds: float
    bound: float
    resident: tuple[float, ...]
    peak: tuple[float, ...]
    bubble: float
    basis: str
    best_name: tuple[str, float] | None = None
    nominal: float = 0.0
    others: tuple[tuple[str, float], ...] = ()
    tried: tuple[tuple[str, float, float, float], ...] = ()

    @property
    def way(self) -> str:
        """The layout and the order, in words."""
        return f"{self.layout}, from {self.origin}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the order, which `from_plain` takes separately."""
        plain = {name: value for name, value in vars(self).items() if name != "order"}
        return plain | {"layout": asdict(self.layout)}

    def __str__(self) -> str:
        """What was chosen, what was predicted of it, and what decided.

        >>> from zbcompile.schedules import build
        >>> tried = (("v, from zb-v", 1.5, 1.4, 1.8), ("v, zb-v", 1.6, 1.4, 1.7))
        >>> order, layout = build("zb-v", 2, 4), Layout("v", 2, 4)
        >>> print(Choice(layout, order, "zb-v", 1.0, 0.96, (), (), 0.1, "measured passes", ("zb-v", 1.05), tried=tried))
        auto: placement v, 4 microbatches, recompute=hints; from zb-v
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
        """The measured step next to that of the next best, which is as good if the ranges of both overlap."""
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
