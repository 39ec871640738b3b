"""How inputs are cut into microbatches."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import WIDTH
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.batches.batch import flatten_batch
from zbcompile.errors import PipelineError

CUTS: list[tuple[dict[str, tuple[int, ...]], dict[str, Any], dict[str, int | None] | None]] = [
    ({"x": (4, 2), "y": (4,)}, {}, {"x": 0, "y": 0}),
    ({"x": (4, 2), "y": ()}, {}, {"x": 0, "y": None}),
    ({"x": (4, 2), "y": (1, 4)}, {}, {"x": 0, "y": None}),  # one row is for all samples
    ({"x": (1,), "y": (1, 4)}, {}, {"x": 0, "y": 0}),
    ({"x": (4, 2), "y": (3,)}, {}, None),
    ({"x": (4, 2), "y": (3,)}, {"y": False}, {"x": 0, "y": None}),
    ({"x": (4, 2), "y": (6, 4)}, {"y": True}, {"x": 0, "y": 0}),
    ({"x": (4, 2), "y": (1, 4)}, {"y": 1}, {"x": 0, "y": 1}),
    ({"x": (4, 2), "y": (3, 2, 4)}, {"y": -1}, {"x": 0, "y": 2}),
    ({"x": (4, 2), "y": (4, 4)}, {}, None),  # a mask of positions, or of samples?
    ({"x": (4, 2), "y": (4, 4)}, {"y": False}, {"x": 0, "y": None}),
    ({"x": (4, 4), "y": (4, 4)}, {}, {"x": 0, "y": 0}),
    ({"x": (4, 2), "target": (4, 4)}, {}, {"x": 0, "target": 0}),
    ({"x": (4, 2)}, {"x": 2}, None),
    ({"x": (4, 2)}, {"x": False}, None),
    ({"x": (0, 2)}, {}, None),
    ({"x": ()}, {}, None),
]


@pytest.mark.parametrize(("shapes", "split", "cuts"), CUTS, ids=str)
def test_cuts_follow_the_rule(shapes: Any, split: Any, cuts: dict[str, int | None] | None) -> None:
    """Refused, or cut so that the microbatches make up the batch."""
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    leaves, target = list(inputs.values()), inputs.pop("target", None)
    if cuts is None:
        with pytest.raises(PipelineError):
            flatten_batch((), inputs, target, split)
        return
    batch = flatten_batch((), inputs, target, split)
    assert batch.cuts[: len(leaves)] == tuple(cuts.values())
    count = 2 if batch.divides_into(2) else 1
    parts = [batch.microbatch(i, count) for i in range(count)]
    for i, (leaf, dim) in enumerate(zip(leaves, cuts.values(), strict=True)):
        pieces = [part.leaves[i] for part in parts]
        if dim is None:
            assert all(piece is leaf for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces, dim), leaf)


class SequenceFirst(nn.Linear):
    """Takes [length, batch, width], as `nn.Transformer` does by default, and a prompt with rows of
    its own."""

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        pairs = prompt.view(x.shape[1], 2, -1).sum(1)
        for _ in range(2):
            x = torch.tanh(super().forward(x)) + pairs
        return x


@pytest.mark.slow
def test_other_dimensions_and_lengths() -> None:
    """A batch along dimension 1 next to one with twice its rows: eager's bits, in `eval` too, which
    has no target though `split=` names it."""
    model = SequenceFirst(WIDTH, WIDTH)
    eager = copy.deepcopy(model)
    x, prompt, goal = torch.randn(3, 8, WIDTH), torch.randn(16, WIDTH), torch.randn(3, 8, WIDTH)
    options: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2, "microbatches": 4, "exact": True}
    split = {"args[0]": 1, "prompt": True, "target": 1}
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, split=split, **options)
    loss, total = pipe.step(x, prompt=prompt, target=goal), torch.zeros(())
    for part, local, target in zip(x.chunk(4, 1), prompt.chunk(4), goal.chunk(4, 1), strict=True):
        scaled = F.mse_loss(eager(part, local), target) / 4
        scaled.backward()
        total = total + scaled.detach()
    assert torch.equal(loss, total)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    assert torch.equal(pipe.eval(x, prompt=prompt), eager(x, prompt))
