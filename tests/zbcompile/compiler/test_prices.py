"""Prices of stages from the graphs of distinct blocks, beside those of the stages compiled for the same cuts."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zbcompile
from targets import gpt, llama, unet
from tests.support.generated import examples
from tests.support.mesh_targets import layers
from zbcompile.compiler.compile_example import CompiledExample, compile_example, one_microbatch
from zbcompile.compiler.compile_model import LaidOut, compile_laid_out, lay_out_step
from zbcompile.compiler.cut_planning import layout_for_makespan, layout_of, places_of, score_of
from zbcompile.compiler.prices import LinePrices
from zbcompile.compiler.stage_price import StagePrice, running_of
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.compile_options import Choices, Policy
from zbcompile.passes.partition.memory_estimate import ReplicaSharding
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.prediction.predict import predicted_costs, prices_of
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, build, search
from zbcompile.torch_private import group_without_peers

POLICIES = ["off", "selective", "full"]


@pytest.fixture(scope="module", params=["gpt", pytest.param("llama", marks=pytest.mark.beyond_sample)])
def compiled(request: pytest.FixtureRequest) -> CompiledExample:
    example = gpt() if request.param == "gpt" else zbcompile.Example(*llama())
    return compile_example(example, build("zb-v", 2, 4), Choices())


def line_prices(compiled: CompiledExample, **choices: Any) -> tuple[LinePrices, list[int]]:
    laid_out = compiled.laid_out
    assert laid_out is not None
    prices = LinePrices(laid_out.canonical, laid_out.line, replace(compiled.program.choices, **choices))
    return prices, [after + 1 for after in compiled.program.cuts.after]


def assert_priced(prices: LinePrices, program: Program, edges: list[int], seconds: float, bytes_: float) -> None:
    """As the compiled stages are, within these shares."""
    found, graphs, running = prices.costs(edges), predicted_costs(program), running_of(prices_of(program))
    for name in ("forward", "backward", "weight", "saved"):
        assert getattr(found, name) == pytest.approx(getattr(graphs, name), rel=seconds, abs=1e-12), name
    for name in ("activation", "residue", "message"):
        assert getattr(found, name) == pytest.approx(getattr(graphs, name), rel=bytes_), name
    for op, of_stages in running_of(prices.stages(edges)).items():
        assert of_stages == pytest.approx(running[op], rel=bytes_), op


@pytest.mark.slow
@pytest.mark.parametrize("recompute", POLICIES)
def test_stages_of_whole_blocks(recompute: Policy) -> None:
    """Two layers of a GPT and its head: seconds, what waits and what is alive while a pass runs. "selective" chooses
    within a whole stage, which may recompute an embedding that a block alone keeps."""
    example, schedule = gpt(), build("1f1b", 3, 4)
    choices = Choices(recompute=recompute, hardware=zbcompile.Hardware.find("h100-sxm"))
    laid_out = lay_out_step(example.model, one_microbatch(example), example.loss, choices)
    prices = LinePrices(laid_out.canonical, laid_out.line, choices)
    edges = edges_named(laid_out.line, ["blocks.1", "blocks.2"], 3)
    program = compile_laid_out(example.model, one_microbatch(example), laid_out, schedule, choices, edges=edges)
    assert_priced(
        prices, program, edges, 0.15 if recompute == "selective" else 0.02, 0.02 if recompute == "off" else 0.12
    )


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("times", [2, 12])
def test_prices_of_a_byte_choose_alike_in_blocks_and_in_stages(times: float) -> None:
    """Within 1 % in seconds and in bytes, also of the running pass."""
    example, schedule = gpt(), build("1f1b", 3, 4)
    hardware = zbcompile.Hardware.find("h100-sxm")
    laid_out = lay_out_step(example.model, one_microbatch(example), example.loss, Choices(hardware=hardware))
    free = LinePrices(laid_out.canonical, laid_out.line, Choices(hardware=hardware))
    assert free.corners[0] == "hints"
    kept = [sum(price.kept for price in free.stages((), each)) for each in free.corners]
    assert kept == sorted(kept, reverse=True)
    policy = f"{times / hardware.bandwidth * 2**30 * 1e3:.2g}ms/GiB"
    prices = replace(free, choices=replace(free.choices, recompute=policy))
    edges = edges_named(laid_out.line, ["blocks.1", "blocks.2"], 3)
    program = compile_laid_out(example.model, one_microbatch(example), laid_out, schedule, prices.choices, edges=edges)
    assert_priced(prices, program, edges, 0.01, 0.01)


class Hinted(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.up, self.down, self.whole = nn.Linear(64, 256), nn.Linear(256, 64), whole

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)

    def forward(self, x: torch.Tensor) -> Any:
        if self.whole:
            return checkpoint(self.outer, x, use_reentrant=False)
        return x + checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_bytes_of_regions_that_the_model_marks(whole: bool) -> None:
    """To the byte, also of a stage that is cut inside a block; what is marked is remade through several blocks."""
    hidden = [Hinted(whole) for _ in range(4)]
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), *hidden, nn.Linear(64, 64)), torch.ones(8, 32, 64)
    example, hardware = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x), zbcompile.Hardware.find("h100-sxm")
    laid_out = lay_out_step(model, one_microbatch(example), example.loss, Choices(hardware=hardware))
    for policy in ("hints", "full"):
        choices = Choices(recompute=policy, hardware=hardware)
        program = compile_laid_out(model, one_microbatch(example), laid_out, build("1f1b", 3, 4), choices)
        found = LinePrices(laid_out.canonical, laid_out.line, choices).costs(
            [after + 1 for after in program.cuts.after]
        )
        graphs = predicted_costs(program)
        assert found.activation == graphs.activation
        assert found.backward == pytest.approx(graphs.backward, rel=0.01)


@pytest.mark.slow
def test_stages_that_are_cut_anywhere(compiled: CompiledExample) -> None:
    prices, edges = line_prices(compiled)
    assert_priced(prices, compiled.program, edges, seconds=0.03, bytes_=0.1)


@cache
def priced_anywhere(name: str) -> tuple[zbcompile.Example, LaidOut, dict[Policy, LinePrices], list[int]]:
    """A model's prices under three policies, and the places where a stage may begin: where only values with gradients
    cross, so not inside of a dropout."""
    example = gpt() if name == "gpt" else zbcompile.Example(*llama())
    laid_out = lay_out_step(example.model, one_microbatch(example), example.loss, Choices(hardware=HARDWARE))
    line = laid_out.line
    prices: dict[Policy, LinePrices] = {
        each: LinePrices(laid_out.canonical, line, Choices(recompute=each, hardware=HARDWARE))
        for each in ("off", "2ms/GiB", "full")
    }
    places = places_of(line)
    found = [at for at in places if all(value.meta["differentiable"] for value in line.live[at - 1])]
    return example, laid_out, prices, found


HARDWARE = zbcompile.Hardware.find("h100-sxm")
SHORT = 12  # operations; the B of fewer, of an embedding alone, may run nothing and hold what W reads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peaks"), [("gpt", 0.0), pytest.param("llama", 0.02, marks=pytest.mark.beyond_sample)]
)
@examples(6)
@given(st.data())
def test_prices_of_stages_that_are_cut_inside_of_blocks(name: str, peaks: float, data: st.DataObject) -> None:
    """Seconds, what waits and the peaks are those of the stages compiled for the same cuts: to the byte, but for the
    tables that each stage of a Llama computes for itself and prices count in each block."""
    example, laid_out, prices, places = priced_anywhere(name)
    first = data.draw(st.sampled_from([at for at in places if SHORT <= at < places[-1] - SHORT]))
    edges = [first, data.draw(st.sampled_from([at for at in places if at >= first + SHORT]))]
    policy = data.draw(st.sampled_from([*prices] if name == "gpt" else ["off", "2ms/GiB"]))
    order, step = build("1f1b", 3, 4), (example.model, one_microbatch(example))
    program = compile_laid_out(*step, laid_out, order, prices[policy].choices, edges=edges)
    for found, graphs in zip(prices[policy].stages(edges), prices_of(program), strict=True):
        assert (found.kept, found.residue) == (graphs.kept, graphs.residue)
        if name == "gpt":
            assert_same_price(found, graphs)
        assert found.running["F"] == pytest.approx(graphs.running["F"], rel=peaks, abs=0)
        assert found.running["B"] == pytest.approx(graphs.running["B"], rel=peaks, abs=0)


def assert_same_price(found: StagePrice, graphs: StagePrice) -> None:
    """Seconds but for rounding, bytes exactly."""
    assert (*found.seconds, found.again) == pytest.approx((*graphs.seconds, graphs.again), rel=1e-9)
    assert (found.kept, found.residue) == (graphs.kept, graphs.residue)
    assert {op: found.running[op] for op in "FB"} == {op: graphs.running[op] for op in "FB"}


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("edges", [(27, 91), (39, 68), (67, 98), (80, 99)])
def test_stages_that_remake_everything_and_begin_inside_of_a_block(edges: tuple[int, int]) -> None:
    """They keep what takes fewest bytes, which need not be what they receive, and what ends inside of a block does not
    remake what only the rest of it reads."""
    example, laid_out, prices, _ = priced_anywhere("gpt")
    order, step = build("1f1b", 3, 4), (example.model, one_microbatch(example))
    program = compile_laid_out(*step, laid_out, order, prices["full"].choices, edges=list(edges))
    for found, graphs in zip(prices["full"].stages(edges), prices_of(program), strict=True):
        assert_same_price(found, graphs)


@pytest.mark.slow
@pytest.mark.parametrize("edges", [(56, 69), (121, 180), (151, 164)])
def test_peaks_of_a_stage_that_is_cut_inside_of_attention(edges: tuple[int, int]) -> None:
    """It sends a part of a value, which is copied; its W reads what it received in several places; what only stages
    behind it leave for W or compute for themselves is not alive in it. F is above by the tables that each block counts:
    .6 % of these stages."""
    example, laid_out, prices, _ = priced_anywhere("llama")
    order, step = build("1f1b", 3, 4), (example.model, one_microbatch(example))
    program = compile_laid_out(*step, laid_out, order, prices["off"].choices, edges=list(edges))
    found, graphs = prices["off"].stages(edges)[1], prices_of(program)[1]
    assert found.running["B"] == graphs.running["B"]
    assert graphs.running["F"] <= found.running["F"] <= 1.006 * graphs.running["F"]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_messages_are_those_of_the_compiled_stages(name: str) -> None:
    example, schedule = zbcompile.Example(*unet()), build(name, 2 if name != "1f1b" else 4, 4)
    laid_out = lay_out_step(example.model, one_microbatch(example), example.loss)
    program = compile_laid_out(example.model, one_microbatch(example), laid_out, schedule, Choices())
    prices, edges = LinePrices(laid_out.canonical, laid_out.line, Choices()), [a + 1 for a in program.cuts.after]
    assert prices.costs(edges, placement=schedule.placement).message == predicted_costs(program).message
    held = sum(prices.always_held(schedule.placement, edges)) - sum(prices.resident(edges, schedule.placement))
    assert held == sum(
        2 * size * (schedule.placement.rank(source) != schedule.placement.rank(target))
        for (source, target), size in messages_of(program).items()
    )


def messages_of(program: Program) -> Counter[tuple[int, int]]:
    found = Counter[tuple[int, int]]()
    for stage in program.stages:
        for spec in stage.sends.values():
            found[stage.stage, stage.stage + spec.hops] += spec.bytes
    return found


def test_what_waits_for_w_in_a_chain_of_products() -> None:
    """The gradients of all products beside their inputs: more than waited for B."""
    model, x = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))), torch.ones(4, 8)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    compiled = compile_example(example, build("zb-h1", 2, 4), Choices())
    prices, edges = line_prices(compiled)
    estimate, graphs = prices.costs(edges), predicted_costs(compiled.program)
    assert (estimate.activation, estimate.residue) == (graphs.activation, graphs.residue)
    assert all(left > kept for kept, left in zip(estimate.activation, estimate.residue, strict=True))


@pytest.mark.slow
def test_what_a_rank_holds_at_most(compiled: CompiledExample) -> None:
    assert_close(*line_prices(compiled), compiled, rel=0.05)  # messages are counted until B


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("placement", ["linear", "v"])
def test_what_a_rank_holds_at_most_where_backwards_are_split(placement: str, recompute: Policy) -> None:
    model, x = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU()))), torch.ones(64, 32)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    order = search(Costs.uniform(4 if placement == "v" else 2), 2, 4, placements=[placement], moves=0).schedule
    compiled = compile_example(example, order, Choices(recompute=recompute))
    assert_close(*line_prices(compiled), compiled, rel=0.05)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_what_a_replica_holds_at_most(schedule: str) -> None:
    """Whatever replicas divide; a layer is large enough to travel by itself."""
    model, x = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(768, 768), nn.GELU()))), torch.ones(16, 768)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    compiled = compile_example(example, build(schedule, 2, 4), Choices())
    require_same_peaks(compiled, rel=0.01)


def test_what_is_frozen_is_divided_too() -> None:
    model, x = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4))), torch.ones(4, 768)
    for layer in list(model)[1::2]:
        layer.requires_grad_(False)
    example = zbcompile.Example(model, (x,), loss=nn.MSELoss(), target=x)
    require_same_peaks(compile_example(example, build("1f1b", 2, 4), Choices()), rel=0.01)


def require_same_peaks(compiled: CompiledExample, rel: float) -> None:
    """Of every rank, whatever replicas divide, by prices and by the graphs."""
    prices, edges = line_prices(compiled)
    program, tensors = compiled.program, dict(compiled.example.model.named_parameters())
    for zero in (0, 1):
        sharding = ReplicaSharding(2, zero)
        memory = rank_memories(program, predicted_costs(program), tensors, sharding)
        found = prices.for_replicas(sharding).most_held(program.schedule, edges)
        assert found == pytest.approx([each.peak for each in memory], rel=rel), sharding


def assert_close(prices: LinePrices, edges: list[int], compiled: CompiledExample, rel: float) -> None:
    """To what the graphs say of the fullest rank."""
    program, model = compiled.program, compiled.example.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    memory = rank_memories(program, predicted_costs(program), tensors)
    assert max(prices.most_held(program.schedule, edges)) == pytest.approx(max(r.peak for r in memory), rel=rel)


@pytest.mark.slow
def test_shares_of_operations_add_up(compiled: CompiledExample) -> None:
    prices, edges = line_prices(compiled)
    estimate = prices.costs(edges)
    whole = sum(map(sum, (estimate.forward, estimate.backward, estimate.weight)))
    assert whole == pytest.approx(sum(prices.loads))  # nominal speeds take no time to start a pass
    again = prices.costs(edges, recompute="full")
    twice = sum(estimate.backward) + sum(estimate.forward)
    assert sum(estimate.backward) < sum(again.backward) <= twice * 1.02
    assert all(a <= b for a, b in zip(again.activation, estimate.activation, strict=True))
    each = prices.costs(edges, recompute=("full", "off", "off", "off"))
    assert (each.backward[0], each.backward[1:]) == (again.backward[0], estimate.backward[1:])
    half = prices.costs(edges, rows=0.5)
    assert all(b / 2 <= a <= b for a, b in zip(half.forward, estimate.forward, strict=True))


@pytest.mark.slow
def test_cuts_for_the_step_are_no_worse_and_hold_the_limit(compiled: CompiledExample) -> None:
    prices, edges = line_prices(compiled)
    schedule = build("zb-v", 2, 4)
    start = layout_of(schedule, edges, prices.choices)
    moved = layout_for_makespan(prices, start, schedule)
    assert score_of(prices, moved, schedule, None) <= score_of(prices, start, schedule, None)
    least = 0.9 * score_of(prices, start, schedule, 0)[0]
    assert score_of(prices, layout_for_makespan(prices, start, schedule, least), schedule, least)[0] == 0


@pytest.mark.slow
def test_a_part_of_a_model_on_a_mesh() -> None:
    """Half of the products, the exchanges, and the bytes of one of two ranks, as in the graphs compiled for it; if
    everything is recomputed, no exchange is repeated, nor a product that only leads to one."""
    whole, schedule = layers(), build("zb-h1", 2, 4)
    laid_out = lay_out_step(whole.model, one_microbatch(whole), whole.loss)
    with group_without_peers(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        part, labels = layers(mesh), {mesh.get_group().group_name: "tp"}
        Parts(part.model, labels)
        step = part.model, one_microbatch(part)
        shared = lay_out_step(*step, part.loss, dimensions=labels)
        program = compile_laid_out(*step, shared, schedule, Choices())
        again = compile_laid_out(*step, shared, schedule, Choices(recompute="full"))
        costs = LinePrices(shared.canonical, shared.line, Choices())
        estimate = costs.costs([after + 1 for after in program.cuts.after])
        repeated = costs.costs([after + 1 for after in again.cuts.after], recompute="full")
    assert sum(shared.line.flops.values()) == sum(laid_out.line.flops.values()) / 2
    graphs = predicted_costs(program)
    assert estimate.activation == pytest.approx(graphs.activation, rel=0.02)
    assert estimate.forward == pytest.approx(graphs.forward, abs=1e-6)  # but elementwise operations
    assert estimate.backward == pytest.approx(graphs.backward, abs=1e-6)
    assert repeated.backward == pytest.approx(predicted_costs(again).backward, abs=2e-6)
    assert sum(estimate.forward) > 2e-4  # of two exchanges


@pytest.mark.slow
def test_equal_layers_on_a_mesh_are_priced_once() -> None:
    """Their parts are operators of other names."""
    with group_without_peers(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        part, labels = layers(mesh, count=8), {mesh.get_group().group_name: "tp"}
        Parts(part.model, labels)
        shared = lay_out_step(part.model, one_microbatch(part), part.loss, dimensions=labels)
        prices = LinePrices(shared.canonical, shared.line, Choices())
        equal = Counter(prices.loads)
        assert len(prices.made) <= 3  # the first, the last, and those between them
    assert max(equal.values()) >= 6


def test_exchanges_grow_with_the_rows() -> None:
    price = StagePrice((10e-3, 8e-3, 5e-3), 2e-3, (4e-3, 3e-3), 1e6, 1e5, {"F": 1e6}, 1e5)
    more = price.of_rows(4, operations=0)
    assert (more.seconds, more.again, more.exchange) == ((40e-3, 32e-3, 20e-3), 8e-3, (16e-3, 12e-3))
    fewer = price.of_rows(0.25, operations=10**6)  # all of it is what operations take to start
    assert fewer.seconds == price.seconds
    assert fewer.exchange == (1e-3, 0.75e-3)
