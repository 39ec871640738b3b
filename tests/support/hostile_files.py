"""Files that anyone may have written, for every reader of such files: how many are refused in one line, are read, raise
another exception, or take longer than 2 s or more than 200 MB.

    python -m tests.support.hostile_files --cases 300 --seed 0

Every case runs in a forked process, which is killed after a minute. A file is a valid one with some values replaced
(of a checkpoint with its digest computed anew), or of an extreme form; some are no files at all.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zbcompile
from zbcompile.json_text import to_text
from zbcompile.program.manifest import digest_of
from zbcompile.program.step_record import FORMAT, VERSION, read_record
from zbcompile.schedules import ScheduleError, build, load, lower, simulate, to_csv, to_json
from zbcompile.schedules.__main__ import main as schedules_main
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import format_schedule

OURS = (zbcompile.PipelineError, zbcompile.CompileError, ScheduleError, OSError)
PATIENCE, SLOW, LARGE, LONG = 60.0, 2.0, 200 << 20, 2000
Change = Callable[[str, random.Random], str | bytes]
Write = Callable[[Path, str], object]


@dataclass(frozen=True)
class Reader:
    """How a file of one kind is read, where it is, a valid text of it, and what changes such a text."""

    name: str
    path: Path
    text: str
    read: Callable[[Path], Any]
    change: Change


def readers(folder: Path) -> list[Reader]:
    """All of them; what they need beside their file is made in `folder`."""
    torch.manual_seed(0)
    schedule = build("zb-v", 2, 4)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zbcompile.save_weights(folder / "weights.safetensors", model)
    header = (folder / "weights.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    names = dict.fromkeys(model.state_dict(), "weights.safetensors")
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": names})
    checkpoint = checkpoint_in(folder, model)
    profile = Path(zbcompile.__file__).parent / "passes" / "machine" / "profiles" / "h100-sxm.toml"
    weights, record = folder / "model.safetensors", json.dumps(record_of(schedule))

    def with_header(text: str, chance: random.Random) -> bytes:
        changed = as_bytes(changed_json(text, chance))
        size = len(changed) if chance.random() < 0.8 else chance.choice((0, 2**63, 2**28, len(changed) * 2))
        return size.to_bytes(8, "little") + changed + header[8 + length :]

    def with_digest(text: str, chance: random.Random) -> str:
        data = json.loads(text)
        replace_values(data, chance)
        return to_text({**data, "digest": digest_of({k: v for k, v in data.items() if k != "digest"})}, 2)

    return [
        Reader("schedule.csv", folder / "s.csv", to_csv(lower(schedule)), load, changed_words),
        Reader("schedule.txt", folder / "s.txt", format_schedule(lower(schedule)), load, changed_words),
        Reader("schedule.json", folder / "s.json", to_json(lower(schedule), Costs.uniform(4)), load, changed_json),
        Reader("costs", folder / "c.json", Costs.uniform(2).to_json(), read_costs, changed_json),
        Reader("record", folder / "r.json", record, read_record, changed_json),
        Reader("hardware", folder / "h.toml", profile.read_text(), zbcompile.Hardware.read, changed_words),
        Reader("index", folder / "i.json", index, lambda p: zbcompile.load_weights(p, copy_of(model)), changed_json),
        Reader(
            "weights",
            weights,
            header[8 : 8 + length].decode(),
            lambda p: zbcompile.load_weights(p, copy_of(model)),
            with_header,
        ),
        Reader("checkpoint", checkpoint, checkpoint.read_text(), lambda p: resume(p, model), with_digest),
    ]


def checkpoint_in(folder: Path, model: nn.Module) -> Path:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    extra = {"seen": [1, 2.5, torch.ones(4)]}
    return zbcompile.save_checkpoint(folder / "all", model, optimizer, extra=extra, step=7) / "checkpoint.json"


def record_of(schedule: Any) -> dict[str, Any]:
    timeline = simulate(schedule)
    spans = [[[str(s.step), s.start, s.end] for s in timeline.spans_of(rank)] for rank in range(schedule.ranks)]
    plain = {"step_time": 30.0, "started": 0.0, "in_process": False, "bytes_sent": [0, 0], "program": {}}
    data = {"format": FORMAT, "version": VERSION, "schedule": json.loads(to_json(schedule)), "spans": spans}
    return {**data, **plain, "held_bytes": [[1] * len(rank) for rank in spans]}


def read_costs(path: Path) -> None:
    """As the command line reads them; what it refuses is one line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        if schedules_main(["show", "1f1b", "--ranks", "2", "--microbatches", "2", "--costs", str(path)]):
            raise ScheduleError(said.getvalue().strip())


