"""Build of the pretended GPU, once per torch, Python and source, into the user's cache; and the
environment of a process that has one.

    python -m tests.support.pretended_gpu.build [--devices N] COMMAND...

runs a command where torch.cuda is there, and prints what it does against CUDA's order.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TORCH = "2.13."  # whose private headers it is written against
MODULE, PRELOAD = "pretended_gpu.so", "preload.so"
# Asserts and -O0 would not do: every launch of a test runs through it.
FLAGS = ("-std=c++20", "-shared", "-fPIC", "-O1", "-w", "-DUSE_C10D_GLOO")


def why_not() -> str | None:
    """The reason why there can be no pretended GPU here; None if there can."""
    import torch

    if sys.platform != "linux":
        return "the pretended GPU is for Linux"
    if torch.version.cuda is not None:
        return "this torch was built for CUDA: the pretended GPU is for one that was not"
    if not torch.__version__.startswith(TORCH):
        return f"the pretended GPU is written for torch {TORCH}*, this is {torch.__version__}"
    if compiler() is None:
        return "the pretended GPU needs a C++ compiler (g++)"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def built() -> Path:
    """The folder with the libraries, which are built if they are not there: 30 seconds of a
    core."""
    folder = _cache() / _fingerprint()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building it
        if not folder.exists():
            created = Path(tempfile.mkdtemp(dir=folder.parent))
            _build(created)
            created.rename(folder)
    return folder


def environment(folder: Path, devices: int = 2, faults: Path | None = None) -> dict[str, str]:
    """This process's environment for a Python that finds pretended GPUs, as do all Pythons that it
    starts; each writes the faults that it finds into a file in `faults`."""
    paths = [str(HERE / "startup"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    added = {
        "PRETENDED_GPU": str(folder),
        "PRETENDED_GPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_PRELOAD": str(folder / PRELOAD),
    }
    if faults is not None:
        added["PRETENDED_GPU_FAULTS"] = str(faults)
    return {**os.environ, **added}


def faults_in(folder: Path) -> list[str]:
    """Returns what processes have written into the folder that they were given for faults."""
    return sorted({line for file in folder.iterdir() for line in file.read_text().splitlines()})


def _cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zbcompile-pretended-gpu"
    )


def _fingerprint() -> str:
    import torch

    hashed = hashlib.sha256(
        repr((torch.__version__, torch.__file__, platform.machine(), FLAGS)).encode()
    )
    for source in sorted((*HERE.glob("*.hpp"), *HERE.glob("*.cpp"))):
        hashed.update(source.read_bytes())
    return f"torch-{torch.__version__}-python-{sysconfig.get_config_var('SOABI')}-{hashed.hexdigest()[:16]}"


def _build(folder: Path) -> None:
    from torch.utils import cpp_extension

    paths = *cpp_extension.include_paths(), sysconfig.get_paths()["include"]
    includes = [f"-I{path}" for path in paths]
    libraries = [f"-L{cpp_extension.library_paths()[0]}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    for name, created, linked in (
        ("module.cpp", MODULE, libraries),
        ("preload.cpp", PRELOAD, ["-ldl"]),
    ):
        files = [str(HERE / name), "-o", str(folder / created)]
        command = [compiler() or "g++", *FLAGS, *includes, *files, *linked]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            failed = f"the pretended GPU cannot be built: {' '.join(command)}"
            raise RuntimeError(f"{failed}\n{done.stderr[-4000:]}")


def main(arguments: list[str], given: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as faults:
        added = environment(built(), options.devices, Path(faults))
        code = subprocess.run(options.command, env={**given, **added}).returncode
        result = faults_in(Path(faults))
    print(*(f"against CUDA's order: {fault}" for fault in result), sep="\n", file=sys.stderr)
    return code or bool(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
