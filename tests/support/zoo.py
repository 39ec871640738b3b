"""Models of the kinds that people train, tiny and with random weights: most of them transformers'
own.

Each is a `Problem` of the oracle: what it takes to train it for a step. transformers is imported
when a model is made. What each needs, and which are not bitwise equal to eager, stands in
docs/models.md.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.oracle import Batch, Problem

VOCABULARY, LENGTH, HIDDEN = 96, 16, 32
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _make(name: str, experts: str | None, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes))
    if experts is not None:
        model.set_experts_implementation(experts)
    return model  # type: ignore[no-any-return]


def _transformers(name: str, experts: str | None = None, **sizes: Any) -> Callable[[], nn.Module]:
    return partial(_make, name, experts, sizes)


# Grouped queries, rotary positions, RMS norm. Without padding it leaves mask and grouping to the
# kernel.
_llama = _transformers("LlamaForCausalLM", **SMALL, num_key_value_heads=2)
# Embedding and head tied; dropout in the embedding, the attention and the residuals.
_gpt2 = _transformers(
    "GPT2LMHeadModel",
    **{"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64},
    **{"bos_token_id": 0, "eos_token_id": 0},
)
# Masked language modelling: head and embedding tied, and a bias tied; dropout everywhere.
_bert = _transformers("BertForMaskedLM", **SMALL)
# Patches through a convolution; its loss is a function of the output.
_vit = _transformers(
    "ViTForImageClassification",
    **{"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4},
    **{"num_hidden_layers": 1, "image_size": 16, "patch_size": 4, "num_labels": 8},
)
# Encoder and decoder: the encoder's last state is used by every layer of the decoder.
_t5 = _transformers(
    "T5ForConditionalGeneration",
    **{"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 1},
    **{"num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
)
# Two inputs of different kinds: spectra into the encoder, tokens into the decoder.
_whisper = _transformers(
    "WhisperForConditionalGeneration",
    **{"vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": 1, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 16},
    **{"max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "dropout": 0.1},
)
# A mixture of experts. The loop over experts depends on data; the batched form does not.
_mixtral = _transformers(
    "MixtralForCausalLM",
    "batched_mm",
    **SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 2},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
)
# More, smaller experts, and normed queries and keys. Rows sorted by their expert, one product for
# all experts.
_qwen_moe = _transformers(
    "Qwen3MoeForCausalLM",
    "grouped_mm",
    **SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8},
    **{"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
)
# Soft caps in attention and head; sliding and full attention in turn.
_gemma2 = _transformers(
    "Gemma2ForCausalLM", **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=8
)
# A state-space model; without its own kernels transformers scans in plain operations.
_mamba = _transformers(
    "MambaForCausalLM",
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "state_size": 4, "num_hidden_layers": 1},
    **{"expand": 2, "use_mambapy": False},
)
# Batch norm in every block.
_resnet = _transformers(
    "ResNetForImageClassification",
    **{"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 1, 1]},
    **{"num_labels": 8, "layer_type": "basic"},
)


class _UNet(nn.Module):
    """Three levels down with strides, up again; the skips cross one another; channels last
    throughout."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, 2 * a, 3, stride=2, padding=1) for a in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(2 * a) for a in sizes)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(sizes))
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in reversed(sizes))
        self.leave = nn.Conv2d(width, 3, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, noisy: Tensor, clean: Tensor) -> dict[str, Tensor]:
        x = self.enter(noisy.contiguous(memory_format=torch.channels_last))
        skips = []
        for down, norm in zip(self.down, self.norms, strict=True):
            skips.append(x)
            x = F.silu(norm(down(x)))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = F.silu(merge(torch.cat([up(x), skips.pop()], dim=1)))
        image = self.leave(x)
        return {"loss": F.mse_loss(image, clean), "image": image}


class _Recurrent(nn.Module):
    """An LSTM between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(HIDDEN, HIDDEN)
        self.cells = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.leave = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.cells(torch.tanh(self.enter(x)))[0])


@torch.library.custom_op("zbcompile_tests::bend", mutates_args=())
def _bend(x: Tensor, by: float) -> Tensor:
    """An operator of the user's own, opaque to torch: x + by * sin(x)."""
    return x + by * x.sin()


