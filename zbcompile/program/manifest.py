"""manifest.json: the part of a saved program that every rank reads, such as the outlines of all
stages (everything except their graphs), with the hash of every other file. docs/programs.md lists
its fields."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from zbcompile.distributed.mesh import DIMENSIONS
from zbcompile.errors import PipelineError
from zbcompile.json_text import from_plain, to_text
from zbcompile.model.model_info import Member, ModelFacts
from zbcompile.options import PipelineOptions, StepOptions
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.hardware import Hardware
from zbcompile.passes.partition.cuts import Cuts
from zbcompile.passes.serialize import DEVICES
from zbcompile.passes.stage.stage_program import Crossing, Recomputation, StageProgram
from zbcompile.passes.vocabulary.shard_program import InputLayer, VocabularyProgram
from zbcompile.program.output import (
    output_from_data,
    output_to_data,
    sizes_from_data,
    spec_from_data,
    spec_to_data,
)
from zbcompile.program.program import Program
from zbcompile.program.rank_files import piece_from_data, piece_to_data
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.untrusted_text import on_a_line, parse_json

FORMAT, VERSION = "zbcompile program", 6
LONGEST = 600  # characters of a message
AGAIN = "Compile and save the program again"


@dataclass(frozen=True)
class SavedProgram(Program):
    """A program that was read from a directory: the stages of this process's ranks with their
    graphs, other stages without. `written` is its manifest."""

    written: Mapping[str, Any] | None = None

    @property
    def digest(self) -> str:
        """The hash of the manifest."""
        return str((self.written or {})["digest"])

    @property
    def digests(self) -> str:
        """Its own, and those of the forwards saved with it."""
        return " ".join(
            [
                self.digest,
                *(each.digest for each in self.also.values() if isinstance(each, SavedProgram)),
            ]
        )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return {**(self.written or {})["program"], "threads": torch.get_num_threads()}


def manifest_to_text(
    program: Program,
    files: Mapping[str, tuple[int, str]],
    operators: list[str],
    dimensions: Mapping[str, int],
) -> str:
    """The manifest of `program`, whose graphs communicate along `dimensions`, each with its number
    of ranks; `files` has bytes and SHA-256. It contains its own digest, so that an edited one is
    noticed."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch_release(torch.__version__),
        "ranks": program.schedule.ranks,
        "device": program.device_type,
        "operators": operators,
        "dimensions": dict(dimensions),
        "call": list(program.call),
        "inputs": {path: [list(shape), dtype] for path, (shape, dtype) in program.inputs.items()},
        "step": _options_to_data(program.step),
        "choices": _options_to_data(program.choices),
        "loss_dtype": program.loss_dtype,
        "program": {key: value for key, value in program.manifest.items() if key != "threads"},
        "cuts": asdict(program.cuts),
        "name": program.model.name,
        "model": [list(member) for member in program.model.members],
        "homes": {name: list(stages) for name, stages in program.homes.items()},
        "stages": [outline_to_data(stage) for stage in program.stages],
        "vocabulary": vocabulary_to_data(program.vocabulary),
        "ends": {str(stage): piece_to_data(piece) for stage, piece in program.ends.items()},
        "output": output_to_data(None if program.trains else program.output),
        "plan": program.plan,
        "files": {name: list(each) for name, each in sorted(files.items())},
    }
    return to_text({**data, "digest": digest_of(data)}, 2)


def manifest_from_text(text: str, where: str) -> dict[str, Any]:
    """The parsed manifest. Raises PipelineError if it is damaged, or if this release or this torch
    cannot run it."""
    try:
        data = parse_json(text, ValueError)
        if data["format"] != FORMAT:
            raise PipelineError(f"{where} says that it is {data['format']!r}; expected {FORMAT!r}.")
        if data["version"] != VERSION:
            raise PipelineError(
                f"{where} has format version {data['version']!r}; this release reads version"
                f" {VERSION}. {AGAIN} with this release."
            )
        _require_torch(on_a_line(data["torch"]), where)
        if data["digest"] != digest_of(
            {key: value for key, value in data.items() if key != "digest"}
        ):
            raise PipelineError(
                f"{where} was changed after it was written: its digest does not match. {AGAIN}."
            )
        _require_counts(data)
    except PipelineError:
        raise
    except Exception as error:  # of JSON that anyone may have written
        raise PipelineError(
            f"{where} is damaged or incomplete ({problem_of(error)}). {AGAIN}."
        ) from None
    return data  # type: ignore[no-any-return]


