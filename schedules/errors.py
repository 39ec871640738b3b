"""The error of the schedules package."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, or that breaks one of its rules: what, where, received,
    expected, what to do."""
