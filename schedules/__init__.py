"""Pipeline schedules as plain data: generate, check, lower, simulate, draw. Imports neither torch
nor sympy.

>>> from zbcompile import schedules
>>> print(*schedules.build("zb-h1", ranks=2, microbatches=2).orders[0])
F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
"""

# a folder called "schedules" on sys.path must never be mistaken for this package
if __name__ != "zbcompile.schedules":
    raise ImportError(f"import this package as 'zbcompile.schedules', not as {__name__!r}")

from typing import TYPE_CHECKING, Any

from zbcompile.schedules.checking.schedule_rules import check as check
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
    Picturable,
    Schedule as Schedule,
    format_order as format_order,
    format_schedule as format_schedule,
    format_step as format_step,
    parse_order as parse_order,
    parse_step as parse_step,
)
from zbcompile.schedules.lowering.lower import lower as lower
from zbcompile.schedules.searching.by_name import build as build
from zbcompile.schedules.searching.order_search import (
    SearchResult as SearchResult,
    bound as bound,
    search as search,
)
from zbcompile.schedules.simulation.critical_path import (
    CriticalStep as CriticalStep,
    critical_path as critical_path,
)
from zbcompile.schedules.simulation.idle_causes import Idle as Idle
from zbcompile.schedules.simulation.timeline import (
    Span as Span,
    Timeline as Timeline,
    simulate as simulate,
)
from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace as to_chrome_trace
from zbcompile.schedules.visualization.svg import to_svg as to_svg
from zbcompile.schedules.visualization.text import (
    format_timeline as format_timeline,
    summary as summary,
)
from zbcompile.schedules.visualization.write import (
    to_html as to_html,
    write_comparison as write_comparison,
    write_picture as write_picture,
)

if TYPE_CHECKING:
    from zbcompile.schedules.simulation.closed_forms import (
        ClosedForm as ClosedForm,
        closed_form as closed_form,
    )


def __getattr__(name: str) -> Any:
    """Imports sympy for the closed forms alone."""
    if name in ("ClosedForm", "closed_form"):
        from zbcompile.schedules.simulation import closed_forms

        return getattr(closed_forms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


_SUBMODULES = {
    "checking",
    "execution",
    "generators",
    "ir",
    "lowering",
    "searching",
    "simulation",
    "visualization",
}
_PRIVATE = {"TYPE_CHECKING", "Any", "Picturable", "errors", *_SUBMODULES}
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    {"ClosedForm", "closed_form", *(name for name in globals() if name[0] != "_")} - _PRIVATE
)
Picturable.picture = lambda self: to_svg(self if isinstance(self, Timeline) else simulate(self))
