"""Twelve output layers and losses that language models have: models of transformers, one layer
each."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import Batch

WORDS = 67
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS_OF_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CAUSAL = {
    **SIZES,
    **HEADS_OF_ATTENTION,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
}
OF_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 64,
    "use_cache": False,
}
DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OF_BERT = {
    **SIZES,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OF_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}


def own_loss(output: Any, target: None) -> Tensor:
    loss: Tensor = output.loss
    return loss


def z_loss(output: Any, target: Tensor) -> Tensor:
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, target.flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()


def smoothed(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def nll(output: Any, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(output.logits.float(), -1).flatten(0, 1), target.flatten())


def gathered(output: Any, target: Tensor) -> Tensor:
    return (
        -F.log_softmax(output.logits.float(), -1).gather(-1, target[..., None]).squeeze(-1).mean()
    )


def unreduced(output: Any, target: Tensor) -> Tensor:
    losses = F.cross_entropy(
        output.logits.flatten(0, 1).float(), target.flatten(), reduction="none"
    )
    saved = (target.flatten() != 3).float()
    return (losses * saved).sum() / saved.sum()


# The kind of model, changes of its configuration, and the loss.
HEADS: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor]]] = {
    "llama": ("llama", CAUSAL, own_loss),
    "gpt2": ("gpt2", {**OF_GPT2, **DROPOUTS}, own_loss),
    "gemma2": ("gemma2", {**CAUSAL, "final_logit_softcapping": 30.0}, own_loss),
    "bert": ("bert", OF_BERT, own_loss),
    "t5": (
        "t5",
        {**OF_T5, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
        own_loss,
    ),
    "qwen3": ("qwen3", CAUSAL, own_loss),
    "mixtral": ("mixtral", {**CAUSAL, **EXPERTS}, own_loss),
    "z-loss": ("llama", CAUSAL, z_loss),
    "label smoothing": ("llama", CAUSAL, smoothed),
    "nll_loss of log_softmax": ("gpt2", {**OF_GPT2, **DROPOUTS}, nll),
    "log_softmax and gather": ("gpt2", {**OF_GPT2, **DROPOUTS}, gathered),
    "without reduction": ("llama", CAUSAL, unreduced),
}
CLASSES = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def head_case(name: str) -> tuple[nn.Module, Batch, Callable[..., Tensor]]:
    """A model, a batch for it, and its loss."""
    import transformers

    kind, sizes, loss = HEADS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = (
        getattr(transformers, CLASSES.get(kind, "AutoModelForCausalLM")).from_config(config).train()
    )
    tokens, labels = torch.randint(3, WORDS, (2, 8)), torch.randint(3, WORDS, (2, 8))
    if loss is not own_loss:
        return model, ((), {"input_ids": tokens}, labels), loss
    labels[0, :3] = -100
    return model, ((), {"input_ids": tokens, "labels": labels}, None), loss