def problem_of(error: Exception) -> str:
    """What is wrong with data that led to this error, on a line."""
    return (
        f"it has no {in_short(error)}"
        if isinstance(error, KeyError)
        else in_short(error) or type(error).__name__
    )


def in_short(error: Exception) -> str:
    """The first line of an error, which may quote data of any length, without control
    characters."""
    text = on_a_line(str(error).partition("\n")[0])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _require_counts(data: Mapping[str, Any]) -> None:
    """Counts are bounded by what is listed one by one, before anything is made for each of them."""
    ranks, stages, files = data["ranks"], len(data["stages"]), data["files"]
    if type(ranks) is not int or not 1 <= ranks <= len(files) or not ranks <= 2 * stages:
        raise ValueError(f"{ranks!r} ranks, but {len(files)} files and {stages} stages")
    if data["device"] not in DEVICES:
        raise ValueError(f"{data['device']!r} is no kind of device")
    if any(
        type(size) is not int or size < 1 or name not in DIMENSIONS
        for name, size in data["dimensions"].items()
    ):
        raise ValueError(f"{data['dimensions']!r} are no dimensions of a mesh")
    if not isinstance(data["operators"], list) or not all(
        isinstance(name, str) for name in data["operators"]
    ):
        raise ValueError(f"{data['operators']!r} are no names of operators")
    for size, sha256 in files.values():
        if type(size) is not int or size < 0 or not isinstance(sha256, str):
            raise ValueError(f"{size!r} is no size of a file, or {sha256!r} no hash")


def _require_torch(release: str, where: str) -> None:
    here = torch_release(torch.__version__)
    if release != here:
        raise PipelineError(
            f"{where}: the program was compiled with torch {release} and this is torch {here}; the"
            f" operators of its graphs may differ. {AGAIN} with torch {here}, or install torch"
            f" {release}."
        )


def torch_release(version: str) -> str:
    """A version without its build: 2.13.0+cpu is 2.13.0.

    >>> torch_release("2.13.0+cpu")
    '2.13.0'
    """
    return version.partition("+")[0]


