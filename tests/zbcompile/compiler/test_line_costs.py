"""What is estimated from the operations alone, beside the graphs that are compiled for the same cuts."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from targets import gpt, llama
from tests.support.mesh_targets import layers
from zbcompile.compiler.compile_example import Inspected, compile_example, one_microbatch
from zbcompile.compiler.compile_model import compile_drawn, draw_step
from zbcompile.compiler.cut_planning import cuts_for_makespan, score_of
from zbcompile.compiler.line_costs import LineCosts
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import build
from zbcompile.torch_private import group_without_peers

CLOSE = 0.15  # of the bytes that wait; dropout's masks are smaller in the graphs than autograd's


@pytest.fixture(scope="module", params=["gpt", "llama"])
def compiled(request: pytest.FixtureRequest) -> Inspected:
    example = gpt() if request.param == "gpt" else zbcompile.Example(*llama())
    return compile_example(example, build("zb-v", 2, 4), Choices())


def line_costs(compiled: Inspected) -> tuple[LineCosts, list[int]]:
    drawn = compiled.drawn
    assert drawn is not None
    costs = LineCosts(drawn.canonical, drawn.line, predicted_seconds(drawn.line))
    return costs, [after + 1 for after in compiled.program.cuts.after]


def test_bytes(compiled: Inspected) -> None:
    costs, edges = line_costs(compiled)
    estimate, graphs = costs.costs(edges), predicted_costs(compiled.program)
    assert estimate.message == graphs.message
    assert estimate.activation == pytest.approx(graphs.activation, rel=CLOSE)
    assert estimate.residue == pytest.approx(graphs.residue, rel=CLOSE)


def test_loads_divide_into_passes(compiled: Inspected) -> None:
    costs, edges = line_costs(compiled)
    estimate = costs.costs(edges)
    whole = sum(map(sum, (estimate.forward, estimate.backward, estimate.weight)))
    assert whole == pytest.approx(sum(costs.loads))
    again = costs.costs(edges, recompute=True)
    assert sum(again.backward) == pytest.approx(sum(estimate.backward) + sum(estimate.forward))
    assert all(a <= b for a, b in zip(again.activation, estimate.activation, strict=True))
    half = costs.costs(edges, rows=0.5)
    assert all(b / 2 <= a <= b for a, b in zip(half.forward, estimate.forward, strict=True))


def test_cuts_for_the_step_are_no_worse_and_hold_the_limit(compiled: Inspected) -> None:
    costs, edges = line_costs(compiled)
    schedule = build("zb-v", 2, 4)
    moved = cuts_for_makespan(costs, edges, schedule)
    assert score_of(costs, moved, schedule, None) <= score_of(costs, edges, schedule, None)
    least = 0.9 * score_of(costs, edges, schedule, 0)[0]
    assert score_of(costs, cuts_for_makespan(costs, edges, schedule, least), schedule, least)[0] == 0


def test_a_part_of_a_model_on_a_mesh() -> None:
    """Half of the products, the exchanges, and the bytes of one of two ranks, as in the graphs compiled for it."""
    whole, schedule = layers(), build("zb-h1", 2, 4)
    drawn = draw_step(whole.model, one_microbatch(whole), whole.loss)
    with group_without_peers(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        part, labels = layers(mesh), {mesh.get_group().group_name: "tp"}
        Parts(part.model, labels)
        step = part.model, one_microbatch(part)
        shared = draw_step(*step, part.loss, dimensions=labels)
        program = compile_drawn(*step, shared, schedule, Choices(), {})
        costs = LineCosts(shared.canonical, shared.line, predicted_seconds(shared.line))
        estimate = costs.costs([after + 1 for after in program.cuts.after])
    assert sum(shared.line.flops.values()) == sum(drawn.line.flops.values()) / 2
    graphs = predicted_costs(program)
    assert estimate.activation == pytest.approx(graphs.activation, rel=CLOSE)
    for name in ("forward", "backward"):
        assert getattr(estimate, name) == pytest.approx(getattr(graphs, name), abs=1e-6), (
            name
        )  # but elementwise operations
    assert sum(estimate.forward) > 2e-4  # of two exchanges
