"""The keywords of `zbcompile.pipeline`: every option, checked before anything is compiled; those that are rarely used
are grouped under one keyword: `memory=Memory(...)`, `vocab=Vocab(...)`."""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from textwrap import fill
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from zbcompile.backends.backend import backend_name, check_backend
from zbcompile.distributed.mesh import MeshNames, read_mesh_names
from zbcompile.errors import PipelineError
from zbcompile.model.materialize import Init
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import VOCAB, Barriers, Choices, VocabLogits
from zbcompile.passes.errors import CompileError
from zbcompile.passes.option import (
    BYTES,
    SWITCH,
    OptionKind,
    Reads,
    UnexpectedValue,
    accept,
    number,
    option,
    options,
    options_of,
    paragraphs_of,
    whole,
)
from zbcompile.program.step_options import StepOptions
from zbcompile.schedules import Lowered, Schedule, load
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES

Part = TypeVar("Part")


def _read_example(given: Any) -> Any:
    args, kwargs = given
    return tuple(args), dict(kwargs)


SCHEDULE = accept(
    lambda given: isinstance(given, str | Schedule | Lowered), "a name, a schedule file or a Schedule", metavar="NAME"
)
MESH = accept(lambda given: isinstance(given, DeviceMesh), "a DeviceMesh")
MESH_NAMES = OptionKind(
    read_mesh_names,
    'a mapping of "pp", "dp", "tp", "cp" or "ep" to the name of a dimension of mesh=, or to several names',
)
EXAMPLE = OptionKind(_read_example, "(args, kwargs) of one batch")


