"""The errors that users may catch; a `ScheduleError` stands by itself."""

from zbcompile.passes.errors import (
    CaptureError as CaptureError,
    CompileError as CompileError,
    PartitionError as PartitionError,
    PipelineError as PipelineError,
)


class FaultError(PipelineError):
    """Something broke on one rank, and every rank ended for it: `rank`, `where` (the action) and
    `cause`.

    The message is the same on all ranks. `rank` is None if no rank is to blame, but the store of
    the process group or a connection. What is left behind is described in docs/faults.md.
    """

    def __init__(self, rank: int | None, where: str, cause: str) -> None:
        who = "the ranks' connection" if rank is None else f"rank {rank}"
        super().__init__(f"{who} failed at {where}: {cause}")
        self.rank = rank
        self.where = where
        self.cause = cause
