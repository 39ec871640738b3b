"""The names that snippets of README and docs/ take for granted: a model, batches, a loss.

`docs/page_runs.py` copies this file next to the snippets: it imports nothing of the checkout.
"""

import importlib
import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import zbcompile

Names = dict[str, Any]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def names_of(page: str) -> Names:
    names = {"__name__": "__main__", **common()}
    return names | OF_PAGE.get(page, lambda _: {})(names)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def common() -> Names:
    """A model of eight layers that maps 16 numbers to 16, and batches for it."""
    torch.manual_seed(0)
    model, loss_fn, device = Net(), nn.functional.mse_loss, torch.device("cpu")
    rank = int(os.environ.get("RANK", 0))
    inputs, targets = torch.randn(2, 16, 16)
    batches = [(inputs, targets)] * 2
    given = {"itertools": itertools, "torch": torch, "nn": nn, "zbcompile": zbcompile, "Net": Net}
    return locals() | given


def piped(names: Names, **options: Any) -> Any:
    options = {"schedule": "zb-h1", "microbatches": 4, "loss": names["loss_fn"], **options}
    return zbcompile.pipeline(names["model"], **options)


def group(**names: Any) -> Names:
    dist.init_process_group("gloo")
    return names


# Before a snippet, by a part of it.


def close_optimizers(names: Names) -> None:
    """One after the other: some may not be next to others."""
    for value in list(names.values()):
        if "zbcompile" in type(value).__module__ and "ptimizer" in type(value).__name__:
            value.close()


def forget_accelerator(_: Names) -> None:
    """A script has one accelerator, be it that of a trainer."""
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)


def for_lightning(names: Names) -> None:
    data = TensorDataset(torch.randn(16, 16), torch.randint(16, (16,)))
    names["loader"] = names["other"] = DataLoader(data, batch_size=8)
    names["lightning"] = importlib.import_module("lightning")
    fresh(names)
    names["pipe"] = piped(names, loss=names["cross_entropy"])


class Reader(nn.Module):
    """Gives the loss of a batch of tokens."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(16, 16) for _ in range(8))
        self.body = nn.Sequential(nn.Embedding(64, 16), *layers, nn.Linear(16, 64))

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        logits = self.body(input_ids) * attention_mask[..., None]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def for_lengths(names: Names) -> None:
    tokens = torch.randint(64, (300,))
    sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    names["data"] = [sample] * 32
    names["pipe"] = zbcompile.pipeline(Reader(), schedule="zb-h1", microbatches=8)


def for_experts(names: Names) -> None:
    sys.path.append("examples")
    names["MoE"] = importlib.import_module("moe").MoE


def fresh(names: Names) -> None:
    """A model that no pipeline has trained."""
    names["model"] = common()["model"]


def trained(names: Names) -> None:
    fresh(names)
    names["pipe"] = piped(names)
    names["pipe"].step(names["inputs"], target=names["targets"])


BEFORE = {
    ".optimizer(": close_optimizers,
    "import PipelineStage": fresh,
    "import ScheduleZBVZeroBubble": fresh,
    "PipelineAccelerator(": forget_accelerator,
    "LightningModule": for_lightning,
    "def pad_to_few_lengths(": for_lengths,
    "from huggingface_parallel import": for_experts,
    "\npipe.close()\nmodel.load_state_dict(": trained,
}


# The further names of each page.


def backends(names: Names) -> Names:
    piped(names).compile(names["inputs"], target=names["targets"]).program.save("program")
    return {}


def composition(names: Names) -> Names:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: F401

    columns = ColwiseParallel(output_layouts=Replicate())
    plan = {f"layers.{layer}.1": columns for layer in range(8)}
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    experts = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8, "use_cache": False}
    moe_config = Qwen3MoeConfig(**SIZES, **experts, num_hidden_layers=2, num_key_value_heads=2)
    tokens, Llama = torch.randint(64, (8, 12)), lambda _: names["model"]
    return locals()


def faults(names: Names) -> Names:
    group()
    trained(names)
    return {"ranks": 2, "host": "127.0.0.1", "port": int(os.environ["PORT"])}


def huggingface(_: Names) -> Names:
    import accelerate  # noqa: F401
    from torch.nn.functional import cross_entropy  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments  # noqa: F401

    os.environ["ACCELERATE_USE_CPU"] = "true"
    config = LlamaConfig(**SIZES, num_hidden_layers=4)
    data = [{"input_ids": part, "labels": part} for part in torch.randint(64, (8, 16)).repeat(4, 1)]
    group()
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config).save_pretrained("folder", max_shard_size="20KB")
    dist.barrier()
    torch.manual_seed(0)
    model, held_out = AutoModelForCausalLM.from_config(config), data[:8]
    ids = torch.stack([sample["input_ids"] for sample in held_out])
    return locals() | {"DataLoader": DataLoader, "loader": DataLoader(data, batch_size=8)}


def inspect(names: Names) -> Names:
    batch = {"tokens": names["inputs"], "next_tokens": names["targets"], "pipe": piped(names)}
    return {"GPT": lambda: names["model"], "next_byte_loss": names["loss_fn"], **batch}


def checkpoints(names: Names) -> Names:
    optimizer = torch.optim.AdamW(names["model"].parameters())
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    weights, state = states.get_state_dict(names["model"], optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="old")
    pipe = piped({**names, "model": common()["model"]}, ranks=2)
    pipe.compile(names["inputs"], target=names["targets"])
    return {"dcp": dcp, "optimizer": optimizer, "pipe": pipe}


def schedules(_: Names) -> Names:
    builder, task = (
        vars(importlib.import_module(f"zbcompile.schedules.generators.{name}"))
        for name in ("order_builder", "task")
    )
    return {**task, "OrderBuilder": builder["OrderBuilder"]}


OF_PAGE = {
    "docs/backends.md": backends,
    "docs/checkpoints.md": checkpoints,
    "docs/composition.md": composition,
    "docs/faq.md": lambda names: {"labels": names["targets"]},
    "docs/faults.md": faults,
    "docs/huggingface.md": huggingface,
    "docs/inspect.md": inspect,
    "docs/optimizer.md": lambda _: group(),
    "docs/schedules.md": schedules,
    "docs/training.md": lambda _: group(DataLoader=DataLoader, collate=default_collate),
}
