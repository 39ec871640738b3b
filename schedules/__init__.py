"""Pipeline schedules as plain data: generate, check, lower, simulate, draw. Imports neither torch nor sympy.

>>> from zbcompile import schedules
>>> print(*schedules.build("zb-h1", ranks=2, microbatches=2).orders[0])
F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
"""

if __name__ != "zbcompile.schedules":  # a folder called "schedules" on sys.path must never be mistaken for this package
    raise ImportError(f"import this package as 'zbcompile.schedules', not as {__name__!r}")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what `__getattr__` resolves, for editors and type checkers; a test keeps the lists equal
    from zbcompile.schedules.checking.schedule_rules import Report, check
    from zbcompile.schedules.errors import ScheduleError
    from zbcompile.schedules.execution.memory import peak_memory
    from zbcompile.schedules.execution.noise import Noise
    from zbcompile.schedules.generators.interlaced import interlaced
    from zbcompile.schedules.generators.registry import admits, names, smallest_microbatches
    from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
    from zbcompile.schedules.ir.actions import Action, Pair
    from zbcompile.schedules.ir.costs import Costs, Link, PairTime
    from zbcompile.schedules.ir.files import from_csv, from_json, load, save, to_csv, to_json
    from zbcompile.schedules.ir.placement import Placement
    from zbcompile.schedules.ir.schedule import (
        Lowered,
        Schedule,
        format_order,
        format_schedule,
        format_step,
        parse_order,
        parse_schedule,
        parse_step,
    )
    from zbcompile.schedules.lowering.lower import lower
    from zbcompile.schedules.searching.by_name import build
    from zbcompile.schedules.searching.order_search import Found, bound, search
    from zbcompile.schedules.simulation.closed_forms import ClosedForm, closed_form
    from zbcompile.schedules.simulation.critical_path import Leg, chain, critical_path
    from zbcompile.schedules.simulation.idle_causes import Idle
    from zbcompile.schedules.simulation.message_slack import Slack, message_slack
    from zbcompile.schedules.simulation.simulator import simulate
    from zbcompile.schedules.simulation.timeline import Span, Timeline
    from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace
    from zbcompile.schedules.visualization.html import to_html
    from zbcompile.schedules.visualization.svg import to_svg
    from zbcompile.schedules.visualization.text import format_timeline, summary
    from zbcompile.schedules.visualization.write import write_comparison, write_picture

_HOME = {
    "ir.actions": ("Action", "Pair"),
    "checking.schedule_rules": ("Report", "check"),
    "simulation.closed_forms": ("ClosedForm", "closed_form"),
    "ir.costs": ("Costs", "Link", "PairTime"),
    "simulation.critical_path": ("Leg", "chain", "critical_path"),
    "errors": ("ScheduleError",),
    "ir.files": ("from_csv", "from_json", "load", "save", "to_csv", "to_json"),
    "visualization.html": ("to_html",),
    "simulation.idle_causes": ("Idle",),
    "generators.interlaced": ("interlaced",),
    "lowering.lower": ("lower",),
    "execution.memory": ("peak_memory",),
    "visualization.write": ("write_comparison", "write_picture"),
    "ir.placement": ("Placement",),
    "generators.registry": ("admits", "names", "smallest_microbatches"),
    "execution.noise": ("Noise",),
    "searching.by_name": ("build",),
    "searching.order_search": ("Found", "bound", "search"),
    "simulation.message_slack": ("Slack", "message_slack"),
    "simulation.simulator": ("simulate",),
    "visualization.svg": ("to_svg",),
    "ir.schedule": (
        "Lowered",
        "Schedule",
        "format_order",
        "format_schedule",
        "format_step",
        "parse_order",
        "parse_schedule",
        "parse_step",
    ),
    "simulation.timeline": ("Span", "Timeline"),
    "visualization.text": ("format_timeline", "summary"),
    "visualization.chrome_trace": ("to_chrome_trace",),
    "generators.vocabulary_insertion": ("with_vocabulary",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [
    "Action",
    "ClosedForm",
    "Costs",
    "Found",
    "Idle",
    "Leg",
    "Link",
    "Lowered",
    "Noise",
    "Pair",
    "PairTime",
    "Placement",
    "Report",
    "Schedule",
    "ScheduleError",
    "Slack",
    "Span",
    "Timeline",
    "admits",
    "bound",
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
    "message_slack",
    "names",
    "parse_order",
    "parse_schedule",
    "parse_step",
    "peak_memory",
    "save",
    "search",
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
    """Import a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
