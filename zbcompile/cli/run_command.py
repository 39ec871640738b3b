"""The run command: trains a saved program with a data function, from weights or its newest checkpoint."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.api.pipeline import Pipeline
from zbcompile.batches.batch import amount
from zbcompile.cli.option_flags import flag_of
from zbcompile.cli.target import load_object
from zbcompile.cli.train_data import Data, Start
from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import BATCHES
from zbcompile.distributed.process_group import start_group
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import restore_random_state, seed_everything
from zbcompile.persistence.checkpoint import Checkpoint, load_state, save_checkpoint
from zbcompile.persistence.checkpoint_directory import candidates, latest_checkpoint
from zbcompile.persistence.loaded_pipeline import device_for, load
from zbcompile.persistence.safetensors_weights import holds_weights, load_weights, save_weights
from zbcompile.progress import Say
from zbcompile.torch_private import pytree


def run(chosen: argparse.Namespace, say: Say) -> None:
    """Trains on this process's ranks. Raises PipelineError, on every rank, if that cannot work."""
    _check(chosen)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    source = load_object(chosen.data)
    say(f"opening {chosen.directory}")
    pipe = load(
        chosen.directory,
        mesh=_mesh(chosen),
        init=load_object(chosen.init) if chosen.init else None,
        seed=chosen.seed,
        operators=chosen.operators,
        timeout=chosen.timeout,
    )
    say("")  # from here on steps are printed
    try:
        _train(chosen, pipe, source)
    finally:
        pipe.close()


def _check(chosen: argparse.Namespace) -> None:
    """Raises PipelineError for numbers out of range, and for arguments that contradict each other."""
    for name in ("steps", "every", "keep", "replicas", "log_every"):
        if getattr(chosen, name) < 1:
            raise PipelineError(f"{flag_of(name)} is {getattr(chosen, name)}; expected at least 1")
    if chosen.resume and chosen.checkpoint is None:
        raise PipelineError("--resume needs --checkpoint DIR, where the checkpoints are")
    if chosen.export is not None and chosen.export.suffix not in ("", ".safetensors"):
        raise PipelineError(f"--export {chosen.export}; expected FILE.safetensors or a directory")


def _mesh(chosen: argparse.Namespace) -> Any:
    """Returns a mesh of replicas; None for one."""
    if chosen.replicas == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    device = device_for(chosen.directory)
    if not dist.is_initialized():
        start_group(lambda: device, chosen.timeout)
    ranks, rest = divmod(dist.get_world_size(), chosen.replicas)
    if rest:
        raise PipelineError(f"--replicas {chosen.replicas} does not divide the {dist.get_world_size()} processes.")
    return init_device_mesh(device.type, (chosen.replicas, ranks), mesh_dim_names=("dp", "pp"))


def _train(chosen: argparse.Namespace, pipe: Pipeline, source: Any) -> None:
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=chosen.lr)
    at = _first_state(chosen, pipe, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = chosen.lr  # the command overrides the checkpoint
    given = chosen.weights or chosen.init
    origin = f"the weights of {given}" if at.path is None else f"resumed from {at.path}"
    _print(pipe, f"step {at.step} of {chosen.steps}: {origin}")
    with pipe.ranks.watch.region(f"opening {chosen.data}"):
        data = together(pipe.ranks, f"opening {chosen.data}", lambda: _data(chosen, pipe, source, at))
    began, rows = time.perf_counter(), 0
    for step in range(at.step + 1, chosen.steps + 1):
        with pipe.ranks.watch.region(f"batch {step - 1}"):
            args, kwargs = _on_device(next(data), pipe.device)
        loss = pipe.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        count, unit = amount((args, {**kwargs, "target": None}))
        rows += count
        if step % chosen.log_every == 0 or step == chosen.steps:
            rate = rows / (time.perf_counter() - began)
            _print(pipe, f"step {step} of {chosen.steps}: loss {loss.item():.6g}, {rate:,.0f} {unit}/s")
            began, rows = time.perf_counter(), 0
        if chosen.checkpoint is not None and (step % chosen.every == 0 or step == chosen.steps):
            _save(chosen, pipe, optimizer, data, step)
    if chosen.export is not None:
        save_weights(chosen.export, pipe)
        _print(pipe, f"weights written to {chosen.export}")


def _first_state(chosen: argparse.Namespace, pipe: Pipeline, optimizer: Any) -> Checkpoint:
    """Fills the parameters: from the newest checkpoint when resuming, else from what the command names."""
    with pipe.ranks.watch.region("looking for checkpoints"):
        existing = gathered(pipe.ranks, chosen.checkpoint and latest_checkpoint(chosen.checkpoint))[0]
    if existing is not None and not chosen.resume:
        raise PipelineError(
            f"{chosen.checkpoint} holds checkpoints up to {existing.name}. Pass --resume to continue from there, or "
            "name another directory."
        )
    if existing is not None:
        return load_state(chosen.checkpoint, pipe, optimizer)
    if chosen.weights is not None:
        _load_weights(chosen.weights, pipe)
    elif chosen.init is None:
        raise PipelineError(
            f"the parameters have no values; {chosen.directory} holds only the program. Pass --weights FILE"
            ".safetensors (zbcompile.save_weights writes one), or --init FILE.py:function."
        )
    return Checkpoint(step=0)


def _load_weights(path: Path, pipe: Pipeline) -> None:
    """Loads weights from safetensors, if there are any, or from a checkpoint, of which only the model is taken."""
    if holds_weights(path) or not candidates(path):
        load_weights(path, pipe)
        return
    load_state(path, pipe)
    pipe.step_index = 0


def _data(chosen: argparse.Namespace, pipe: Pipeline, source: Any, at: Checkpoint) -> Data:
    """Returns the data from step `at.step` on. If batches are drawn again to be skipped, so are their random numbers;
    otherwise the generators continue from their restored state."""
    seed, mesh = pipe.options.seed, pipe.ranks.mesh
    seed_everything(seed)
    replica, replicas = mesh.index(*BATCHES), mesh.size(*BATCHES)
    states = at.extra if at.extra and len(at.extra) == replicas else [at.extra[0] if at.extra else None] * replicas
    data = Data(source, chosen.data, Start(at.step, seed, replica, replicas, states[replica]))
    if at.random is not None and not data.skips:
        restore_random_state(at.random, pipe.device)
    return data


def _save(chosen: argparse.Namespace, pipe: Pipeline, optimizer: Any, data: Data, step: int) -> None:
    """Saves with the state of the data of every replica."""
    states, wait = pipe.from_replicas(data.state()), not chosen.save_async
    written = save_checkpoint(chosen.checkpoint, pipe, optimizer, extra=states, keep=chosen.keep, wait=wait)
    _print(pipe, f"step {step} of {chosen.steps}: {'saved' if wait else 'saving'} {written}")


def _on_device(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)


def _print(pipe: Pipeline, text: str) -> None:
    if pipe.is_first:
        print(text, flush=True)
