"""An explanation: what would be compiled of a model, where it could be cut, what is unsupported and the remedies."""

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 15  # places that the printed form lists


@dataclass(frozen=True)
class Place:
    """A position where the model can be cut.

    `after` is the operation before it with its module and source line, `bytes` what crosses per microbatch in each
    direction, `share` the part of the step's nominal time that lies before it.
    """

    operation: str
    after: str
    bytes: int
    share: float


@dataclass(frozen=True)
class Explanation:
    """What `zbcompile.pipeline` would do with a model. Empty `problems`: it compiles.

    `problems` are sentences that name what is unsupported, where, and the remedy; `notes` what a user should know.
    `places` is empty when the model could not be captured at all.
    """

    model: str
    inputs: tuple[str, ...]
    loss: str
    parameters: tuple[str, ...]
    places: tuple[Place, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def supported(self) -> bool:
        return not self.problems

    def nearest_places(self, stages: int) -> tuple[Place, ...]:
        """For each of the `stages - 1` even cuts the place whose share is nearest to it."""
        even = (k / stages for k in range(1, stages))
        return tuple(min(self.places, key=lambda place: abs(place.share - share)) for share in even)

    def __str__(self) -> str:
        return "\n".join(
            [*self._what(), *self._where(), *_listed("Problems", self.problems), *_listed("Notes", self.notes)]
        )

    def _what(self) -> list[str]:
        verdict = "can be compiled" if self.supported else f"cannot be compiled: {counted(self.problems, 'problem')}"
        return [
            f"{self.model} {verdict}.",
            f"  inputs      {', '.join(self.inputs) or 'no tensors'}",
            f"  loss        {self.loss}",
            f"  parameters  {', '.join(self.parameters)}",
        ]

    def _where(self) -> list[str]:
        if not self.places:
            return []
        shown = self.places if len(self.places) <= SHOWN else tuple(dict.fromkeys(self.nearest_places(SHOWN + 1)))
        hidden = len(self.places) - len(shown)
        title = f"It can be cut in {counted(self.places, 'place')}" + (f" ({hidden} not shown)" if hidden else "")
        lines = (f"  {place.share:6.1%}  {place.bytes:>12,} B  {place.after}" for place in shown)
        return [f"{title}; work before the cut, bytes across it, and after what:", *lines]


def _listed(title: str, texts: tuple[str, ...]) -> list[str]:
    return [f"{title}:", *(f"  - {text}" for text in texts)] if texts else []


def counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
