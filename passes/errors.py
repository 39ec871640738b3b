"""The errors of the compiler and their base class, below which are those of the runtime
(`zbcompile.errors`)."""


class PipelineError(RuntimeError):
    """A pipeline used or run in a way that cannot work: what, where, received, expected, what to
    do."""


class CompileError(PipelineError):
    """A model that cannot be compiled as asked: what, where, received, expected, what to do."""


class CaptureError(CompileError):
    """The model cannot be captured, or capturing it would silently lose gradients."""


class PartitionError(CompileError):
    """The model cannot be cut into the stages that the schedule needs."""


class VerificationError(CompileError):
    """A pass made a graph that breaks a rule which later passes rely on: a bug of the compiler, not
    of the model."""
