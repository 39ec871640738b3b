"""The summary of a compiled program: stages, ranks, the picture of a step, one line of
prediction."""

from collections import Counter
from collections.abc import Iterator

from zbcompile.amounts import format_bytes, format_share, format_time
from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.inspection.idle_report import format_idle, idle_by_cause
from zbcompile.passes.cost.node_cost import operators_without_formula
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of
from zbcompile.prediction.predict import CostSource, count_messages, hardware_of
from zbcompile.prediction.rank_memory import RankMemory, rank_memories
from zbcompile.program.program import Program
from zbcompile.schedules import Timeline, format_timeline, simulate
from zbcompile.schedules.visualization.step_tables import idle_share
from zbcompile.tables import WIDTH, Figure, Table, facts, wrap

_LONGEST_PLACE = 22


class Summary:
    """The tables of a compiled example under some costs."""

    def __init__(self, inspected: CompiledExample, source: CostSource) -> None:
        self.inspected, self.source, self.program = inspected, source, inspected.program
        model = inspected.example.model
        self.sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.memory = rank_memories(self.program, source.costs, tensors)
        self.timeline = simulate(self.program.schedule, source.costs)

    def tables(self) -> Iterator[Table]:
        """Yields the tables in order."""
        yield self._model()
        yield self._stages()
        yield self._ranks()
        yield _picture(self.timeline)
        yield self._prediction()
        notes = [f"- {note}" for note in self._notes()]
        yield Table("notes", "Notes" if notes else "", notes=notes)

    def _model(self) -> Table:
        program = self.program
        inputs = (
            f"{path} {dtype.removeprefix('torch.')}{list(shape)}"
            for path, (shape, dtype) in program.inputs.items()
        )
        return facts(
            "model",
            [
                Figure("model", type(self.inspected.example.model).__name__),
                Figure("parameters", sum(self.sizes.values()), "parameters"),
                Figure("microbatch", tuple(inputs)),
                Figure("microbatches", program.schedule.microbatches),
                Figure("schedule", program.schedule.name),
                Figure("ranks", program.schedule.ranks),
                Figure("loss", f"{program.step.loss_reduction} of those of the microbatches"),
                Figure("gradients", "exact" if program.exact else "accumulated in place"),
                Figure("predicted", self.source.text),
            ],
        )

    def _stages(self) -> Table:
        costs, rows = self.source.costs, []
        for stage in self.program.stages:
            index, crossing = stage.stage, stage.crossing
            times = costs.forward[index], costs.backward[index], costs.weight[index]
            rows.append(
                [
                    Figure("stage", index),
                    Figure("rank", tuple(sorted(self.program.ranks_of(index)))),
                    Figure("cut after", last_operation(stage)),
                    *(
                        Figure(op, time, "s", "microbatch")
                        for op, time in zip("FBW", times, strict=True)
                    ),
                    Figure("keeps", crossing.kept, "B", "microbatch"),
                    Figure("residue", crossing.residue, "B", "microbatch"),
                    Figure("sends", stage.message_bytes("F"), "B", "microbatch"),
                ]
            )
        distinct = len({stage.original for stage in self.program.stages})
        busy = self.timeline.busy
        ratio = max(busy) * len(busy) / (sum(busy) or 1.0)
        note = (
            f"{len(rows)} stages, {distinct} distinct graphs; the heaviest rank has {ratio:.2f}"
            " times the mean work."
        )
        overweight = self.program.overweight
        return Table("stages", "Stages, per microbatch", rows, [note, *filter(None, [overweight])])

    def _ranks(self) -> Table:
        rows = []
        for rank, memory in enumerate(self.memory):
            busy, length = self.timeline.busy[rank], self.timeline.makespan
            rows.append(
                [
                    Figure("rank", rank),
                    Figure("busy", busy, "s", "step"),
                    Figure("idle", 1 - busy / length if length else 0.0, "share", "step"),
                    *(
                        Figure(name.removesuffix("_state"), getattr(memory, name), "B")
                        for name in RankMemory.__dataclass_fields__
                    ),
                ]
            )
        return Table("ranks", "Ranks, in one step", rows)

    def _prediction(self) -> Table:
        now, (count, sent) = self.timeline, count_messages(self.program)
        peaks = [memory.peak for memory in self.memory]
        limit = self.program.choices.memory or hardware_of(self.program).memory
        fullest = peaks.index(max(peaks))
        idle = format_idle(idle_by_cause(now))
        limit_text = ""
        if limit is not None:
            verb = "fits in" if max(peaks) <= limit else "DOES NOT FIT in"
            limit_text = f", which {verb} {format_bytes(limit)}"
        text = (
            f"One step takes {format_time(now.makespan, 's')} (bubble {format_share(now.bubble)})"
            f" and at most {format_bytes(max(peaks))}, on rank {fullest}{limit_text};"
            f" {count} messages carry {format_bytes(sent)}. {idle}"
        )
        figures = [
            Figure("step", now.makespan, "s", "step"),
            Figure("bubble", now.bubble, "share", "step"),
            Figure("idle of all ranks", idle_share(now), "share", "step"),
            Figure("peak", max(peaks), "B", "rank"),
            Figure("limit", limit, "B", "rank"),
            Figure("messages", count, "", "step"),
            Figure("sent", sent, "B", "step"),
        ]
        picture = "\n".join(wrap(text, ""))
        return Table("prediction", rows=[figures], upright=True, picture=picture)

    def _notes(self) -> Iterator[str]:
        program = self.program
        yield from program.plan.splitlines()
        if dropped := self.inspected.dropped:
            yield f"{', '.join(dropped)}: returned besides the loss, dropped in training."
        if random := [str(stage.stage) for stage in program.stages if stage.random]:
            yield (
                f"stages that draw random numbers: {', '.join(random)}; the generator's state"
                " travels with the activations."
            )
        if unknown := sorted(_unknown_operators(program)):
            yield f"FLOPs unknown, so timed by the bytes that they move: {', '.join(unknown)}."
        if program.shared:
            names = ", ".join(sorted(program.shared))
            yield f"on several stages, gradients summed over them: {names}."
        if program.vocabulary is not None:
            words = ", ".join(str(high - low) for low, high in program.vocabulary.bounds)
            weight, width = program.vocabulary.parameters[0], program.vocabulary.hidden.shape[-1]
            shape = [program.vocabulary.bounds[-1][1], width]
            yield f"output layer over all ranks: {weight} {shape}; words by rank: {words}."
        yield from _recomputation(program)
        yield from _collectives(program)
        yield from (f"warning while capturing: {text}" for text in self.inspected.warnings)


