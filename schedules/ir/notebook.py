"""What notebooks show of a schedule and of a timeline: its picture."""

from importlib import import_module


class Shown:
    """In notebooks it is a picture of its steps; those of a schedule take the times of `Costs`' defaults."""

    def _repr_html_(self) -> str:
        drawing = import_module("zbcompile.schedules.visualization.figure")  # which imports this module
        return str(drawing.figure([drawing.timeline_of(self)]))
