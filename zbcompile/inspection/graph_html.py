"""All graphs of a program as one HTML file: stages side by side, F, B and W coloured on the module tree, the values
that cross between them with their bytes, and a search box. The page is self-contained.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from torch.fx import Graph

from zbcompile.amounts import format_bytes, format_count
from zbcompile.passes.graph.fx import is_getitem, output_values
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.print_python import describe_value
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import is_in_place
from zbcompile.program.program import Program
from zbcompile.schedules.visualization import looks
from zbcompile.schedules.visualization.looks import LOOKS
from zbcompile.schedules.visualization.shapes import shape, window

SHOWN = ("F", "B", "W")
STYLE = """
body { font: 14px sans-serif; margin: 16px; color: #111; background: #fff; color-scheme: light dark }
#stages { display: flex; align-items: flex-start; overflow-x: auto; padding-bottom: 12px }
.stage { flex: 0 0 450px; border: 1px solid #bbb; border-radius: 6px; padding: 10px }
.hop { flex: 0 0 88px; text-align: center; font-size: 12px; padding-top: 92px }
.hop b { display: block; font-size: 20px; font-weight: normal; line-height: 1 }
h2 { font-size: 16px; margin: 0 0 4px } p { margin: 4px 0 }
details { margin-left: 10px } summary { cursor: pointer; padding: 1px 0 }
.count { border-radius: 8px; padding: 0 6px; margin-left: 4px; font-size: 12px; border: 1px solid #555 }
.op { border-left: 6px solid; margin: 1px 0 1px 10px; padding: 1px 6px; font: 12px monospace; overflow-wrap: anywhere }
.op span { opacity: .75 } .values { font: 12px monospace; margin: 2px 0 6px 12px; overflow-wrap: anywhere }
.F { border-color: COLOUR_F } .B { border-color: COLOUR_B } .W { border-color: COLOUR_W }
.count.F { background: COLOUR_F } .count.B { background: COLOUR_B } .count.W { background: COLOUR_W }
.count { color: #111 } input { font-size: 14px; padding: 4px 8px; width: 320px }
.hidden { display: none } .hit { background: #fff3a0; color: #111 }
"""
_DARK = (("body", "color: #ddd; background: #1c1c1f"),)
SCRIPT = """
const ops = [...document.querySelectorAll(".op")], found = document.getElementById("found");
document.getElementById("search").addEventListener("input", event => {
  const text = event.target.value.trim().toLowerCase();
  let hits = 0;
  document.querySelectorAll("#stages details.module").forEach(part => part.open = false);
  for (const op of ops) {
    const hit = text !== "" && op.textContent.toLowerCase().includes(text);
    op.classList.toggle("hit", hit);
    op.classList.toggle("hidden", text !== "" && !hit);
    if (!hit) continue;
    hits += 1;
    for (let part = op.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  }
  found.textContent = text === "" ? "" : hits + (hits === 1 ? " operation" : " operations");
});
"""


@dataclass(frozen=True)
class Operation:
    """One operation of a graph: the module and line of the model it is from, or the pass of the compiler that made it.

    `inputs` are names of operations or of the graph's inputs; `value` is type and size; `effect` is "view", "in place"
    or "".
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    value: str
    effect: str
    module: str
    line: str
    made_by: str


def operations_of(graph: Graph) -> Iterator[Operation]:
    """The operations of one pass of a stage, in their order."""
    for node in (node for node in graph.nodes if node.op == "call_function"):
        origin = origin_of(node)
        effect = "in place" if is_in_place(node.target) else "view" if not is_getitem(node) and is_view(node) else ""
        yield Operation(
            name=node.name,
            operator="getitem" if is_getitem(node) else str(node.target),
            inputs=tuple(argument.name for argument in node.all_input_nodes),
            value=describe_value(node.meta.get("val")),
            effect=effect,
            module=origin.owner if origin else "",
            line=origin.text if origin else "",
            made_by=str(node.meta.get("pass", "")),
        )


@dataclass
class _Module:
    """A module of the tree: its own operations by pass, and its children by name."""

    operations: dict[str, list[Operation]] = field(default_factory=lambda: {name: [] for name in SHOWN})
    children: dict[str, "_Module"] = field(default_factory=dict)

    def count(self, name: str) -> int:
        return len(self.operations[name]) + sum(child.count(name) for child in self.children.values())


def to_page(program: Program, title: str) -> str:
    """The page as text; `title` names the model."""
    style = f"{looks.STYLE}{STYLE}{looks.in_the_dark(*looks.DARK, *_DARK)}"
    for name in SHOWN:
        style = style.replace(f"COLOUR_{name}", LOOKS[name][0])
    plan = f"{program.schedule.name}, {program.schedule.ranks} ranks, {len(program.stages)} stages"
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
            f"<style>{style}</style>",
            f'<h1 style="font-size: 20px">{escape(title)}: {escape(plan)}</h1>',
            '<p><input id="search" type="search" placeholder="operation, module, line, shape ..."> ',
            '<span id="found"></span></p>',
            f'<div id="stages">{"".join(_columns(program))}</div>',
            f"<script>{SCRIPT}</script>\n</html>\n",
        ]
    )


def _columns(program: Program) -> Iterator[str]:
    for stage in program.stages:
        if stage.stage:
            yield _hop(program.stages[stage.stage - 1], stage)
        yield _stage(program, stage)


def _hop(left: StageProgram, right: StageProgram) -> str:
    """The values that cross between a stage and later ones: activations to the right, also to stages further away
    (`value__to5`), and if the program trains their gradients, to the left."""
    there, back = (format_bytes(sum(spec.bytes for spec in each.values())) for each in (left.sends, left.gradients_in))
    travels = f"<b>&#8594;</b>{there}<br>activations"
    travels += f"<br><b>&#8592;</b>{back}<br>gradients" if "B" in left.pieces else ""
    names = escape(", ".join(left.sends))
    return f'<div class="hop" title="{names}">{travels}</div>'


def _stage(program: Program, stage: StageProgram) -> str:
    shown = [name for name in SHOWN if name in stage.pieces]
    rank = program.rank_of(stage.stage)
    flops = ", ".join(f"{name} {format_count(stage.flops[name])}" for name in shown)
    return "\n".join(
        [
            f'<section class="stage"><h2>stage {stage.stage} on rank {rank}</h2>',
            f"<p>{len(stage.parameters)} parameters; FLOPs {flops}</p>",
            *([_passes(stage), *_crossing(stage)] if "B" in stage.pieces else []),  # not of a forward alone
            *_tree(_modules({name: stage.pieces[name] for name in shown}), "open"),
            "</section>",
        ]
    )


def _passes(stage: StageProgram) -> str:
    """F, B and W as boxes, and between them arrows whose width shows the bytes that wait."""
    crossing = stage.crossing
    amounts = (crossing.forward_to_backward, crossing.backward_to_weight, crossing.forward_to_weight)
    thick = [1 + 7 * amount / (max(amounts) or 1) for amount in amounts]
    shapes = []
    for name, x in zip(SHOWN, (10, 190, 370), strict=True):
        shapes.append(shape("rect", x=x, y=44, width=60, height=34, rx=5, fill=LOOKS[name][0], stroke="#333"))
        shapes.append(shape("text", "step", name, x=x + 30, y=61))
    for x, width, amount in ((70, thick[0], amounts[0]), (250, thick[1], amounts[1])):
        shapes.append(shape("line", x1=x, y1=61, x2=x + 112, y2=61, stroke="#888", stroke_width=width))
        shapes.append(shape("path", d=f"M{x + 110},53 l10,8 l-10,8z", fill="#888"))
        shapes.append(shape("text", text=format_bytes(amount), x=x + 58, y=92, text_anchor="middle"))
    shapes.append(shape("path", d="M40,44 C40,8 400,8 400,36", fill="none", stroke="#888", stroke_width=thick[2]))
    shapes.append(shape("path", d="M392,34 l8,10 l8,-10z", fill="#888"))
    shapes.append(shape("text", text=format_bytes(amounts[2]), x=220, y=12, text_anchor="middle"))
    label = ' role="img" aria-label="what waits between F, B and W"'
    return "".join((window(440, 100, more=label), *shapes, "</svg>"))


def _crossing(stage: StageProgram) -> Iterator[str]:
    for first, second in (("F", "B"), ("F", "W"), ("B", "W")):
        made, wanted = stage.pieces[first], set(map(str, stage.pieces[second].inputs))
        pairs = zip(made.outputs, output_values(made.module.graph), strict=True)
        values = [(slot.name, node) for slot, node in pairs if slot.kind == "saved" and str(slot) in wanted]
        if values:
            yield f"<details><summary>{first} keeps {len(values)} values for {second}</summary>"
            lines = (f"{escape(name)}: {escape(describe_value(node.meta.get('val')))}" for name, node in values)
            yield f'<div class="values">{"<br>".join(lines)}</div></details>'


def _modules(pieces: Mapping[str, Piece]) -> _Module:
    root = _Module()
    for name, piece in pieces.items():
        for operation in operations_of(piece.module.graph):
            _place(root, operation).operations[name].append(operation)
    return root


def _place(root: _Module, operation: Operation) -> _Module:
    """The module of an operation; names with a space ("the model", "the loss") are no paths."""
    module = operation.module or f"made by {operation.made_by or 'zbcompile'}"
    for part in [module] if " " in module else module.split("."):
        root = root.children.setdefault(part, _Module())
    return root


def _tree(module: _Module, state: str = "") -> Iterator[str]:
    """The modules below `module`; `state` is "open" where a reader begins."""
    for name, child in module.children.items():
        counts = "".join(f'<span class="count {p}">{p} {child.count(p)}</span>' for p in SHOWN if child.count(p))
        yield f'<details class="module" {state}><summary>{escape(name)} {counts}</summary>'
        for passed in SHOWN:
            yield from _operations(passed, child.operations[passed])
        yield from _tree(child)
        yield "</details>"


def _operations(name: str, operations: list[Operation]) -> Iterator[str]:
    for op in operations:
        effect = f" ({op.effect})" if op.effect else ""
        made = f" by {op.made_by}" if op.made_by else ""
        code = f"{op.name} = {op.operator}({', '.join(op.inputs)})"
        where = f"<br><span>{escape(op.line)}</span>" if op.line else ""
        value = f"<span>{escape(op.value)}{effect}{made}</span>"
        yield f'<div class="op {name}">{name}: {escape(code)} {value}{where}</div>'
