"""The user's line that a node comes from."""

from types import FrameType

LINE = "line"  # key of an annotation: file and line of the user's code
_NOT_USERS = ("torch", "zbcompile", "contextlib")
_STEP = ("training_step", "forward_only")  # modules of ours that call the model and the loss


def users_line(frame: FrameType | None) -> str:
    """Returns `file:line` of the innermost frame outside of torch and this library.

    A model that consists of modules of torch has only frames of torch.nn, of which the innermost
    counts.
    """
    of_torch = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_users_frame(frame):
            return _line_of(frame)
        if name.startswith("torch.nn.") and not of_torch:
            of_torch = _line_of(frame)
        if name.startswith("zbcompile.") and name.rpartition(".")[2] in _STEP:
            break
        frame = frame.f_back
    return of_torch


def is_users_frame(frame: FrameType) -> bool:
    """Returns True for a frame of a function of neither torch nor this library."""
    if frame.f_code.co_filename == "<string>":  # code that torch generates, without a line to show
        return False
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_USERS


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
