"""The run command: trains a saved program with a data function, from weights or its newest
checkpoint."""

import argparse
import inspect
import time
from collections.abc import Mapping
from typing import Any

import torch

from zbcompile.api.pipeline import Pipeline
from zbcompile.cli.parsers import flag_of
from zbcompile.cli.target import load_object
from zbcompile.distributed.agreement import together
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import restore_random_state, seed_everything
from zbcompile.persistence.checkpoint import Checkpoint, load_state, save_checkpoint
from zbcompile.persistence.checkpoint_directory import latest_checkpoint
from zbcompile.persistence.loaded_pipeline import load
from zbcompile.persistence.safetensors_weights import load_weights
from zbcompile.progress import Say
from zbcompile.torch_private import pytree

Batch = tuple[tuple[Any, ...], dict[str, Any]]
EXPECTED = (
    "expected (args, kwargs), a tuple and a mapping, or one mapping of keywords, as pipe.step takes"
    ' them (the loss\'s target as the keyword "target")'
)
LOG_EVERY = 10  # steps


class Data:
    """The batches from step `start` on, by `next`. `state` is the data source's `state_dict`
    from the checkpoint, None if it has none. `skips` says whether it had to draw the batches of
    earlier steps, and drop them."""

    def __init__(self, source: Any, name: str, start: int, seed: int, state: Any = None) -> None:
        self.name, self.step, keywords = name, start, dict[str, int]()
        if callable(source) and not hasattr(source, "__iter__"):
            parameters = inspect.signature(source).parameters
            choices = {"start": start, "seed": seed}
            keywords = {key: value for key, value in choices.items() if key in parameters}
            source = _call(source, keywords, name)
        self._source = (
            source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None
        )
        if self._source is not None and state is not None:
            source.load_state_dict(state)
        try:
            self._iterator = iter(source)
        except TypeError:
            raise PipelineError(
                f"{name} gives a {type(source).__name__}; expected an iterable of batches, or a"
                " function that returns one."
            ) from None
        self.skips = self._source is None and "start" not in keywords
        for step in range(start if self.skips else 0):
            self._draw(step)

    def __next__(self) -> Batch:
        batch = as_batch(self._draw(self.step), f"batch {self.step} of {self.name}")
        self.step += 1
        return batch

    def state(self) -> Any:
        """Returns the data source's `state_dict()`, or None if it is not stateful."""
        return None if self._source is None else self._source.state_dict()

    def _draw(self, step: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise PipelineError(
                f"{self.name} ended after {step} batches; the run needs one for every step. Let it"
                " start over at the end, or ask for fewer --steps."
            ) from None


def _call(function: Any, keywords: Mapping[str, Any], name: str) -> Any:
    try:
        return function(**keywords)
    except TypeError as error:
        raise PipelineError(
            f"calling {name} with {', '.join(keywords) or 'no arguments'} failed: {error}. It may"
            " have parameters called start and seed; others need defaults."
        ) from error


def as_batch(item: Any, where: str) -> Batch:
    """Returns an item of a data function as the arguments of `pipe.step`. Raises PipelineError for
    another form.

    >>> as_batch({"x": 1}, "batch 0")
    ((), {'x': 1})
    """
    if isinstance(item, Mapping):
        return (), dict(item)
    if isinstance(item, (tuple, list)) and len(item) == 2:
        args, kwargs = item
        if isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return tuple(args), dict(kwargs)
    raise PipelineError(f"{where} is a {type(item).__name__}; {EXPECTED}.")


def run(options: argparse.Namespace, say: Say) -> None:
    """Trains on this process's ranks. Raises PipelineError, on every rank, if that cannot work."""
    _check(options)
    source = load_object(options.data)
    say(f"opening {options.directory}")
    pipe = load(options.directory, seed=options.seed)
    say("")  # from here on steps are printed
    try:
        _train(options, pipe, source)
    finally:
        pipe.close()


def _check(options: argparse.Namespace) -> None:
    """Raises PipelineError for numbers out of range, and for arguments that contradict each
    other."""
    for name in ("steps", "every", "keep"):
        if getattr(options, name) < 1:
            raise PipelineError(f"{flag_of(name)} is {getattr(options, name)}; expected at least 1")
    if options.resume and options.checkpoint is None:
        raise PipelineError("--resume needs --checkpoint DIR, where the checkpoints are")


def _train(options: argparse.Namespace, pipe: Pipeline, source: Any) -> None:
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=options.lr)
    checkpoint = _first_state(options, pipe, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = options.lr  # the command overrides the checkpoint
    at = checkpoint.path
    origin = f"the weights of {options.weights}" if at is None else f"resumed from {at}"
    _print(pipe, f"step {checkpoint.step} of {options.steps}: {origin}")
    with pipe.ranks.watch.region(f"opening {options.data}"):
        data = together(
            pipe.ranks, f"opening {options.data}", lambda: _data(options, pipe, source, checkpoint)
        )
    began, rows = time.perf_counter(), 0
    for step in range(checkpoint.step + 1, options.steps + 1):
        with pipe.ranks.watch.region(f"batch {step - 1}"):
            args, kwargs = _on_device(next(data), pipe.device)
        loss = pipe.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        count, unit = _amount((args, {**kwargs, "target": None}))
        rows += count
        if step % LOG_EVERY == 0 or step == options.steps:
            rate = rows / (time.perf_counter() - began)
            _print(
                pipe,
                f"step {step} of {options.steps}: loss {loss.item():.6g}, {rate:,.0f} {unit}/s",
            )
            began, rows = time.perf_counter(), 0
        if options.checkpoint is not None and (step % options.every == 0 or step == options.steps):
            saved = save_checkpoint(
                options.checkpoint, pipe, optimizer, extra=data.state(), keep=options.keep
            )
            _print(pipe, f"step {step} of {options.steps}: saved {saved}")


def _first_state(options: argparse.Namespace, pipe: Pipeline, optimizer: Any) -> Checkpoint:
    """Fills the parameters: from the newest checkpoint when resuming, else from what the command
    names."""
    with pipe.ranks.watch.region("looking for checkpoints"):
        newest = options.checkpoint and latest_checkpoint(options.checkpoint)
        existing = pipe.ranks.gather(newest)[0]
    if existing is not None and not options.resume:
        raise PipelineError(
            f"{options.checkpoint} holds checkpoints up to {existing.name}. Pass --resume to"
            " continue from there, or name another directory."
        )
    if existing is not None:
        return load_state(options.checkpoint, pipe, optimizer)
    if options.weights is None:
        raise PipelineError(
            f"the parameters have no values; {options.directory} holds only the program. Pass"
            " --weights FILE.safetensors (zbcompile.save_weights writes one)."
        )
    load_weights(options.weights, pipe)
    return Checkpoint(step=0)


def _data(options: argparse.Namespace, pipe: Pipeline, source: Any, checkpoint: Checkpoint) -> Data:
    """Returns the data from the checkpoint's step on. If batches are drawn again to be skipped, so
    are their random numbers; otherwise the generators continue from their restored state."""
    seed = pipe.options.seed
    seed_everything(seed)
    data = Data(source, options.data, checkpoint.step, seed, checkpoint.extra)
    if checkpoint.random and not data.skips:
        restore_random_state(checkpoint.random, pipe.device)
    return data


def _on_device(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)


def _print(pipe: Pipeline, text: str) -> None:
    if pipe.is_first:
        print(text, flush=True)


def _amount(inputs: Any) -> tuple[int, str]:
    """The size of inputs without target: in tokens if integer inputs have a length dimension, else
    in samples."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    tokens = next((t for t in tensors if not t.is_floating_point() and t.dim() > 1), None)
    if tokens is not None:
        return tokens.numel(), "tokens"
    return next((t.shape[0] for t in tensors if t.dim()), 0), "samples"
