"""Why the oracle is what it is: the shortcuts that look the same have other bits."""

import torch

import zbcompile
from tests.support.oracle import PROBLEMS, eager_step, eager_step_in_order
from tests.support.training import gradients_of

M = 5


def gradients(problem: str, divide_afterwards: bool) -> dict[str, torch.Tensor]:
    chosen = PROBLEMS[problem]
    model, batch = chosen.model(), chosen.batches(1, 2 * M)[0]
    if not divide_afterwards:
        eager_step(model, chosen.loss, batch, M, 0)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for part in batch.parts(M):
        chosen.loss(model(*part.args), part.target).backward()  # type: ignore[misc]
    return {name: p.grad / M for name, p in model.named_parameters() if p.grad is not None}


def test_dividing_gradients_afterwards_gives_other_bits() -> None:
    ours, theirs = gradients("gpt", False), gradients("gpt", True)
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_order_of_microbatches_gives_other_bits() -> None:
    chosen = PROBLEMS["mlp"]
    batch = chosen.batches(1, 2 * M)[0]
    found = []
    for order in (tuple(range(M)), tuple(reversed(range(M)))):
        model = chosen.model()
        eager_step_in_order(
            model, chosen.loss, batch, 0, {name: order for name, _ in model.named_parameters()}
        )
        found.append(gradients_of(model))
    model = chosen.model()
    eager_step(model, chosen.loss, batch, M, 0)
    assert all(torch.equal(found[0][name], p.grad) for name, p in model.named_parameters())  # type: ignore[arg-type]
    assert not all(torch.equal(found[0][name], found[1][name]) for name in found[0])  # type: ignore[arg-type]


def test_seeds_differ_by_step_microbatch_and_seed() -> None:
    seeds = {
        zbcompile.microbatch_seed(s, m, k) for s in range(20) for m in range(20) for k in range(5)
    }
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
