"""What is estimated from the operations alone, beside the graphs that are compiled for the same cuts."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from targets import gpt, llama
from tests.support.mesh_targets import layers
from zbcompile.compiler.compile_example import Inspected, compile_example, one_microbatch
from zbcompile.compiler.compile_model import compile_drawn, draw_step
from zbcompile.compiler.cut_planning import cuts_for_makespan, score_of
from zbcompile.compiler.line_costs import LineCosts
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.compile_options import Choices, Recompute
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.schedules import Costs, build, search
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


def test_what_waits_for_w_in_a_chain_of_products() -> None:
    """The gradients of all products beside their inputs: more than waited for B."""
    model, x = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))), torch.ones(4, 8)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    compiled = compile_example(example, build("zb-h1", 2, 4), Choices())
    costs, edges = line_costs(compiled)
    estimate, graphs = costs.costs(edges), predicted_costs(compiled.program)
    assert (estimate.activation, estimate.residue) == (graphs.activation, graphs.residue)
    assert all(left > kept for kept, left in zip(estimate.activation, estimate.residue, strict=True))


def test_what_a_rank_holds_at_most(compiled: Inspected) -> None:
    costs, edges = line_costs(compiled)
    assert_close(costs, edges, compiled, rel=0.1)  # masks again


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("placement", ["linear", "v"])
def test_what_a_rank_holds_at_most_where_backwards_are_split(placement: str, recompute: Recompute) -> None:
    model, x = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))), torch.ones(64, 32)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    order = search(Costs.uniform(4 if placement == "v" else 2), 2, 4, placements=[placement], moves=0).schedule
    compiled = compile_example(example, order, Choices(recompute=recompute))
    assert_close(*line_costs(compiled), compiled, rel=0.05)


def assert_close(costs: LineCosts, edges: list[int], compiled: Inspected, rel: float) -> None:
    """To what the graphs say of the fullest rank."""
    program, model = compiled.program, compiled.example.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    most = costs.most_held(program.schedule, edges, recompute=program.choices.recompute == "full")
    memory = rank_memories(program, predicted_costs(program), tensors)
    assert max(most) == pytest.approx(max(rank.peak for rank in memory), rel=rel)


def test_loads_divide_into_passes(compiled: Inspected) -> None:
    costs, edges = line_costs(compiled)
    estimate = costs.costs(edges)
    whole = sum(map(sum, (estimate.forward, estimate.backward, estimate.weight)))
    assert whole == pytest.approx(sum(costs.loads))
    again = costs.costs(edges, recompute=True)
    twice = sum(estimate.backward) + sum(estimate.forward)
    assert sum(again.backward) == pytest.approx(twice, rel=0.02)  # random numbers are not drawn again
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
    """Half of the products, the exchanges, and the bytes of one of two ranks, as in the graphs compiled for it; if
    everything is recomputed, no exchange is repeated, nor a product that only leads to one."""
    whole, schedule = layers(), build("zb-h1", 2, 4)
    drawn = draw_step(whole.model, one_microbatch(whole), whole.loss)
    with group_without_peers(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        part, labels = layers(mesh), {mesh.get_group().group_name: "tp"}
        Parts(part.model, labels)
        step = part.model, one_microbatch(part)
        shared = draw_step(*step, part.loss, dimensions=labels)
        program = compile_drawn(*step, shared, schedule, Choices(), {})
        again = compile_drawn(*step, shared, schedule, Choices(recompute="full"), {})
        costs = LineCosts(shared.canonical, shared.line, predicted_seconds(shared.line))
        estimate = costs.costs([after + 1 for after in program.cuts.after])
        repeated = costs.costs([after + 1 for after in again.cuts.after], recompute=True)
    assert sum(shared.line.flops.values()) == sum(drawn.line.flops.values()) / 2
    graphs = predicted_costs(program)
    assert estimate.activation == pytest.approx(graphs.activation, rel=CLOSE)
    assert estimate.forward == pytest.approx(graphs.forward, abs=1e-6)  # but elementwise operations
    assert estimate.backward == pytest.approx(graphs.backward, abs=1e-6)
    assert repeated.backward == pytest.approx(predicted_costs(again).backward, abs=2e-6)
    assert sum(estimate.forward) > 2e-4  # of two exchanges