@_bend.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("zbcompile_tests::bend_backward", mutates_args=())
def _bend_backward(gradient: Tensor, x: Tensor, by: float) -> Tensor:
    return gradient * (1 + by * x.cos())


@_bend_backward.register_fake
def _(gradient: Tensor, x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.by = inputs
    ctx.save_for_backward(x)


_bend.register_autograd(
    lambda ctx, g: (_bend_backward(g, *ctx.saved_tensors, ctx.by), None), setup_context=_keep
)


class _Bending(nn.Module):
    """A custom operator with its own autograd formula after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + _bend(layer(x), 0.5)
        return x


def _tokens(size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (size, LENGTH))


def _text(size: int) -> Batch:
    tokens = _tokens(size)
    return Batch((), {"input_ids": tokens, "labels": tokens})


def half_padded_text(size: int) -> Batch:
    """Every second pair of rows is full, so that microbatches go different ways."""
    batch = _padded_text(size)
    full = (torch.arange(size) // 2 % 2 == 0)[:, None]
    tokens, mask, labels = (
        batch.kwargs[name] for name in ("input_ids", "attention_mask", "labels")
    )
    mask, labels = mask.where(~full, 1), labels.where(~full, tokens)
    return Batch((), {"input_ids": tokens, "attention_mask": mask, "labels": labels})


def _short_text(size: int) -> Batch:
    """A scan over time is as many operations as there are tokens."""
    tokens = torch.randint(3, VOCABULARY, (size, 7))
    return Batch((), {"input_ids": tokens, "labels": tokens})


def _padded_text(size: int) -> Batch:
    """Rows of different lengths, padded on the left; the padding is not asked for."""
    tokens = _tokens(size)
    mask = (torch.arange(LENGTH) >= torch.randint(1, LENGTH // 2, (size, 1))).long()
    return Batch(
        (), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)}
    )


def _masked_text(size: int) -> Batch:
    """Rows of different lengths; a third of the tokens is asked for."""
    tokens = _tokens(size)
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (size, 1))).long()
    labels = tokens.where((torch.rand(size, LENGTH) < 0.3) & mask.bool(), -100)
    labels[:, 0] = tokens[:, 0]
    return Batch((), {"input_ids": tokens, "attention_mask": mask, "labels": labels})


def _translation(size: int) -> Batch:
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (size, 1))).long()
    return Batch(
        (),
        {
            "input_ids": _tokens(size),
            "attention_mask": mask,
            "labels": _tokens(size)[:, 1:].contiguous(),
        },
    )


def _speech(size: int) -> Batch:
    return Batch((), {"input_features": torch.randn(size, 8, 32), "labels": _tokens(size)})


def _images(size: int) -> Batch:
    return Batch(
        (), {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(0, 8, (size,))}
    )


def _classes(size: int) -> Batch:
    return Batch((torch.randn(size, 3, 16, 16),), {}, torch.randint(0, 8, (size,)))


def _of_logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def _noisy_images(size: int) -> Batch:
    clean = torch.randn(size, 3, 16, 16)
    return Batch((clean + 0.1 * torch.randn_like(clean), clean), {})


def _sequences(size: int) -> Batch:
    return Batch((torch.randn(size, 5, HIDDEN),), {}, torch.randn(size, 5, HIDDEN))


ZOO: Mapping[str, Problem] = {
    "llama": Problem(_llama, None, _padded_text),
    "llama-unpadded": Problem(_llama, None, _text),
    "gpt2": Problem(_gpt2, None, _text),
    "bert": Problem(_bert, None, _masked_text),
    "vit": Problem(_vit, _of_logits, _classes),
    "t5": Problem(_t5, None, _translation),
    "whisper": Problem(_whisper, None, _speech),
    "mixtral": Problem(_mixtral, None, _padded_text),
    "qwen-moe": Problem(_qwen_moe, None, _padded_text),
    "gemma2": Problem(_gemma2, None, _padded_text),
    "mamba": Problem(_mamba, None, _short_text),
    "resnet": Problem(_resnet, None, _images),
    "unet": Problem(_UNet, None, _noisy_images),
    "lstm": Problem(_Recurrent, F.mse_loss, _sequences),
    "custom-op": Problem(_Bending, F.mse_loss, _sequences),
}
