"""Pipeline schedules as plain data: generate, check, lower, simulate, draw. Imports neither torch nor sympy.

>>> from zbcompile import schedules
>>> print(*schedules.build("zb-h1", ranks=2, microbatches=2).orders[0])
F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
"""

if __name__ != "zbcompile.schedules":  # a folder called "schedules" on sys.path must never be mistaken for this package
    raise ImportError(f"import this package as 'zbcompile.schedules', not as {__name__!r}")

from importlib import import_module

_HOME = {
    "actions": ("Action", "Pair"),
    "costs": ("Costs", "Link", "PairTime"),
    "checker": ("check",),
    "errors": ("ScheduleError",),
    "files": ("from_csv", "from_json", "load", "save", "to_csv", "to_json"),
    "lowering": ("lower",),
    "placement": ("Placement",),
    "registry": ("admits", "build", "names", "smallest_microbatches"),
    "schedule": ("Lowered", "Schedule"),
    "simulator": ("simulate",),
    "text": ("format_order", "format_schedule", "format_step", "parse_order", "parse_schedule", "parse_step"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