def copy_of(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def resume(path: Path, model: nn.Sequential) -> None:
    other = copy_of(model)
    at = zbcompile.load_checkpoint(path.parent, other, torch.optim.Adam(other.parameters()))
    assert type(at.step) is int
    assert at.step >= 0


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**9, 10**18, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")),
    *("", "x", "F0.0", "F0.1000000000", "\ud800", "a\0b", "..", "../x", "1" * 4000, "x" * 10**6, "torch", "float32"),
    *([], {}, [[]], [0], [-1, -1], {"": 0}, {"tuple": 0}, {"tensor": "x"}, {"float": "x"}, deep(50), [0] * 10**5),
)
NUMBERS = (
    "0",
    "1",
    "1000000000",
    "9" * 19,
    "9" * 5000,
    "-1",
    "1e9",
    "1e-320",
    "1e308",
    "nan",
    "inf",
    "\u0663",
    "\u00b2",
)
WORDS = ("", "x", "rank", "F0.0", "(F0.0|BW0.0)", "map:0,1", "map:9999999999999999", "dual", '"', "[[", "{", "é", "\0")


def replace_values(data: Any, chance: random.Random) -> None:
    """Replace, remove or repeat one to three values of a JSON tree."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        holders = list(inner_holders(data))
        holder = chance.choice(holders)
        place = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        how = chance.random()
        if how < 0.1:
            del holder[place]
        elif how < 0.2:
            holder[place] = chance.choice(holders)  # a value of another kind, or one that is nested in itself
            holder[place] = json.loads(json.dumps(holder[place])) if not cyclic(data) else 0
        else:
            holder[place] = json.loads(json.dumps(chance.choice(VALUES)))


def cyclic(data: Any) -> bool:
    try:
        json.dumps(data)
    except ValueError:
        return True
    return False


def inner_holders(value: Any) -> Iterator[Any]:
    """The lists and objects in a value that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from inner_holders(each)


def changed_json(text: str, chance: random.Random) -> str:
    data = json.loads(text)
    replace_values(data, chance)
    return json.dumps(data)


