"""Divides a transformers model over a mesh: `apply_tensor_parallel_plan` by the plan of tensor
parallelism that it brings along, `divide_experts` its experts. Copy it next to your script:

    model = apply_tensor_parallel_plan(LlamaForCausalLM(config), mesh["tp"])
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="zb-v")

    model, placements = divide_experts(Qwen3MoeForCausalLM(config), mesh["ep"])
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="zb-v", placements=placements)
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

Model = TypeVar("Model", bound=nn.Module)
Placements = dict[str, dict[str, str]]
OF_EXPERTS = (  # every layer has it whose forward `use_experts_implementation` chooses
    "_is_expert_parallel"
)
EXCHANGED = (  # the experts of `divide_experts` among transformers' ways to run experts
    "zbcompile_exchange"
)


def apply_tensor_parallel_plan(
    model: Model, mesh: Any, plan: Mapping[str, str] | None = None
) -> Model:
    """Parallelise a transformers model over `mesh`, one dimension of a mesh, in place; returns the
    model.

    Its parameters become DTensors, of which each rank keeps its part, in the styles of
    `torch.distributed.tensor.parallel`. Tied parameters stay tied.

    Args:
        mesh: such as `mesh["tp"]`. Heads, of queries as of keys, must be divisible by its size.
        plan: a style for each pattern of module names; default: the model's own (`model.tp_plan`,
            which transformers puts together from `config.base_model_tp_plan`).

    Raises ValueError for a model without a plan, and for styles that are not known here, such as
    those of experts.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    styles_by_pattern = dict(plan if plan is not None else getattr(model, "tp_plan", None) or {})
    if not styles_by_pattern:
        raise ValueError(
            f"{type(model).__name__} brings no tensor-parallel plan along (tp_plan is empty). Pass"
            " plan=, or parallelise it with torch.distributed.tensor.parallel.parallelize_module."
        )
    styles = _styles()
    _check_styles(styles_by_pattern, styles)
    _require_divisible(model, mesh.size() if mesh is not None else 1, styles_by_pattern)
    tied = _tied(model)
    chosen = {pattern: styles[style] for pattern, style in styles_by_pattern.items()}
    parallelize_module(
        model, mesh, {pattern: style for pattern, style in chosen.items() if style is not None}
    )
    _tie(model, tied)
    return model


def _check_styles(plan: Mapping[str, str], styles: Mapping[str, Any]) -> None:
    """Raise ValueError for styles that are not known; what lies below such a module belongs
    to it."""
    modules = tuple(f"{pattern}." for pattern, style in plan.items() if style not in styles)
    refused = {
        p: style for p, style in plan.items() if style not in styles or p.startswith(modules)
    }
    if refused:
        text = ", ".join(f"{style!r} for {pattern}" for pattern, style in refused.items())
        raise ValueError(
            f"the plan has {text}; expected styles among {', '.join(sorted(styles))}. Pass plan="
            " without these: such modules stay whole, and every rank computes them. Or divide them"
            " by hand, with functional collectives and placements=."
        )


HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def _require_divisible(model: nn.Module, ranks: int, plan: Mapping[str, str]) -> None:
    """Raise ValueError if heads that the plan divides are not divisible."""
    config = getattr(model, "config", None)
    for projection, name in HEADS.items():
        heads = getattr(config, name, None) or 0
        if heads % ranks and any(
            p.endswith(projection) and style == "colwise" for p, style in plan.items()
        ):
            raise ValueError(
                f"{name} is {heads}, which is not divisible by the {ranks} ranks of the mesh."
            )


def _styles() -> dict[str, Any]:
    """The styles by their names in transformers. A replicated norm sees this rank's heads alone: to
    DTensor these are rows of a sharded tensor, which sums the gradient."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    gathered = ColwiseParallel(output_layouts=Replicate())
    row_of_replicated = RowwiseParallel(input_layouts=Replicate())
    return {
        **{"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()},
        **dict.fromkeys(("colwise_rep", "colwise_gather_output", "embedding_colwise"), gathered),
        **dict.fromkeys(
            ("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), row_of_replicated
        ),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=0, use_local_output=True),
        "replicate": None,
    }


def _tied(model: nn.Module) -> dict[str, str]:
    """The first name of the same parameter, for every tied name."""
    first: dict[int, str] = {}
    modules = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            modules[name] = first[id(parameter)]
    return modules


def _tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie again the parameters that the styles have separated."""
    for name, first in tied.items():
        weight_, first_weight = model.get_parameter(name), model.get_parameter(first)
        if getattr(weight_, "placements", None) != getattr(first_weight, "placements", None):
            raise ValueError(
                f"{name} and {first} are one parameter, and the plan shards them in different ways."
            )
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, first_weight)


