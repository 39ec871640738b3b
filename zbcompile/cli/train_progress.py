"""The display of a run: a bar on a terminal, plain lines elsewhere; on the first rank only."""

import sys
import time
from typing import Any

import torch
from tqdm import tqdm

REFRESH = 0.5  # seconds between two readings of the loss, each of which waits for the device


class Progress:
    """Shows steps out of `steps`, from `start` on; every `every` steps if there is no terminal."""

    def __init__(self, start: int, steps: int, every: int, shown: bool) -> None:
        self.steps, self.every, self.shown = steps, every, shown
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(initial=start, total=steps, unit="step")
        self._amount, self._since, self._step = 0, time.perf_counter(), start

    def step(self, step: int, loss: torch.Tensor, amount: tuple[int, str]) -> None:
        """`step` steps are done; the last one had this loss and amount of data."""
        self._amount += amount[0]
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.update()
        passed = time.perf_counter() - self._since
        due = passed >= REFRESH if self._bar is not None else step % self.every == 0
        if due or step == self.steps:
            self._show(step, f"loss {loss.item():.6g}, {self._amount / passed:,.0f} {amount[1]}/s")
            self._amount, self._since = 0, time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.shown:
            tqdm.write(text) if self._bar is not None else print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, step: int, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            print(f"step {step} of {self.steps}: {text}", flush=True)
