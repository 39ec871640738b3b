"""The summary of a compiled program: its tables, from the model to the order of every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.compiler.stage_price import running_of
from zbcompile.inspection.idle_report import format_idle, idle_by_cause
from zbcompile.inspection.request import Prediction
from zbcompile.inspection.stage_tables import cuts, place_of, stage_tables
from zbcompile.passes.machine.flops import without_formula
from zbcompile.prediction.predict import count_messages, hardware_of, prices_of
from zbcompile.prediction.rank_memory import RankMemory, copies_bytes, rank_memories
from zbcompile.schedules import format_schedule, format_timeline
from zbcompile.schedules.ir.actions import flatten
from zbcompile.schedules.visualization.step_tables import idle_share
from zbcompile.tables import WIDTH, Figure, Table, facts

_BASES = {
    "flops": "FLOPs and bytes",
    "names": "names (loads from FLOPs and bytes)",
}
_SPEED = (
    "Times are in FLOPs of a nominal core, which moves a byte in the time of five: this machine is"
    " not known. For seconds: --hardware with the profile of a machine; --costs measured; or the"
    " record of a step as --costs."
)


class Summary:
    """The tables of a compiled example under a prediction."""

    def __init__(
        self,
        inspected: CompiledExample,
        prediction: Prediction,
    ) -> None:
        self.inspected, self.prediction = inspected, prediction
        self.program, self.model = inspected.program, inspected.example.model
        self.timeline, self.unit = prediction.shown, prediction.unit
        self.sizes = {
            name: (p.numel(), p.numel() * p.element_size())
            for name, p in self.model.named_parameters()
        }
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self.prices = prediction.basis.prices or prices_of(self.program)
        running = running_of(self.prices)
        self.memory = rank_memories(
            self.program, prediction.timeline.costs, tensors, running=running
        )

    def tables(self) -> Iterator[Table]:
        yield self._model()
        yield Table("plan", notes=self.program.plan.splitlines())
        yield cuts(self.program, self.sizes)
        yield self._balance()
        yield from stage_tables(self.program, self.prices)
        yield self._ranks()
        yield self._memory()
        yield self._vocabulary()
        picture = format_timeline(self.timeline, width=WIDTH).partition("\n")[2]
        yield Table("step", "The predicted step, to scale (dots are idle time)", picture=picture)
        yield self._orders()
        yield Table(
            "notes",
            "Notes" if (notes := [f"- {each}" for each in self._notes()]) else "",
            notes=notes,
        )
        yield self._prediction()

    def _model(self) -> Table:
        program = self.program
        inputs = (
            f"{path} {dtype.removeprefix('torch.')}{list(shape)}"
            for path, (shape, dtype) in program.inputs.items()
        )
        return facts(
            "model",
            [
                Figure("model", type(self.model).__name__),
                Figure("parameters", sum(count for count, _ in self.sizes.values()), "parameters"),
                Figure("size", sum(size for _, size in self.sizes.values()), "B"),
                Figure("one microbatch", tuple(inputs)),
                Figure("schedule", program.schedule.name),
                Figure("ranks", program.schedule.ranks),
                Figure("stages", len(program.stages)),
                Figure("microbatches", program.schedule.microbatches),
                Figure("loss", f"{program.step.loss_reduction} of those of the microbatches"),
                Figure("gradients", "exact" if program.exact else "accumulated in place"),
            ],
        )

    def _prediction(self) -> Table:
        now, sent, limit = self.timeline, count_messages(self.program), self._memory_limit
        notes = [format_idle(idle_by_cause(self.prediction.timeline)), self.program.cuts.overweight]
        notes = [note for note in notes if note] + ([_SPEED] if self.unit == "FLOP" else [])
        figures = [
            Figure("step", now.makespan, self.unit, "step"),
            Figure("predicted", self.prediction.basis.text),
            Figure("bubble of the busiest rank", now.bubble, "share", "step"),
            Figure("idle of all ranks", idle_share(now), "share", "step"),
            Figure("without the barrier", now.cost_bubble, "share", "step"),
            Figure("peak memory", max(each.peak for each in self.memory), "B", "rank"),
            Figure("memory limit", limit, "B", "rank"),
            Figure("messages", sent.count, "", "step"),
            Figure("sent", sent.bytes, "B", "step"),
        ]
        return facts(
            "prediction",
            [each for each in figures if each.value is not None],
            "One step, predicted",
            notes,
        )

    @property
    def _memory_limit(self) -> float | None:
        return self.program.choices.memory or hardware_of(self.program).memory

    def _loads(self) -> tuple[Sequence[float], str]:
        """The load of every stage and its unit: that of the predicted step, or without times that
        of the cuts."""
        cuts, costs = self.program.cuts, self.prediction.timeline.costs
        if self.prediction.basis.unit != "s":
            return cuts.loads, cuts.unit
        scale = self.prediction.speed or 1.0
        columns = zip(costs.forward, costs.backward, costs.weight, strict=True)
        return [scale * sum(times) for times in columns], self.unit

    def _balance(self) -> Table:
        loads, unit = self._loads()
        stages, placement = self.program.stages, self.program.schedule.placement
        mean, ranks = sum(loads) / len(loads) or 1.0, [0.0] * placement.ranks
        for stage, load in enumerate(loads):
            for rank in placement.owners[stage]:
                ranks[rank] += load
        ratio = max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0
        rows = [
            [
                Figure("stage", stage.stage),
                Figure("rank", tuple(sorted(self.program.ranks_of(stage.stage)))),
                Figure("F + B + W", load, unit, "microbatch"),
                Figure("of the mean", load / mean, "ratio"),
                Figure("crosses", stage.send_bytes, "B", "microbatch"),
                Figure("last operation", place_of(stage)[1]),
                Figure(
                    "graphs",
                    "its own" if stage.original == stage.stage else f"of stage {stage.original}",
                ),
            ]
            for stage, load in zip(stages, loads, strict=True)
        ]
        counts = (
            f"{_number(len(stages), 'stage')},"
            f" {_number(len({s.original for s in stages}), 'distinct graph')}"
        )
        note = f"{counts}; the heaviest rank carries {ratio:.2f} times the mean load."
        return Table("balance", f"Cut by {_BASES[self.program.cuts.basis]}", rows, [note])

    def _ranks(self) -> Table:
        program, rows = self.program, []
        of_rank = [
            sum(program.stages[a.stage].flops.get(a.op, 0) for a in flatten(order))
            for order in program.schedule.orders
        ]
        for rank, flops in enumerate(of_rank):
            stages, busy = program.schedule.placement.stages_of(rank), self.timeline.busy[rank]
            names = {name for stage in stages for name in program.stages[stage].parameters}
            idle = 1 - busy / self.timeline.makespan if self.timeline.makespan else 0.0
            rows.append(
                [
                    Figure("rank", rank),
                    Figure("stages", tuple(stages)),
                    Figure("parameters", sum(self.sizes[name][0] for name in names), "parameters"),
                    Figure("FLOPs", flops, "FLOP", "step"),
                    Figure("share", flops / (sum(of_rank) or 1), "share"),
                    Figure("busy", busy, self.unit, "step"),
                    Figure("idle", idle, "share", "step"),
                    Figure("peak waiting", int(self.prediction.timeline.peak_memory[rank]), "B"),
                    Figure("peak running", self.memory[rank].activations, "B"),
                ]
            )
        return Table("ranks", f"Ranks in one step, predicted {self.prediction.basis.text}", rows)

    def _memory(self) -> Table:
        names = [each.name for each in fields(RankMemory)]
        rows = [
            [
                Figure("rank", rank),
                *(Figure(name.replace("_state", ""), getattr(memory, name), "B") for name in names),
                Figure("copies", copies_bytes(self.program, rank, self.sizes), "B"),
            ]
            for rank, memory in enumerate(self.memory)
        ]
        notes = [
            'Copies are what pipe.optimizer(validate="after") keeps besides.',
            *self._fit(),
        ]
        return Table(
            "memory",
            "Memory of the ranks: the most at any moment, and of all together",
            rows,
            notes,
        )

    def _fit(self) -> Iterator[str]:
        """Whether the fullest rank is within the limit."""
        limit, peaks = self._memory_limit, [memory.peak for memory in self.memory]
        if limit is None:
            return
        rank, left = peaks.index(max(peaks)), (limit - max(peaks)) / 1e9
        if left < 0:
            yield f"Rank {rank} does not fit in {limit / 1e9:g} GB: {-left:.3g} GB are missing."
        else:
            yield f"Rank {rank}, the fullest, fits in {limit / 1e9:g} GB with {left:.3g} to spare."

    def _vocabulary(self) -> Table:
        found = self.program.vocabulary
        if found is None:
            return Table("vocabulary")
        figures = [
            Figure("found", found.text),
            Figure("embedding", found.lookup.weight if found.lookup else None),
            Figure("words by rank", tuple(high - low for low, high in found.bounds)),
            *(Figure(op, found.flops[0][op], "FLOP", "microbatch") for op in ("S", "T")),
            Figure("barriers", found.barriers),
        ]
        return facts("vocabulary", figures, "Output layer sharded over all ranks")

    def _orders(self) -> Table:
        rows = [
            [
                Figure("rank", rank),
                Figure("actions", [*map(str, order)]),
                Figure("with messages", [*map(str, program)]),
            ]
            for rank, (order, program) in enumerate(
                zip(self.program.schedule.orders, self.program.lowered.orders, strict=True)
            )
        ]
        picture = format_schedule(self.program.schedule, width=WIDTH)
        return Table("orders", "The order of every rank", rows, picture=picture)

    def _notes(self) -> Iterator[str]:
        dropped, program = self.inspected.dropped, self.program
        if dropped:
            yield f"{', '.join(dropped)}: returned besides the loss, dropped in training."
        random = [str(stage.stage) for stage in program.stages if stage.random]
        if random:
            stages = ", ".join(random)
            yield (
                f"stages that draw random numbers: {stages}; the generator's state travels with the"
                " activations."
            )
        pieces = {id(piece): piece for stage in program.stages for piece in stage.pieces.values()}
        unknown = sorted(
            {name for piece in pieces.values() for name in without_formula(piece.module)}
        )
        if unknown:
            yield f"FLOPs unknown, so timed by the bytes that they move: {', '.join(unknown)}."
        if program.shared:
            yield (
                "on several stages, gradients summed over them:"
                f" {', '.join(sorted(program.shared))}."
            )
        yield from (f"warning while capturing: {text}" for text in self.inspected.warnings)


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
