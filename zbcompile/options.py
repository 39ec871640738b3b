"""The options of `zbcompile.pipeline`: one frozen dataclass that checks every value, and the
sentences that the removed options answer with."""

import difflib
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zbcompile.batches.batch import Split
from zbcompile.errors import PipelineError
from zbcompile.model.materialize import Init
from zbcompile.model.placements import Placements, read_placements
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import (
    POLICIES,
    Balance,
    Barriers,
    CompileOptions,
    Policy,
    Recompute,
    is_real,
    read_bytes,
)
from zbcompile.passes.cost.hardware import Hardware, hardware_names, read_hardware
from zbcompile.passes.errors import CompileError
from zbcompile.passes.torch_names import NAMED
from zbcompile.schedules import Schedule, load
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES

BACKENDS = ("fx", "inductor")
SIZES = (
    'bytes: a number, or a text such as "80GiB" or "24 GB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)'
)

REMOVED = {
    "boundary_bytes": "cuts are balanced by predicted time; balance= names others, to send less",
    "channels": "a hardware profile has the speeds of collectives: hardware=",
    "compare_batches": "the ranks compare their batches without being asked",
    "early": "overlap=True lets pipe.step update each stage",
    "max_ctas": "set NCCL_MAX_CTAS in the environment",
    "max_receives": "receives are posted as the schedule orders them",
    "mesh_names": (
        "call the dimensions of mesh= pp, dp, tp, cp and ep; flatten others into these first"
    ),
    "relay": "values that skip stages always pass through the stages between",
    "reshard_after_forward": "zero takes 0 or 1, which keeps parameters whole",
    "search_seconds": "the search is deterministic and takes no time limit",
    "vocab_logits": "the logits of a shard wait from pass S to pass T",
    "weight_recompute": "recompute= chooses what a backward recomputes",
}


@dataclass(frozen=True)
class StepOptions:
    """The options of a step that a saved program keeps. `backend` is its name."""

    loss_reduction: str = "mean"
    seed: int = 0
    split: Split | None = None
    static_inputs: tuple[str, ...] = ()
    placements: Placements | None = None
    backend: str = "fx"
    cuda_graphs: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """All options of a pipeline; `zbcompile.pipeline` describes them. Raises PipelineError for a
    value that an option cannot have."""

    schedule: str | Schedule = "zb-v"
    microbatches: int | None = None
    ranks: int | None = None
    loss: LossFunction | None = None
    loss_reduction: str = "mean"
    chunks: int | None = None
    mesh: DeviceMesh | None = None
    exact: bool = False
    recompute: Recompute = "hints"
    memory: int | None = None
    optimizer_state: float = 2.0
    vocab: Barriers | None = None
    balance: Balance = "flops"
    hardware: Hardware | None = None
    backend: str | Callable[..., Any] = "fx"
    cuda_graphs: bool = False
    split: Split | None = None
    static_inputs: tuple[str, ...] = ()
    placements: Placements | None = None
    accumulate_dtype: torch.dtype | None = None
    pairs: str = "auto"
    seed: int = 0
    operators: tuple[str, ...] = ()
    init: Init | None = None
    timeout: float = 300.0
    max_shapes: int = 8
    debug_nan: bool = False
    warm_up: bool = True
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in OPTIONS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if self.exact and self.backend == "inductor":
            raise PipelineError(
                'backend="inductor" fuses and reorders arithmetic, so its gradients are not bitwise'
                " those of eager; exact=True cannot use it. Use exact=False (equal within 2e-6 in"
                ' fp32), or backend="fx".'
            )
        if self.exact and self.vocab in (1, 2):
            raise PipelineError(
                f"vocab={self.vocab} sums over the vocabulary in a different order than eager; "
                'exact=True cannot use it. Use exact=False, or vocab="off".'
            )

    @property
    def choices(self) -> CompileOptions:
        """The options that change the graphs. Without `vocab=` the output layer is sharded only if
        `schedule="auto"` decides so; passes are paired only where graphs run as they are."""
        choices = CompileOptions(
            **{field.name: getattr(self, field.name) for field in fields(CompileOptions)}
        )
        choices = replace(choices, vocab=self.vocab or ("auto" if is_searched(self) else "off"))
        return choices if backend_name(self.backend) == "fx" else replace(choices, pairs="given")

    @property
    def step(self) -> StepOptions:
        """The options that a saved program keeps of a step."""
        values = {field.name: getattr(self, field.name) for field in fields(StepOptions)}
        return StepOptions(**{**values, "backend": backend_name(self.backend)})


OPTIONS = {field.name: field.default for field in fields(PipelineOptions)}


def is_searched(options: PipelineOptions) -> bool:
    """Returns True for `schedule="auto"`: the first batch decides which named schedule it is."""
    return isinstance(options.schedule, str) and find(options.schedule).name == "auto"


def backend_name(backend: str | Callable[..., Any]) -> str:
    """The name of a backend in messages and in a saved program."""
    if isinstance(backend, str):
        return backend
    return str(getattr(backend, "__qualname__", type(backend).__qualname__))


def refuse_removed(function: str, names: Iterable[str]) -> None:
    """Raises TypeError for a keyword that `function` had once, and says what to do instead."""
    for name in names:
        if name in REMOVED:
            raise TypeError(f"{function} has no option {name}= any more: {REMOVED[name]}.")


def require_known(names: Iterable[str]) -> None:
    """Raises TypeError for a keyword that is no option of `zbcompile.pipeline`."""
    refuse_removed("zbcompile.pipeline", names)
    for name in names:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {near[0]}=?" if near else "help(zbcompile.pipeline) lists all."
            raise TypeError(f"zbcompile.pipeline has no option {name}=; {hint}")


