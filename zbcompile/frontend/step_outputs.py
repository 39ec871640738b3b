"""What a step returns beside its loss: the model's outputs, joined over the microbatches."""

from collections.abc import Sequence
from typing import Any

import torch

from zbcompile.distributed.packing import empty
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.losses import total_loss
from zbcompile.program.output import Output
from zbcompile.runtime.engine import Executable, Made

WHERE = (False, True, "last")


def require_where(asked: Any) -> None:
    """Raise PipelineError unless `asked` is a value of return_outputs=."""
    if not isinstance(asked, bool | str) or asked not in WHERE:
        raise PipelineError(f"return_outputs={asked!r}; expected one of {WHERE}.")


def joined_outputs(
    made: Made, executable: Executable, rows: int | None, reduction: str, ranks: Ranks, everywhere: bool
) -> Any:
    """The outputs of a step, on every rank or only on that of the last stage (None on others): leaves with a row for
    each of the `rows` samples of a microbatch are concatenated, floating scalars combined as losses are, others are
    lists over the microbatches."""
    count = executable.program.schedule.microbatches
    returned = executable.returned or (executable.program.returned,) * count
    outputs = [each for each in returned if each is not None]
    if ranks.group is not None:
        _exchange(made, executable, outputs, ranks, everywhere)
        if not everywhere and ranks.rank != executable.program.rank_of(executable.program.schedule.stages - 1):
            return None
    first = outputs[0]
    if any(
        (each.structure, each.names, each.constants) != (first.structure, first.names, first.constants)
        for each in outputs
    ):
        return [each.rebuild({name: made[name][i] for name in each.made}) for i, each in enumerate(outputs)]
    return first.rebuild({n: _joined([made[n][i] for i in range(count)], rows, reduction) for n in first.made})


def _joined(parts: list[torch.Tensor], rows: int | None, reduction: str) -> Any:
    if rows is not None and all(part.shape[:1] == (rows,) for part in parts):
        return torch.cat(parts)
    if all(part.ndim == 0 and part.is_floating_point() for part in parts):
        return total_loss(parts, reduction)
    return parts


def _exchange(made: Made, executable: Executable, outputs: Sequence[Output], ranks: Ranks, everywhere: bool) -> None:
    """Fill `made` with what other ranks have made, of those who need it."""
    program = executable.program
    last = program.rank_of(program.schedule.stages - 1)
    for i, output in enumerate(outputs):
        for name, (stage, spec) in sorted(output.made.items()):
            source = program.rank_of(stage, i)
            if everywhere or source != last:
                own = made.setdefault(name, {})
                own[i] = own[i].contiguous() if ranks.rank == source else empty(spec, ranks.device)
                ranks.broadcast(own[i], source)
