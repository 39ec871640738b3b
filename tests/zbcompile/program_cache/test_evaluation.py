"""Evaluation equals the model's own output in eval mode, on every rank and at any time: before the
first step, between steps, after changes. It leaves nothing behind in what trains."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.live_storages import Alive, forward_bytes
from tests.support.oracle import WIDTH, Batch, eager_step
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

SIZES = (7, 1)  # what microbatches do not divide, one sample


class Net(nn.Module):
    """Dropout, running statistics, and an output of several kinds of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        x = self.norm(x)
        return {"rows": x, "pair": (x.mean(1), x.amax(1)), "no": None, "half": x.shape[0] / 2}


def values(name: str, tensor: Tensor) -> None:
    tensor.copy_(0.3 * torch.arange(tensor.numel()).sin().square().view(tensor.shape))


def net(meta: bool = False) -> Net:
    with torch.device("meta" if meta else "cpu"), torch.no_grad():
        model = Net()
        for name, tensor in model.state_dict().items():
            values(name, tensor if not meta else torch.empty(tensor.shape))
    return model


def rows(size: int) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size))


def loss_of(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.mse_loss(output["rows"], target)


def made(model: nn.Module, loss: Any = loss_of, **options: Any) -> zbcompile.Pipeline:
    options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 4, **options}
    return zbcompile.pipeline(model, loss=loss, **options)


@pytest.fixture(scope="module")
def pipe() -> zbcompile.Pipeline:
    return made(net()).compile(rows(8), target=rows(8))


