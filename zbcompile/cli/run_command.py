"""The run command: trains a saved program with a data function, from weights or its newest
checkpoint."""

import argparse
import time
from typing import Any

import torch

from zbcompile.api.pipeline import Pipeline
from zbcompile.batches.batch import amount
from zbcompile.cli.option_flags import flag_of
from zbcompile.cli.target import load_object
from zbcompile.cli.train_data import Data
from zbcompile.distributed.agreement import gathered, together
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import restore_random_state, seed_everything
from zbcompile.persistence.checkpoint import Checkpoint, load_state, save_checkpoint
from zbcompile.persistence.checkpoint_directory import latest_checkpoint
from zbcompile.persistence.loaded_pipeline import load
from zbcompile.persistence.safetensors_weights import load_weights, save_weights
from zbcompile.progress import Say
from zbcompile.torch_private import pytree


def run(options: argparse.Namespace, say: Say) -> None:
    """Trains on this process's ranks. Raises PipelineError, on every rank, if that cannot work."""
    _check(options)
    source = load_object(options.data)
    say(f"opening {options.directory}")
    pipe = load(
        options.directory,
        init=load_object(options.init) if options.init else None,
        seed=options.seed,
        operators=options.operators,
        timeout=options.timeout,
    )
    say("")  # from here on steps are printed
    try:
        _train(options, pipe, source)
    finally:
        pipe.close()


def _check(options: argparse.Namespace) -> None:
    """Raises PipelineError for numbers out of range, and for arguments that contradict each
    other."""
    for name in ("steps", "every", "keep", "log_every"):
        if getattr(options, name) < 1:
            raise PipelineError(f"{flag_of(name)} is {getattr(options, name)}; expected at least 1")
    if options.resume and options.checkpoint is None:
        raise PipelineError("--resume needs --checkpoint DIR, where the checkpoints are")
    if options.export is not None and options.export.suffix not in ("", ".safetensors"):
        raise PipelineError(f"--export {options.export}; expected FILE.safetensors or a directory")


def _train(options: argparse.Namespace, pipe: Pipeline, source: Any) -> None:
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=options.lr)
    checkpoint = _first_state(options, pipe, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = options.lr  # the command overrides the checkpoint
    weights = options.weights or options.init
    origin = (
        f"the weights of {weights}"
        if checkpoint.path is None
        else f"resumed from {checkpoint.path}"
    )
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
        count, unit = amount((args, {**kwargs, "target": None}))
        rows += count
        if step % options.log_every == 0 or step == options.steps:
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
    if options.export is not None:
        save_weights(options.export, pipe)
        _print(pipe, f"weights written to {options.export}")


def _first_state(options: argparse.Namespace, pipe: Pipeline, optimizer: Any) -> Checkpoint:
    """Fills the parameters: from the newest checkpoint when resuming, else from what the command
    names."""
    with pipe.ranks.watch.region("looking for checkpoints"):
        existing = gathered(
            pipe.ranks, options.checkpoint and latest_checkpoint(options.checkpoint)
        )[0]
    if existing is not None and not options.resume:
        raise PipelineError(
            f"{options.checkpoint} holds checkpoints up to {existing.name}. Pass --resume to"
            " continue from there, or name another directory."
        )
    if existing is not None:
        return load_state(options.checkpoint, pipe, optimizer)
    if options.weights is not None:
        load_weights(options.weights, pipe)
    elif options.init is None:
        raise PipelineError(
            f"the parameters have no values; {options.directory} holds only the program. Pass"
            " --weights FILE.safetensors (zbcompile.save_weights writes one), or --init"
            " FILE.py:function."
        )
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
