"""The output layer of a step is found, with what its loss reads of the logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.vocabulary.output_layer import (
    LABEL_LOGIT,
    LOG_SUM_EXP,
    LOGIT_SUM,
    NotShardableError,
    OutputLayer,
    find_output_layers,
)

WORDS, WIDTH = 13, 8


class Model(nn.Module):
    """An embedding, a layer and an output layer in one of several forms."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.form = form
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=form in ("bias", "autocast"))
        if form == "tied":
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        if self.form == "matmul":
            return hidden @ self.embedding.weight.T
        with torch.autocast("cpu", torch.bfloat16, enabled=self.form == "autocast"):
            logits = self.output(hidden)
        if self.form == "soft cap":
            return torch.tanh(logits / 30.0) * 30.0
        return logits / 4.0 if self.form == "scaled" else logits


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), **options)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), target[:, 1:].reshape(-1))


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, label_smoothing=0.1)


def nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), target.flatten())


def gathered(logits: Tensor, target: Tensor) -> Tensor:
    return -F.log_softmax(logits, -1).gather(-1, target[..., None]).mean()


def without_softmax(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.logsumexp(-1) - logits.gather(-1, target[..., None]).squeeze(-1)).mean()


def unreduced(logits: Tensor, target: Tensor) -> Tensor:
    return (cross_entropy(logits, target, reduction="none") * torch.ones(10)).sum() / 10


def output_layers(
    model: nn.Module, loss: Callable[..., Any] = cross_entropy, **options: Any
) -> list[OutputLayer]:
    batch = torch.randint(WORDS, (2, 5)), torch.randint(WORDS, (2, 5))
    exported = ExportOptions(**options)
    step = export_training_step(model, (batch[0],), {}, batch[1], loss, exported)
    layers = find_output_layers(step)
    assert all(layer.weight in step.parameters.values() for layer in layers)
    return layers


@pytest.mark.parametrize(
    ("form", "elementwise"),
    [
        ("plain", []),
        ("tied", []),
        ("matmul", []),
        ("bias", []),
        ("scaled", ["div"]),
        ("soft cap", ["div", "tanh", "mul"]),
        ("autocast", ["_to_copy"]),
    ],
)
def test_forms_of_the_layer(form: str, elementwise: list[str]) -> None:
    [layer] = output_layers(Model(form))
    [(names, logits)] = layer.statistics.values()
    assert names == (LABEL_LOGIT, LOG_SUM_EXP)
    assert [operator_name(node) for node in logits.elementwise] == elementwise
    assert (layer.bias is not None) == (form in ("bias", "autocast"))
    assert layer.hidden.meta["val"].shape == (10, WIDTH)


@pytest.mark.parametrize(
    ("loss", "statistics"),
    [
        (shifted, {LABEL_LOGIT, LOG_SUM_EXP}),
        (z_loss, {LABEL_LOGIT, LOG_SUM_EXP}),
        (smoothed, {LABEL_LOGIT, LOG_SUM_EXP, LOGIT_SUM}),
        (nll, {LABEL_LOGIT, LOG_SUM_EXP}),
        (gathered, {LABEL_LOGIT, LOG_SUM_EXP}),
        (without_softmax, {LABEL_LOGIT, LOG_SUM_EXP}),
        (unreduced, {LABEL_LOGIT, LOG_SUM_EXP}),
    ],
)
def test_statistics_of_a_loss(loss: Callable[..., Tensor], statistics: set[str]) -> None:
    [layer] = output_layers(Model(), loss)
    assert {name for names, _ in layer.statistics.values() for name in names} == statistics
    assert len(layer.labels) == 1


def test_a_loss_in_chunks_has_several_products() -> None:
    class Chunks(Model):
        def forward(self, tokens: Tensor) -> list[Tensor]:
            hidden = torch.tanh(self.layer(self.embedding(tokens)))
            return [self.output(chunk) for chunk in hidden.unbind(0)]

    def loss(chunks: list[Tensor], target: Tensor) -> Tensor:
        return sum(map(F.cross_entropy, chunks, target.unbind(0)), torch.zeros(()))

    assert len(output_layers(Chunks(), loss)) == 2


def test_a_router_is_no_output_layer() -> None:
    class Routed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.layer(self.embedding(tokens))
            weights = F.softmax(self.router(hidden), -1).topk(2).values
            return self.output(hidden * weights.sum(-1, keepdim=True))

    [layer] = output_layers(Routed())
    assert "output" in layer.weight.name


def test_a_step_without_a_softmax_has_none() -> None:
    with pytest.raises(NotShardableError, match="no softmax normalizes the product"):
        output_layers(Model(), lambda logits, target: logits.square().mean())


def class_weights(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, weight=torch.ones(WORDS))


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    return (F.log_softmax(logits, -1) * F.softmax(logits, -1)).sum()


def accuracy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean()


def masked_words(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits + torch.zeros(WORDS), target)


def concatenated(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(torch.cat([logits, logits], 1), torch.cat([target, target], 1)) + nll(
        logits, target
    )


def total(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + logits.sum((1, 2)).mean() + logits.sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (concatenated, "cat of the logits"),
        (total, "sum of the logits"),
        (class_weights, "nll_loss_forward of the logits"),
        (entropy, "mul of the logits|_softmax of the logits"),
        (masked_words, "add of the logits"),
    ],
)
def test_other_uses_are_named_with_their_line(loss: Callable[..., Any], reason: str) -> None:
    with pytest.raises(NotShardableError, match=rf"has ({reason}) \(\S*{__name__[-12:]}\.py:\d+\)"):
        output_layers(Model(), loss)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("masked_fill", lambda logits: logits.masked_fill(torch.arange(WORDS) < 2, -1e9)),
        ("where", lambda logits: torch.where(torch.arange(WORDS) > 1, logits, -1e9)),
        ("flip", lambda logits: logits.flip(-1)),
    ],
)
def test_operations_before_the_softmax_are_named(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    reason = rf"{name} of the logits before their softmax \(\S*\.py:\d+\). .* vocab=\"off\""
    with pytest.raises(NotShardableError, match=reason):
        output_layers(Model(), lambda logits, target: cross_entropy(change(logits), target))


def test_logits_are_no_output() -> None:
    with pytest.raises(NotShardableError, match="an output of the size of the vocabulary"):
        output_layers(Model(), returns="outputs")


def test_metrics_count_if_they_are_returned() -> None:
    assert output_layers(Model(), accuracy)
    with pytest.raises(NotShardableError, match="has argmax of the logits"):
        output_layers(Model(), accuracy, returns="metrics")
