"""The tables of a summary that have a row per stage: where it ends, what it keeps, needs,
recomputes and exchanges."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from zbcompile.compiler.paired_schedule import seen
from zbcompile.compiler.stage_price import StagePrice
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.source_location import Origin, origin_of, shown_path
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.program import Program
from zbcompile.tables import Figure, Table

_LONGEST_CUT = 50


def cuts(program: Program, sizes: Mapping[str, tuple[int, int]]) -> Table:
    """Where the model was cut, and the work of the stages; `sizes` has the elements and bytes of
    each parameter."""
    rows = [
        [
            Figure("stage", stage.stage),
            Figure("rank", tuple(sorted(program.ranks_of(stage.stage)))),
            Figure("cut after", place_of(stage)[0]),
            Figure("parameters", sum(sizes[name][0] for name in stage.parameters), "parameters"),
            *(Figure(op, stage.flops[op], "FLOP", "microbatch") for op in ("F", "B", "W")),
        ]
        for stage in program.stages
    ]
    return Table("stages", "Stages, FLOPs per microbatch (a multiply-add is two)", rows)


def place_of(stage: StageProgram) -> tuple[str, str]:
    """Where the model was cut after `stage`: module and line of the last value that it makes and
    sends on, and the name of its operation, which `balance=` takes."""
    piece = stage.pieces["F"]
    order = {node: i for i, node in enumerate(piece.module.graph.nodes)}
    pairs = zip(piece.outputs, output_values(piece.module.graph), strict=True)
    made = {
        node: slot.name
        for slot, node in pairs
        if slot.role == "activation" and node.op == "call_function"
    }
    if not made:
        return "(the loss)", ""
    last = max(made, key=order.__getitem__)
    origin = origin_of(last) or Origin("", "", 0)
    file = shown_path(origin.file).rpartition("/")[2] if origin.file else ""
    place = f"{origin.module or 'model'} {file}:{origin.line}" if file else "loss"
    return place if len(place) <= _LONGEST_CUT else f"...{place[3 - _LONGEST_CUT :]}", made[last]


def stage_tables(program: Program, prices: Sequence[StagePrice]) -> Iterator[Table]:
    """Bytes, recomputation, exchanges; those without rows have nothing to show."""
    tables: dict[str, tuple[str, Callable[[StageProgram, StagePrice], Iterator[list[Figure]]]]] = {
        "bytes": ("Bytes per microbatch kept between the passes, and sent", _bytes),
        "running": (
            (
                "Most bytes of a microbatch that are held while a pass runs, also those kept for"
                " later passes"
            ),
            _running,
        ),
        "recomputed": ("Recomputed in B, per microbatch", partial(_recomputed, program)),
    }
    for name, (title, rows_of) in tables.items():
        pairs = zip(program.stages, prices, strict=True)
        rows = [
            [Figure("stage", stage.stage), *row]
            for stage, price in pairs
            for row in rows_of(stage, price)
        ]
        yield Table(name, title if rows else "", rows)
    yield _collectives(program)


def _bytes(stage: StageProgram, price: StagePrice) -> Iterator[list[Figure]]:
    crossing = stage.crossing
    named = {
        "F->B": crossing.forward_to_backward,
        "F->W": crossing.forward_to_weight,
        "B->W": crossing.backward_to_weight,
        "kept F..B": price.kept,
        "residue B..W": price.residue,
        "receives": stage.receive_bytes,
        "sends": price.message,
    }
    yield [Figure(name, size, "B", "microbatch") for name, size in named.items()]


def _running(_: StageProgram, price: StagePrice) -> Iterator[list[Figure]]:
    yield [Figure(op, price.running.get(op, 0), "B", "microbatch") for op in ("F", "B", "W", "BW")]


def _recomputed(program: Program, stage: StageProgram, price: StagePrice) -> Iterator[list[Figure]]:
    if (again := stage.recomputed) is not None:
        policy = program.choices.recompute_of(stage.stage)
        yield [
            Figure("recompute", f"{policy:,} bytes" if isinstance(policy, int) else str(policy)),
            Figure("operations", again.operations),
            Figure("FLOPs", again.flops, "FLOP", "microbatch"),
            Figure("of F", again.flops / (stage.flops["F"] or 1), "share"),
            Figure("takes", price.again, "s", "microbatch"),
            Figure("kept F..B without", again.kept_before, "B", "microbatch"),
            Figure("with", again.kept_after, "B", "microbatch"),
            Figure("saves", again.kept_before - again.kept_after, "B", "microbatch"),
        ]


def _collectives(program: Program) -> Table:
    """What stages exchange with ranks outside the pipeline; equal exchanges of a pass are one row.
    BW's are those of B and W."""
    found = (
        (stage.stage, each)
        for stage in program.stages
        for each in seen(program, stage)
        if each.name != "BW"
    )
    counts = Counter(
        (n, c.name, c.dimension, c.kind, c.bytes, c.seconds, c.behind) for n, c in found
    )
    rows = [
        [
            Figure("stage", stage),
            Figure("pass", name),
            Figure("along", dimension),
            Figure("collective", kind),
            Figure("count", count),
            Figure("bytes", count * size, "B", "microbatch"),
            Figure("takes", count * seconds, "s", "microbatch"),
            Figure("hidden behind", behind),
        ]
        for (stage, name, dimension, kind, size, seconds, behind), count in counts.items()
    ]
    return Table(
        "collectives",
        "Exchanges with ranks outside of the pipeline, per microbatch" if rows else "",
        rows,
    )
