"""zbcompile: a zero-bubble pipeline compiler for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING

from zbcompile.version import __version__ as __version__

if TYPE_CHECKING:
    from zbcompile import passes as passes
    from zbcompile import schedules as schedules
    from zbcompile.checkpoint_files import latest_checkpoint as latest_checkpoint
    from zbcompile.checkpoints import Checkpoint as Checkpoint
    from zbcompile.checkpoints import load_checkpoint as load_checkpoint
    from zbcompile.checkpoints import save_checkpoint as save_checkpoint
    from zbcompile.errors import FaultError as FaultError
    from zbcompile.errors import PipelineError as PipelineError
    from zbcompile.examination import explain as explain
    from zbcompile.example import Example as Example
    from zbcompile.explanation import Explanation as Explanation
    from zbcompile.front import pipeline as pipeline
    from zbcompile.loading import load as load
    from zbcompile.passes.errors import CaptureError as CaptureError
    from zbcompile.passes.errors import CompileError as CompileError
    from zbcompile.passes.errors import PartitionError as PartitionError
    from zbcompile.pipe import Pipeline as Pipeline
    from zbcompile.scaling import GradScaler as GradScaler
    from zbcompile.schedules.errors import ScheduleError as ScheduleError
    from zbcompile.seeds import microbatch_seed as microbatch_seed
    from zbcompile.tracing import trace as trace
    from zbcompile.weights import load_weights as load_weights
    from zbcompile.weights import save_weights as save_weights

_HOME = {
    "checkpoint_files": ("latest_checkpoint",),
    "checkpoints": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
    "example": ("Example",),
    "examination": ("explain",),
    "explanation": ("Explanation",),
    "front": ("pipeline",),
    "loading": ("load",),
    "pipe": ("Pipeline",),
    "scaling": ("GradScaler",),
    "tracing": ("trace",),
    "weights": ("load_weights", "save_weights"),
    "seeds": ("microbatch_seed",),
    "errors": ("FaultError", "PipelineError"),
    "passes.errors": ("CompileError", "CaptureError", "PartitionError"),
    "schedules.errors": ("ScheduleError",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is asked for: `import zbcompile` alone imports neither torch nor sympy."""
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
