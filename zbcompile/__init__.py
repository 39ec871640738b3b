"""zbcompile: a zero-bubble pipeline compiler for PyTorch."""

from importlib import import_module

from zbcompile.version import __version__ as __version__

_HOME = {
    "front": ("pipeline",),
    "pipe": ("Pipeline",),
    "seeds": ("microbatch_seed",),
    "errors": ("PipelineError",),
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
