"""Weights as safetensors: one file, or several with an index, as model hubs store them."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.agreement import together
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import chunk_of, is_distributed, local_of
from zbcompile.persistence.hub_layout import HubTensor, as_stored, hub_tensors, write_config
from zbcompile.persistence.local_state import LocalState, local_state, require_names
from zbcompile.persistence.safetensors_files import safetensors_dtype
from zbcompile.safe_files import write_whole
from zbcompile.untrusted_text import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_weights(path: str | Path, source: Pipeline | nn.Module) -> None:
    """Write parameters and buffers as safetensors, under the model's own names; every rank must
    call it.

    Args:
        path: a file that ends in .safetensors, which the first rank writes after gathering
            everything; or a directory, into which each rank writes its own file, with
            `model.safetensors.index.json` next to them, written last. Tied parameters are written
            once, under their first name, as safetensors demands. A model of transformers is written
            as its `save_pretrained` does, in a directory with its configuration.
        source: a pipeline, or a plain model in one process.

    >>> zbcompile.save_weights("model.safetensors", pipe)                   # doctest: +SKIP
    """
    state, target = _unsharded_state(source), Path(path)
    ranks, what = state.ranks, f"writing {target}"
    with ranks.watch.region(what):
        stored = together(ranks, what, lambda: as_stored(state.module, _tensors_to_write(state)))
        if target.suffix != ".safetensors":
            _write_parts(target, state, stored, what)
            return
        tensors = {name: tensor for part in ranks.gather(stored) for name, tensor in part.items()}
        together(ranks, what, lambda: _write(target, tensors) if ranks.is_first else None)


def _unsharded_state(source: Pipeline | nn.Module) -> LocalState:
    state = local_state(source)
    for name in state.shapes.keys() - state.model.names.keys():
        raise PipelineError(
            f"{name} is sharded by hand; files of weights hold whole tensors. Make it a DTensor, or"
            " use zbcompile.save_checkpoint, which keeps a part of each rank."
        )
    return state


def _tensors_to_write(state: LocalState) -> dict[str, torch.Tensor]:
    """The tensors that this process writes, on the CPU; sharded ones are put together."""
    tensors, ranks = dict[str, torch.Tensor](), state.ranks
    for name, tensor in sorted(state.tensors.items()):
        full: Any = tensor.detach()
        writes = ranks.leads and state.is_writer(name)
        if is_distributed(tensor):
            with ranks.waiting(name):
                if full.device_mesh.mesh_dim_names:
                    full = full.full_tensor()
                else:  # rows of the output layer lie on the ranks of the pipeline
                    full = torch.cat(ranks.gather_here(local_of(full).cpu()))
                    writes = ranks.is_first
        if writes:
            tensors[name] = full.cpu().contiguous()
    return tensors


def _write_parts(
    target: Path, state: LocalState, tensors: Mapping[str, torch.Tensor], what: str
) -> None:
    ranks, model = state.ranks, state.module
    rank = ranks.local[0]
    name = f"model-{rank + 1:05d}-of-{ranks.count // len(ranks.local):05d}.safetensors"
    leads = rank == 0 and ranks.leads
    if leads:
        # without these, the files that follow are not yet a complete set
        for name_of_set in (INDEX, SINGLE):
            (target / name_of_set).unlink(missing_ok=True)
    listed = ranks.gather({key: (t.nbytes, tuple(t.shape), name) for key, t in tensors.items()})
    entries = {key: entry for part in listed for key, entry in part.items()}
    shapes = {key: shape for key, (_, shape, _) in entries.items()}
    together(ranks, what, lambda: _sources(target, hub_tensors(model, shapes), state))
    together(ranks, what, lambda: _write(target / name, tensors) if tensors else None)
    index = {
        "metadata": {"total_size": sum(size for size, *_ in entries.values())},
        "weight_map": {key: file for key, (*_, file) in sorted(entries.items())},
    }

    def finish() -> None:
        write_config(target, model)
        write_whole(target / INDEX, json.dumps(index, indent=2).encode())

    together(ranks, what, lambda: finish() if leads else None)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(
        path,
        save({name: tensor.clone() for name, tensor in tensors.items()}, metadata={"format": "pt"}),
    )


def load_weights(path: str | Path, source: Pipeline | nn.Module) -> None:
    """Fill a pipeline, or a plain model, with weights from safetensors; every rank reads only its
    own part.

    Args:
        path: a .safetensors file, an index (.json), or a directory that holds either under the
            usual name. For a model of transformers its tensors are renamed, and put together, as
            `from_pretrained` does.
        source: a compiled or loaded pipeline, or a plain model.

    A tied parameter may be stored under any of its names. Floating-point values are converted to
    the dtype that the model has. Raises PipelineError, on every rank and before anything is
    changed, if names or shapes differ, or values of another kind are stored, such as integers or
    complex numbers for float32.

    >>> zbcompile.load_weights("model.safetensors", pipe)                   # doctest: +SKIP
    """
    state = _unsharded_state(source)
    what = f"loading {path}"
    with state.ranks.watch.region(what):
        together(state.ranks, what, lambda: _load(Path(path), state))
    if isinstance(source, Pipeline):
        source.resume(source.step_index, state.model.names)


def _load(path: Path, state: LocalState) -> None:
    with ExitStack() as stack:
        try:
            files = dict[str, Any]()
            for location in _files_of(path):
                file = stack.enter_context(safe_open(location, "pt"))
                for key in file.keys():  # noqa: SIM118
                    if files.setdefault(key, file) is not file:
                        raise PipelineError(
                            f"{path}: {key:.200} stands in several files. Save the weights again"
                            " into an empty folder."
                        )
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key, file in files.items()}
        except (OSError, SafetensorError) as error:
            raise PipelineError(
                f"{path} is neither a safetensors file nor an index of such files:"
                f" {error!s:.300}. Copy it again."
            ) from None
        sources = _sources(path, hub_tensors(state.module, shapes, loading=True), state)
        _require_kinds(sources, files, state)
        with torch.no_grad():
            for name, tensor in state.tensors.items():
                local, chunk = local_of(tensor), chunk_of(tensor)
                begins = () if chunk is None else chunk[1]  # of a whole tensor all is read
                part = tuple(
                    slice(low, low + size) for low, size in zip(begins, local.shape, strict=False)
                )
                local.copy_(sources[name].read(files, part))


def _files_of(path: Path) -> list[Path]:
    """Returns the files of the weights, all in one folder."""
    if path.is_dir():
        present = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        if not present:
            names = sorted(file.name for file in path.iterdir())
            raise PipelineError(
                f"{path} holds no {SINGLE} and no {INDEX}, only"
                f" {', '.join(names[:6]) or 'nothing'}. Copy all files of the weights; those in"
                " another format must be saved as safetensors first."
            )
        path = present[0]
    if path.suffix != ".json":
        return [path]
    data = read_json(path, PipelineError)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict):
        raise PipelineError(
            f'{path} is no index: expected {{"weight_map": {{name of a tensor: name of a file}}}}.'
        )
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise PipelineError(
                f"{path}: {name:.200} is in {file!r:.200}; expected the name of a file in the same"
                " folder."
            )
    return [path.parent / file for file in sorted(set(files.values()))]


def _sources(
    path: Path, stored: Mapping[str, HubTensor], state: LocalState
) -> dict[str, HubTensor]:
    """Returns the stored tensor of every tensor of the model, on every rank, so that all report
    the same error."""
    names: dict[str, list[str]] = {}
    for member in state.model.members:
        if member.saved:
            names.setdefault(member.first, []).append(member.name)
    stored_names = {
        first: [name for name in aliases if name in stored] for first, aliases in names.items()
    }
    missing = [first for first, sources in stored_names.items() if not sources]
    require_names(
        path,
        missing,
        sorted(stored.keys() - {name for aliases in names.values() for name in aliases}),
    )
    sources = {first: stored[names[0]] for first, names in stored_names.items()}
    for first, shape in state.shapes.items():
        if sources[first].shape != shape:
            raise PipelineError(
                f"{first} has shape {list(sources[first].shape)} in {path} and"
                f" {list(shape or ())} in the model."
            )
    return sources


def _require_kinds(
    sources: Mapping[str, HubTensor], files: Mapping[str, Any], state: LocalState
) -> None:
    """Refuse values that the model's dtype cannot hold: copying would drop imaginary parts and
    fractions."""
    for name, tensor in state.tensors.items():
        kind = "F" if tensor.dtype.is_floating_point else safetensors_dtype(tensor.dtype)
        for stored in sources[name].dtypes(files):
            if kind != ("F" if stored.startswith(("F", "BF")) else stored):
                raise PipelineError(
                    f"{name} is stored as {stored} and is {tensor.dtype} in the model; only"
                    " floating-point numbers are converted. Convert the file, or the model."
                )
