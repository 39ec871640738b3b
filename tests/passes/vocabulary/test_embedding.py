"""The sharded lookup against torch's embedding; which embeddings are sharded and which are not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbcompile.passes.capture.export import capture
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.pass_list.passes_in_order import canonicalise
from zbcompile.passes.vocabulary.embedding import VocabularyLookup, find_lookup, look_up, spread
from zbcompile.passes.vocabulary.output_layer import VocabularyHead, find_head
from zbcompile.passes.vocabulary.shard import Shard
from zbcompile.passes.vocabulary.shard_program import even_bounds, levelled_bounds

WORDS, WIDTH = 11, 8


class Words(nn.Module):
    """Words in, logits out: tied, with two lookups, or with options of the embedding; positions have their own."""

    def __init__(self, tied: bool = False, twice: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, **options)
        self.position = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.twice = twice
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) + self.position.weight[: words.shape[1]]
        hidden = hidden + self.embedding(words.flip(1)) if self.twice else hidden
        return self.head(torch.tanh(hidden))  # type: ignore[no-any-return]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def found_in(model: nn.Module) -> tuple[VocabularyHead, VocabularyLookup | None]:
    words = torch.zeros(3, 5, dtype=torch.long)
    canonical = canonicalise(capture(model, (words,), {}, words, loss_of))
    head = find_head(canonical)
    return head, find_lookup(canonical, head)


@pytest.mark.parametrize("padding", [None, 3])
def test_shards_look_up_what_the_whole_table_has(padding: int | None) -> None:
    """Rows are equal bit by bit, as are their gradients but for the order in which equal words are added."""
    model = Words(padding_idx=padding)
    head, lookup = found_in(model)
    assert lookup is not None
    words = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
    values = dict.fromkeys(lookup.data, words)
    table = model.embedding.weight.detach().clone().requires_grad_()
    whole = F.embedding(words, table, padding)
    gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad(whole, table, gradient)
    for p in (1, 2, 3, 8, 16):
        bounds = even_bounds(WORDS, p)
        shards = [Shard(head, rank, bounds, 1, True, WORDS) for rank in range(p)]
        parts = [look_up(s, lookup, table.detach()[a:b], values) for s, (a, b) in zip(shards, bounds, strict=True)]
        assert torch.equal(torch.stack(parts).sum(0), whole)
        rows = torch.cat([spread(shard, lookup, gradient, values) for shard in shards])
        assert torch.allclose(rows, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_of_the_words_is_found(tied: bool) -> None:
    head, lookup = found_in(Words(tied=tied))
    assert lookup is not None
    assert lookup.weight == "embedding.weight"
    assert (head.weight == lookup.weight) == tied
    assert lookup.data == (Slot("input", "args[0]"),)


@pytest.mark.parametrize("options", [{"twice": True}, {"scale_grad_by_freq": True}], ids=str)
def test_an_embedding_that_cannot_be_sharded_stays(options: dict[str, Any]) -> None:
    """Looked up in two places, or with gradients that count the words of a whole batch."""
    assert found_in(Words(**options))[1] is None


def test_an_embedding_that_is_not_trained_stays() -> None:
    model = Words()
    model.embedding.weight.requires_grad_(False)
    assert found_in(model)[1] is None


@pytest.mark.parametrize(
    ("size", "loads", "parts"),
    [(10, [0, 0], [5, 5]), (10, [4, 0], [3, 7]), (3, [5, 1], [0, 3]), (12, [0, 100, 0], [6, 0, 6]), (7, [3], [7])],
)
def test_words_level_what_ranks_have_to_do(size: int, loads: list[float], parts: list[int]) -> None:
    bounds = levelled_bounds(size, loads)
    assert [high - low for low, high in bounds] == parts
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