@options
class Options(Choices, StepOptions):
    """All options of a pipeline, each by its own name, as manifests and command lines have them. Raises PipelineError
    for a value that an option cannot have.

    Args:
        schedule: A name in any spelling (`zbcompile.schedules.names()`), a .csv, .json or .txt file, or a `Schedule`;
            with messages (a `Lowered`, or such a file) these are kept. Weight gradients accumulate in its order of W.
            "auto" searches placement, cuts, recomputation (with a limit of memory), the number of microbatches (if not
            given) and the order by cost, when the first batch is there (docs/search.md).
        search_seconds: How long "auto" may search, and then how long it may try what it found by steps on the ranks.
        microbatches: How many equal parts each batch is split into. Default: the smallest count from 2 x stages on that
            the schedule admits and that divides the first batch, else the largest below.
        ranks: Without torchrun, how many ranks to run inside this process. Under torchrun the process group decides.
            Default: those of a `Schedule` or schedule file, else one.
        loss: `loss(output, target)`. Without it, forward returns the loss, or something with a `.loss`.
        chunks: Stages per rank, for the interleaved schedules.
        example: `(args, kwargs)` of one batch (`target` among the keywords). Compiles at once.
        mesh: A DeviceMesh of all processes with any of the dimensions "pp" (the pipeline's ranks), "dp" (replicas),
            "tp" (tensor parallelism), "cp" (context parallelism) and "ep" (experts), docs/composition.md. Ranks along
            "dp" and "ep" pass batches of their own, along "pp", "tp" and "cp" the same one. Loss and gradients are
            those of the concatenated batch (the mean or the sum over all of it and over "cp", by `loss_reduction`).
        mesh_names: The names that dimensions of the pipeline have in `mesh`, where they are called otherwise or are
            made of several: {"dp": ("dp_replicate", "dp_shard"), "pp": "stages"}. Dimensions of one rank need no name.
        timeout: Seconds that a rank waits for another one before all ranks end with an error that names it. In a step,
            a compilation or at the start; a rank that fails or dies ends the other ranks within 5 seconds.
        max_shapes: How many programs are kept. Every new shape of batch compiles one, with a notice; beyond this many
            the least recently used is evicted. Parameters and their places are the same for all.
        init: `init(name, tensor)` fills a parameter or buffer in place, for a model built on the meta device. After the
            first compilation each rank materialises its own share and nothing else. Without it `load_state_dict` fills
            the share before the first step.
        debug_nan: Stop at the first operation of a step or of `eval` that makes a NaN or an infinity. Names its stage,
            pass, microbatch and line, or the input, parameter or buffer that holds a NaN (slow; the graphs run as they
            are, whatever the backend). ZBCOMPILE_DEBUG_NAN=1 does the same.
    """

    schedule: Reads[str | Schedule | Lowered, str | Schedule] = option("zb-v", SCHEDULE)
    microbatches: int | None = option(None, whole(" of microbatches").or_none())
    ranks: int | None = option(None, whole(" of ranks").or_none())
    loss: LossFunction | None = option(None, accept(callable, "a function loss(output, target)").or_none())
    chunks: int | None = option(None, whole(" of stages per rank").or_none())
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = option(None, EXAMPLE.or_none())
    mesh: DeviceMesh | None = option(None, MESH.or_none())
    mesh_names: MeshNames | None = option(None, MESH_NAMES.or_none())
    timeout: float = option(300.0, number("a positive number of seconds", lambda given: given > 0, "SECONDS"))
    search_seconds: float = option(20.0, number("a positive number of seconds", lambda given: given > 0, "SECONDS"))
    max_shapes: int = option(8, whole(" of programs to keep"))
    init: Init | None = option(None, accept(callable, "a function init(name, tensor)").or_none())
    debug_nan: bool = option(False, SWITCH)
    memory: Reads["float | str | Memory | None", int | None] = option(None, BYTES.or_none())  # type: ignore[assignment]
    vocab: Reads["Barriers | Vocab | None", Barriers | None] = option(None, VOCAB.or_none())  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in OPTIONS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if isinstance(self.schedule, str) and self.schedule.endswith(ENDS_OF_SCHEDULES):
            object.__setattr__(self, "schedule", load(self.schedule))
        if isinstance(self.schedule, Lowered):
            object.__setattr__(self, "schedule", self.schedule.as_schedule())
        check_backend(self.backend, self.exact)

    @property
    def choices(self) -> Choices:
        """Only graphs that run as they are can be interleaved; what is not said of the output layer is searched."""
        vocab = self.vocab or ("auto" if is_searched(self) else "off")
        found = replace(_part(self, Choices), vocab=vocab)
        return found if backend_name(self.backend) == "fx" else replace(found, pairs="given")

    @property
    def step(self) -> StepOptions:
        return replace(_part(self, StepOptions), backend=backend_name(self.backend))

    def with_placements(self, found: Mapping[str, Mapping[str, str]]) -> "Options":
        """The options of a model whose DTensors say these placements."""
        return replace(self, placements={**(self.placements or {}), **found}) if found else self


def is_searched(options: Options) -> bool:
    """Whether the layout is searched by cost when the first batch is there: `schedule="auto"`."""
    return isinstance(options.schedule, str) and find(options.schedule).name == "auto"


OPTIONS = {  # what `Options` itself adds first, as a reader of `help(zbcompile.pipeline)` meets them
    name: options_of(Options)[name] for kind in Options.__mro__ for name in vars(kind).get("__annotations__", ())
}
PARAGRAPHS = paragraphs_of(Options)


def _part(options: Options, kind: type[Part]) -> Part:
    return kind(**{name: getattr(options, name) for name in options_of(kind)})


def checked(name: str, given: Any, written: str = "") -> Any:
    """The value that an option keeps for a given one. Raises PipelineError, which calls the option as it is `written`.

    >>> checked("memory", "80GiB")
    85899345920
    """
    kind = OPTIONS[name].metadata["kind"]
    try:
        return kind.read(given)
    except (ValueError, TypeError, OverflowError) as error:
        shown = repr(given) if len(repr(given)) <= 80 else f"<{type(given).__name__}>"
        expected = error if isinstance(error, UnexpectedValue) else f"expected {kind.expected}"
        raise PipelineError(f"{written or name}={shown}; {expected}.") from None
    except CompileError as error:  # of a profile, which says what is wrong in it
        raise PipelineError(f"{written or name}: {error}") from None


