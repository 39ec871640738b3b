"""Answers in docs/faq.md, and situations that users of other pipelines reported."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.training import gradients_of

pytestmark = pytest.mark.slow

TOKENS, WIDTH = 30, 16


def pipeline(model: nn.Module, loss: Any = None, **options: Any) -> zbcompile.Pipeline:
    options = {"schedule": "zb-h1", "microbatches": 4, "ranks": 2, **options}
    return zbcompile.pipeline(model, loss=loss, **options)  # type: ignore[no-any-return]


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, loss: Any, parts: Any) -> None:
    """Eager's mean loss over the microbatches."""
    for args, _, target in parts:
        (loss(theirs(*args), target) / len(parts)).backward()
    gradients = {k.replace("_orig_mod.", ""): grad for k, grad in gradients_of(ours).items()}
    torch.testing.assert_close(gradients, gradients_of(theirs), rtol=1e-4, atol=1e-6)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PackedDocuments(nn.Module):
    """Attention within documents, which begin at `offsets` of the flattened rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(tokens.numel())
        document = (place[:, None] >= offsets[1:]).sum(1)
        mask = (document[:, None] == document) & (place[:, None] >= place)
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            q, k, v = layer(x)[None, None].chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, 0]
        return self.head(x).unflatten(0, tokens.shape)


def test_offsets_of_each_microbatch() -> None:
    torch.manual_seed(0)
    model, tokens, labels = PackedDocuments(), *torch.randint(TOKENS, (2, 8, 5))
    offsets = [torch.tensor([0, middle, 10]) for middle in (3, 4, 6, 6)]
    pairs = zip(tokens.chunk(4), offsets, labels.chunk(4), strict=True)
    parts: Any = [((part, places), {}, target) for part, places, target in pairs]
    plain = copy.deepcopy(model)
    with pytest.raises(zbcompile.PipelineError, match=r"microbatches=\["):
        pipeline(model, token_loss).step(tokens, torch.arange(0, 45, 5), target=labels)
    pipeline(model, token_loss).step(microbatches=parts)
    assert_same_gradients(model, plain, token_loss, parts)


@torch.compile(backend="eager")
def quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x) * x


class Activated(nn.Module):
    """A layer whose activation is a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + quick_gelu(self.linear(x))


def parts_of(x: Tensor, y: Tensor) -> Any:
    return [((a,), {}, b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]


def test_blocks_that_are_compiled_in_place() -> None:
    """Also a compiled function, wrapped blocks, and a model that is compiled as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Activated() for _ in range(4)))
    plain, (x, y) = copy.deepcopy(model), torch.randn(2, 8, WIDTH)
    model[0].compile(backend="eager")
    model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
    whole: Any = torch.compile(model, backend="eager")
    pipeline(whole, F.mse_loss).step(x, target=y)
    assert_same_gradients(model, plain, F.mse_loss, parts_of(x, y))


def network(outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, outputs))


def test_a_heavy_output_layer_is_named_and_can_be_sharded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    inputs, labels = torch.randn(8, WIDTH), torch.randint(20_000, (8,))
    loss = pipeline(network(20_000), F.cross_entropy).step(inputs, target=labels)
    assert "vocab=1" in capfd.readouterr().out
    with_shards = pipeline(network(20_000), F.cross_entropy, vocab=1)
    torch.testing.assert_close(with_shards.step(inputs, target=labels), loss)
    assert "vocab=1" not in capfd.readouterr().out


@pytest.mark.beyond_sample
def test_a_teacher_beside_a_student() -> None:
    """The teacher is a pipeline that evaluates; its outputs are targets of the student's step."""
    teacher, student, inputs = network().requires_grad_(False), network(), torch.randn(8, WIDTH)
    teacher[-1].weight.mul_(2)  # type: ignore[operator, union-attr]

    def distillation(output: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(output.log_softmax(-1), target.softmax(-1), reduction="batchmean")

    logits = pipeline(teacher).eval(inputs)
    pipeline(student, distillation).step(inputs, target=logits)
    parts = parts_of(inputs, teacher(inputs))
    assert_same_gradients(student, network(), distillation, parts)
