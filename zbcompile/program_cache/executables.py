"""The executables of a pipeline: its model compiled for the shapes that it meets, bound to its tensors; a few are kept.

The first one decides where every parameter lives; later ones keep to that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from zbcompile.compiler.compile_model import Drawn, compile_drawn, draw_step, is_drawn_as
from zbcompile.compiler.measure_nodes import measure_line
from zbcompile.distributed.agreement import (
    agreed_seconds,
    equal_everywhere,
    gathered,
    require_equal_programs,
    together,
)
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.batch import (
    Microbatch,
    Microbatches,
    hint_at_device,
    hint_at_target,
    hinting,
)
from zbcompile.model.held_elsewhere import readable
from zbcompile.model.placements import require_matches
from zbcompile.options import Options, is_searched
from zbcompile.passes.capture.questions import Given
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.torch_private import global_hooks
from zbcompile.passes.values.premises import Standing
from zbcompile.program.program import OF_A_PLACE, Program
from zbcompile.program_cache.answers import (
    ByAnswers,
    ByShape,
    Recent,
    captured_alike,
    refuse_answers,
    save_with_answers,
)
from zbcompile.program_cache.apart_draws import draw_apart
from zbcompile.program_cache.bound_programs import BoundPrograms
from zbcompile.program_cache.orders import in_another_order, order_at
from zbcompile.program_cache.program_keys import ProgramKey, key_of, torch_modes, what_is_new
from zbcompile.program_cache.step_outputs import KINDS, kept_for, keyword
from zbcompile.progress import LONG, Progress
from zbcompile.runtime.engine import Executable, mix
from zbcompile.schedules import Schedule, lower
from zbcompile.torch_private import fingerprint


@dataclass(frozen=True)
class Searched:
    """The first step as a search has compiled it."""

    drawn: Drawn
    program: Program


class Executables(BoundPrograms):
    """What a pipeline runs, by the shapes of its microbatches."""

    def __init__(self, model: nn.Module, options: Options, ranks: Ranks, schedule: Schedule) -> None:
        super().__init__(model, options, ranks)
        self.schedule = schedule
        self.decided: Choices | None = None  # by a search
        self.searched: Searched | None = None  # until it is an executable
        self._kept: ByShape[Any, Executable] = ByShape(options.max_shapes)
        self._runs: Recent[Any, tuple[Any, Executable]] = Recent(4 * options.max_shapes)
        self._last: ByAnswers[Executable]
        self._last_state: tuple[Any, ...] | None = None
        self.outputs: bool | str = False  # what the present step returns beside its loss, of KINDS

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._kept)

    def first(self) -> Executable:
        """The one that was made first."""
        return self._kept.first().first()

    def adopt(self, program: Program) -> Executable:
        """Run `program`, which was compiled elsewhere."""
        self.hold(program)
        self._last = self._kept.new()
        for each in (program, *program.answers):
            self._last.add(each.guards, self.prepare_step(each), each.exchanges)
            self.trained |= each.trained
        self._kept.add((), self._last)
        return self._last.first()

    def adopted(self, step: Microbatches) -> Executable:
        """What was adopted, by the answers of each microbatch, which it must hold."""
        for index, key in enumerate(self._last.matching(step.tensors)):
            if key is None:
                refuse_answers(self._last.guards[0], index, step.tensors[index])
        return self._of_one_shape(step)

    def get(self, step: Microbatches) -> Executable:
        """The executable for the microbatches of a step, by their number and shapes and by their answers to what
        forward asks; compiled if there is none. Raises PipelineError and CaptureError if the model is no longer the one
        that was compiled."""
        first = self._last_state is None  # a lazy parameter has no state yet
        known = step.alike and not first and self._state(step.each[0]) == self._last_state and self._last.holds()
        if self.ranks.replicas.count > 1:
            self._require_equal_steps(step, known)
        if not step.alike:
            _require_few(step.each, self._options.max_shapes)
            return self._answered([self._look_up(each) for each in step.each], step)
        if not known:
            self._last = self._look_up(step.each[0])
            self._last_state = self._state(step.each[0])
        return self._of_one_shape(step)

    def _require_equal_steps(self, step: Microbatches, known: bool) -> None:
        """Raise PipelineError, on every rank, if replicas have batches of other numbers of microbatches, or want other
        outputs, or if one has to compile for shapes that others do not have, or to ask microbatches of other shapes."""
        shapes, count = step.shapes(), len(step.each)
        new = not known and not all(self._kept.find(self._key(each)) for each in step.distinct)
        asks = any(each.program.guards is not None for each in self)
        number = count * len(KINDS) + KINDS.index(self.outputs)
        change = next(filter(None, (self._kept.change(self._key(each)) for each in step.distinct)), "") if new else ""
        if equal_everywhere(self.ranks, number, (shapes, change), new or asks):
            return
        for rank, (*other, there), (*expected, own) in self._beside_first((count, shapes, self.outputs, change)):
            if other == expected and there != own:
                leader, same = self.ranks.members[0], "nothing has changed"
                raise self.ranks.refusal(
                    f"what forward reads in Python differs between ranks: on rank {leader} {own or same}, "
                    f"on rank {rank} {there or same}. Change it on every rank."
                )
            if other != expected:
                first, here = (f"{n} microbatches of {of[0]}, {keyword(to)}" for n, of, to in (expected, other))
                raise self.ranks.refusal(
                    f"rank {self.ranks.members[0]} passes {first}, rank {rank} {here}. Replicas take as many "
                    "microbatches in every step, and compile together: pass batches of one size, and equal keywords."
                )

    def _beside_first(self, own: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...]]]:
        """Every rank with what it has as its `own`, beside that of the first."""
        found = gathered(self.ranks, own)
        return ((rank, other, found[0]) for rank, other in zip(self.ranks.members, found, strict=True))

    def _answered(self, found: Sequence[ByAnswers[Executable]], step: Microbatches) -> Executable:
        """One executable for microbatches of several shapes or answers; `found` are those for the shape of each."""
        own: dict[int, Executable] = {}
        needed: list[Executable] = []
        for kind in {id(each): each for each in found}.values():
            places = [i for i, each in enumerate(found) if each is kind]
            keys, everywhere = self._find(kind, [step.each[i] for i in places])
            own |= {place: kind[key] for place, key in zip(places, keys, strict=True)}
            needed += [kind[key] for key in everywhere]
        why = "shapes" if len(set(map(id, found))) > 1 else f"answers to {found[0].guards[0].lines[0]}"
        count = len(step.each)
        chosen = [self.at(own[place], count) for place in range(count)]
        return self._mixed(chosen, [self.at(each, count) for each in needed], why)

    def _of_one_shape(self, step: Microbatches) -> Executable:
        count = len(step.each)
        return self._answered([self._last] * count, step) if self._last.asks else self.at(self._last.first(), count)

    def _find(self, found: ByAnswers[Executable], microbatches: Sequence[Microbatch]) -> tuple[list[str], list[str]]:
        def add(new: int | None) -> None:
            self._add(found, microbatches[new or 0], leads=new is not None)
            self._note_eviction(self._kept.trim(found))

        return found.find(self.ranks, [each.tensors for each in microbatches], add)

    def _mixed(self, own: Sequence[Executable], everywhere: Sequence[Executable], why: str) -> Executable:
        if all(each is own[0] for each in everywhere):
            return own[0]
        return self._kept_run(
            ("mixed", *map(id, own), *map(id, everywhere)), (own, everywhere), lambda: mix(own, everywhere, why)
        )

    def at(self, executable: Executable, count: int) -> Executable:
        """The executable in the order for `count` microbatches."""
        if count == executable.program.schedule.microbatches:
            return executable

        def make() -> Executable:
            program = replace(executable.program, lowered=lower(order_at(executable.program, count)))
            return in_another_order(executable, program, self.ranks)

        return self._kept_run((count, id(executable)), executable, make)

    def _kept_run(self, key: tuple[Any, ...], of: Any, make: Callable[[], Executable]) -> Executable:
        """What `make` makes of executables that it must not outlive: their ids are its key."""
        if key not in self._runs:
            self._runs.add(key, (of, make()))
        return self._runs[key][1]

    def _state(self, microbatch: Microbatch) -> tuple[Any, ...]:
        """Cache key: if unchanged since the last step, reuse the last executable."""
        hooks = bool(global_hooks())
        modes = kept_for(self.outputs), torch_modes(self.ranks.device)
        return microbatch.signature, modes, hooks, fingerprint(self._model)

    def _look_up(self, microbatch: Microbatch) -> ByAnswers[Executable]:
        found = self._kept.find(self._key(microbatch))
        if found is None:
            if self.program is not None:  # what is lazy has no shape before
                self.require_same_model()
            found = self._kept.new()
            self._add(found, microbatch, leads=True)
            key = self._key(microbatch)  # forward may have installed hooks, as transformers' do when they first run
            self._note_eviction(self._kept.add(key, found))
        self.require_same_model()
        return found

    @contextmanager
    def void_if_it_fails(self) -> Iterator[None]:
        """If a step fails, drop its partial sums: an optimizer that steps nevertheless finds no gradients."""
        try:
            yield
        except BaseException:
            for parameter in (*self._model.parameters(), *self.parameters.values()):
                parameter.grad = None
            self.ranks.replicas.forget()
            for executable in self:
                executable.buffers.made.clear()  # a message may still arrive in them
            raise

    def _add(self, found: ByAnswers[Executable], microbatch: Microbatch, leads: bool) -> None:
        """Compile for a microbatch whose answers are new, on all ranks; only some of them may have met it (`leads`)."""
        change = self._kept.change(self._key(microbatch))
        since = f" (on this rank, of {change})" if change else ""
        what = f"compiling for microbatches of {microbatch.summary()}{since}"
        with self.ranks.watch.position.turn_to(what), Progress(f"zbcompile: {what}", first=LONG):
            drawn = self.searched.drawn if self.searched else self.drawn(microbatch, leads)
            guards = drawn.captured.guards
            found.standing.append(Standing(drawn.captured.premises, {"model": self._model, "loss": self._options.loss}))
            reason = guards.unlike(found.guards) if guards is not None and found.asks else ""
            same = next((each for each in found if is_drawn_as(each.program, drawn)), None)
            executable = same or self._compile(microbatch, drawn, reason)
            self._note_eviction(found.add(guards, executable, executable.program.exchanges))

    def _note_eviction(self, dropped: bool) -> None:
        if dropped:
            self._runs = Recent(self._runs.limit)  # they hold what was evicted
        if dropped and self.ranks.is_first:
            print(f"zbcompile: evicted the least recently used program; max_shapes={self._options.max_shapes}.")

    def _key(self, microbatch: Microbatch) -> ProgramKey:
        return key_of(self._model, microbatch, self.ranks.device, kept_for(self.outputs))

    def _compile(self, microbatch: Microbatch, drawn: Drawn, reason: str) -> Executable:
        if self.trains and self.ranks.is_first:
            key = self._key(microbatch)
            reason = reason or self._kept.change(key) or what_is_new(self._model, microbatch, key, self._kept.keys)
            number = f"program {len(self.compilations) + 1}; max_shapes={self._options.max_shapes} are kept"
            print(f"zbcompile: compiling again for {reason} ({number}).")
        program = self._make_program(microbatch, drawn)
        asked = {"what a step returns": keyword(self.outputs), "max_shapes": self._options.max_shapes}
        asked |= {"debug_nan": self.debug_nan, **vars(self._options.step)}
        require_equal_programs(self.ranks, {**asked, **program.manifest}, of_a_place=OF_A_PLACE)
        if self.program is None:
            self.hold(program)
            require_matches(program.step.placements or {}, program.homes)
            self.copy_first_replica(program)
        elif not self.trains and program.homes != self.program.homes:
            self.move(program)
        elif not self.trains:
            self.program = program  # an evaluation placed the parameters; from now on they train
            for name, rows in self.shards.own.items() if self.shards else ():
                rows.requires_grad_(name in program.trained)
        self.trained |= program.trained
        return self.prepare_step(program)

    def drawn(self, microbatch: Microbatch, leads: bool) -> Drawn:
        """The captured step, with the same answers on all ranks."""

        def draw(given: Given | None) -> Drawn:
            undecided = is_searched(self._options) and not self.trains and self.decided is None
            schedule = None if undecided else self.schedule
            step = self._model, microbatch, self._options.loss, self._choices(), schedule
            device = partial(hint_at_device, microbatch, self.ranks.device)
            target = partial(hint_at_target, self._model, microbatch, self._options.loss)
            with readable(self._model), hinting(device, target):
                return draw_step(*step, dimensions=self.ranks.mesh.labels, given=given, keep=kept_for(self.outputs))

        return captured_alike(self.ranks, "capturing", draw, lambda drawn: drawn.captured.guards, leads)

    def _make_program(self, microbatch: Microbatch, drawn: Drawn) -> Program:
        searched, self.searched = self.searched, None
        if searched is not None:
            program = searched.program
            if self.ranks.is_first:
                print(f"zbcompile: {program.plan}")
        else:
            program = self.make(microbatch, drawn, self.schedule, self.decided or self._options.choices)
        program = replace(program, writer=partial(save_with_answers, self._kept, self.ranks))
        if self.ranks.is_first and self.program is None and program.cuts.overweight:
            print(f"zbcompile: {program.cuts.overweight}")
        return program

    def make(
        self,
        microbatch: Microbatch,
        drawn: Drawn,
        schedule: Schedule,
        choices: Choices,
        edges: Sequence[int] | None = None,
    ) -> Program:
        seconds = self.measured(drawn)

        task = self._model, microbatch, drawn, schedule, choices, seconds

        def compile_() -> Program:
            try:
                return compile_drawn(*task, self._placed, edges=edges)
            except PartitionError:
                if self.trains or self._placed is None:
                    raise
                return compile_drawn(*task, edges=edges)  # what an evaluation has placed is in another order

        program = replace(together(self.ranks, "compiling", compile_), step=self._options.step)
        return draw_apart(self.ranks, program)

    @property
    def _placed(self) -> Program | None:
        """The program whose placement a step keeps: not that of an evaluation if a layout is searched for training, or
        the output layer is to be sharded, which the evaluation of a model that trains leaves to the step."""
        found = self.program
        if found is None or self.trains:
            return found
        sharded = self._options.choices.vocab in (1, 2) and found.choices.vocab == "off"
        return None if is_searched(self._options) or sharded else found

    def _choices(self) -> Choices:
        """Later programs reuse the first one's sharding decision, because row ownership is already fixed."""
        choices = self.decided or self._options.choices
        if self.decided is None and self.outputs and self._options.vocab is None:
            return replace(choices, vocab="off")  # what is returned is made of whole outputs
        placed = self._placed
        if placed is None or (choices.vocab != "auto" and self.trains):
            return choices
        if placed.vocabulary is None:
            return replace(choices, vocab="off")
        return choices if choices.vocab in (1, 2) else replace(choices, vocab=1)

    def measured(self, drawn: Drawn) -> dict[str, float]:
        """The times by which the model is cut, the same on all ranks."""
        if self._options.choices.balance != "measured" or self._placed is not None:
            return {}
        return agreed_seconds(self.ranks, together(self.ranks, "measuring", lambda: measure_line(drawn.line)))


def _require_few(microbatches: Sequence[Microbatch], limit: int) -> None:
    """Raise PipelineError if the microbatches of a step have more shapes than programs are kept."""
    kinds = len({each.signature for each in microbatches})
    if kinds > limit:
        raise PipelineError(
            f"the microbatches of this step have {kinds} shapes, and max_shapes={limit} programs are kept. Raise "
            "it, or pad to fewer shapes."
        )
