"""Training a compiled program with a data function: from its weights or its newest checkpoint to the last step."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from tqdm import tqdm

from zbcompile.api.pipeline import Pipeline
from zbcompile.batches.batch import amount
from zbcompile.cli.target import load_object
from zbcompile.cli.train_data import Data, Start, on_device
from zbcompile.cli.train_optimizer import NAMED, make_optimizer, options_of, rate_factor, set_options
from zbcompile.cli.train_pipeline import Job, open_pipeline
from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import BATCHES
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import restore_random_state, seed_everything
from zbcompile.persistence.checkpoint import Checkpoint, load_state, save_checkpoint
from zbcompile.persistence.checkpoint_directory import candidates, latest_checkpoint
from zbcompile.persistence.safetensors_weights import holds_weights, load_weights, save_weights
from zbcompile.progress import Say, silent

REFRESH = 0.5  # seconds between two readings of the loss, each of which waits for the device


class StepProgress:
    """Shows steps out of `steps`, from `start` on; every `every` steps if there is no terminal."""

    def __init__(self, start: int, steps: int, every: int, shown: bool) -> None:
        self.steps, self.every, self.shown = steps, every, shown
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(initial=start, total=steps, unit="step")
        self._amount, self._since, self._step = 0, time.perf_counter(), start

    def step(self, step: int, loss: torch.Tensor, amount: tuple[int, str]) -> None:
        """Report that `step` steps are done, with the loss and the amount of data of the last one."""
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

    def say(self, text: object) -> None:
        """Print a line above the progress bar."""
        if self.shown:
            tqdm.write(str(text)) if self._bar is not None else print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, step: int, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            print(f"step {step} of {self.steps}: {text}", flush=True)


def train(job: Job, say: Say = silent) -> None:
    """Run the job on this process's ranks. Raises PipelineError, on every rank, if the job cannot work."""
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    source = load_object(job.data)
    pipe = open_pipeline(job)
    say("")  # from here on steps are shown
    try:
        _train(job, pipe, source)
    finally:
        pipe.close()


def _train(job: Job, pipe: Pipeline, source: Any) -> None:
    optimizer = _optimizer(job, pipe)
    asked = options_of(optimizer)
    at = _first_state(job, pipe, optimizer)
    set_options(optimizer, asked)
    progress = StepProgress(at.step, job.steps, job.log_every, pipe.is_first)
    given = job.weights or job.init or job.directory
    origin = f"the weights of {given}" if at.path is None else f"resumed from {at.path}"
    progress.say(f"step {at.step} of {job.steps}: {origin}")
    with pipe.ranks.watch.region(f"opening {job.data}"):
        data = together(pipe.ranks, f"opening {job.data}", lambda: _data(job, pipe, source, at))
    try:
        _steps(job, pipe, optimizer, data, progress)
    finally:
        progress.close()
    if job.export is not None:
        save_weights(job.export, pipe)
        progress.say(f"weights written to {job.export}")


def _optimizer(job: Job, pipe: Pipeline) -> Optimizer:
    if job.update:
        kind = NAMED.get(job.optimizer) or load_object(job.optimizer)
        return pipe.optimizer(kind, clip=job.clip, **job.update, **job.options)
    made, what = lambda: make_optimizer(job.optimizer, pipe.named_parameters(), job.options), "making the optimizer"
    with pipe.ranks.watch.region(what):
        return together(pipe.ranks, what, made)


def _first_state(job: Job, pipe: Pipeline, optimizer: Optimizer) -> Checkpoint:
    """Fill the parameters: from the newest checkpoint when resuming, else from what the command names."""
    with pipe.ranks.watch.region("looking for checkpoints"):
        existing = gathered(pipe.ranks, job.checkpoint and latest_checkpoint(job.checkpoint))[0]
    if existing is not None and not job.resume:
        raise PipelineError(
            f"{job.checkpoint} holds checkpoints up to {existing.name}. Pass --resume to continue from there, or name "
            "another directory."
        )
    if existing is not None and job.checkpoint is not None:
        return load_state(job.checkpoint, pipe, optimizer)
    if job.weights is not None:
        _load_weights(job.weights, pipe)
    elif job.init is None and not job.is_target:
        raise PipelineError(
            f"the parameters have no values; {job.directory} holds only the program. Pass --weights FILE"
            ".safetensors (zbcompile.save_weights writes one), or --init FILE.py:function."
        )
    return Checkpoint(step=0)


def _load_weights(path: Path, pipe: Pipeline) -> None:
    """Load weights from safetensors, if there are any, or from a checkpoint, of which only the model is taken."""
    if holds_weights(path) or not candidates(path):
        load_weights(path, pipe)
        return
    load_state(path, pipe)
    pipe.step_index = 0


def _data(job: Job, pipe: Pipeline, source: Any, at: Checkpoint) -> Data:
    """The data from step `at.step` on. If batches are drawn again to be skipped, so are their random numbers; otherwise
    the generators continue from their restored state."""
    seed, mesh = pipe.options.seed, pipe.ranks.mesh
    seed_everything(seed)
    replica, replicas = mesh.index(*BATCHES), mesh.size(*BATCHES)
    states = at.extra.get("replicas") or [at.extra["data"]] * replicas if at.extra else [None] * replicas
    state = states[replica] if len(states) == replicas else states[0]
    data = Data(source, job.data, Start(at.step, seed, replica, replicas, state))
    if at.random is not None and not data.skips:
        restore_random_state(at.random, pipe.device)
    return data


def _steps(job: Job, pipe: Pipeline, optimizer: Optimizer, data: Data, progress: StepProgress) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(pipe.step_index, job.steps):
        with pipe.ranks.watch.region(f"batch {step}"):
            batch = on_device(next(data), pipe.device)
        factor = rate_factor(step, job.steps, job.warmup, job.decay)
        set_options(optimizer, [{"lr": rate * factor} for rate in rates])
        loss = pipe.step(*batch[0], **batch[1])
        if job.clip is not None and not job.update:
            pipe.clip_grad_norm_(job.clip)
        optimizer.step()
        optimizer.zero_grad()
        progress.step(step + 1, loss, amount((batch[0], {**batch[1], "target": None})))
        if job.checkpoint is not None and ((step + 1) % job.every == 0 or step + 1 == job.steps):
            states, wait = pipe.from_replicas(data.state()), not job.save_async
            extra = {"data": states[0], "replicas": states} if len(states) > 1 else {"data": states[0]}
            written = save_checkpoint(job.checkpoint, pipe, optimizer, extra=extra, keep=job.keep, wait=wait)
            progress.say(f"step {step + 1} of {job.steps}: {'saved' if wait else 'saving'} {written}")
