"""Which optimizers can be divided among replicas: those that update element by element, or matrix by matrix."""

import torch
from torch.optim import Optimizer

from zbcompile.distributed.mesh import Mesh
from zbcompile.errors import PipelineError

ELEMENTS, MATRICES = "element by element", "matrix by matrix"
KNOWN = {
    **dict.fromkeys(("AdamW", "Adam", "SGD", "RMSprop", "Adagrad"), ELEMENTS),
    "Muon": MATRICES,  # torch 2.9 has it
}


def rule_of(kind: type[Optimizer]) -> str | None:
    """How an optimizer updates: as its class declares (`elementwise = True`, `matrixwise = True`), or as is known of
    torch's own; None if nothing is known."""
    for attribute, rule in (("elementwise", ELEMENTS), ("matrixwise", MATRICES)):
        if getattr(kind, attribute, False):
            return rule
    return next((rule for name, rule in KNOWN.items() if getattr(torch.optim, name, None) is kind), None)


def require_divisible(kind: type[Optimizer], zero: int, mesh: Mesh) -> str:
    """The rule by which the optimizer is divided. Raises PipelineError if it has none, or if there is no replica."""
    rule = rule_of(kind)
    if rule is None:
        raise PipelineError(
            f"zero={zero} divides the optimizer among replicas, and {kind.__name__} is not known to update element by "
            f"element ({', '.join(name for name, each in KNOWN.items() if each == ELEMENTS)}) or matrix by matrix "
            "(Muon). If it does, say so in its class: elementwise = True, or matrixwise = True; otherwise pass zero=0."
        )
    if "dp" not in mesh.names:
        raise PipelineError(
            f'zero={zero} divides the optimizer among replicas, but the mesh has no dimension "dp". Pass mesh= with '
            "one, or zero=0."
        )
    return rule
