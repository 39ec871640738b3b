"""Pipeline schedules as plain data: generate, check, lower, simulate, draw. Imports neither torch nor sympy.

>>> from zbcompile import schedules
>>> print(*schedules.build("zb-h1", ranks=2, microbatches=2).orders[0])
F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
"""

if __name__ != "zbcompile.schedules":  # a folder called "schedules" on sys.path must never be mistaken for this package
    raise ImportError(f"import this package as 'zbcompile.schedules', not as {__name__!r}")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what `__getattr__` finds, for editors and type checkers; a test keeps the lists equal
    from zbcompile.schedules.actions import Action, Pair
    from zbcompile.schedules.checker import Report, check
    from zbcompile.schedules.closed_forms import ClosedForm, closed_form
    from zbcompile.schedules.costs import Costs, Link, PairTime
    from zbcompile.schedules.critical import Leg, chain, critical_path
    from zbcompile.schedules.errors import ScheduleError
    from zbcompile.schedules.files import from_csv, from_json, load, save, to_csv, to_json
    from zbcompile.schedules.html_picture import to_html
    from zbcompile.schedules.idle import Idle
    from zbcompile.schedules.interlaced_pipeline import interlaced
    from zbcompile.schedules.lowering import lower
    from zbcompile.schedules.memory import peak_memory
    from zbcompile.schedules.pictures import write_comparison, write_picture
    from zbcompile.schedules.placement import Placement
    from zbcompile.schedules.registry import admits, build, names, smallest_microbatches
    from zbcompile.schedules.schedule import Lowered, Schedule
    from zbcompile.schedules.simulator import simulate
    from zbcompile.schedules.svg_picture import to_svg
    from zbcompile.schedules.text import (
        format_order,
        format_schedule,
        format_step,
        parse_order,
        parse_schedule,
        parse_step,
    )
    from zbcompile.schedules.timeline import Span, Timeline
    from zbcompile.schedules.timeline_text import format_timeline, summary
    from zbcompile.schedules.trace_picture import to_chrome_trace
    from zbcompile.schedules.vocabulary_insertion import with_vocabulary

_HOME = {
    "actions": ("Action", "Pair"),
    "checker": ("Report", "check"),
    "closed_forms": ("ClosedForm", "closed_form"),
    "costs": ("Costs", "Link", "PairTime"),
    "critical": ("Leg", "chain", "critical_path"),
    "errors": ("ScheduleError",),
    "files": ("from_csv", "from_json", "load", "save", "to_csv", "to_json"),
    "html_picture": ("to_html",),
    "idle": ("Idle",),
    "interlaced_pipeline": ("interlaced",),
    "lowering": ("lower",),
    "memory": ("peak_memory",),
    "pictures": ("write_comparison", "write_picture"),
    "placement": ("Placement",),
    "registry": ("admits", "build", "names", "smallest_microbatches"),
    "schedule": ("Lowered", "Schedule"),
    "simulator": ("simulate",),
    "svg_picture": ("to_svg",),
    "text": ("format_order", "format_schedule", "format_step", "parse_order", "parse_schedule", "parse_step"),
    "timeline": ("Span", "Timeline"),
    "timeline_text": ("format_timeline", "summary"),
    "trace_picture": ("to_chrome_trace",),
    "vocabulary_insertion": ("with_vocabulary",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [
    "Action",
    "ClosedForm",
    "Costs",
    "Idle",
    "Leg",
    "Link",
    "Lowered",
    "Pair",
    "PairTime",
    "Placement",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "admits",
    "build",
    "chain",
    "check",
    "closed_form",
    "critical_path",
    "format_order",
    "format_schedule",
    "format_step",
    "format_timeline",
    "from_csv",
    "from_json",
    "interlaced",
    "load",
    "lower",
    "names",
    "parse_order",
    "parse_schedule",
    "parse_step",
    "peak_memory",
    "save",
    "simulate",
    "smallest_microbatches",
    "summary",
    "to_chrome_trace",
    "to_csv",
    "to_html",
    "to_json",
    "to_svg",
    "with_vocabulary",
    "write_comparison",
    "write_picture",
]


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
