"""The public names, as a list that a change of them must change."""

import inspect
from pathlib import Path

import zbcompile
from zbcompile import integrations, schedules

ROOT = Path(zbcompile.__file__).parent


def commands() -> list[str]:
    """The modules and packages that are command lines."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/__main__.py")]
    runnable = (
        file for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")
    )
    return sorted(
        file.parent.name if file.name == "__main__.py" else file.stem for file in runnable
    )


def test_public_names(golden) -> None:
    methods = [name for name in dir(zbcompile.Pipeline) if not name.startswith("_")]
    listed = {
        "zbcompile": zbcompile.__all__,
        "zbcompile.integrations": integrations.__all__,
        "zbcompile.schedules": schedules.__all__,
        "zbcompile.pipeline(...)": list(inspect.signature(zbcompile.pipeline).parameters),
        "zbcompile.Pipeline": [*methods, "record", "last_step", "step_index"],
        "python -m zbcompile.*": commands(),
    }
    lines = [
        f"{where}\n" + "".join(f"    {name}\n" for name in sorted(set(names)))
        for where, names in listed.items()
    ]
    golden("public_names.txt", "\n".join(lines))
