"""Updates that do not wait for the norm of all gradients (Qi et al., Zero Bubble, section 4): the protocol of one rank
in one step, without tensors.

A stage updates if the gradients that its rank knows of by then, its own and those of the ranks before it, give no
reason against it. Behind them follows what all gradients say. If that is the same, and every rank has updated every
stage, the updates stand. Otherwise all ranks undo theirs, and update as they would have if they had waited.
"""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["as it is", "clipped", "skipped"]  # how an update uses its gradients


@dataclass
class Speculation:
    """`updated` are the stages whose updates have not waited, `held` says that some stage waits."""

    updated: list[int] = field(default_factory=list)
    held: bool = False

    def may_update(self, stage: int, known: Verdict) -> bool:
        """Whether a stage updates now, given what the gradients say that are known."""
        if known != "as it is":
            self.held = True
            return False
        self.updated.append(stage)
        return True

    def stands(self, total: Verdict, held_anywhere: bool) -> bool:
        """Whether the updates are those of all gradients; if not, `updated` are to be undone. `held_anywhere` says
        whether some stage of any rank waits: replicas exchange their updates, so that all of them must agree.

        >>> rank = Speculation()
        >>> rank.may_update(0, "as it is"), rank.stands("clipped", held_anywhere=False)
        (True, False)
        """
        return total == "as it is" and not held_anywhere
