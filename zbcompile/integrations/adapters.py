"""Saves and loads adapters of PEFT in PEFT's own layout, without their base model."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.agreement import together
from zbcompile.errors import PipelineError
from zbcompile.model.remote_tensors import local_state_allowed

DEFAULT = (  # the adapter whose files lie in the folder itself; others have one of their own
    "default"
)


def has_adapters(model: nn.Module) -> bool:
    """Returns True for a model that `peft.get_peft_model` returned."""
    return hasattr(model, "peft_config")


def save_adapters(folder: Path, pipe: Pipeline, writes: bool) -> None:
    """`save_pretrained` of a PEFT model, by the process that `writes`; every rank must call it."""
    model: Any = pipe.model
    with local_state_allowed():
        tensors = model.state_dict().items()
    here = {name: value for name, value in tensors if not getattr(value, "is_meta", False)}
    state = {**here, **pipe.state_dict(full=True, frozen=False)}
    together(
        pipe.ranks,
        f"writing {folder}",
        lambda: model.save_pretrained(folder, state_dict=state) if writes else None,
    )


def load_adapters(folder: str | Path, pipe: Pipeline) -> None:
    """Load all adapters of a model; every rank must call it."""
    what = f"loading the adapters in {folder}"
    pipe.parameters()  # waits for the last update
    with pipe.ranks.watch.region(what), local_state_allowed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*meta parameter.*no-op")  # those of other ranks
        together(pipe.ranks, what, partial(_read, Path(folder), pipe.model))
        names = list(pipe.model.state_dict())
    adapters = [f".{name}." for name in pipe.model.peft_config]  # type: ignore[union-attr]
    filled = [name for name in names if any(adapter in name for adapter in adapters)]
    pipe.resume(pipe.step_index, filled)


def _read(folder: Path, model: Any) -> None:
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        place = folder if name == DEFAULT else folder / name
        if not (place / "adapter_config.json").exists():
            raise PipelineError(
                f"{place} has no adapter_config.json, which PEFT writes beside the adapter"
                f" {name!r}."
            )
        set_peft_model_state_dict(
            model, load_peft_weights(str(place), device="cpu"), adapter_name=name
        )
