"""`--schedule auto` on a command line: the layout of one microbatch of a batch whose size is not known."""

from collections.abc import Callable, Mapping, Sequence

from zbcompile.compiler.compile_model import Drawn
from zbcompile.frontend.options import Options
from zbcompile.passes.compile_options import Choices
from zbcompile.planning.planner import decide, order_by_graphs, reordered
from zbcompile.program.program import Program
from zbcompile.schedules.ir.schedule import Schedule


class ExamplePlanner:
    """The planner of `compile_example` for `options`; `announce` is told which layout it looks at."""

    def __init__(self, provisional: Schedule, options: Options, announce: Callable[[str], None]) -> None:
        self.provisional, self.options, self.announce = provisional, options, announce

    def decide(self, drawn: Drawn, seconds: Mapping[str, float]) -> tuple[Schedule, Choices, Sequence[int]]:
        """The fastest layout that fits."""
        asked = self.options
        settings = asked.choices, (), asked.chunks, asked.search_seconds, seconds, self.announce
        self.decision = decide(drawn, self.provisional, *settings)
        return self.decision.schedule, self.decision.choices, self.decision.edges

    def finish(self, program: Program) -> Program:
        """With the order that is best for the FLOPs of the graphs: the device at hand may not be the one to run on."""
        return reordered(program, *order_by_graphs(program, self.decision, self.options.search_seconds, measure=False))
