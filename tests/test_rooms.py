"""The rooms: where modules may stand, what they may be called, and in which one direction they
import each other.

Type-only and lazy imports count: an arrow that a reader has to follow is an arrow.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = {
    "zbcompile": "zbcompile",
    "passes": "zbcompile.passes",
    "schedules": "zbcompile.schedules",
}

# Layers of each folder: a module imports from its own layer and from those above it in this list.
LAYERS = {
    "schedules": ("*",),
    "passes": ("*",),
    "zbcompile": (
        "version __init__ untrusted_text field_check errors amounts tables env json_text "
        "safe_files torch_private progress",
        "model batches faults distributed options program backends compiler engine optimizer "
        "prediction profiling program_cache planning torch_pipelining api",
        "persistence integrations inspection cli compile run inspect __main__",
    ),
}
OTHERS = {
    "schedules": set(),
    "passes": set(),
    "zbcompile": {"passes", "schedules"},
}  # which folders each may import
_FOR_ALL = "version untrusted_text progress amounts tables field_check"
FOR_ALL = {f"zbcompile.{name}" for name in _FOR_ALL.split()}  # import nothing but each other
MANY = {"__init__", "__main__", "errors", "torch_private"}  # names that several rooms have


def modules() -> dict[str, tuple[str, Path]]:
    """Dotted name -> (top-level folder, file)."""
    result: dict[str, tuple[str, Path]] = {}
    for top, package in PACKAGE.items():
        for file in (ROOT / top).rglob("*.py"):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            if not (top == "zbcompile" and parts[0] in ("passes", "schedules")):
                result[".".join((package, *parts)).removesuffix(".__init__")] = top, file
    return result


MODULES = modules()


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """All statements of a module, those inside functions and branches too; not the expressions in
    them."""
    yield block
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for item in getattr(block, field, ()):
            yield from statements(item)


def imports(name: str) -> Iterator[str]:
    """The modules that a module names in an import anywhere, calls of `import_module` included;
    public names count as the modules that define them."""
    tree = ast.parse(MODULES[name][1].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).endswith("import_module")
        ):
            named = ast.unparse(node.args[0]).strip("'")
            yield from [named] * (named in MODULES)
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else public_names().get(full, node.module)


@cache
def public_names() -> dict[str, str]:
    """`package.name` -> the module that defines it, for the lazy names of the packages' `__init__`
    files."""
    result: dict[str, str] = {}
    for package in PACKAGE.values():
        for node in statements(ast.parse(MODULES[package][1].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                result |= {f"{package}.{alias.name}": node.module for alias in node.names}
    return result


@cache
def arrows() -> dict[str, set[str]]:
    return {
        name: set(imports(name)) - {name}
        for name in MODULES
        if MODULES[name][1].name != "__init__.py"
    }


def room(name: str) -> str:
    """The sub-package, or the module if it stands at the top of its folder."""
    top = MODULES[name][0]
    rest = name.removeprefix(PACKAGE[top]).removeprefix(".")
    return rest.partition(".")[0] or "__init__"


def layer(name: str) -> int:
    """The index of the layer of a module in LAYERS."""
    layers = LAYERS[MODULES[name][0]]
    result = [i for i, rooms in enumerate(layers) if rooms == "*" or room(name) in rooms.split()]
    assert len(result) == 1, f"{name} belongs to {len(result)} layers"
    return result[0]


def test_no_import_circle() -> None:
    try:
        tuple(TopologicalSorter(arrows()).static_order())
    except CycleError as error:
        pytest.fail(
            f"modules import each other in a circle: {' <- '.join(error.args[1])}", pytrace=False
        )


def test_layers_import_in_one_direction() -> None:
    upwards = []
    for name, targets in arrows().items():
        top = MODULES[name][0]
        for target in sorted(targets):
            second = MODULES[target][0]
            if second != top:
                allowed = second in OTHERS[top] or target in FOR_ALL
            else:
                allowed = layer(target) <= layer(name)
            if not allowed:
                upwards.append(f"{name} imports {target}")
    assert not upwards, "\n".join(upwards)
    assert all(arrows()[name] <= FOR_ALL for name in FOR_ALL)


def test_no_two_classes_have_one_name() -> None:
    """A name means one thing, wherever it is read."""
    counts = Counter(
        (top, node.name)
        for top, file in MODULES.values()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    twice = {name for name, count in counts.items() if count > 1}
    assert not twice


def test_no_two_modules_have_one_name() -> None:
    counts = Counter((top, file.stem) for top, file in MODULES.values())
    assert {stem for (_, stem), count in counts.items() if count > 1} <= MANY


def test_no_module_has_the_name_of_a_public_function() -> None:
    """A module `zbcompile.schedules.check` would hide the function of that name once it is
    imported."""
    for package in PACKAGE.values():
        public = {
            name.rpartition(".")[2] for name in public_names() if name.rpartition(".")[0] == package
        }
        modules = {
            name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == package
        }
        assert not public & modules - {"passes", "schedules"}


def test_rooms_are_not_halls() -> None:
    """More than about two dozen modules side by side hide what a reader looks for."""
    crowd = Counter(file.parent for _, file in MODULES.values())
    assert max(crowd.values()) <= 24, crowd.most_common(3)


@pytest.mark.slow
def test_one_file_names_the_accelerator() -> None:
    """Another one is then another such file. Messages and docstrings may say what a user writes."""
    named = ("torch.cuda", "torch.accelerator", "is_cuda")
    result = set()
    for name, (_, file) in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (
                ast.unparse(node) in named or node.attr in named
            ):
                result.add(name)
    assert result == {"zbcompile.passes.gpu"}
