"""How far the device is, which on CUDA lags behind its host."""

import torch

from zbcompile.passes import gpu


class DeviceProgress:
    """`mark` notes that a call has been given to the device; `behind` says, without waiting, whether the device has yet
    to finish what was marked last: never, of a device that works while the host waits."""

    def mark(self) -> None:
        pass

    def behind(self) -> bool:
        return False


class StreamProgress(DeviceProgress):
    """For CUDA: an event behind everything in the stream. Another thread may ask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: gpu.Event | None = None

    def mark(self) -> None:
        event = gpu.Event()
        event.record(gpu.current_stream(self._device))
        self._event = event

    def behind(self) -> bool:
        event = self._event
        try:
            with gpu.as_current(self._device):  # of that thread it is GPU 0, on which a query would make a context
                return event is not None and not event.query()
        except RuntimeError:  # the device has failed: its next use says why
            return False


def progress_of(device: torch.device) -> DeviceProgress:
    return StreamProgress(device) if gpu.is_gpu(device) else DeviceProgress()