def document(thing: Any, options: Mapping[str, str]) -> None:
    """Put the paragraph of each option, under the name that it has there, into a docstring: in place of {options}."""
    paragraphs = (f"{name}: {PARAGRAPHS.get(option)}" for name, option in options.items())
    filled = [fill(text, 120, initial_indent=8 * " ", subsequent_indent=12 * " ") for text in paragraphs]
    if thing.__doc__:  # none under python -OO
        thing.__doc__ = thing.__doc__.replace("{options}", "\n".join(filled).lstrip())


def _option(name: str, **default: Any) -> Any:
    """A field that is the option `name`, with its default."""
    return field(**{"default": OPTIONS[name].default, **default}, metadata={"option": name})


class _Group:
    def __post_init__(self) -> None:
        for name, own in options_in(type(self)).items():
            object.__setattr__(self, name, checked(own, getattr(self, name), f"{type(self).__name__}.{name}"))


@dataclass(frozen=True)
class Memory(_Group):
    """What a rank may hold: `memory=` of `zbcompile.pipeline`. Raises PipelineError for what is no size.

    Args:
        {options}

    >>> Memory("80GiB", optimizer_state=1.0)
    Memory(limit=85899345920, optimizer_state=1.0, boundary_bytes=None)
    """

    limit: int | float | str | None = _option("memory")
    optimizer_state: float = _option("optimizer_state")
    boundary_bytes: int | float | str | None = _option("boundary_bytes")


@dataclass(frozen=True)
class Vocab(_Group):
    """How the output layer is sharded over the ranks: `vocab=` of `zbcompile.pipeline`. Raises PipelineError for what
    does not exist. Unlike that keyword, `barriers` is "auto" by default.

    Args:
        {options}

    >>> Vocab(barriers=1, logits="keep")
    Vocab(barriers=1, logits='keep')
    """

    barriers: Barriers = _option("vocab", default="auto")
    logits: VocabLogits = _option("vocab_logits")


GROUPS: dict[str, type[Any]] = {"memory": Memory, "vocab": Vocab}


def options_in(group: type[Any]) -> dict[str, str]:
    """The option that each field of a group is."""
    return {each.name: each.metadata["option"] for each in fields(group)}


for _group in GROUPS.values():
    document(_group, options_in(_group))


def options_from(given: Mapping[str, Any]) -> Options:
    """The options that these keywords of `zbcompile.pipeline` ask for.

    Raises PipelineError for a value that an option cannot have, TypeError for a keyword that does not exist.
    """
    require_known(given)
    flat: dict[str, Any] = dict(given)
    for keyword, group in GROUPS.items():
        _group_parts(keyword, group, flat)
        if isinstance(flat.get(keyword), group):
            asked = flat.pop(keyword)
            flat |= {option: getattr(asked, part) for part, option in options_in(group).items()}
    return Options(**flat)


def require_known(names: Iterable[str]) -> None:
    """Raise TypeError for a keyword that does not exist."""
    for name in names:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            raise TypeError(f"zbcompile.pipeline has no option {name}={f'; did you mean {near[0]}=?' if near else ''}")


def _group_parts(keyword: str, group: type[Any], flat: dict[str, Any]) -> None:
    """Put parts of a group that are given by their own names into the group, and say how that is written."""
    parts = options_in(group)
    old = [f"{option}=" for option in parts.values() if option in flat and option != keyword]
    if not old:
        return
    if isinstance(flat.get(keyword), group):
        raise PipelineError(f"{old[0]} and {keyword}={group.__name__}(...) are both given; set it in the latter.")
    usual = {name: option.default for name, option in options_of(Choices).items()}
    flat[keyword] = group(**{part: flat.pop(option, usual[option]) for part, option in parts.items()})
    text = f"zbcompile.pipeline({', '.join(old)}) is deprecated; write {keyword}=zbcompile.{flat[keyword]!r}"
    warnings.warn(text, DeprecationWarning, stacklevel=4)
