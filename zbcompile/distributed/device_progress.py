"""How far the device is: on CUDA a call may return before the device has executed it."""

import torch


class Progress:
    """`mark` notes that a call has been given to the device; `behind` says, without waiting, whether the device has yet
    to finish what was marked last: never, of a device that works while the host waits."""

    def mark(self) -> None:
        pass

    def behind(self) -> bool:
        return False


class StreamProgress(Progress):
    """For CUDA: an event behind everything in the stream. Another thread may ask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None

    def mark(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._event = event

    def behind(self) -> bool:
        event = self._event
        try:
            return event is not None and not event.query()
        except RuntimeError:  # the device has failed: whoever uses it next learns why
            return False


def progress_of(device: torch.device) -> Progress:
    return StreamProgress(device) if device.type == "cuda" else Progress()
