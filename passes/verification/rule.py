"""A rule: one property of what a pass has made, the sentence that states it, and the search for what breaks it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from zbcompile.passes.errors import VerificationError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.verification.graph_views import GraphView, graphs_of


class Break(NamedTuple):
    """One place where a rule does not hold: `what` is wrong with `node` (or with the graph, if no node is to blame)."""

    what: str
    node: Node | None = None
    graph: str = ""


@dataclass(frozen=True)
class Rule:
    """`find(made, before)` yields every place that breaks the rule in what a pass has `made`; `says` states it."""

    name: str
    says: str
    find: Callable[[Any, Any], Iterable[Break]]


def rule(says: str) -> Callable[[Callable[[Any, Any], Iterable[Break]]], Rule]:
    """Turn a search over the result and the input of a pass into a rule named after the function."""
    return lambda find: Rule(_name_of(find), says, find)


def graph_rule(says: str) -> Callable[[Callable[[GraphView], Iterable[Break]]], Rule]:
    """Turn a search over one graph into a rule for every graph that a pass has made."""

    def make(find: Callable[[GraphView], Iterable[Break]]) -> Rule:
        def everywhere(made: Any, before: Any) -> Iterator[Break]:
            for view in graphs_of(made):
                yield from (found._replace(graph=view.title) for found in find(view))

        return Rule(_name_of(find), says, everywhere)

    return make


def verify(name: str, rules: Sequence[Rule], made: Any, before: Any = None) -> None:
    """Check `made`, the result of pass `name` on `before`. Raises VerificationError for the first broken rule."""
    for each in rules:
        found = list(each.find(made, before))
        if found:
            more = f" ({len(found) - 1} more such places.)" if found[1:] else ""
            raise VerificationError(
                f"after the pass {name}{_place(found[0])} {found[0].what}. This breaks the rule {each.name}: "
                f"{each.says}.{more} This is a bug of the compiler; please report it with the model."
            )


def _name_of(find: Callable[..., Any]) -> str:
    return find.__name__.replace("_", "-")


def _place(found: Break) -> str:
    graph = f", in {found.graph}" if found.graph else ""
    if found.node is None:
        return f"{graph}:"
    origin = origin_of(found.node)
    return f"{graph}: {found.node.name}{f' ({origin})' if origin else ''}"