def digest_of(data: Mapping[str, Any]) -> str:
    """The hash of a manifest's fields, whatever their order."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()


def program_from_manifest(
    data: Mapping[str, Any], lowered: Schedule, device: torch.device, operators: Collection[str]
) -> SavedProgram:
    """The program, still without the graphs of its stages; it may call `operators` of other
    libraries. Raises KeyError, TypeError or ValueError for data of another form."""
    members = tuple(_member_from_data(*each) for each in data["model"])
    return SavedProgram(
        model=ModelFacts(on_a_line(data["name"]), members, {}, {}),
        cuts=from_plain(Cuts, data["cuts"]),
        stages=tuple(outline_from_data(each, str(device)) for each in data["stages"]),
        lowered=lowered,
        homes={name: tuple(stages) for name, stages in data["homes"].items()},
        choices=_choices_from_data(data["choices"]),
        loss_dtype=data["loss_dtype"],
        inputs={
            path: (sizes_from_data(shape), on_a_line(dtype))
            for path, (shape, dtype) in data["inputs"].items()
        },
        vocabulary=vocabulary_from_data(data["vocabulary"], str(device)),
        canonical_targets=(),
        ends={
            int(stage): piece_from_data("E", each, device, operators)
            for stage, each in data["ends"].items()
        },
        call=_texts(data["call"]),
        groups=dict.fromkeys(data["dimensions"], ""),  # named by the process that loads it
        step=_step_from_data(data["step"]),
        output=output_from_data(data["output"], str(device)),
        plan=data["plan"],
        written=data,
    )


def _options_to_data(options: Choices | StepOptions) -> dict[str, Any]:
    """Options as plain data."""
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(options).items()
    }
    plain |= {name: value.to_dict() for name, value in plain.items() if isinstance(value, Hardware)}
    return {
        n: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
        for n, v in plain.items()
    }


def _member_from_data(name: str, kind: str, shape: Any, stride: Any, *rest: Any) -> Member:
    found = Member(name, kind, sizes_from_data(shape), sizes_from_data(stride), *rest)
    texts = [found.name, found.dtype, found.first]
    if kind not in ("parameter", "buffer") or not all(isinstance(each, str) for each in texts):
        raise TypeError(f"{texts} is no parameter or buffer")
    return found


def _choices_from_data(data: Mapping[str, Any]) -> Choices:
    if not isinstance(data.get("hardware"), dict | None):  # a name may be that of a file
        raise ValueError(f"{data['hardware']!r} stands for a machine's figures")
    return _options_from_data(data).choices


def _step_from_data(data: Mapping[str, Any]) -> StepOptions:
    """The options of a step, of which a custom backend is a name that nothing reads."""
    options = _options_from_data({name: value for name, value in data.items() if name != "backend"})
    return replace(options.step, backend=on_a_line(data["backend"]))


def _options_from_data(data: Mapping[str, Any]) -> PipelineOptions:
    try:
        return PipelineOptions(**data)
    except PipelineError as error:
        raise ValueError(error) from None


BOUNDARIES = ("receives", "sends", "gradients_in", "gradients_out")
NAMES = ("parameters", "buffers", "trained", "parts")
PLAIN = ("stage", "original", "random")
SHARDING = ("text", "weight", "bias", "barriers", "activation", "loss_dtype")
SHARDED = ("hidden", "statistics", "gradient")


def outline_to_data(stage: StageProgram) -> dict[str, Any]:
    """A stage without its graphs, as JSON values."""
    data: dict[str, Any] = {name: getattr(stage, name) for name in PLAIN}
    data |= {name: list(getattr(stage, name)) for name in NAMES}
    data |= {
        key: {name: spec_to_data(spec) for name, spec in getattr(stage, key).items()}
        for key in BOUNDARIES
    }
    data["flops"] = dict(stage.flops)
    data["deferred"] = {name: list(dimensions) for name, dimensions in stage.deferred.items()}
    data["crossing"] = asdict(stage.crossing)
    data["recomputed"] = asdict(stage.recomputed) if stage.recomputed else None
    return data


def outline_from_data(data: dict[str, Any], device: str) -> StageProgram:
    """The stage without its graphs; its boundary tensors are on `device`."""
    fields: dict[str, Any] = {name: data[name] for name in PLAIN}
    fields |= {name: _texts(data[name]) for name in NAMES}
    fields |= {
        key: {name: spec_from_data(spec, device) for name, spec in data[key].items()}
        for key in BOUNDARIES
    }
    return StageProgram(
        **fields,
        pieces={},
        crossing=from_plain(Crossing, data["crossing"]),
        flops=_counts(data["flops"]),
        deferred={name: _texts(dimensions) for name, dimensions in data["deferred"].items()},
        recomputed=from_plain(Recomputation, data["recomputed"]) if data["recomputed"] else None,
    )


def _texts(data: Iterable[Any]) -> tuple[str, ...]:
    found = tuple(data)
    if not isinstance(data, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{data!r} are no names")
    return found


def _counts(data: Mapping[str, Any]) -> dict[str, int]:
    if not all(type(each) is int for each in data.values()):
        raise TypeError(f"{data!r} is no count of FLOPs by pass")
    return dict(data)


def vocabulary_to_data(found: VocabularyProgram | None) -> dict[str, Any] | None:
    """A sharded output layer without its graphs, as JSON values."""
    if found is None:
        return None
    data: dict[str, Any] = {name: getattr(found, name) for name in SHARDING}
    data |= {name: spec_to_data(getattr(found, name)) for name in SHARDED}
    lookup = found.lookup
    data["lookup"] = lookup and [lookup.weight, lookup.activation, spec_to_data(lookup.rows)]
    return data | {"bounds": list(map(list, found.bounds)), "flops": list(map(dict, found.flops))}


def vocabulary_from_data(data: dict[str, Any] | None, device: str) -> VocabularyProgram | None:
    """The output layer, still without the graphs of any rank."""
    if data is None:
        return None
    fields: dict[str, Any] = {name: data[name] for name in SHARDING}
    fields |= {name: spec_from_data(data[name], device) for name in SHARDED}
    if data["lookup"]:
        weight, activation, rows = data["lookup"]
        fields["lookup"] = InputLayer(weight, activation, spec_from_data(rows, device))
    bounds = tuple((low, high) for low, high in data["bounds"])
    return VocabularyProgram(
        **fields,
        bounds=bounds,
        flops=tuple(map(_counts, data["flops"])),
        pieces=({},) * len(bounds),
    )
