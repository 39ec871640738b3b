"""Whether the parts of a program that was read from files fit together, and no part takes what no other gives."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch.fx import Node

from zbcompile.errors import PipelineError
from zbcompile.model.model_info import module_of
from zbcompile.passes.capture.guards import Guards
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.process_groups import groups_in
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.pass_list.passes_in_order import DEDUPLICATE, SHARD, WHOLE
from zbcompile.passes.split.subgraphs import LATER
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.verification.piece_rules import crossing_counted
from zbcompile.passes.verification.rule import Rule
from zbcompile.program.output import FORWARDS
from zbcompile.program.program import Program

Form = tuple[tuple[int, ...], str]
Forms = dict[Slot, Form]
# Graphs that were read share no storages, from which what waits between them is counted.
_OF_A_STEP = tuple(each for each in DEDUPLICATE.holds if each is not crossing_counted)


def require_whole(program: Program) -> None:
    """Require that the parts of a program that every rank has are consistent. Raises PipelineError, or as
    `module_of`."""
    names, count = {member.name for member in program.model.members}, len(program.stages)
    _require(len(names) == len(program.model.members), "two parameters or buffers have one name")
    _require({member.first for member in program.model.members} <= names, "a tensor is tied to none of the model's")
    _require(program.homes.keys() <= names, "homes of a tensor that the model lacks")
    _require(all(stage in range(count) for each in program.homes.values() for stage in each), "a home that is no stage")
    for number, stage in enumerate(program.stages):
        held = [*stage.parameters, *stage.buffers, *stage.trained]
        known = (stage.stage, stage.original in range(count)) == (number, True)
        _require(known and all(number in program.homes.get(name, ()) for name in held), f"stage {number}: its tensors")
    for sender, receiver in pairwise(program.stages):
        sent, received = _boundary(sender.sends), _boundary(receiver.receives)
        returned = _boundary(sender.gradients_in) == _boundary(receiver.gradients_out)
        what = f"stage {receiver.stage} receives something else than stage {sender.stage} sends"
        _require(sent == received and returned, what)
    module_of(program.model)
    if program.guards is not None:
        _require_answers(program, program.guards)
    if program.output is not None:
        made = (stage in range(count) for stage, _ in program.output.made.values())
        _require(program.output.computes in FORWARDS and all(made), "what the forward computes")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PipelineError(f"a program that does not fit together ({what}). Compile and save the program again.")


def _boundary(specs: Mapping[str, TensorSpec]) -> list[tuple[str, Form]]:
    return [(name, (spec.shape, spec.dtype)) for name, spec in specs.items()]


def _require_answers(program: Program, guards: Guards) -> None:
    """The questions are asked of what there is, each has a line and an answer, and no other rank is needed for it."""
    same = len(guards.lines) == len(guards.given.answers) == len(output_values(guards.module.graph))
    _require(same and not set(groups_in(guards.module.graph)), "as many questions as answers")
    given = _inputs(program)
    given |= {Slot("constant", name): _form_of(tensor) for name, tensor in guards.constants.items()}
    _require_given("guards", zip(guards.inputs, _holders(guards), strict=True), given)


def require_consistent(program: Program, rank: int) -> None:
    """Require that the graphs of a rank obey the rules of the compiler, and take what the model and each other give
    them. Raises PipelineError for the first one that does not, and for an input of another shape or dtype."""
    for number in program.stages_of(rank):
        stage = program.stages[number]
        _require(stage.pieces.keys() == (LATER.keys() if program.trains else {"F"}), f"stage {number}: its graphs")
        _require_rules(_OF_A_STEP if program.trains else WHOLE, stage)
        given = _inputs(program) | _resident(program, number) | _arriving(program, stage)
        for piece in stage.pieces.values():
            given |= {slot: _form(node) for slot, node in _results(piece) if slot.kind == "saved"}
        for name, piece in stage.pieces.items():
            _require_given(f"stage {number}, {name}", zip(piece.inputs, _holders(piece), strict=True), given)
            _require_given(f"stage {number}, {name}", _results(piece), _leaving(program, stage, given))
    if program.vocabulary is not None:
        _require_rules(SHARD.holds, program.vocabulary)


def _require_rules(rules: Iterable[Rule], made: Any) -> None:
    for rule in rules:
        found = next(iter(rule.find(made, None)), None)
        if found is not None:
            where = f"{found.graph}{f', {found.node.name}' if found.node else ''}".lstrip(", ")
            raise PipelineError(f"{where}: {found.what}. No release writes this: {rule.says}.")


def _inputs(program: Program) -> Forms:
    found = program.inputs.items()
    return {Slot("input", path): (shape, dtype.removeprefix("torch.")) for path, (shape, dtype) in found}


def _resident(program: Program, stage: int) -> Forms:
    """The model's tensors that a stage uses, and the buffers into which it adds gradients."""
    held = [member for member in program.model.members if stage in program.homes.get(member.first, ())]
    found = {Slot(member.kind, member.name): (member.shape, member.dtype) for member in held}  # type: ignore[arg-type]
    return found | {Slot("constant", name): _form_of(tensor) for name, tensor in program.model.constants.items()}


def _arriving(program: Program, stage: StageProgram) -> Forms:
    found = {Slot("activation", name): (spec.shape, spec.dtype) for name, spec in stage.receives.items()}
    found |= {Slot("tangent", name): (spec.shape, spec.dtype) for name, spec in stage.gradients_in.items()}
    return {**found, Slot("tangent", "loss"): ((), program.loss_dtype)}


def _leaving(program: Program, stage: StageProgram, given: Forms) -> Forms:
    """What the graphs of a stage may return."""
    found = {Slot("activation", name): (spec.shape, spec.dtype) for name, spec in stage.sends.items()}
    found |= {Slot("input_gradient", name): (spec.shape, spec.dtype) for name, spec in stage.gradients_out.items()}
    found |= {Slot("mutation", slot.name): form for slot, form in given.items() if slot.kind == "buffer"}
    if program.output is None:  # a step whose outputs were asked for computes them, but a saved one returns none
        found |= {slot: _form(node) for slot, node in _results(stage.pieces["F"]) if slot.kind == "output"}
    else:
        made = program.output.made.items()
        found |= {Slot("output", name): (spec.shape, spec.dtype) for name, (at, spec) in made if at == stage.stage}
    found |= {slot: form for slot, form in given.items() if slot.kind == "saved"}
    return {**found, Slot("loss"): ((), program.loss_dtype)}


def _require_given(where: str, pairs: Iterable[tuple[Slot, Any]], given: Forms) -> None:
    for slot, node in pairs:
        if slot.kind in ("accumulator", "gradient"):  # the rules say of which parameters; their dtype is an option
            continue
        if slot not in given:
            raise PipelineError(f"{where}: the graph names {slot}, and nothing of the program is called so.")
        if isinstance(node, Node) and given[slot] != _form(node):
            raise PipelineError(f"{where}: {slot} is {given[slot]}, and the graph has {_form(node)}.")


def _holders(piece: Any) -> list[Node]:
    return list(piece.module.graph.find_nodes(op="placeholder"))


def _results(piece: Any) -> Iterator[tuple[Slot, Any]]:
    return zip(piece.outputs, output_values(piece.module.graph), strict=True)


def _form(node: Node) -> Form:
    return _form_of(node.meta["val"])


def _form_of(value: Any) -> Form:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")