def last_operation(stage: StageProgram) -> str:
    """Returns the last operation of a stage whose value is sent on, and its module; "(the loss)"
    for the last stage. `balance=` takes the operation."""
    piece = stage.pieces["F"]
    order = {node: index for index, node in enumerate(piece.module.graph.nodes)}
    values = zip(piece.outputs, output_values(piece.module.graph), strict=True)
    sent = {node: slot.name for slot, node in values if slot.role == "activation" and node in order}
    computed = [node for node in sent if node.op == "call_function"]
    if not computed:
        return "(the loss)"
    last = max(computed, key=order.__getitem__)
    origin, name = origin_of(last), sent[last]
    module = origin.module if origin is not None else ""
    width = _LONGEST_PLACE - len(name) - 1
    return f"{name} {module if len(module) <= width else f'...{module[3 - width :]}'}".rstrip()


def _picture(timeline: Timeline) -> Table:
    text = format_timeline(timeline, width=WIDTH).partition("\n")[2]
    return Table("step", "The step, to scale (dots are idle time)", picture=text)


def _unknown_operators(program: Program) -> set[str]:
    pieces = {id(piece): piece for stage in program.stages for piece in stage.pieces.values()}
    return {
        name for piece in pieces.values() for name in operators_without_formula(piece.module.graph)
    }


def _recomputation(program: Program) -> Iterator[str]:
    recomputations = [stage.recomputed for stage in program.stages if stage.recomputed is not None]
    if operations := sum(statistics.operations for statistics in recomputations):
        before, after = (
            format_bytes(sum(getattr(statistics, name) for statistics in recomputations))
            for name in ("kept_before", "kept_after")
        )
        flops = sum(stage.flops["F"] for stage in program.stages) or 1
        share = format_share(sum(statistics.flops for statistics in recomputations) / flops)
        yield (
            f"recomputation: {operations} operations, {share} of the forward's FLOPs; all stages"
            f" keep {after} of {before} per microbatch."
        )


def _collectives(program: Program) -> Iterator[str]:
    """Yields what the stages exchange with ranks outside of the pipeline."""
    hardware = hardware_of(program)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    seconds: dict[tuple[str, str], float] = {}
    for stage in program.stages:
        for collective in collectives_of(stage):
            if collective.name != "BW":  # the same as those of B and W
                key = collective.kind, collective.dimension
                counts[key] += 1
                sizes[key] += collective.bytes
                duration = hardware.collective_seconds(collective.bytes, collective.kind)
                seconds[key] = seconds.get(key, 0.0) + duration
    for (kind, dimension), count in counts.items():
        key = kind, dimension
        yield (
            f"{count} {kind} along {dimension} per microbatch: {format_bytes(sizes[key])},"
            f" {format_time(seconds[key], 's')}."
        )
