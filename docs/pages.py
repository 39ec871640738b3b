"""Pages of the site that are made from the code: one for every schedule, and the reference of all
public names. What Markdown leaves as text becomes code: examples of docstrings, and blocks with a
mark for the tests."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

import zbcompile
from zbcompile import schedules
from zbcompile.schedules.generators.registry import Family, find

RANKS, MICROBATCHES = 4, 8  # of the pictures
WHEN = {
    "gpipe": (
        "Never for training; it is the reference for everything else, and the order of forward-only"
        " runs."
    ),
    "1f1b": (
        "When splitting is not worth it: long pipelines of tiny stages, or many microbatches per"
        " rank."
    ),
    "1f1b-overlap": (
        "When each layer waits for collectives (experts): a forward runs beside a backward."
    ),
    "interleaved-1f1b": "When backward passes cannot be split, and messages are cheap.",
    "interleaved-1f1b-overlap": (
        "As 1f1b-overlap, with several stages on a rank and a smaller bubble."
    ),
    "looped-bfs": (
        "With parameters that are gathered per stage: every stage's parameters are needed in one"
        " stretch."
    ),
    "zb-h1": "The first to try: the memory of 1F1B, about a third of its bubble.",
    "zb-h1-lazy": "As zb-h1 where splitting costs time: it splits only the backwards that must be.",
    "zb-h2": (
        "When memory for twice the activations is there: no bubble without an optimizer barrier."
    ),
    "zb-1p": "When stages differ: the order follows the costs of each, within the memory of 1F1B.",
    "zb-2p": "As zb-1p with twice the memory.",
    "interleaved-zb": (
        "Under an optimizer barrier: with four stages a rank its step is the shortest of the names."
    ),
    "zb-v": (
        "No bubble in the memory of 1F1B, and the loss on the first rank; it sends more messages."
    ),
    "v-half": "When activations must take half of 1F1B's memory.",
    "v-min": "When activations must take a third of 1F1B's memory, whatever it costs in time.",
    "dualpipe": (
        "For comparison: two copies of the model for the overlap that dualpipe-v has with one."
    ),
    "dualpipe-v": (
        "Mixtures of experts: every exchange of tokens runs beside the products of another"
        " microbatch."
    ),
    "auto": (
        "When stages differ, memory is limited in bytes or hops cost time"
        " ([how](../schedules.md#scheduleauto))."
    ),
}


MARKED = re.compile(r"^(```\w+) \{.*\}$", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
SKIPPED = re.compile(r" *# doctest: \+\w+")
STYLES = {"": "default", '[data-bs-theme="dark"] ': "github-dark"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, the pictures in them, and the colours of code."""
    for path, text in (*schedule_pages(), ("reference.md", reference()), ("code.css", colours())):
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the schedules under their own page, and let docstrings show examples."""
    config.markdown_extensions.append(DoctestExtension())  # type: ignore[arg-type]
    pages = [{name: f"schedules/{name}.md"} for name in schedules.names()]
    for entry in config.nav or []:
        if "Schedules" in entry:
            entry["Schedules"] += pages
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with plain fences: those with a mark, such as `{run}`, are read by the tests."""
    return MARKED.sub(r"\1", markdown)


class DoctestExtension(Extension):
    """Shows the examples of docstrings as code; Markdown takes `>>>` for a quote in a quote in a
    quote."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(DoctestFences(md), "doctests", 30)  # before fences are read


class DoctestFences(Preprocessor):
    """Puts fences around examples, up to the next empty line."""

    def run(self, lines: list[str]) -> list[str]:
        return EXAMPLE.sub(_fenced, "\n".join(lines)).split("\n")


def _fenced(found: re.Match[str]) -> str:
    return f"\n```pycon\n{inspect.cleandoc(SKIPPED.sub('', found.group()))}\n```\n"


def colours() -> str:
    """A style sheet for code, in light and dark."""
    parts = (
        HtmlFormatter(style=style).get_style_defs(f"{where}.codehilite")
        for where, style in STYLES.items()
    )
    return "\n".join(parts)


def schedule_pages() -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the page of every schedule and of its picture."""
    for family in map(find, schedules.names()):
        count = schedules.smallest_microbatches(family.name, RANKS, MICROBATCHES)
        schedule = schedules.build(family.name, RANKS, count)
        timeline = schedules.simulate(schedule, schedules.Costs.uniform(schedule.stages))
        yield f"schedules/{family.name}.svg", schedules.to_svg(timeline)
        yield (
            f"schedules/{family.name}.md",
            "\n\n".join(_page(family, count, schedules.summary(timeline))),
        )


def _page(family: Family, count: int, figures: str) -> Iterator[str]:
    yield f"# {family.name}"
    yield f"**When to use it.** {WHEN[family.name]}"
    yield f"![{family.name} on {RANKS} ranks, {count} microbatches]({family.name}.svg)"
    yield f"```\n{figures}\n```"
    yield f'`schedule="{family.name}"` takes {family.rule.text}; placement {family.placement}.'
    if family.generate is not None:
        yield "## The rule\n\n" + _as_markdown(inspect.getdoc(family.generate) or "")
    yield f"## Closed form\n\n{_formula(family.name)}"


def _as_markdown(text: str) -> str:
    """A docstring whose pictures are literal blocks after `::`."""
    return text.replace("::\n", ":\n")


def _formula(name: str) -> str:
    """The closed form; where an order is searched, what none can be shorter than."""
    if name == "auto":
        costs = schedules.Costs.uniform(2 * RANKS)
        bounds = [
            schedules.bound(costs, RANKS, MICROBATCHES, placement)
            for placement in ("looped:2", "v")
        ]
        return (
            "A searched order has none. No order of the picture's passes is shorter than "
            f"{min(bounds):g} (`schedules.bound`)."
        )
    form = schedules.closed_form(name)
    shown = {"makespan": form.makespan, "cost": form.cost, "peak memory": form.peak_memory}
    lines = [
        f"{figure}: {expression}" for figure, expression in shown.items() if expression is not None
    ]
    return "\n".join(["```", *lines, *([f"assumes {form.assumes}"] if form.assumes else []), "```"])


def reference() -> str:
    """One section for each public name."""
    parts = ["# Reference", "What is listed here is public: it changes only with a deprecation."]
    for package in (zbcompile, schedules):
        parts.append(f"## {package.__name__}")
        parts += [
            f"::: {package.__name__}.{name}"
            for name in sorted(package.__all__)
            if _is_documented(package, name)
        ]
    text = "\n\n".join(parts)
    made = "::: zbcompile.pipeline"  # its docstring is made from the description of the options
    return text.replace(f"{made}\n", f"{made}\n    options:\n      force_inspection: true\n")


def _is_documented(package: Any, name: str) -> bool:
    return not name.startswith("_") and bool(inspect.getdoc(getattr(package, name)))
