"""Tensor parallelism of a transformers model that is built already, by the plan that it brings along."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from zbcompile.errors import PipelineError

Model = TypeVar("Model", bound=nn.Module)


def apply_tensor_parallel_plan(model: Model, mesh: Any, plan: Mapping[str, str] | None = None) -> Model:
    """Parallelise a transformers model over `mesh`, one dimension of a mesh, in place; returns the model.

    Its parameters become DTensors, of which each rank keeps its part, in the styles of
    `torch.distributed.tensor.parallel`. Tied parameters stay tied.

    Args:
        mesh: such as `mesh["tp"]`. Heads, of queries as of keys, must be divisible by its size.
        plan: a style for each pattern of module names; default: the model's own (`model.tp_plan`, which transformers
            puts together from `config.base_model_tp_plan`).

    Raises PipelineError for a model without a plan, and for styles that are not known here, such as those of experts.

    >>> model = LlamaForCausalLM(config)                                                        # doctest: +SKIP
    >>> model = zbcompile.apply_tensor_parallel_plan(model, mesh["tp"])                         # doctest: +SKIP
    >>> pipe = zbcompile.pipeline(model, mesh=mesh, schedule="zb-v")                            # doctest: +SKIP
    """
    from torch.distributed.tensor.parallel import parallelize_module

    wanted = dict(plan if plan is not None else getattr(model, "tp_plan", None) or {})
    if not wanted:
        raise PipelineError(
            f"{type(model).__name__} brings no tensor-parallel plan along (tp_plan is empty). Pass plan=, or "
            "parallelise it with torch.distributed.tensor.parallel.parallelize_module."
        )
    styles = _styles()
    _require_known(wanted, styles)
    _require_divisible(model, mesh.size() if mesh is not None else 1, wanted)
    tied = _tied(model)
    chosen = {pattern: styles[style] for pattern, style in wanted.items()}
    parallelize_module(model, mesh, {pattern: style for pattern, style in chosen.items() if style is not None})
    _tie(model, tied)
    return model


def _require_known(plan: Mapping[str, str], styles: Mapping[str, Any]) -> None:
    """Raise PipelineError for styles that are not known; what lies below such a module belongs to it."""
    modules = tuple(f"{pattern}." for pattern, style in plan.items() if style not in styles)
    refused = {p: style for p, style in plan.items() if style not in styles or p.startswith(modules)}
    if refused:
        shown = ", ".join(f"{style!r} for {pattern}" for pattern, style in refused.items())
        raise PipelineError(
            f"the plan has {shown}; expected styles among {', '.join(sorted(styles))}. Pass plan= without these: such "
            "modules stay whole, and every rank computes them. Or divide them by hand, with functional collectives and "
            "placements=."
        )


HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def _require_divisible(model: nn.Module, ranks: int, plan: Mapping[str, str]) -> None:
    """Raise PipelineError if heads that the plan divides are not divisible."""
    config = getattr(model, "config", None)
    for projection, name in HEADS.items():
        heads = getattr(config, name, None) or 0
        if heads % ranks and any(p.endswith(projection) and style == "colwise" for p, style in plan.items()):
            raise PipelineError(f"{name} is {heads}, which is not divisible by the {ranks} ranks of the mesh.")


def _styles() -> dict[str, Any]:
    """The styles by their names in transformers. A replicated norm sees this rank's heads alone: to DTensor these are
    rows of a sharded tensor, which sums the gradient."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    gathered = ColwiseParallel(output_layouts=Replicate())
    of_whole = RowwiseParallel(input_layouts=Replicate())
    return {
        **{"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()},
        **dict.fromkeys(("colwise_rep", "colwise_gather_output", "embedding_colwise"), gathered),
        **dict.fromkeys(("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), of_whole),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=0, use_local_output=True),
        "replicate": None,
    }


def _tied(model: nn.Module) -> dict[str, str]:
    """The first name of the same parameter, for every tied name."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie again the parameters that the styles have separated."""
    for name, first in tied.items():
        own, other = model.get_parameter(name), model.get_parameter(first)
        if getattr(own, "placements", None) != getattr(other, "placements", None):
            raise PipelineError(f"{name} and {first} are one parameter, and the plan shards them in different ways.")
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, other)
