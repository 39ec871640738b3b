"""How far the device is, which on CUDA lags behind its host."""

import torch

from zbcompile.passes import gpu


class DeviceProgress:
    """`mark` notes that a call has been given to the device; `behind` says, without waiting,
    whether the device still works on what was marked last. This class is for the CPU, where a call
    has ended when it returns: never behind.
    """

    def mark(self) -> None:
        pass

    def behind(self) -> bool:
        return False


class StreamProgress(DeviceProgress):
    """For CUDA: `mark` records an event behind everything in the stream. Any thread may ask
    `behind`."""

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
            with gpu.as_current(
                self._device
            ):  # another thread's device is GPU 0, where a query would make a context
                return event is not None and not event.query()
        except RuntimeError:  # the device has failed: its next use says why
            return False


def progress_of(device: torch.device) -> DeviceProgress:
    return StreamProgress(device) if gpu.is_gpu(device) else DeviceProgress()
