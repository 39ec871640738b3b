"""The user's line that a node comes from."""

from types import FrameType

LINE = "line"  # key of an annotation: file and line of the user's code
_NOT_USERS = ("torch", "zbcompile", "contextlib")


def users_line(frame: FrameType | None) -> str:
    """Returns `file:line` of the innermost frame outside of torch and this library."""
    while frame is not None:
        if is_users_frame(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users_frame(frame: FrameType) -> bool:
    """Returns True for a frame of a function of neither torch nor this library."""
    if frame.f_code.co_filename == "<string>":  # code that torch generates, without a line to show
        return False
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_USERS
