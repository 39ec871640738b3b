"""The error family of the front door and the runtime."""


class PipelineError(RuntimeError):
    """A pipeline used or run in a way that cannot work: what, where, received, expected, what to do."""
