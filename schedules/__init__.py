"""Pipeline schedules as plain data: generate, check, lower, simulate, draw. Imports neither torch nor sympy.

>>> from zbcompile import schedules
>>> print(*schedules.build("zb-h1", ranks=2, microbatches=2).orders[0])
F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
"""

if __name__ != "zbcompile.schedules":  # a folder called "schedules" on sys.path must never be mistaken for this package
    raise ImportError(f"import this package as 'zbcompile.schedules', not as {__name__!r}")

from importlib import import_module
from typing import TYPE_CHECKING

from zbcompile.schedules.ir.schedule import Picturable

if TYPE_CHECKING:  # what `__getattr__` resolves, for editors and type checkers; a test keeps the lists equal
    from zbcompile.schedules.checking.schedule_rules import Report as Report, check as check
    from zbcompile.schedules.errors import ScheduleError as ScheduleError
    from zbcompile.schedules.execution.memory import peak_memory as peak_memory
    from zbcompile.schedules.generators.interlaced import interlaced as interlaced
    from zbcompile.schedules.generators.registry import (
        admits as admits,
        names as names,
        smallest_microbatches as smallest_microbatches,
    )
    from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary as with_vocabulary
    from zbcompile.schedules.ir.actions import Action as Action, Pair as Pair
    from zbcompile.schedules.ir.costs import Costs as Costs, Link as Link
    from zbcompile.schedules.ir.files import (
        from_csv as from_csv,
        from_json as from_json,
        load as load,
        save as save,
        to_csv as to_csv,
        to_json as to_json,
    )
    from zbcompile.schedules.ir.placement import Placement as Placement
    from zbcompile.schedules.ir.schedule import (
        Schedule as Schedule,
        format_order as format_order,
        format_schedule as format_schedule,
        format_step as format_step,
        parse_order as parse_order,
        parse_step as parse_step,
    )
    from zbcompile.schedules.lowering.lower import lower as lower
    from zbcompile.schedules.lowering.updates import with_updates as with_updates
    from zbcompile.schedules.searching.by_name import build as build
    from zbcompile.schedules.searching.order_search import (
        SearchResult as SearchResult,
        bound as bound,
        search as search,
    )
    from zbcompile.schedules.simulation.closed_forms import ClosedForm as ClosedForm, closed_form as closed_form
    from zbcompile.schedules.simulation.critical_path import (
        CriticalStep as CriticalStep,
        blocking_chain as blocking_chain,
        critical_path as critical_path,
    )
    from zbcompile.schedules.simulation.idle_causes import Idle as Idle
    from zbcompile.schedules.simulation.timeline import Span as Span, Timeline as Timeline, simulate as simulate
    from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace as to_chrome_trace
    from zbcompile.schedules.visualization.html_page import to_html as to_html
    from zbcompile.schedules.visualization.svg import to_svg as to_svg
    from zbcompile.schedules.visualization.text import format_timeline as format_timeline, summary as summary
    from zbcompile.schedules.visualization.write import (
        write_comparison as write_comparison,
        write_picture as write_picture,
    )

_HOME = {
    "checking.schedule_rules": "Report check",
    "errors": "ScheduleError",
    "execution.memory": "peak_memory",
    "generators.interlaced": "interlaced",
    "generators.registry": "admits names smallest_microbatches",
    "generators.vocabulary_insertion": "with_vocabulary",
    "ir.actions": "Action Pair",
    "ir.costs": "Costs Link",
    "ir.files": "from_csv from_json load save to_csv to_json",
    "ir.placement": "Placement",
    "ir.schedule": "Schedule format_order format_schedule format_step parse_order parse_step",
    "lowering.lower": "lower",
    "lowering.updates": "with_updates",
    "searching.by_name": "build",
    "searching.order_search": "SearchResult bound search",
    "simulation.closed_forms": "ClosedForm closed_form",
    "simulation.critical_path": "CriticalStep blocking_chain critical_path",
    "simulation.idle_causes": "Idle",
    "simulation.timeline": "Span Timeline simulate",
    "visualization.chrome_trace": "to_chrome_trace",
    "visualization.html_page": "to_html",
    "visualization.svg": "to_svg",
    "visualization.text": "format_timeline summary",
    "visualization.write": "write_comparison write_picture",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _picture(shown: object) -> str:
    from zbcompile.schedules.simulation.timeline import Timeline, simulate
    from zbcompile.schedules.visualization.svg import to_svg

    return to_svg(shown if isinstance(shown, Timeline) else simulate(shown))  # type: ignore[arg-type]


Picturable.picture = _picture