def divide_experts(model: Model, mesh: Any, factor: float = 1.25) -> tuple[Model, Placements]:
    """Divides the experts of a transformers mixture among the ranks of `mesh`, in place. Returns
    the model, and the placements of the divided parameters for `zbcompile.pipeline(...,
    placements=)`.

    Each rank keeps its part of every layer's experts, computes them with `grouped_mm`, and
    exchanges tokens by an `ExpertExchange`, the submodule `exchange` of each.

    Args:
        mesh: the dimension of a mesh, such as `mesh["ep"]`. The number of experts must be a
            multiple of its size.
        factor: that of `ExpertExchange`.

    Raises ValueError for a model without experts that transformers knows how to group.
    """
    modules = {
        name: module for name, module in model.named_modules() if hasattr(module, OF_EXPERTS)
    }
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no layer of experts that transformers runs by an"
            " implementation of its choice (model.set_experts_implementation). Divide it by hand,"
            ' with ExpertExchange and placements={name: {"ep": "shard"}}.'
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXCHANGED, exchanged_experts)
    divided = [
        f"{path}.{name}"
        for path, module in modules.items()
        if mesh.size() > 1
        for name in _divide(module, mesh, factor)
    ]
    return model, {name: {"ep": "shard"} for name in divided}


def _divide(module: Any, mesh: Any, factor: float) -> list[str]:
    """Keeps this rank's experts of one layer. Returns the names of the parameters that it
    divided."""
    count, rank, ranks = module.num_experts, mesh.get_local_rank(), mesh.size()
    divided = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[0] == count:
            weight_ = parameter.detach().chunk(ranks)[rank].clone()
            setattr(module, name, nn.Parameter(weight_, parameter.requires_grad))
            divided.append(name)
    module.exchange = zbcompile.ExpertExchange(count, mesh.get_group(), factor)
    module.num_experts = count // ranks
    module.config._experts_implementation = EXCHANGED
    return divided


def exchanged_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' grouped experts on the ranks of a mesh: the same operations in the same order,
    with an exchange before and behind the products. Tokens are sorted stably, so that those of an
    expert keep their order.
    """
    count, width = top_k_index.shape[-1], hidden_states.shape[-1]
    chosen, order = top_k_index.flatten().sort(stable=True)
    rows, ends, route = module.exchange.dispatch(hidden_states[order // count], chosen)
    results = module.exchange.combine(_computed(module, rows, ends), route)
    weighted = results * top_k_weights.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order).index_copy(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    return weighted[back].view(-1, count, width).sum(1).to(hidden_states.dtype)


def _computed(module: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """Returns the outputs of this rank's experts, with zeros in place of padding."""
    numbers = torch.searchsorted(
        ends.long(), torch.arange(rows.shape[0], device=rows.device), right=True
    )
    padding = (numbers == module.num_experts).unsqueeze(-1)
    numbers = numbers.clamp(max=module.num_experts - 1)

    def product(name: str, rows: Tensor) -> Tensor:
        weight = (
            getattr(module, name)
            if module.is_transposed
            else getattr(module, name).transpose(-2, -1)
        )
        results = F.grouped_mm(rows.to(weight.dtype), weight, offs=ends)
        return (
            results + getattr(module, f"{name}_bias")[numbers] if module.has_bias else results
        ).masked_fill(padding, 0.0)

    inner = module._apply_gate(product("gate_up_proj", rows)) if module.has_gate else None
    results = product(
        "down_proj", module.act_fn(product("up_proj", rows)) if inner is None else inner
    )
    return module.post_expert_norm(results) if module.has_post_expert_norm else results  # type: ignore[no-any-return]
