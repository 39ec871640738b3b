"""Forward hooks and pre-hooks are Python that runs in forward: captured as eager runs them, bit for
bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, Batch, eager_step
from tests.support.refused import ROWS
from zbcompile.passes.torch_private_hooks import hooks_of


def scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def shift_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 0.25,)


def look(module: nn.Module, args: Any, output: Tensor) -> None:
    """Keeps what it sees, as hooks that collect hidden states do."""
    vars(module).setdefault("seen", []).append(output.shape)


def with_keywords(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return torch.tanh(output) + len(kwargs)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda model: model.layers[2].register_forward_hook(scale_output),
    "input": lambda model: model.layers[3].register_forward_pre_hook(shift_input),
    "looks": lambda model: model.layers[1].register_forward_hook(look),
    "keywords": (
        lambda model: model.layers[2].register_forward_hook(with_keywords, with_kwargs=True)
    ),
    "always": lambda model: model.layers[2].register_forward_hook(scale_output, always_call=True),
    "the model itself": lambda model: model.register_forward_hook(scale_output),
    "two in order": lambda model: [
        model.layers[2].register_forward_hook(scale_output),
        model.layers[2].register_forward_hook(with_keywords, with_kwargs=True, prepend=True),
    ],
    "trains activations": (
        lambda model: model.layers[0].register_forward_hook(
            lambda module, args, output: output.requires_grad_(True)
        )
    ),
}


def made(kind: type[MLP] = MLP) -> MLP:
    torch.manual_seed(0)
    return kind()


def pipeline_of(model: nn.Module, schedule: str) -> zbcompile.Pipeline:
    options: dict[str, Any] = {
        "microbatches": 4,
        "ranks": 2,
        "loss": nn.functional.mse_loss,
        "exact": True,
    }
    return zbcompile.pipeline(model, schedule=schedule, **options)  # type: ignore[no-any-return]


def assert_eagers_gradients(pipe: zbcompile.Pipeline, hooked: Callable[[nn.Module], Any]) -> None:
    eager = made()
    hooked(eager)
    eager_step(eager, nn.functional.mse_loss, Batch((ROWS,), {}, ROWS), 4, 0)
    for parameter in pipe.compile(ROWS, target=ROWS).parameters():
        parameter.grad = None
    pipe.step(ROWS, target=ROWS)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, eager.get_parameter(name).grad), name


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("kind", HOOKS)
def test_as_eager_runs_them(kind: str) -> None:
    model = made()
    HOOKS[kind](model)
    assert_eagers_gradients(pipeline_of(model, "zb-v"), HOOKS[kind])


@pytest.mark.slow
def test_a_hook_that_comes_or_goes_compiles_again(capsys: pytest.CaptureFixture[str]) -> None:
    model = made()
    pipe = pipeline_of(model, "zb-h1")
    assert_eagers_gradients(pipe, lambda model: None)
    handle = HOOKS["output"](model)
    assert_eagers_gradients(pipe, HOOKS["output"])
    handle.remove()
    assert_eagers_gradients(pipe, lambda model: None)
    assert capsys.readouterr().out.count("compiling again") == 1  # the first program is still there


def test_a_hook_in_the_memory_of_another_is_another() -> None:
    """Python reuses the address of a hook that is gone; the step must not reuse its graph."""
    model, seen = made(), set()
    for factor in range(20):
        handle = model.layers[2].register_forward_hook(
            lambda module, args, output, factor=factor: output * factor
        )
        seen.add(hooks_of(model.layers[2]))
        handle.remove()
    assert len(seen) == 20


class Lazily(MLP):
    """Installs a hook when it first runs, as transformers' models do to collect outputs."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "installed"):
            self.installed = self.layers[2].register_forward_hook(scale_output)
        return super().forward(x)


@pytest.mark.slow
def test_a_hook_that_forward_installs_is_captured_once(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline_of(made(Lazily), "zb-h1")
    for _ in range(2):
        assert_eagers_gradients(pipe, HOOKS["output"])
    assert "compiling again" not in capsys.readouterr().out


class Accumulating(MLP):
    """Installs a further hook in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[2].register_forward_hook(scale_output)
        return super().forward(x)


def test_a_forward_that_installs_a_hook_each_time_is_refused() -> None:
    with pytest.raises(
        zbcompile.CaptureError, match=r"forward changes the hooks of model\.layers\.2"
    ):
        pipeline_of(made(Accumulating), "zb-h1").step(ROWS, target=ROWS)


def llama(reentrant: bool) -> nn.Module:
    """With every hook that transformers installs by itself, at a call or when forward first
    runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, use_cache=False, output_hidden_states=True)
    ).train()
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model  # type: ignore[no-any-return]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_that_transformers_installs(reentrant: bool) -> None:
    tokens = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    eager, model = llama(reentrant), llama(reentrant)
    eager_step(eager, None, Batch((), {"input_ids": tokens, "labels": tokens}), 4, 0)
    pipe = zbcompile.pipeline(model, schedule="zb-h1", microbatches=4, ranks=2, exact=True)
    pipe.step(input_ids=tokens, labels=tokens)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, eager.get_parameter(name).grad), name
