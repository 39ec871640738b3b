"""The memory of a pass while it runs, predicted from its graph, against the storages that a real
run keeps alive."""

from pathlib import Path

import pytest
import torch

from tests.support.live_storages import Alive
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.compiler.measure_nodes import synthetic
from zbcompile.passes.compile_options import Choices, Recompute
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.peak_memory import ALIVE, LATER, LOSS, transient_bytes
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import boxed
from zbcompile.schedules import build

TARGETS = Path(__file__).parents[3] / "examples" / "targets.py"


def whole(value: torch.Tensor) -> torch.Tensor:
    """Returns random numbers in a storage as large as that of a fake value: a stage on this rank
    passes views on."""
    found = synthetic(value)
    found.untyped_storage().resize_(int(value.untyped_storage().nbytes()))
    return found


def measured(stage: StageProgram, name: str, frame: dict[Slot, torch.Tensor]) -> int:
    """Run a pass as a step does, on the values in `frame`: the most bytes that it keeps alive."""
    piece = stage.pieces[name]
    for slot, node in zip(
        piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True
    ):
        if slot not in frame:
            frame[slot] = whole(node.meta["val"])
    later = {slot for each in LATER[name] for slot in stage.pieces[each].inputs}
    stays = [slot for slot in piece.inputs if slot.role in ALIVE or slot == LOSS]
    values = [frame[slot] for slot in piece.inputs]
    for slot in set(piece.inputs) - later - set(stays):
        del frame[slot]
    with torch.no_grad(), Alive(values, [frame[slot] for slot in stays]) as alive:
        results = boxed(piece.module)(values)
    frame.update(  # results that are sent alone are not the stage's any more
        (slot, result) for slot, result in zip(piece.outputs, results, strict=True) if slot in later
    )
    return alive.most


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    ("target", "recompute"), [("unet", "hints"), ("gpt", "full"), ("gpt", "off")]
)
def test_what_is_predicted_is_alive(target: str, recompute: Recompute) -> None:
    """F, B and W of every stage, but for what an operation allocates for itself: batch norm copies
    its statistics."""
    example = load_example(f"{TARGETS}:{target}")
    program = compile_example(example, build("zb-v", 1, 2), Choices(recompute=recompute)).program
    for stage in program.stages:
        frame: dict[Slot, torch.Tensor] = {}
        for name in ("F", "B", "W"):
            predicted, found = transient_bytes(stage, name), measured(stage, name, frame)
            assert predicted <= found <= 1.005 * predicted, f"{name} of stage {stage.stage}"