def checked(name: str, value: Any) -> Any:
    """Returns the value that option `name` keeps of a given one. Raises PipelineError.

    >>> checked("memory", "80GiB")
    85899345920
    """
    if value is None and OPTIONS[name] is None:
        return None
    read, expected = _READERS[name]
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError) as error:
        text = repr(value) if len(repr(value)) <= 80 else f"<{type(value).__name__}>"
        detail = str(error) if str(error).startswith("expected") else f"expected {expected}"
        raise PipelineError(f"{name}={text}; {detail}.") from None
    except CompileError as error:  # of a hardware profile
        raise PipelineError(f"{name}: {error}") from None


def _accept(holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Returns a reader that keeps values for which `holds` is true."""

    def read(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return read


def _one_of(*values: str | int) -> Callable[[Any], Any]:
    return _accept(lambda value: not isinstance(value, bool) and value in values)


def _count(value: Any) -> int:
    if isinstance(value, bool) or operator.index(value) < 1:
        raise ValueError
    return operator.index(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    return operator.index(value)


def _positive_bytes(value: Any) -> int:
    if (size := read_bytes(value)) < 1:
        raise ValueError
    return size


def _read_schedule(value: Any) -> str | Schedule:
    if isinstance(value, str) and value.endswith(ENDS_OF_SCHEDULES):
        value = load(value)
    if isinstance(value, Schedule):
        value = value.compute_only()  # messages are placed for the compiled stages
    if not isinstance(value, str | Schedule):
        raise ValueError
    return value


def _read_recompute(value: Any) -> Recompute:
    if not isinstance(value, list | tuple):
        return _read_policy(value)
    if not value:
        raise ValueError
    policies = tuple(map(_read_policy, value))
    return policies if len(policies) > 1 else policies[0]


def _read_policy(value: Any) -> Policy:
    if isinstance(value, str) and re.fullmatch(r"[01]?\.\d*", value):
        value = float(value)
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise ValueError
        return value
    if isinstance(value, str) and value in POLICIES:
        return value
    return read_bytes(value)


def _read_balance(value: Any) -> Balance:
    if value == "flops":
        return "flops"
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


def _read_dtype(value: Any) -> torch.dtype:
    dtype = NAMED["dtype"].get(value) if isinstance(value, str) else value
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError
    return dtype


def _read_split(value: Any) -> dict[str, bool | int]:
    split = dict(value)
    if not all(isinstance(name, str) and isinstance(answer, int) for name, answer in split.items()):
        raise ValueError
    return split


def _read_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


def _read_example(value: Any) -> Any:
    args, kwargs = value
    return tuple(args), dict(kwargs)


_SWITCH = _accept(lambda value: isinstance(value, bool)), "True or False"
_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "schedule": (_read_schedule, "a name, a schedule file or a Schedule"),
    "microbatches": (_count, "a positive whole number of microbatches"),
    "ranks": (_count, "a positive whole number of ranks"),
    "loss": (_accept(callable), "a function loss(output, target)"),
    "loss_reduction": (_one_of("mean", "sum"), '"mean" or "sum"'),
    "chunks": (_count, "a positive whole number of stages per rank"),
    "mesh": (_accept(lambda value: isinstance(value, DeviceMesh)), "a DeviceMesh"),
    "exact": _SWITCH,
    "recompute": (
        _read_recompute,
        (
            '"off", "hints", "selective", "full"; a share of what is kept otherwise, such as 0.5;'
            f" what a stage keeps of a microbatch in {SIZES}; or a list with one of these per stage"
        ),
    ),
    "memory": (_positive_bytes, f"a positive number of {SIZES}"),
    "optimizer_state": (
        _accept(lambda value: is_real(value) and value >= 0),
        "bytes per byte of parameter",
    ),
    "vocab": (_one_of("off", "auto", 1, 2), '"off", "auto", 1 or 2 (barriers)'),
    "balance": (_read_balance, '"flops", or a list with the names of all cuts, such as "blocks.2"'),
    "hardware": (
        read_hardware,
        f"{', '.join(hardware_names())}, a FILE.toml, or a zbcompile.Hardware",
    ),
    "backend": (
        _accept(lambda value: value in BACKENDS if isinstance(value, str) else callable(value)),
        '"fx", "inductor", or a function of a graph and its example inputs',
    ),
    "cuda_graphs": _SWITCH,
    "split": (
        _read_split,
        'a mapping of inputs to False, True or the dimension to cut, such as {"mask": False}',
    ),
    "static_inputs": (_read_names, 'a list of names of inputs, such as "image_grid_thw"'),
    "placements": (
        read_placements,
        (
            'a mapping of name patterns to "replicate", "partial" or "shard" along "tp", "cp" or'
            ' "ep", such as {"*norm*": {"tp": "partial"}}'
        ),
    ),
    "accumulate_dtype": (_read_dtype, "a floating-point dtype, such as torch.float32"),
    "pairs": (_one_of("auto", "given"), '"auto" or "given"'),
    "seed": (_whole, "a whole number"),
    "operators": (_read_names, 'a list of names of operators, such as "mylibrary::scale"'),
    "init": (_accept(callable), "a function init(name, tensor)"),
    "timeout": (
        _accept(lambda value: is_real(value) and value > 0),
        "a positive number of seconds",
    ),
    "max_shapes": (_count, "a positive whole number of programs to keep"),
    "debug_nan": _SWITCH,
    "warm_up": _SWITCH,
    "example": (_read_example, "(args, kwargs) of one batch"),
}
