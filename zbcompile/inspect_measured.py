"""`--measured`: the record of a real step, beside the prediction or by itself."""

import json

from zbcompile.causes import format_critical_path, format_idle_intervals
from zbcompile.inspect_request import Request, predicted
from zbcompile.inspected import Inspected
from zbcompile.picture_units import for_trace, in_units
from zbcompile.record import StepRecord
from zbcompile.schedules.pictures import write_comparison, write_picture
from zbcompile.step_comparison import compare_step, measured_timeline, require_same_schedule
from zbcompile.step_comparison_report import comparison_to_dict, format_step_comparison


def show_measured(inspected: Inspected, record: StepRecord, request: Request) -> None:
    """Print, or draw, what was asked for of a recorded step of `inspected`."""
    require_same_schedule(record.schedule, inspected.program.schedule)
    expected, basis = predicted(inspected, request)
    measured = measured_timeline(record, expected.costs)
    if request.explain_idle is not None:
        print(format_idle_intervals(measured, request.explain_idle, "s"), end="")
        return
    if request.critical_path:
        print(format_critical_path(measured, "s"), end="")
        return
    if request.timeline and request.timeline.suffix == ".json":
        print(write_picture(for_trace(measured), request.timeline))
    elif request.timeline:
        print(write_comparison(in_units([expected, measured]), request.timeline))
    else:
        comparison = compare_step(record, expected, basis, inspected.program.manifest)
        if request.json:
            print(json.dumps(comparison_to_dict(comparison), indent=1))
        else:
            print(format_step_comparison(comparison, expected, measured), end="")
