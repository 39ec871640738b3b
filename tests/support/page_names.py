"""The names that snippets of README and docs/ take for granted: a model, batches, a loss.

`tests/support/page_runs.py` copies this file next to the snippets: it imports nothing of the
checkout.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

ELSEWHERE = ("lightning",)  # need not be installed


def run(page: str, blocks: list[tuple[int, str]], with_names: bool) -> None:
    """Runs the blocks of a page, (line, text) each, and ends with status 1 if one of them
    raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if with_names:
        names |= common()
        names |= OF_PAGE.get(page, lambda _: {})(names)
    failed = False
    for line, text in blocks:
        try:
            for part, prepare in BEFORE.items():
                if part in text:
                    prepare(names)
            exec(compile("\n" * (line - 1) + text, page, "exec"), names)
        except ModuleNotFoundError as error:
            print(f"--- {page}:{line} is left out, as it needs {error.name}", file=sys.stderr)
            failed |= error.name not in ELSEWHERE
        except Exception:
            failed = True
            print(f"--- {page}:{line}, rank {os.environ.get('RANK', 0)}", file=sys.stderr)
            traceback.print_exc()
    sys.exit(int(failed))


def close_optimizers(names: dict[str, Any]) -> None:
    """One after the other: some may not be next to others."""
    for value in list(names.values()):
        if "zbcompile" in type(value).__module__ and "ptimizer" in type(value).__name__:
            value.close()


def forget_accelerator(_: dict[str, Any]) -> None:
    """A script has one accelerator, be it that of a trainer."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def for_lightning(names: dict[str, Any]) -> None:
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.randn(16, 16), torch.randint(16, (16,))), batch_size=8)
    fresh(names)
    names |= {"lightning": lightning, "loader": loader, "other": loader}
    names["pipe"] = piped(names, loss=names["cross_entropy"])


def for_lengths(names: dict[str, Any]) -> None:
    """Samples of 300 tokens, and a model that gives the loss of a batch of them."""
    torch, nn = names["torch"], names["nn"]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Embedding(64, 16), *(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 64)
            )

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            logits = self.body(input_ids) * attention_mask[..., None]
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    tokens = torch.randint(64, (300,))
    names["data"] = [
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    ] * 32
    names["pipe"] = names["zbcompile"].pipeline(Reader(), schedule="zb-h1", microbatches=8)


def for_experts(names: dict[str, Any]) -> None:
    sys.path.append("examples")
    names["MoE"] = importlib.import_module("moe").MoE


def fresh(names: dict[str, Any]) -> None:
    """A model that no pipeline has trained."""
    names["model"] = common()["model"]


def trained(names: dict[str, Any]) -> None:
    fresh(names)
    names["pipe"] = piped(names)
    names["pipe"].step(names["inputs"], target=names["targets"])


def piped(names: dict[str, Any], **options: Any) -> Any:
    options = {"schedule": "zb-h1", "microbatches": 4, "loss": names["loss_fn"], **options}
    return names["zbcompile"].pipeline(names["model"], **options)


BEFORE: dict[str, Callable[[dict[str, Any]], None]] = {  # by a part of the snippet
    ".optimizer(": close_optimizers,
    "import PipelineStage": fresh,
    "import ScheduleZBVZeroBubble": fresh,
    "PipelineAccelerator(": forget_accelerator,
    "LightningModule": for_lightning,
    "def pad_to_few_lengths(": for_lengths,
    "MoE(": for_experts,
    "from huggingface_parallel import": for_experts,
    "\npipe.close()\nmodel.load_state_dict(": trained,
}


def common() -> dict[str, Any]:
    """A model of eight layers that maps 16 numbers to 16, and batches for it."""
    import itertools  # noqa: F401

    import torch
    from torch import nn

    import zbcompile  # noqa: F401

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [
                nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(8)
            ]
            self.layers = nn.ModuleList(blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    device, rank = torch.device("cpu"), int(os.environ.get("RANK", 0))
    model, loss_fn = Net(), nn.functional.mse_loss
    inputs, targets = torch.randn(16, 16), torch.randn(16, 16)
    batches = [(inputs, targets)] * 2
    return locals()


def group() -> None:
    import torch

    torch.distributed.init_process_group("gloo")


def backends(names: dict[str, Any]) -> dict[str, Any]:
    piped(names).compile(names["inputs"], target=names["targets"]).program.save("program")
    return {}


def composition(names: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: F401  # noqa: F401

    columns = ColwiseParallel(output_layouts=Replicate())
    plan = {f"layers.{layer}.1": columns for layer in range(8)}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4}
    config = LlamaConfig(**sizes)
    experts = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8, "use_cache": False}
    moe_config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2)
    tokens = names["torch"].randint(64, (8, 12))
    Llama = lambda _: names["model"]  # noqa: E731
    return locals()


def faq(names: dict[str, Any]) -> dict[str, Any]:
    return {"labels": names["targets"]}


def faults(names: dict[str, Any]) -> dict[str, Any]:
    group()
    trained(names)
    return {"ranks": 2, "host": "127.0.0.1", "port": int(os.environ["PORT"])}


def huggingface(_: dict[str, Any]) -> dict[str, Any]:
    import accelerate  # noqa: F401
    import torch
    from torch.nn.functional import cross_entropy  # noqa: F401
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments  # noqa: F401

    os.environ["ACCELERATE_USE_CPU"] = "true"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=4)
    ids = torch.randint(64, (8, 16))
    data = [{"input_ids": part, "labels": part} for part in ids.repeat(4, 1)]
    group()
    if torch.distributed.get_rank() == 0:
        AutoModelForCausalLM.from_config(config).save_pretrained("folder", max_shard_size="20KB")
    torch.distributed.barrier()
    torch.manual_seed(0)
    model, held_out = AutoModelForCausalLM.from_config(config), data[:8]
    loader = DataLoader(data, batch_size=8)
    return locals()


def inspect(names: dict[str, Any]) -> dict[str, Any]:
    GPT, next_byte_loss = (lambda: names["model"]), names["loss_fn"]
    tokens, next_tokens, pipe = names["inputs"], names["targets"], piped(names)
    return locals()


def optimizer(_: dict[str, Any]) -> dict[str, Any]:
    group()
    return {}


def checkpoints(names: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    optimizer = names["torch"].optim.AdamW(names["model"].parameters())
    weights, state = get_state_dict(names["model"], optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="old")
    pipe = piped({**names, "model": common()["model"]}, ranks=2)
    pipe.compile(names["inputs"], target=names["targets"])
    return {"dcp": dcp, "optimizer": optimizer, "pipe": pipe}


def schedules(_: dict[str, Any]) -> dict[str, Any]:
    from zbcompile.schedules.generators.order_builder import OrderBuilder
    from zbcompile.schedules.generators.task import Order, Task, each_rank

    return {"Order": Order, "Task": Task, "OrderBuilder": OrderBuilder, "each_rank": each_rank}


def training(_: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    group()
    return {"DataLoader": DataLoader, "collate": torch.utils.data.default_collate}


OF_PAGE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "docs/backends.md": backends,
    "docs/checkpoints.md": checkpoints,
    "docs/composition.md": composition,
    "docs/faq.md": faq,
    "docs/faults.md": faults,
    "docs/huggingface.md": huggingface,
    "docs/inspect.md": inspect,
    "docs/optimizer.md": optimizer,
    "docs/schedules.md": schedules,
    "docs/training.md": training,
}