def assert_like(ours: Any, theirs: Any) -> None:
    """The last bit of a row may depend on how many rows its GEMM has."""
    torch.testing.assert_close(ours["rows"], theirs["rows"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours["pair"], theirs["pair"], rtol=1e-6, atol=1e-6)
    rest = [{k: v for k, v in x.items() if k not in ("rows", "pair")} for x in (ours, theirs)]
    assert rest[0] == rest[1]


def evaluated(model: nn.Module, x: Tensor, microbatches: int = 1) -> Any:
    with torch.no_grad():
        outputs = [model.eval()(part) for part in x.chunk(microbatches)]
    model.train()
    return outputs[0] if microbatches == 1 else torch.cat([item["rows"] for item in outputs])


def life(meta: bool) -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
    """Evaluate, also what is no batch of a step; load other weights; train, with an evaluation in
    between; evaluate. Results, the last state, and outputs for batches of several sizes."""
    pipe = made(net(meta), exact=True, init=values if meta else None)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    results = [pipe.eval(rows(3))["rows"]]
    assert any(p.is_meta for p in pipe.model.parameters()) == (meta and dist.is_initialized())
    pipe.load_state_dict({key: value * 2 for key, value in pipe.state_dict(full=True).items()})
    for _ in range(2):
        results.append(pipe.eval(rows(8))["rows"])
        results.append(pipe.step(rows(8), target=rows(8)))
        optimizer.step()
        optimizer.zero_grad()
    state = dict(pipe.state_dict(full=True))
    assert_same_tensors(dict(pipe.stream_state_dict()), state, "stream:")
    return results, state, [pipe.eval(rows(size)) for size in SIZES]


def eager_life() -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
    """The same of the unsplit model, microbatch by microbatch."""
    model = net()
    results = [evaluated(model, rows(3), 3)]
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        results.append(evaluated(model, rows(8), 4))
        results.append(eager_step(model, loss_of, Batch((rows(8),), {}, rows(8)), 4, step))
        optimizer.step()
        optimizer.zero_grad()
    return results, model.state_dict(), [evaluated(model, rows(size)) for size in SIZES]


def calls_apart() -> list[str]:
    """Returns what two ranks say that make different calls; the pipeline stays whole."""
    pipe, x, rank = made(net().requires_grad_(False), ranks=None), rows(8), dist.get_rank()
    pipe.eval(x)
    labels, reasons = torch.zeros(8, dtype=torch.int64), []
    for call in (
        lambda: pipe.eval(x, outputs=("all", "last")[rank]),
        lambda: pipe.eval(x, microbatches=1 + rank),
        lambda: pipe.eval(rows(8 - rank)),
        lambda: pipe.eval(microbatches=[((x[:2],), {})] * (1 + rank)),
        lambda: pipe.log_probs(x, labels=labels if rank else None),
        lambda: (pipe.eval, pipe.log_probs)[rank](x),
    ):
        with pytest.raises(zbcompile.PipelineError) as raised:
            call()
        reasons.append(str(raised.value))
    output = pipe.eval(x, outputs="last")
    assert (output is None) == (rank == 0)
    if output is not None:
        assert_like(output, evaluated(net(), x))
    return reasons


def on_ranks() -> Any:
    return life(meta=True), calls_apart()


@pytest.mark.slow
def test_training_after_an_evaluation_has_eagers_bits(pool: Pool) -> None:
    """In one process and on two ranks, from the meta device, with outputs of any structure for any
    batch size. Ranks that ask for different things say so, all of them."""
    shares, reasons = zip(*pool.run(on_ranks), strict=True)
    losses, state, outputs = eager_life()
    for results, last, given in (life(meta=False), *shares):
        pairs = enumerate(zip(results, losses, strict=True))
        assert [i for i, pair in pairs if not torch.equal(*pair)] == []
        assert_same_tensors(last, state, "state:")
        for mine, other in zip(given, outputs, strict=True):
            assert_like(mine, other)
    assert reasons[0] == reasons[1]
    shapes = "the inputs[0][0]"
    words = ("outputs", "microbatches", shapes, "the inputs", "the inputs[0]", "the call")
    for word, reason in zip(words, reasons[0], strict=True):
        assert f"the ranks evaluate different things: {word} is " in reason


class Modes(nn.Module):
    """Works otherwise in training than in evaluation."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head, self.function = nn.Linear(WIDTH, WIDTH), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_head_that_only_evaluation_uses() -> None:
    """It lives on the last stage, after what it works on. Modes and generator stay as they are."""
    model = Modes(lambda net, x: net.body(x) if net.training else net.head(net.body(x)))
    model.body[0].eval()
    pipe = made(model, F.mse_loss)
    pipe.step(rows(8), target=rows(8))
    generator = torch.get_rng_state()
    output = pipe.eval(rows(8))
    assert torch.equal(generator, torch.get_rng_state())
    assert (model.training, model.body[0].training, model.body[1].training) == (True, False, True)
    assert not output.requires_grad
    torch.testing.assert_close(output, evaluated(model, rows(8)))


@pytest.mark.slow
def test_parameters_that_training_and_evaluation_place_otherwise() -> None:
    """Evaluation runs layers backwards; training begins with a layer that evaluation does not use,
    which cannot know where it belongs."""
    pipe = made(
        Modes(lambda n, x: n.body(x) if n.training else n.body[0](n.body[1](x))), F.mse_loss
    ).compile(rows(8), target=rows(8))
    with pytest.raises(zbcompile.PartitionError, match="parameters in another order than when it"):
        pipe.eval(rows(8))
    begins = lambda net, x: net.body(net.head(x) if net.training else x)  # noqa: E731
    pipe = made(Modes(begins), F.mse_loss)
    pipe.eval(rows(8))
    with pytest.raises(zbcompile.PipelineError, match=r"no step is compiled yet\. Call pipe\.comp"):
        pipe.stages()
    message = r"An evaluation has placed the parameters; compile the training step before it"
    with pytest.raises(zbcompile.CompileError, match=message):
        pipe.step(rows(8), target=rows(8))
    pipe = made(Modes(begins), F.mse_loss).compile(rows(8), target=rows(8))
    pipe.eval(rows(8))
    pipe.step(rows(8), target=rows(8))


class DropConnect(nn.Linear):
    """Training drops weights, so the weight and the bias are read by different operations."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.2, self.training), self.bias)


@pytest.mark.slow
def test_no_cut_divides_a_layer_whose_weight_training_computes() -> None:
    """Balance alone would cut behind the power iteration, or behind the mask."""
    torch.manual_seed(0)
    norm, x = nn.utils.parametrizations.spectral_norm, torch.randn(4, 8)
    for linears in ([DropConnect(8, 8) for _ in range(2)], [norm(nn.Linear(8, 8)) for _ in "abc"]):
        model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in linears))
        ranks = 5 - len(linears)
        pipe = made(model, F.mse_loss, microbatches=2, ranks=ranks, exact=True)
        pipe.step(x, target=x)
        assert torch.equal(pipe.eval(x), model.eval()(x))


