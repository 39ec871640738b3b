"""Outlines as data: everything about a stage, or a sharded output layer, except its graphs. Every rank has every
stage's."""

from dataclasses import asdict
from typing import Any

from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.split.joint_graph import Recomputed
from zbcompile.passes.split.saved_bytes import Crossing
from zbcompile.passes.split.split import Improvement
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.vocabulary.shard_program import InputLayer, Tiling, VocabularyProgram

BOUNDARIES = ("receives", "sends", "gradients_in", "gradients_out")
NAMES = ("parameters", "buffers", "trained")
PLAIN = ("stage", "original", "random")
SHARDING = ("text", "weight", "bias", "barriers", "activation", "loss_dtype")
SHARDED = ("hidden", "statistics", "gradient")


def outline_to_data(stage: StageProgram) -> dict[str, Any]:
    """A stage without its graphs, as JSON values."""
    data: dict[str, Any] = {name: getattr(stage, name) for name in PLAIN}
    data |= {name: list(getattr(stage, name)) for name in NAMES}
    data |= {key: {name: spec_to_data(spec) for name, spec in getattr(stage, key).items()} for key in BOUNDARIES}
    data["flops"] = dict(stage.flops)
    data["deferred"] = dict(stage.deferred)
    data["crossing"] = asdict(stage.crossing)
    data["improvements"] = [asdict(each) for each in stage.improvements]
    data["recomputed"] = asdict(stage.recomputed) if stage.recomputed else None
    return data


def outline_from_data(data: dict[str, Any], device: str) -> StageProgram:
    """The stage without its graphs; its boundary tensors are on `device`."""
    fields: dict[str, Any] = {name: data[name] for name in PLAIN}
    fields |= {name: tuple(data[name]) for name in NAMES}
    fields |= {key: {name: spec_from_data(spec, device) for name, spec in data[key].items()} for key in BOUNDARIES}
    return StageProgram(
        **fields,
        pieces={},
        crossing=Crossing(**data["crossing"]),
        improvements=tuple(Improvement(**each) for each in data["improvements"]),
        flops=data["flops"],
        deferred=data["deferred"],
        recomputed=Recomputed(**data["recomputed"]) if data["recomputed"] else None,
    )


def vocabulary_to_data(found: VocabularyProgram | None) -> dict[str, Any] | None:
    """A sharded output layer without its graphs, as JSON values."""
    if found is None:
        return None
    data: dict[str, Any] = {name: getattr(found, name) for name in SHARDING}
    data |= {name: spec_to_data(getattr(found, name)) for name in SHARDED}
    lookup = found.lookup
    data["lookup"] = lookup and [lookup.weight, lookup.activation, spec_to_data(lookup.rows)]
    data["tiling"] = [found.tiling.words, found.tiling.keep]
    return data | {"bounds": list(map(list, found.bounds)), "flops": list(map(dict, found.flops))}


def vocabulary_from_data(data: dict[str, Any] | None, device: str) -> VocabularyProgram | None:
    """The output layer, still without the graphs of any rank."""
    if data is None:
        return None
    fields: dict[str, Any] = {name: data[name] for name in SHARDING}
    fields |= {name: spec_from_data(data[name], device) for name in SHARDED}
    fields["tiling"] = Tiling(*data["tiling"])
    if data["lookup"]:
        weight, activation, rows = data["lookup"]
        fields["lookup"] = InputLayer(weight, activation, spec_from_data(rows, device))
    bounds = tuple((low, high) for low, high in data["bounds"])
    return VocabularyProgram(**fields, bounds=bounds, flops=tuple(data["flops"]), pieces=({},) * len(bounds))


def spec_to_data(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), list(spec.stride), spec.dtype, spec.needs_gradient]


def spec_from_data(data: list[Any], device: str) -> TensorSpec:
    shape, stride, dtype, needs_gradient = data
    return TensorSpec(tuple(shape), tuple(stride), dtype, device, needs_gradient)
