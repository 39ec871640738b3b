"""The rooms: where modules may stand, what they may be called, in which one direction they import
each other, and where torch's private names stand. Type-only and lazy imports count: a reader has to
follow them too."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = {
    "zbcompile": "zbcompile",
    "passes": "zbcompile.passes",
    "schedules": "zbcompile.schedules",
}

# A module of zbcompile imports from its own layer and from those above it in this list.
LAYERS = (
    "version __init__ untrusted_text field_check errors amounts tables env json_text "
    "safe_files torch_private progress",
    "model batches faults distributed options program backends compiler engine optimizer "
    "prediction profiling program_cache planning torch_pipelining api",
    "persistence integrations inspection cli compile run inspect __main__",
)
OTHERS = {"schedules": set(), "passes": set(), "zbcompile": {"passes", "schedules"}}
FOR_ALL = {  # import nothing but each other
    f"zbcompile.{name}"
    for name in ["version", "untrusted_text", "progress", "amounts", "tables", "field_check"]
}
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


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name][1].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """The modules that a module imports anywhere, by `import_module` too; a public name counts as
    the module that defines it."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = ast.unparse(node.args[0]).strip("'")
            yield from [named] * (named in MODULES)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else public_names().get(full, node.module)


@cache
def public_names() -> dict[str, str]:
    """`package.name` -> the module that defines it, for the lazy names of the `__init__` files."""
    return {
        f"{package}.{alias.name}": node.module
        for package in PACKAGE.values()
        for node in ast.walk(tree_of(package))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
    }


@cache
def imports_of_all() -> dict[str, set[str]]:
    files = (name for name in MODULES if MODULES[name][1].name != "__init__.py")
    return {name: set(imports(name)) - {name} for name in files}


def layer(name: str) -> int:
    """The index of the layer of a module of zbcompile in LAYERS."""
    room = name.removeprefix("zbcompile").removeprefix(".").partition(".")[0] or "__init__"
    result = [i for i, rooms in enumerate(LAYERS) if room in rooms.split()]
    assert len(result) == 1, f"{name} belongs to {len(result)} layers"
    return result[0]


def may_import(name: str, target: str) -> bool:
    top, second = MODULES[name][0], MODULES[target][0]
    if top == second:
        return top != "zbcompile" or layer(target) <= layer(name)
    return second in OTHERS[top] or target in FOR_ALL


def test_imports_go_in_one_direction() -> None:
    TopologicalSorter(imports_of_all()).prepare()  # CycleError names the circle
    wrong = [
        f"{name} imports {target}"
        for name, targets in imports_of_all().items()
        for target in sorted(targets)
        if not may_import(name, target)
    ]
    assert not wrong, "\n".join(wrong)
    assert all(imports_of_all()[name] <= FOR_ALL for name in FOR_ALL)


def test_no_two_things_have_one_name() -> None:
    """Of classes and modules of a folder; nor has a module the name of a public function, which it
    would hide once it is imported."""
    classes = Counter(
        (MODULES[module][0], node.name)
        for module in MODULES
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef)
    )
    assert max(classes.values()) == 1, classes.most_common(3)
    files = Counter((top, file.stem) for top, file in MODULES.values())
    assert {stem for (_, stem), count in files.items() if count > 1} <= MANY
    shadowed = public_names().keys() & MODULES.keys()
    assert shadowed == {"zbcompile.passes", "zbcompile.schedules"}


def test_rooms_are_not_halls() -> None:
    """More than about two dozen modules side by side hide what a reader looks for."""
    crowd = Counter(file.parent for _, file in MODULES.values())
    assert max(crowd.values()) <= 24, crowd.most_common(3)


@pytest.mark.slow
def test_one_file_names_the_accelerator() -> None:
    """Another one is then another such file. Messages and docstrings may say what a user writes."""
    named = ("torch.cuda", "torch.accelerator", "is_cuda")
    attributes = (
        (module, node)
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute)
    )
    result = {name for name, node in attributes if {ast.unparse(node), node.attr} & {*named}}
    assert result == {"zbcompile.passes.gpu"}


def imported(name: str) -> Iterator[str]:
    """The dotted name of every module, or of the thing in it, that a file imports anywhere."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# What torch does not document although no underscore says so: regions of an exported graph, keys of
# `node.meta`.
UNDOCUMENTED = {"wrap_with_autocast", "wrap_with_set_grad_enabled", "fake_mode"}
UNDOCUMENTED |= {"custom", "from_node", "nn_module_stack"}
OF_PYTHON = {"_replace", "_asdict", "_fields", "_getframe"}  # documented
BANNED = {"schedules": "torch", "passes": "torch.distributed"}


@pytest.mark.slow
def test_private_names_stand_in_one_file_and_rooms_do_without_some_imports() -> None:
    """A newer torch is then supported by mending `torch_private.py`, of which the passes have three
    parts."""
    ours = OF_PYTHON.union(*(defined(tree_of(name)) for name in MODULES))
    for name, (top, file) in MODULES.items():
        imports_of = set(imported(name))
        assert not [n for n in imports_of if f"{n}.".startswith(f"{BANNED.get(top, '')}.")], name
        if not file.name.startswith("torch_private"):
            nodes = list(ast.walk(tree_of(name)))
            names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
            foreign = {n for n in names if n.startswith("_") and not n.startswith("__")} - ours
            foreign |= {n for n in imports_of if n.startswith("torch.") and "._" in n}
            foreign |= UNDOCUMENTED & (names | texts)
            assert not foreign, f"{name} uses {sorted(foreign)}"


def defined(tree: ast.Module) -> set[str]:
    """Functions, classes, annotated fields, and what is assigned to `self`."""
    nodes = list(ast.walk(tree))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) if hasattr(n.target, "id")}
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    return names | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
