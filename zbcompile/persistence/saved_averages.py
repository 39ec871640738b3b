"""Averages of a pipeline's parameters in a checkpoint: a section like that of the parameters, under the same names."""

from typing import Any

from zbcompile.api.averages import Averages
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.persistence.checkpoint_values import Tensors
from zbcompile.persistence.local_tensors import Holding, like_rows
from zbcompile.persistence.saved_state import SavedState
from zbcompile.persistence.saved_values import read_values


def counted(ema: Averages | None) -> dict[str, Any] | None:
    """What a checkpoint keeps of averages besides their values: the decay, and the number of updates."""
    return None if ema is None else {"decay": ema.decay, "updates": ema.updates}


def averages_to_write(ema: Averages | None, source: Any, holding: Holding) -> Tensors:
    """The averages that this process writes. Raises PipelineError for those of another pipeline than `source`."""
    if ema is None:
        return {}
    _require_of(ema, source)
    return {name: each for name, each in _averages(ema, holding).items() if holding.writes(name)}


def require_averages(saved: SavedState, ema: Averages | None, source: Any, holding: Holding) -> None:
    """Raise PipelineError unless the checkpoint holds such averages of all of this process's parameters."""
    if ema is None:
        return
    _require_of(ema, source)
    found, known, left_out = saved.fields["ema"], saved.keys("ema"), saved.fields["left_out"]
    if found is None or any(name not in known and name not in left_out for name in holding.parameters):
        raise PipelineError(
            f"{saved.path} holds no averages of this model. Load it without ema=: the first update copies the "
            "parameters."
        )
    if found["decay"] != ema.decay:
        raise PipelineError(f"{saved.path} was saved with averages of decay={found['decay']}; this is {ema.decay}.")


def load_averages(saved: SavedState, ema: Averages, holding: Holding) -> None:
    """Continue from the saved averages, now that the parameters are loaded: what was left out is what the model has."""
    ema.begin_again(saved.fields["ema"]["updates"])
    left_out = saved.fields["left_out"]
    read_values(saved, {name: each for name, each in _averages(ema, holding).items() if name not in left_out}, "ema")


def _require_of(ema: Any, source: Any) -> None:
    if not isinstance(ema, Averages) or ema.pipe is not source:
        raise PipelineError("ema= takes the averages that zbcompile.ema makes of the same pipeline.")


def _averages(ema: Averages, holding: Holding) -> Tensors:
    """This process's averages by the names in a checkpoint, in their own memory; DTensors where parameters are."""
    own = dict(zip(map(id, ema.pipe.parameters()), ema.tensors().values(), strict=True))
    found = {name: own[id(parameter)] for name, parameter in holding.parameters.items() if name in holding.tensors}
    kinds = holding.tensors
    return {name: like_rows(each, kinds[name]) if is_distributed(kinds[name]) else each for name, each in found.items()}