def counting(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return net.body(x) * net.calls  # type: ignore[no-any-return]


@pytest.mark.slow
def test_buffers_that_evaluation_changes_change_once() -> None:
    model = Modes(counting)
    model.register_buffer("calls", torch.zeros(()))
    pipe = made(model, F.mse_loss)
    pipe.step(rows(8), target=rows(8))
    pipe.eval(rows(8))
    assert model.calls == 5  # four microbatches, and one batch as a whole


def test_what_is_predicted_is_alive(pipe: zbcompile.Pipeline) -> None:
    """One microbatch in one stage next to messages and outputs, however many there are."""
    x = rows(8)
    pipe.eval(x, microbatches=8)
    with Alive([], [*pipe.model.parameters(), *pipe.model.buffers(), x]) as alive:
        pipe.eval(x, microbatches=8)
    inside, extra = forward_bytes(list(pipe._compiled.evaluations.plans.values())[-1].program)
    assert inside <= alive.most <= inside + extra


def test_split_microbatches_of_any_shape(pipe: zbcompile.Pipeline) -> None:
    parts = [rows(size) for size in (3, 1, 3)]
    outputs = pipe.eval(microbatches=[((part,), {}) for part in parts])
    for output, part in zip(outputs, parts, strict=True):
        assert torch.equal(output["rows"], evaluated(net(), part)["rows"])


@pytest.mark.slow
def test_hooks_that_come_and_go_are_seen(pipe: zbcompile.Pipeline) -> None:
    hook = pipe.model.layers[3].register_forward_hook(lambda module, args, output: output * 2)
    assert_like(pipe.eval(rows(8)), evaluated(pipe.model, rows(8)))
    hook.remove()
    assert_like(pipe.eval(rows(8)), evaluated(pipe.model, rows(8)))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(zbcompile.CompileError, match="for all modules are registered"):
            pipe.eval(rows(8))
    finally:
        everywhere.remove()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_changed_model_is_refused(
    pipe: zbcompile.Pipeline, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In programs that are compiled, and in others."""
    if frozen:  # nothing trains, and it is evaluated
        pipe = made(net().requires_grad_(False))
        pipe.eval(rows(8))

    def refused(reason: str) -> None:
        for size in (8, 2):
            with pytest.raises(zbcompile.PipelineError, match=reason):
                pipe.eval(rows(size))

    with monkeypatch.context() as patch:
        patch.setattr(pipe.model.layers[3], "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH)))
        refused("weight was replaced by another tensor")
    pipe.model.layers.double()
    refused("was float32.* and is float64")
    pipe.model.layers.float()
    assert_like(pipe.eval(rows(8)), evaluated(pipe.model, rows(8)))


def test_split_microbatches_have_one_form(pipe: zbcompile.Pipeline) -> None:
    x = rows(8)
    wrong: dict[str, tuple[Any, Any]] = {
        r"microbatches=\[\]; expected one or more \(args, kwargs\)": ((), []),
        "microbatches='4'; expected": ((x,), "4"),
        r"microbatches\[0\] is a tuple of another form": ((), [(x,)]),
        r"microbatches\[1\] is": ((), [((x,), {}), (x, {})]),
        "other inputs were passed as well": ((x,), [((x,), {})]),
    }
    for reason, (args, microbatches) in wrong.items():
        with pytest.raises(zbcompile.PipelineError, match=reason):
            pipe.eval(*args, microbatches=microbatches)
    with pytest.raises(zbcompile.PipelineError, match="labels"):
        pipe.log_probs(microbatches=[((x,), {})])


class Random(Net):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"rows": F.dropout(super().forward(x)["rows"])}


def test_random_numbers_in_eval_mode_are_said_to_differ() -> None:
    pipe, state = made(Random().requires_grad_(False)), torch.get_rng_state()
    with pytest.warns(UserWarning, match="draws random numbers in eval mode"):
        pipe.eval(rows(8))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_compiled_in_inference_mode_and_frozen_serves_outside_and_trains_later() -> None:
    model = net().requires_grad_(False)
    pipe = made(model, exact=True)
    with torch.inference_mode():
        inside = pipe.eval(rows(8).clone(), microbatches=2)
    assert torch.equal(pipe.eval(rows(8), microbatches=2)["rows"], inside["rows"])
    model.requires_grad_(True)
    expected = eager_step(net(), loss_of, Batch((rows(8),), {}, rows(8)), 4, 0)
    assert torch.equal(pipe.step(rows(8), target=rows(8)), expected)
    assert {name for name, _ in model.named_parameters()} == set(pipe.program.trained)
