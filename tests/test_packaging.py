"""The package can be imported from a wheel, an sdist, an editable install and a bare checkout, and
cheaply."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORTS = (
    "import zbcompile, zbcompile.passes, zbcompile.schedules; print(zbcompile.schedules.__file__)"
)
FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
FOLDERS = (".ci", ".github", "docs", "examples", "passes", "schedules", "tests", "zbcompile")


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run without what this process has on its path, and return what was printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        command, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def python(code: str, folder: Path, path: Path) -> str:
    """Run `code` where `path` comes before anything that is installed."""
    return run(
        [sys.executable, "-c", code], folder, PYTHONPATH=str(path), PYTHONDONTWRITEBYTECODE="1"
    )


def pip(folder: Path, *arguments: str) -> None:
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, links kept: builds leave files behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(
        source,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    )
    return next(folder.glob("zbcompile-*.whl"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], source)
    return next(folder.glob("zbcompile-*.tar.gz"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".dist-info"} == {
        "zbcompile"
    }
    assert (tmp_path / "zbcompile" / "py.typed").exists()
    printed = run(
        [sys.executable, "-S", "-m", "zbcompile.inspect", "--help"], tmp_path
    )  # without what is installed
    assert printed.startswith("usage: python -m zbcompile.inspect")
    isolated = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {IMPORTS}"
    assert run([sys.executable, "-I", "-c", isolated], tmp_path.parent).startswith(str(tmp_path))


@pytest.mark.parametrize("room", ["zbcompile", "passes", "schedules"])
def test_wheel_has_every_module(room: str, wheel: Path) -> None:
    folder = Path("zbcompile") if room == "zbcompile" else Path("zbcompile", room)
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert packed >= {
        (folder / file.relative_to(ROOT / room)).as_posix() for file in modules_of(room)
    }


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "zbcompile"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "torch>=2.11" in metadata.get_all(
        "Requires-Dist", []
    )  # no upper bound: installing never replaces torch
    required = [re.split(r"[<>=!~;\[ ]", line)[0] for line in metadata.get_all("Requires-Dist", [])]
    assert {"torch", "sympy", "tqdm"} <= set(required)
    assert (
        "functorch" not in required
    )  # it is the module inside torch; the package replaces it by an old one


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = next(tmp_path.iterdir())
    assert {path.name for path in unpacked.iterdir()} >= {*FILES, *FOLDERS}
    pip(
        tmp_path,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(unpacked),
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as ours, zipfile.ZipFile(wheel) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable(mode: str, source: Path, tmp_path: Path) -> None:
    """Into a folder of its own, read as site-packages so that its .pth file takes effect."""
    pip(
        tmp_path, "install", "--no-deps", "--no-build-isolation", "--target", str(tmp_path),
        "--config-settings", f"editable_mode={mode}", "--editable", str(source),
    )  # fmt: skip
    code = f"import site; site.addsitedir({str(tmp_path)!r}); {IMPORTS}"
    printed = run([sys.executable, "-S", "-c", code], tmp_path)
    assert "schedules" in printed
    assert printed.startswith(str(source)) or mode == "strict"


def test_bare_checkout(source: Path, tmp_path: Path) -> None:
    assert python(IMPORTS, tmp_path, source) == str(
        source / "zbcompile" / "schedules" / "__init__.py"
    )


@pytest.mark.parametrize("room", ["schedules", "passes"])
def test_rooms_refuse_another_name(room: str, source: Path, tmp_path: Path) -> None:
    """A user's own folder called `schedules` must never be taken for ours, nor ours for theirs."""
    code = f"try:\n    import {room}\nexcept ImportError as error:\n    print(error)"
    assert f"zbcompile.{room}" in python(code, tmp_path, source)


@pytest.mark.parametrize("room", ["schedules", "passes"])
def test_a_folder_of_the_user_with_the_same_name(room: str, source: Path, tmp_path: Path) -> None:
    """Both can be imported, in either order."""
    (tmp_path / room).mkdir()
    (tmp_path / room / "__init__.py").write_text("mine = True\n")
    for order in (f"{room}, zbcompile.{room}", f"zbcompile.{room}, {room}"):
        code = f"import {order}; print({room}.mine, zbcompile.{room}.__name__)"
        assert python(code, tmp_path, source) == f"True zbcompile.{room}"


@pytest.mark.parametrize("module", ["zbcompile", "zbcompile.schedules", "zbcompile.passes"])
def test_import_is_light(module: str, tmp_path: Path) -> None:
    """Looking at a schedule must not cost the seconds that torch takes."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'sympy', 'numpy'}} & set(sys.modules)))"
    assert python(code, tmp_path, ROOT) == ""


@pytest.mark.parametrize(
    ("room", "banned"), [("schedules", "torch"), ("passes", "torch.distributed")]
)
def test_rooms_never_import(room: str, banned: str) -> None:
    for file in modules_of(room):
        for name in imported(file):
            assert not f"{name}.".startswith(f"{banned}."), (
                f"{file.relative_to(ROOT)} imports {name}"
            )


def modules_of(room: str) -> list[Path]:
    """The modules of one of the three top-level folders, its sub-folders included; zbcompile/
    without the two links."""
    linked = (
        {ROOT / "zbcompile" / "passes", ROOT / "zbcompile" / "schedules"}
        if room == "zbcompile"
        else set()
    )
    result = [file for file in (ROOT / room).rglob("*.py") if not linked & set(file.parents)]
    assert len(result) > 30, f"{room}/ holds {len(result)} modules: is it the right folder?"
    return result


def imported(file: Path) -> Iterator[str]:
    """The dotted name of every module, or of the thing in it, that a file imports anywhere."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# What torch does not document although no underscore says so: regions of an exported graph, keys of
# `node.meta`.
UNDOCUMENTED = {"wrap_with_autocast", "wrap_with_set_grad_enabled", "fake_mode"}
UNDOCUMENTED |= {"custom", "from_node", "nn_module_stack"}


@pytest.mark.slow
@pytest.mark.parametrize("room", ["passes", "zbcompile"])
def test_private_names_stand_in_one_file(room: str) -> None:
    """A newer torch is then supported by mending `torch_private.py`, of which the passes have three
    parts."""
    for file in modules_of(room):
        if not file.name.startswith("torch_private"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            foreign = private_attributes(tree) - defined_here(tree) - inherited(tree)
            foreign |= {
                name for name in imported(file) if name.startswith("torch.") and "._" in name
            }
            foreign |= UNDOCUMENTED & (attributes(tree) | strings(tree))
            assert not foreign, f"{file.relative_to(ROOT)} uses {sorted(foreign)}"


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def strings(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def private_attributes(tree: ast.AST) -> set[str]:
    names = attributes(tree)
    public = {
        "_replace",
        "_asdict",
        "_fields",
        "_getframe",
    }  # of named tuples and of sys, documented by Python
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - public


def inherited(tree: ast.Module) -> set[str]:
    """Returns what the files of this module's own base classes define."""
    bases = {
        base.id
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    names: set[str] = set()
    for node in tree.body:
        file = ROOT / f"{(getattr(node, 'module', None) or '').replace('.', '/')}.py"
        if (
            isinstance(node, ast.ImportFrom)
            and file.is_file()
            and bases & {alias.name for alias in node.names}
        ):
            base = ast.parse(file.read_text(encoding="utf-8"))
            names |= defined_here(base) | inherited(base)
    return names


def defined_here(tree: ast.AST) -> set[str]:
    """Functions, classes, annotated fields, and what is assigned to `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names
