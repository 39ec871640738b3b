"""Options that are rarely used, grouped under one keyword: `memory=Memory(...)`, `vocab=Vocab(...)`."""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.frontend.options import OPTIONS, Options, checked, document
from zbcompile.passes.compile_options import Barriers, Choices, VocabLogits
from zbcompile.passes.option import options_of


def _option(name: str, **default: Any) -> Any:
    """A field that is the option `name`, with its default."""
    return field(**{"default": OPTIONS[name].default, **default}, metadata={"option": name})


class _Group:
    def __post_init__(self) -> None:
        for name, option in options_in(type(self)).items():
            object.__setattr__(self, name, checked(option, getattr(self, name), f"{type(self).__name__}.{name}"))


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