def changed_words(text: str, chance: random.Random) -> str:
    """One to three numbers or words replaced, or lines removed or repeated."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        numbers, words, lines = r"\d+(?:\.\d+)?(?:e-?\d+)?", r"[\w.:|()]+", r".+\n"
        pattern, others = chance.choice(((numbers, NUMBERS), (words, WORDS), (lines, ("", "\n"))))
        if found := list(re.finditer(pattern, text)):
            match = chance.choice(found)
            text = text[: match.start()] + chance.choice((*others, match[0] * 2)) + text[match.end() :]
    return text


def as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")


EXTREMES: dict[str, Write] = {  # in an order in which a sample has for each form a reader that it is meant for
    "a pipe": lambda path, text: os.mkfifo(path),
    "a directory": lambda path, text: path.mkdir(),
    "a device": lambda path, text: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path, text: path.symlink_to("nowhere"),
    "nothing in it": lambda path, text: path.write_text(""),
    "UTF-16": lambda path, text: path.write_text(text, "utf-16"),
    "Latin-1": lambda path, text: path.write_bytes(b"\xe9" + text.encode()),
    "a mark before it": lambda path, text: path.write_text(text, "utf-8-sig"),
    "half of it": lambda path, text: path.write_text(text[: len(text) // 2]),
    "null bytes": lambda path, text: path.write_bytes(b"\0" * 1000),
    "levels without end": lambda path, text: path.write_text("[" * 10**6),
    "objects without end": lambda path, text: path.write_text('{"a":' * 10**6),
    "one long line": lambda path, text: path.write_text("F0.0," * 2 * 10**5),
    "many digits": lambda path, text: path.write_text("[" + "9" * 10**6 + "]"),
    "many keys": lambda path, text: path.write_text("".join(f"a{i}.b.c.d=1\n" for i in range(10**5))),
    "many rows": lambda path, text: path.write_text("0F0\n" * 5 * 10**5),
    "many levels": lambda path, text: path.write_text("[" * 900 + "]" * 900),
    "a long key": lambda path, text: path.write_text("a." * 10**5 + "a=1"),
}
HEAVY: dict[str, Write] = {
    "250 MB before it": lambda path, text: path.write_bytes(b" " * 250_000_000 + text.encode()),
    "250 MB of lists": lambda path, text: path.write_text("[" + "[]," * 83_000_000 + "0]"),
    "15 MB of lists": lambda path, text: path.write_text("[" + "[]," * 5_000_000 + "0]"),
    "15 MB of objects": lambda path, text: path.write_text("[" + '{"":0},' * 2_200_000 + "0]"),
    "15 MB of strings": lambda path, text: path.write_text("[" + '"ab",' * 3_000_000 + "0]"),
    "15 MB of actions": lambda path, text: path.write_text("F0.0 " * 3_000_000),
    "15 MB of cells": lambda path, text: path.write_text("0F0," * 3_700_000),
}


def put(reader: Reader, write: Write) -> None:
    if reader.path.is_dir():
        reader.path.rmdir()
    reader.path.unlink(missing_ok=True)
    write(reader.path, reader.text)


def cases(reader: Reader, extremes: dict[str, Write], number: int, seed: int) -> Iterator[tuple[str, Write]]:
    yield from extremes.items()
    for each in range(number):
        yield f"change {each}", partial(write_changed, reader, random.Random(f"{seed} {reader.name} {each}"))


def write_changed(reader: Reader, chance: random.Random, path: Path, text: str) -> None:
    path.write_bytes(as_bytes(reader.change(text, chance)))


def outcome_of(reader: Reader) -> str:
    """What came of reading the file, in a process of its own."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.close(receive)
        try:
            os.write(send, reported(reader).encode("utf-8", "replace")[:4000])
        finally:
            os._exit(0)
    os.close(send)
    ended, _, _ = select.select([receive], [], [], PATIENCE)
    said = os.read(receive, 5000).decode() if ended else ""
    os.close(receive)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return said or ("slow: killed" if not ended else f"ended with status {status}")


def reported(reader: Reader) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + (4 << 30),) * 2)
    before, begun, wall = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), time.monotonic()
    said = refusal(reader)
    spent = min(time.process_time() - begun, time.monotonic() - wall)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 > LARGE:
        return f"large: {said}"
    return f"slow: {spent:.1f} s, {said}" if spent > SLOW else said


def refusal(reader: Reader) -> str:
    try:
        reader.read(reader.path)
    except OURS as error:
        said = f"{error}"
        return f"refused: {said}" if "\n" not in said and len(said) < LONG else f"raw: long {said[:200]!r}"
    except BaseException as error:
        return f"raw: {type(error).__name__}: {error!s:.200}"
    return "read"


def count(folder: Path, number: int, seed: int, sample: int = 1, show: bool = False) -> Counter[str]:
    """How many cases of all readers had which outcome: of `number` changed files each, and of every `sample`th extreme
    form, from another one on for each reader; of all with a sample of 1, also of the large ones."""
    counts: Counter[str] = Counter()
    everything = list({**EXTREMES, **(HEAVY if sample == 1 else {})}.items())
    for place, reader in enumerate(readers(folder)):
        found: Counter[str] = Counter()
        for label, write in cases(reader, dict(everything[place % sample :: sample]), number, seed):
            try:
                put(reader, write)
            except (ValueError, TypeError):  # no digest of NaN
                continue
            said = outcome_of(reader)
            found[said.partition(":")[0]] += 1
            if show and not said.startswith(("refused", "read")):
                print(f"  {reader.name}, {label}: {said}", flush=True)
        put(reader, lambda path, text: None)
        if show:
            print(f"{reader.name}: {dict(found)}", flush=True)
        counts += found
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(dict(count(Path(folder), options.cases, options.seed, show=True)))


if __name__ == "__main__":
    sys.exit(main())
