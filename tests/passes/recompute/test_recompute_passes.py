"""Recomputation keeps the bits, keeps no more bytes than it says, and never draws twice."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt import GPT, next_byte_loss
from tests.passes.test_bits import MICROBATCHES, batches_of, text
from tests.support.pass_graph_runner import (
    Batch,
    Runner,
    compile_step,
    differences,
    eager_step,
    output_bytes,
)
from zbcompile import schedules
from zbcompile.passes.compile_step import CompiledStep
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.roles import SAVED
from zbcompile.passes.recompute.recompute import RECOMPUTED
from zbcompile.passes.recompute.saved_values import (
    Candidates,
    fewest_bytes,
    least_cost_within,
    lowest_cost,
)


def check(
    model: nn.Module,
    batches: list[Batch],
    loss: Any,
    recompute: Any,
    oracle: nn.Module | None = None,
) -> CompiledStep:
    built = schedules.build("zb-h1", ranks=2, microbatches=MICROBATCHES)
    compiled = compile_step(
        model, *batches[0], loss, ranks_of=[0, 1], exact=True, recompute=recompute
    )
    result = Runner(compiled, model, batches, seed=5).run(built.orders)
    assert not differences(result, eager_step(oracle or model, batches, loss, seed=5))
    return compiled


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=32, length=16, dropout=0.1, tied=False)


def saved_bytes(compiled: CompiledStep) -> list[int]:
    """Returns the bytes that wait between F and B of each stage."""
    return [
        output_bytes(graph, SAVED) for label, graph in compiled.passes.items() if label.kind == "F"
    ]


def operations_of(compiled: CompiledStep) -> list[str]:
    return [
        str(node.target)
        for graph in compiled.passes.values()
        for node in graph.calls
        if node.meta.get(RECOMPUTED)
    ]


@pytest.mark.slow
def test_policies_keep_fewer_and_fewer_bytes() -> None:
    batches = batches_of(text)
    policies: Sequence[Any] = ("off", 0.7, "selective", "full")
    compiled = {p: check(gpt(), batches, next_byte_loss, p) for p in policies}
    is_kept = [sum(saved_bytes(compiled[p])) for p in policies]
    assert is_kept == sorted(is_kept, reverse=True)
    assert len(set(is_kept)) == 4
    assert not operations_of(compiled["off"])
    assert "aten.mm.default" not in operations_of(compiled["selective"])
    assert not any("addmm" in name for name in operations_of(compiled["selective"]))
    for one in compiled.values():
        for label, graph in one.passes.items():
            assert label.kind == "F" or not any(map(is_random, graph.calls))


@pytest.mark.slow
def test_each_stage_has_its_own_policy_and_bytes_are_a_limit() -> None:
    batches = batches_of(text)
    off = saved_bytes(check(gpt(), batches, next_byte_loss, "off"))
    mixed = saved_bytes(check(gpt(), batches, next_byte_loss, ["off", off[1] * 2 // 3]))
    assert mixed[0] == off[0]
    assert off[1] // 2 < mixed[1] <= off[1] * 2 // 3
    with pytest.raises(CompileError, match="stage 0 keeps at least"):
        check(gpt(), batches, next_byte_loss, [100, "off"])


class Checkpointed(nn.Module):
    """Two of four blocks are in checkpointed regions; batch norm writes buffers in one of them."""

    def __init__(self, regions: bool = True) -> None:
        super().__init__()
        self.regions = regions
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = (
                checkpoint(block, x, use_reentrant=False)
                if index % 2 and self.regions
                else block(x)
            )
        return x


def rows() -> Batch:
    return (torch.randn(8, 8),), {}, torch.randn(8, 8)


@pytest.mark.parametrize("policy", ["hints", "full"])
def test_hints_and_buffers(policy: str) -> None:
    """Eager's checkpoint updates a batch norm's statistics twice; the oracle has no regions."""
    torch.manual_seed(0)
    model, oracle = Checkpointed(), Checkpointed(regions=False)
    oracle.load_state_dict(model.state_dict())
    compiled = check(model, batches_of(rows), nn.functional.mse_loss, policy, oracle)
    assert any("gelu" in name for name in operations_of(compiled))


def test_a_budget_is_met_at_the_lowest_cost() -> None:
    """Three layers of 10 bytes behind an input of 1 byte, with a kept output each."""
    inputs = {"x": (), "a": ("x",), "b": ("a",), "c": ("b",)}
    candidates = Candidates(
        backward_inputs=frozenset(inputs),
        inputs=inputs,
        bytes={"x": 1, "a": 10, "b": 10, "c": 10},
        cost={"a": 5, "b": 5, "c": 5},
    )
    costs = {}
    for budget in (31, 30, 21, 20, 11, 1):
        saved = least_cost_within(candidates, budget)
        assert saved is not None
        costs[budget] = saved.cost
        assert saved.bytes <= budget
    assert costs == {31: 0, 30: 5, 21: 5, 20: 10, 11: 10, 1: 15}
    assert least_cost_within(candidates, 0) is None


def random_candidates(seed: int) -> Candidates:
    """Ten values, each computed from up to two earlier ones; some are not kept, others not made."""
    rng, values = random.Random(seed), range(10)
    unkept = {value for value in values if rng.random() < 0.2}
    return Candidates(
        backward_inputs=frozenset(rng.sample(values, 5)),
        inputs={v: tuple(rng.sample(range(v), min(v, rng.randint(0, 2)))) for v in values},
        bytes={value: rng.randint(1, 20) for value in values if value not in unkept},
        cost={v: rng.randint(0, 20) for v in values if v in unkept or rng.random() < 0.8},
    )


def every_choice(candidates: Candidates) -> Iterator[tuple[int, int]]:
    """Bytes and cost of every set of kept values from which the backward's can be made."""
    for flags in itertools.product((False, True), repeat=len(candidates.bytes)):
        saved = {value for value, flag in zip(candidates.bytes, flags, strict=True) if flag}
        remade: set[Any] = set()
        missing = [value for value in candidates.backward_inputs if value not in saved]
        while missing and missing[-1] in candidates.cost:
            value = missing.pop()
            new = () if value in remade else candidates.inputs[value]
            remade.add(value)
            missing += [argument for argument in new if argument not in saved]
        if not missing:
            yield (
                sum(candidates.bytes[value] for value in saved),
                sum(candidates.cost[value] for value in remade),
            )


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed: int) -> None:
    """Within a budget: between the best choice and the best corner of the hull."""
    candidates = random_candidates(seed)
    choices = set(every_choice(candidates))
    few, cheap = fewest_bytes(candidates), lowest_cost(candidates)
    assert (few.bytes, few.cost) == min(choices)
    assert (cheap.cost, cheap.bytes) == min((cost, size) for size, cost in choices)
    weights = [(a, b) for a in range(1, 40) for b in range(1, 40)]
    corners = {min(choices, key=lambda c, w=w: (w[0] * c[0] + w[1] * c[1], c)) for w in weights}
    for budget in range(few.bytes, cheap.bytes + 1):
        actual = least_cost_within(candidates, budget)
        assert actual is not None
        assert (actual.bytes, actual.cost) in choices
        assert actual.bytes <= budget
        assert actual.cost >= min(cost for size, cost in choices if size <= budget)
        assert actual.cost <= min(c for s, c in {*corners, min(choices)} if s <= budget)
    assert least_cost_within(candidates, few.bytes - 1) is None
