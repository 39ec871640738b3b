"""How inputs are cut into microbatches, against the rule in its plainest form."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import WIDTH
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.batches.batch import flatten_batch
from zbcompile.errors import PipelineError

BATCH, COUNT = 4, 2
SHAPES = [
    (),
    (1,),
    (1, 4),
    (4,),
    (4, 2),
    (4, 3, 2),
    (4, 4),
    (4, 4, 2),
    (2, 4),
    (6, 4),
    (3,),
    (0, 2),
]
tensors = st.builds(
    torch.zeros, st.sampled_from(SHAPES), dtype=st.sampled_from([torch.float32, torch.int64])
)
answers = st.sampled_from([False, True, 0, 1, -1])
numbers = st.sampled_from([3, 0.5, "mean", None])
rows = st.builds(torch.zeros, st.sampled_from([s for s in SHAPES if s[:1] in ((), (1,), (BATCH,))]))


def trees(tensors: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A leaf, a list or a mapping of leaves."""
    some = st.lists(tensors, max_size=2)
    return tensors | some | st.dictionaries(st.sampled_from("ab"), tensors, max_size=2)


def inputs(tensors: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The args, kwargs and target of a step."""
    args = st.lists(trees(tensors), max_size=3).map(tuple)
    kwargs = st.dictionaries(st.sampled_from(["mask", "scale"]), trees(tensors), max_size=2)
    return st.tuples(args, kwargs, trees(tensors) | st.none())


def leaves_of(tree: Any, path: str) -> dict[str, Any]:
    """Every leaf by its path."""
    if isinstance(tree, dict):
        parts = [leaves_of(tree[key], f"{path}[{key!r}]") for key in tree]
    elif isinstance(tree, list | tuple):
        parts = [leaves_of(part, f"{path}[{i}]") for i, part in enumerate(tree)]
    else:
        return {path: tree}
    return {name: leaf for part in parts for name, leaf in part.items()}


def rule(tensors: dict[str, Any], split: dict[str, Any]) -> dict[str, int | None] | None:
    """The dimension to cut of every leaf; None if this batch is refused."""
    cuts: dict[str, int | None] = {}
    for path, answer in split.items():
        leaf = tensors[path]
        if answer is False or leaf is None:
            cuts[path] = None
            continue
        dims = leaf.ndim if isinstance(leaf, Tensor) else 0
        dim = 0 if answer is True else answer
        if dim not in range(-dims, dims):
            return None
        cuts[path] = dim if dim >= 0 else dim + dims
    by_name = any(dim is not None for dim in cuts.values())
    free = {
        p: leaf
        for p, leaf in tensors.items()
        if p not in split and isinstance(leaf, Tensor) and leaf.ndim > 0
    }
    long = {p: leaf for p, leaf in free.items() if len(leaf) != 1}
    batch = long if long or by_name else free
    if len({len(leaf) for leaf in batch.values()}) > 1:
        return None
    square = {p for p, leaf in batch.items() if leaf.ndim > 1 and leaf.shape[0] == leaf.shape[1]}
    first = next(iter(batch), "")
    for path in square:
        equal = batch[path].shape == batch[first].shape and batch[path].dtype == batch[first].dtype
        if not path.startswith("target") and not equal:
            return None
    cuts = {path: cuts.get(path, 0 if path in batch else None) for path in tensors}
    lengths = [tensors[path].shape[dim] for path, dim in cuts.items() if dim is not None]
    return cuts if lengths and all(lengths) else None


class SequenceFirst(nn.Module):
    """Takes [length, batch, width], as `nn.Transformer` does by default, and a prompt with rows of
    its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        pairs = prompt.view(x.shape[1], 2, -1).sum(1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + pairs
        return x


def made() -> SequenceFirst:
    torch.manual_seed(0)
    return SequenceFirst()


@pytest.mark.slow
def test_other_dimensions_and_lengths() -> None:
    """A batch along dimension 1 next to one with twice its rows: eager's bits, in `eval` too."""
    model, eager = made(), made()
    x, prompt, goal = torch.randn(3, 8, WIDTH), torch.randn(16, WIDTH), torch.randn(3, 8, WIDTH)
    split = {"args[0]": 1, "prompt": True, "target": 1}
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", ranks=2, microbatches=4, loss=F.mse_loss, exact=True, split=split
    )
    loss = pipe.step(x, prompt=prompt, target=goal)
    total = torch.zeros(())
    for part, local, target in zip(x.chunk(4, 1), prompt.chunk(4), goal.chunk(4, 1), strict=True):
        scaled = F.mse_loss(eager(part, local), target) / 4
        scaled.backward()
        total = total + scaled.detach()
    assert torch.equal(loss, total)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    assert torch.equal(pipe.eval(x, prompt=prompt), eager(x, prompt))


@pytest.mark.slow
def test_an_evaluation_lacks_labels() -> None:
    """`split=` may name inputs that a step alone has."""
    pipe = zbcompile.pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
        schedule="1f1b",
        ranks=2,
        microbatches=4,
        loss=F.mse_loss,
        split={"target": True},
    )
    pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))
    assert pipe.eval(torch.randn(8, WIDTH)).shape == (8, WIDTH)


@pytest.mark.slow
@given(st.data(), st.booleans())
def test_cuts_follow_the_rule(data: Any, agreeing: bool) -> None:
    """Any tree of inputs, any `split=`: refused as the rule says, or cut so that its microbatches
    make it up."""
    args, kwargs, target = data.draw(inputs(numbers | (rows if agreeing else tensors)))
    leaves = {
        **leaves_of(args, "args"),
        **leaves_of(kwargs, "kwargs"),
        **leaves_of(target, "target"),
    }
    some = st.dictionaries(st.sampled_from(sorted(leaves) or [""]), answers, max_size=2)
    split = data.draw(some) if leaves else {}
    expected = rule(leaves, split)
    if expected is None:
        with pytest.raises(PipelineError):
            flatten_batch(args, kwargs, target, split)
        return
    batch = flatten_batch(args, kwargs, target, split)
    assert dict(zip(batch.paths, batch.cuts, strict=True)) == expected
    count = COUNT if all(n % COUNT == 0 for n in batch.lengths.values()) else 1
    assert batch.divides_into(count)
    parts = [batch.microbatch(i, count) for i in range(count)]
    for i, (path, leaf) in enumerate(leaves.items()):
        dim, pieces = expected[path], [part.leaves[i] for part in parts]
        if dim is None:
            assert all(piece is leaf for piece in pieces)
        else:
            assert len({piece.shape for piece in pieces}) == 1
            assert torch.equal(torch.cat(pieces, dim), leaf)
