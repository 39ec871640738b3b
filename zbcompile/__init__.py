"""zbcompile: a zero-bubble pipeline compiler for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING

from zbcompile.version import __version__ as __version__

if TYPE_CHECKING:
    from zbcompile import passes as passes, schedules as schedules
    from zbcompile.api.pipeline import Pipeline as Pipeline
    from zbcompile.api.pipeline_function import pipeline as pipeline
    from zbcompile.batches.example import Example as Example
    from zbcompile.errors import FaultError as FaultError, PipelineError as PipelineError
    from zbcompile.inspection.explain_model import Explanation as Explanation, explain as explain
    from zbcompile.model.experts import ExpertExchange as ExpertExchange
    from zbcompile.model.seeds import microbatch_seed as microbatch_seed
    from zbcompile.passes.cost.hardware import Hardware as Hardware
    from zbcompile.passes.errors import (
        CaptureError as CaptureError,
        CompileError as CompileError,
        PartitionError as PartitionError,
    )
    from zbcompile.persistence.checkpoint import (
        Checkpoint as Checkpoint,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from zbcompile.persistence.checkpoint_directory import latest_checkpoint as latest_checkpoint
    from zbcompile.persistence.checkpoint_files import verify_checkpoint as verify_checkpoint
    from zbcompile.persistence.loaded_pipeline import load as load
    from zbcompile.persistence.safetensors_weights import (
        load_weights as load_weights,
        save_weights as save_weights,
    )
    from zbcompile.schedules.errors import ScheduleError as ScheduleError

_HOME = {
    "persistence.checkpoint_directory": ("latest_checkpoint",),
    "persistence.checkpoint": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
    "persistence.checkpoint_files": ("verify_checkpoint",),
    "batches.example": ("Example",),
    "inspection.explain_model": ("Explanation", "explain"),
    "api.pipeline_function": ("pipeline",),
    "persistence.loaded_pipeline": ("load",),
    "api.pipeline": ("Pipeline",),
    "persistence.safetensors_weights": ("load_weights", "save_weights"),
    "model.experts": ("ExpertExchange",),
    "model.seeds": ("microbatch_seed",),
    "errors": ("FaultError", "PipelineError"),
    "passes.cost.hardware": ("Hardware",),
    "passes.errors": ("CompileError", "CaptureError", "PartitionError"),
    "schedules.errors": ("ScheduleError",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name on first use: `import zbcompile` alone imports neither torch nor
    sympy."""
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in ("schedules", "passes"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "passes", "schedules"})
