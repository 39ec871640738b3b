"""Program directories with random edits in their JSON files and every hash computed again, as
somebody would write them who knows the format.

    python -m tests.support.hostile_programs --edits 300 --seed 0

from the repository's root. A program must be refused in one line, or train to the same numbers, or
to those of another program (a constant of another value). Nothing may be executed: processes,
pickles and the mark of a payload are watched.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zbcompile
from tests.support.damage import outcome_of
from zbcompile.program.directory import digest_of

MARK = Path(tempfile.gettempdir()) / "zbcompile-hostile-program"
CODE = f"__import__('os').system('touch {MARK}')"
OTHERS = '["__class__", "exec", "a b", "", "\\ud800", null, [], {}, -1, 0, 1, 7, 1e30, 0.5, true]'
VALUES = [*json.loads(OTHERS), CODE, f'"); {CODE}; ("', 2**31, 2**63, 10**30, {"node": 0}]
WATCHED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
INPUTS = torch.ones(4, 4)


class Branching(nn.Module):
    """A model with a constant, a buffer that no state dict holds, a branch and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 8)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.scale = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = (self.first(x) + self.table).sort(-1)
        values = torch.cond(x.sum() > 2, torch.sin, torch.cos, (values * self.scale,))
        return self.last(torch.tanh(values))


LAST = partial(nn.Linear, 4, 8, bias=False)
PROGRAMS: dict[str, tuple[Any, Tensor, dict[str, Any]]] = {
    "steps": (Branching, torch.ones(4, 8), {"schedule": "zb-h1", "loss": nn.functional.mse_loss}),
    "words": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), LAST()),
        torch.arange(4),
        {"vocab": 1, "loss": nn.functional.cross_entropy},
    ),
}


def save_program(name: str, folder: Path) -> Path:
    model, target, options = PROGRAMS[name]
    pipe = zbcompile.pipeline(model(), ranks=2, microbatches=2, **{"schedule": "1f1b", **options})
    pipe.compile(INPUTS, target=target).program.save(folder / name)
    pipe.close()
    return folder / name


def numbers_of(name: str, program: Path) -> str:
    """Returns the loss and the gradients of a step of the program."""
    torch.manual_seed(0)
    model, target, _ = PROGRAMS[name]
    pipe = zbcompile.load(program, model().state_dict())
    try:
        loss = pipe.step(INPUTS, target=target)
        return repr((loss, [(key, value.grad) for key, value in pipe.named_parameters()]))
    finally:
        pipe.close()


def places_of(data: Any) -> list[tuple[Any, Any]]:
    """Returns the container and the key of every value in JSON data."""
    keys = list(data) if isinstance(data, dict) else range(len(data))
    nested = [data[key] for key in keys if isinstance(data[key], dict | list)]
    return [(data, key) for key in keys] + [place for inner in nested for place in places_of(inner)]


def edit(program: Path, chance: random.Random) -> str:
    """Changes one value of one JSON file, and all hashes. Returns a description of the edit."""
    file = chance.choice(sorted(program.glob("*.json")))
    data = json.loads(file.read_text())
    places = places_of(data)
    container, key = chance.choice(places)
    elsewhere, name = chance.choice(places)
    value = json.loads(json.dumps(chance.choice([elsewhere[name], *VALUES])))
    before, kind = f"{container[key]!r:.60}", chance.random()
    if kind < 0.2:
        container.pop(key)
    elif kind < 0.3 and isinstance(container, dict):
        container[str(value)] = container.pop(key)
    else:
        container[key] = value
    file.write_text(json.dumps(data))
    manifest = json.loads((program / "manifest.json").read_text())
    if file.name in (manifest.get("files") or {}):
        manifest["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (program / "manifest.json").write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))
    return f"{file.name}: {key}: {before} -> {value!r:.60} ({kind:.1f})"


def edited_programs(folder: Path, edits: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Returns the number of edits by outcome, and those that were neither refused nor without
    effect."""
    chance, counts, faults, events = random.Random(seed), Counter[str](), list[str](), list[str]()
    programs = {name: save_program(name, folder) for name in PROGRAMS}
    expected = {name: numbers_of(name, program) for name, program in programs.items()}
    words_for = {"without effect": "same numbers", "silent": "another program"}
    sys.addaudithook(lambda event, _: events.append(event) if event in WATCHED else None)
    for number in range(edits):
        name, copy = chance.choice(sorted(programs)), folder / f"edited-{number}"
        shutil.copytree(programs[name], copy)
        description = edit(copy, chance)
        events.clear()
        signal.alarm(120)  # ends a run that hangs
        same = partial(lambda name, copy: numbers_of(name, copy) == expected[name], name, copy)
        outcome = outcome_of(same)
        signal.alarm(0)
        outcome = words_for.get(outcome, outcome)
        if events or MARK.exists():
            outcome = f"executed {events}"
        MARK.unlink(missing_ok=True)
        counts[outcome] += 1
        if outcome not in ("refused", "same numbers"):
            faults.append(f"{number}, {name}: {description}: {outcome}")
        shutil.rmtree(copy)
    return counts, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        totals, unusual = edited_programs(Path(temporary), options.edits, options.seed)
    print("\n".join(unusual), f"{options.edits} edits: {dict(totals)}", sep="\n")
