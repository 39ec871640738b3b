"""The package can be imported from a wheel, a bare checkout, and cheaply."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORTS = (
    "import zbcompile, zbcompile.passes, zbcompile.schedules; print(zbcompile.schedules.__file__)"
)
FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
FOLDERS = ("docs", "examples", "passes", "schedules", "tests", "zbcompile")


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """Run Python without what this process has on its path, and return what was printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def python(code: str, folder: Path, path: Path) -> str:
    """Run `code` where `path` comes before anything that is installed."""
    return run(folder, "-c", code, PYTHONPATH=str(path), PYTHONDONTWRITEBYTECODE="1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, links kept: builds leave files behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {"zbcompile": "", "passes": "zbcompile.", "schedules": "zbcompile."}
    files = ((room, file) for room in rooms for file in (ROOT / room).rglob("*.py"))
    found = {rooms[room] + ".".join(file.parent.relative_to(ROOT).parts) for room, file in files}
    assert found | {"zbcompile.passes", "zbcompile.schedules"} == {*listed}


@pytest.mark.slow
def test_wheel_of_the_sdist(source: Path, tmp_path: Path) -> None:
    build = "from setuptools.build_meta import build_{0}; build_{0}({1!r})"
    run(source, "-c", build.format("sdist", str(tmp_path)))
    with tarfile.open(next(tmp_path.glob("zbcompile-*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    run(next((tmp_path / "sdist").iterdir()), "-c", build.format("wheel", str(tmp_path)))
    with zipfile.ZipFile(next(tmp_path.glob("zbcompile-*.whl"))) as archive:
        archive.extractall(unpacked := tmp_path / "unpacked")
    for room in ("zbcompile", "passes", "schedules"):
        for file in (ROOT / room).rglob("*.py"):
            inside = file.relative_to(ROOT / "zbcompile" if room == "zbcompile" else ROOT)
            assert (unpacked / "zbcompile" / inside).exists(), inside
    assert (unpacked / "zbcompile" / "py.typed").exists()
    assert len([path for path in unpacked.iterdir() if path.suffix != ".dist-info"]) == 1
    printed = run(unpacked, "-S", "-m", "zbcompile.inspect", "--help")  # nothing is installed
    assert printed.startswith("usage: python -m zbcompile.inspect")
    metadata = Parser().parsestr(next(unpacked.glob("*.dist-info/METADATA")).read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    required = metadata.get_all("Requires-Dist", [])
    assert "torch>=2.11" in required  # no upper bound: installing never replaces torch
    assert not any(line.startswith("functorch") for line in required)  # an old one, not torch's


def test_folders_of_the_user_with_the_same_names(source: Path, tmp_path: Path) -> None:
    """In a bare checkout. They must never be taken for ours, nor ours for theirs; both can be
    imported, in any order."""
    code = IMPORTS
    for room in ("schedules", "passes"):
        code += f"\ntry:\n    import {room}\nexcept ImportError as error:\n    print(error)"
    place, *errors = python(code, tmp_path, source).splitlines()
    assert place == str(source / "zbcompile" / "schedules" / "__init__.py")
    for room, error in zip(("schedules", "passes"), errors, strict=True):
        assert f"import this package as 'zbcompile.{room}', not as '{room}'" in error
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("mine = True\n")
    names = "schedules.mine, passes.mine, zbcompile.schedules.__name__, zbcompile.passes.__name__"
    both = ("schedules, passes", "zbcompile.schedules, zbcompile.passes")
    for order in (both, both[::-1]):
        printed = python(f"import {', '.join(order)}; print({names})", tmp_path, source)
        assert printed == "True True zbcompile.schedules zbcompile.passes"


def test_imports_and_schedules_are_light(tmp_path: Path) -> None:
    """Looking at a schedule must not cost the seconds that torch takes."""
    code = f"import sys; {IMPORTS}; from zbcompile.schedules.__main__ import main\n"
    code += "main(['compare', '1f1b', 'zb-v'])\n"
    code += "print(*sorted({'torch', 'sympy', 'numpy'} & set(sys.modules)))\nmain(['--help'])"
    printed = python(code, tmp_path, ROOT)
    assert "\n\nusage: python -m zbcompile.schedules" in printed
    assert "python -m zbcompile.schedules compare" in printed
