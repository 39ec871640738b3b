"""The model's outputs that a step returns besides its loss, joined over the microbatches."""

from typing import Any, Final

import torch

from zbcompile.batches.losses import total_loss
from zbcompile.engine.executable import Executable, Outputs
from zbcompile.errors import PipelineError
from zbcompile.program.output import Output

WHERE = (False, True, "last")
# what the loss function returns besides the loss, without what the model returns
METRICS: Final = "metrics"
KINDS = (*WHERE, METRICS)


def kind_of(return_outputs: Any, return_metrics: Any) -> bool | str:
    """Returns which of KINDS a step returns. Raises PipelineError for other values, and for both
    together."""
    if not isinstance(return_outputs, bool | str) or return_outputs not in WHERE:
        raise PipelineError(f"return_outputs={return_outputs!r}; expected one of {WHERE}.")
    if not isinstance(return_metrics, bool):
        raise PipelineError(f"return_metrics={return_metrics!r}; expected True or False.")
    if return_outputs and return_metrics:
        raise PipelineError(
            f"return_metrics=True and return_outputs={return_outputs!r}: the outputs already come"
            " with the metrics, as (outputs, metrics). Pass one of the two."
        )
    return METRICS if return_metrics else return_outputs


def returned_values(kind: bool | str) -> str:
    """Returns what a captured step returns of its forward for one of KINDS."""
    return METRICS if kind == METRICS else "outputs" if kind else ""


def keyword(kind: bool | str) -> str:
    """The keyword argument that asks a step for this, as text."""
    return "return_metrics=True" if kind == METRICS else f"return_outputs={kind!r}"


def joined_outputs(
    leaves: Outputs, executable: Executable, rows: int | None, reduction: str
) -> Any:
    """Returns the extra results of a step. Leaves with a row for each of the `rows` samples of a
    microbatch are concatenated, floating scalars combined as losses are, others are lists over the
    microbatches.
    """
    outputs, count = executable.outputs, executable.program.schedule.microbatches
    first = outputs[0]
    if any(output.structure != first.structure for output in outputs):
        return [
            output.rebuild({name: leaves[name][i] for name in output.made})
            for i, output in enumerate(outputs)
        ]
    return first.rebuild(
        {n: _joined([leaves[n][i] for i in range(count)], rows, reduction) for n in first.made}
    )


def _joined(parts: list[torch.Tensor], rows: int | None, reduction: str) -> Any:
    if rows is not None and all(part.shape[:1] == (rows,) for part in parts):
        return torch.cat(parts)
    if all(part.ndim == 0 and part.is_floating_point() for part in parts):
        return total_loss(parts, reduction)
    return parts


def joined_rows(leaves: Outputs, outputs: dict[int, Output]) -> Any:
    """The output of an evaluation: the rows of its microbatches, joined into one batch. `outputs`
    says, by microbatch, how to rebuild it."""
    chosen = {name: [parts[i] for i in outputs] for name, parts in leaves.items()}
    joined = {
        name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in chosen.items()
    }
    return next(iter(outputs.values())).rebuild(joined)
