"""A graph in Graphviz's language: operations in boxes by module, what arrives and leaves in ovals."""

from itertools import groupby

from zbcompile.inspection.graph_data import Boundary, Graph, Operation

FILL = {"F": "#cfe8f7", "B": "#f6dca6", "W": "#bfe5d6", "BW": "#f3c7ab"}


def to_dot(graph: Graph) -> str:
    """The text for `dot -Tsvg`."""
    boxes = enumerate(groupby(graph.operations, key=lambda op: op.module))  # neighbours of the same module
    lines = [
        f'digraph "stage {graph.stage} {graph.name}" {{',
        '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];',
        *(_oval(b.node, b) for b in graph.inputs),
        *(line for i, (module, ops) in boxes for line in _cluster(i, module, list(ops), FILL[graph.name])),
        *(_oval(f"output {i}", b) for i, b in enumerate(graph.outputs)),
        *(f"  {_quoted(a)} -> {_quoted(op.name)};" for op in graph.operations for a in op.inputs),
        *(f"  {_quoted(b.node)} -> {_quoted(f'output {i}')};" for i, b in enumerate(graph.outputs)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _cluster(index: int, module: str, operations: list[Operation], fill: str) -> list[str]:
    texts = [(op, _quoted(f"{op.operator}\n{op.value}".strip())) for op in operations]
    boxes = [f"    {_quoted(op.name)} [label={text}, tooltip={_quoted(op.line)}];" for op, text in texts]
    head = f"  subgraph cluster_{index} {{ label={_quoted(module or operations[0].made_by)};"
    return [f'{head} color="#999999"; node [fillcolor="{fill}"];', *boxes, "  }"]


def _oval(name: str, boundary: Boundary) -> str:
    label = _quoted(f"{boundary.meaning}\n{boundary.value}".strip())
    return f'  {_quoted(name)} [label={label}, shape=oval, fillcolor="#eeeeee"];'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
