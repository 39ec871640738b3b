"""Programs whose files were edited by someone who knows the format, with every hash computed again.

    python -m tests.support.hostile_programs --programs 500 --seed 0

from the repository's root. Each is loaded, run and inspected, in a process of its own or by both
ranks of a mesh. It is refused with one line of ours, or trains to the same numbers, or was edited
into another program, which trains to other ones ("another program"). It is raw if another exception
comes out, executed if a payload has left its mark, and hangs after a minute.
"""

import argparse
import contextlib
import copy
import hashlib
import io
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zbcompile
import zbcompile.inspect
from tests.support.apart import apart, on_two_ranks
from tests.support.damage import OURS
from tests.support.meshes import mesh_of
from tests.support.parallel_models import Along, Leave
from zbcompile.compiler.compile_example import compile_example_forward
from zbcompile.passes.compile_options import Choices
from zbcompile.program.directories import save_here
from zbcompile.program.manifest import digest_of
from zbcompile.schedules import build

MARK = "executed"  # the file that a payload leaves, in the directory that it came from
Json = Any
Outcomes = dict[str, tuple[str, str]]


class Branching(nn.Module):
    """Has a constant, a buffer that no state dict holds, a branch, and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.scale = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = (self.first(x) + self.table).sort(-1)
        values = values * self.scale
        values = torch.cond(x.sum() > 2, torch.sin, torch.cos, (values,))
        return self.last(torch.tanh(values))


@torch.library.custom_op("zbhostile::bend", mutates_args=())
def bend(x: Tensor) -> Tensor:
    return x.sin()


bend.register_fake(torch.empty_like)
bend.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
FOREIGN = "zbhostile::bend"


class Bending(nn.Module):
    """Calls an operator of another library."""

    def forward(self, x: Tensor) -> Tensor:
        return bend(x)


class Halved(nn.Module):
    """Each of two ranks has half of the columns of the first matrix and half of the rows of the
    second."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        along = Along(mesh, "tp")
        self.processes = along.processes
        self.columns = nn.Parameter(along.part(torch.randn(8, 4), 0).clone())
        self.rows = nn.Parameter(along.part(torch.randn(8, 8), 1).clone())
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        part = torch.tanh(nn.functional.linear(x, self.columns))
        return self.last(Leave.apply(nn.functional.linear(part, self.rows), self.processes))


def model_of(name: str, mesh: Any = None) -> nn.Module:
    if name == MESH:
        return Halved(mesh)
    torch.manual_seed(0)
    activation = Bending() if name == "foreign" else nn.Tanh()
    return (
        Branching()
        if name == "branching"
        else nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 8, bias=False))
    )


STEPS: dict[str, dict[str, Any]] = {
    "plain": {"schedule": "zb-h1", "loss": nn.functional.mse_loss},
    "branching": {"schedule": "1f1b", "loss": nn.functional.mse_loss},
    "foreign": {"schedule": "1f1b", "loss": nn.functional.mse_loss},
    "words": {"schedule": "1f1b", "loss": nn.functional.cross_entropy, "vocab": 1},
}
FORWARD, MESH = "forward", "mesh"


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    return torch.ones(4, 4), (
        torch.arange(4) if name == "words" else torch.ones(4, 4 if name == "branching" else 8)
    )


def save_programs(folder: Path, *names: str) -> dict[str, Path]:
    """Programs by the names of their models."""
    for name in names:
        if name == MESH:
            on_two_ranks(_save_on_mesh, folder / name)
        elif name == FORWARD:
            example = zbcompile.Example(model_of(name), (torch.ones(1, 4),))
            save_here(
                compile_example_forward(example, "eval", build("zb-h1", 2, 4), Choices()),
                folder / name,
            )
        else:
            pipe = zbcompile.pipeline(model_of(name), ranks=2, microbatches=4, **STEPS[name])
            x, target = batch_of(name)
            pipe.compile(x, target=target).program.save(folder / name)
            pipe.close()
    return {name: folder / name for name in names}


def _save_on_mesh(directory: Path, rank: int) -> None:
    mesh, (x, target) = mesh_of(pp=1, tp=2), batch_of(MESH)
    plan: dict[str, Any] = {
        **STEPS["plain"],
        "placements": {name: {"tp": "shard"} for name in ("columns", "rows")},
    }
    pipe = zbcompile.pipeline(model_of(MESH, mesh), mesh=mesh, microbatches=4, **plan)
    pipe.compile(x, target=target).program.save(directory)
    pipe.close()


def expected_of(directory: Path, name: str) -> list[str]:
    """The numbers of a program that nobody has edited, on each rank of its mesh."""
    numbers = (
        on_two_ranks(numbers_of, directory, name) if name == MESH else [numbers_of(directory, name)]
    )
    assert None not in numbers, f"the program {name}, which nobody has edited, does not run"
    return numbers


def numbers_of(directory: Path, name: str, rank: int = 0) -> str:
    """The loss and the gradients of a step of a program, or what its forward returns."""
    mesh = mesh_of(pp=1, tp=2) if name == MESH else None
    pipe = zbcompile.load(
        directory, model_of(name, mesh).state_dict(), operators=[FOREIGN], mesh=mesh
    )
    try:
        x, target = batch_of(name)
        if name == FORWARD:
            return repr(pipe.eval(x).tolist())
        loss = pipe.step(x, target=target)
        gradients = [
            (name, p.grad.tolist()) for name, p in pipe.named_parameters() if p.grad is not None
        ]
        return repr((float(loss), gradients))
    finally:
        pipe.close()


def inspect(directory: Path) -> bool:
    """Let inspect print a program, and all of its graphs. Raises PipelineError with what it says on
    standard error."""
    for arguments in ([], ["--json"], ["--graph", "0.F"], ["--graphs", str(directory / "graphs")]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = zbcompile.inspect.main([str(directory), *arguments])
        if err.getvalue().startswith("zbcompile.inspect: unexpected"):
            raise RuntimeError(err.getvalue().strip())
        if status:
            raise zbcompile.PipelineError(err.getvalue().strip())
    return True


def outcome_of(use: Callable[[], bool]) -> tuple[str, str]:
    """What came of a use, which says whether its numbers are the right ones; and in which words."""
    try:
        return ("same numbers" if use() else "another program"), ""
    except OURS as error:
        several = len(str(error).splitlines()) != 1 or len(str(error)) > 2000
        return ("refused in several lines" if several else "refused"), str(error)
    except BaseException as error:
        return f"raw {type(error).__name__}", repr(error)[:300]


def outcomes(directory: Path, name: str, expected: list[str], rank: int) -> Outcomes:
    """What comes of running and of inspecting a program; one rank inspects."""
    found = {"run": outcome_of(lambda: numbers_of(directory, name, rank) == expected[rank])}
    return found if rank else found | {"inspect": outcome_of(lambda: inspect(directory))}


# --- edits
# -----------------------------------------------------------------------------------------------------------

PACKETS = ("aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata")
PATHS: list[Json] = [
    "__import__('os').system('touch executed')",
    "x=exec('1')",
    "self",
    "torch",
    "__import__",
    "class",
]
PATHS += [
    "__class__",
    "forward",
    "_parameters",
    "\uff45\uff58\uff45\uff43",
    "a b",
    "",
    "0",
    "\ud800",
    "input",
    "a\nb",
    "aten_relu_default",
]
NUMBERS: list[Json] = [-1, 0, 1, 2**31, 2**63, 10**30, -(2**63), 1.5, True, None]
TEXTS: list[Json] = [
    "nan",
    "float32",
    "int64",
    "qint8",
    "Tensor",
    "save",
    "load",
    "strided",
    "sparse_coo",
    "tp",
    "pp",
]
ODD: list[Json] = [
    [],
    {},
    [[]],
    {"node": "x"},
    {"float": "1_0"},
    {"complex": [{"float": "inf"}, 1]},
    {"dtype": "save"},
]
ODD += [
    {"device": "meta"},
    {"layout": "load"},
    {"tuple": 3},
    {"slice": [1, 2, 3, 4]},
    {"node": []},
    {"a": 1, "b": 2},
]
VALUES = [*PATHS, *NUMBERS, *TEXTS, *ODD]


def places(data: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [each for key, value in inner for each in ((*path, key), *places(value, (*path, key)))]


def at(data: Json, path: tuple[Any, ...]) -> Json:
    for key in path:
        data = data[key]
    return data


def put_anything(data: Json, chance: random.Random) -> str:
    """Replace, remove, repeat or exchange anything."""
    part = chance.choice(list(data))  # the larger ones have most of the places
    path = (part, *chance.choice([(), *places(data[part])]))
    holder, key = at(data, path[:-1]), path[-1]
    kind = chance.choice(("replace", "replace", "replace", "remove", "repeat", "exchange"))
    if kind == "remove":
        del holder[key]
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "exchange":
        holder[key] = copy.deepcopy(at(data, chance.choice(places(data))))
    else:
        holder[key] = chance.choice(VALUES)
    return f"{kind} {'.'.join(map(str, path))}"


def graphs_in(data: Json) -> list[Json]:
    """The written graphs in a file, those inside others too."""
    inner = (
        list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else []
    )
    own = [data] if isinstance(data, dict) and "nodes" in data else []
    return own + [
        graph for each in inner if isinstance(each, dict | list) for graph in graphs_in(each)
    ]


def any_node(data: Json, chance: random.Random) -> tuple[Json, Json]:
    """A graph of a file and a node of it."""
    return chance.choice([(graph, node) for graph in graphs_in(data) for node in graph["nodes"]])


def hostile_name(chance: random.Random) -> str:
    """The name of an operation, most of which are none."""
    packet = chance.choice(
        (*PACKETS, "aten.relu", "getitem", "higher_order", "higher_order.cond", "torch", "aten")
    )
    names = [
        *dir(torch.ops.aten._assert_async),
        "default",
        "msg",
        "__globals__",
        "__builtins__",
        "op",
        "system",
    ]
    everything = sorted(torch._C._dispatch_get_all_op_names())
    known = chance.choice(everything).replace("::", ".")
    return chance.choice(
        (f"{packet}.{chance.choice(names)}", known if known.count(".") == 2 else f"{known}.default")
    )


def put_operator(data: Json, chance: random.Random) -> str:
    _, node = any_node(data, chance)
    node["call"] = hostile_name(chance)
    return f"operator {node['call']}"


def put_another(data: Json, chance: random.Random) -> str:
    """An operator in the place of another that may be called alike."""
    _, node = any_node(data, chance)
    alike = (
        "sin.default",
        "cos.default",
        "add_.Tensor",
        "add.Tensor",
        "mul.Tensor",
        "mm.default",
        "copy_.default",
    )
    alike += (
        "set_.source_Tensor",
        "resize_as_.default",
        "to_sparse.default",
        "unbind.int",
        "item.default",
    )
    alike += (
        "t_.default",
        "sort.default",
        "_to_copy.default",
        "empty_like.default",
        "requires_grad_.default",
    )
    alike += ("nonzero.default", "geqrf.default")
    before, node["call"] = node["call"], f"aten.{chance.choice(alike)}"
    if chance.random() < 0.5:
        node["args"] = node["args"][:1]
    return f"{node['call']} for {before}"


def put_slot(data: Json, chance: random.Random) -> str:
    """Another meaning of a graph's inputs and outputs, or another order of them."""
    graph = chance.choice([each for each in graphs_in(data) if each.get("slots", {}).get("inputs")])
    slots = graph["slots"][chance.choice(("inputs", "outputs"))]
    kinds = (
        "parameter",
        "buffer",
        "saved",
        "tangent",
        "gradient",
        "accumulator",
        "loss",
        "output",
        "mutation",
        "input",
    )
    slot = chance.choice(slots)
    before = list(slot)
    if chance.random() < 0.5:
        slot[0] = chance.choice(kinds)
    else:
        slot[1:] = chance.choice([*slots, ["", "0.weight"], ["", "weight"], ["", ""]])[1:]
    return f"{before} becomes {slot}"


def put_keyword(data: Json, chance: random.Random) -> str:
    _, node = any_node(data, chance)
    name = chance.choice([*PATHS, "self", "dtype", "out"])
    node.setdefault("kwargs", {})[name] = chance.choice(VALUES)
    return f"keyword {name!r}"


def put_argument(data: Json, chance: random.Random) -> str:
    _, node = any_node(data, chance)
    node["args"] = node["args"] or [0]
    node["args"][chance.randrange(len(node["args"]))] = value = chance.choice(VALUES)
    return f"argument {value!r} of {node['call']}"


def put_number(data: Json, chance: random.Random) -> str:
    """Another node as an argument or a result."""
    graph, node = any_node(data, chance)
    count = len(graph["inputs"]) + len(graph["nodes"])
    number = chance.choice([-1, count, chance.randrange(count), chance.randrange(count)])
    if chance.random() < 0.3 and graph["outputs"]:
        graph["outputs"][chance.randrange(len(graph["outputs"]))] = number
    elif node["args"]:
        node["args"][0] = {"node": number}
    return f"node {number}"


def put_input(data: Json, chance: random.Random) -> str:
    graph = chance.choice([each for each in graphs_in(data) if each["inputs"]])
    value, part = chance.choice(graph["inputs"]), chance.randrange(6)
    numbers = [chance.choice([-1, 0, 1, 4, 10**6, 10**13, 2**63])] * chance.randrange(3)
    value[part] = (
        chance.choice((chance.choice(VALUES), numbers)) if part in (2, 3) else chance.choice(VALUES)
    )
    return f"input {part}: {value[part]!r}"


def put_storage(data: Json, chance: random.Random) -> str:
    graph = chance.choice([each for each in graphs_in(data) if each["storages"]])
    graph["storages"][0] = size = chance.choice([-1, 0, 1, 10**13, 2**63, True, "a"])
    return f"a storage of {size!r} bytes"


def put_branch(data: Json, chance: random.Random) -> str:
    graph, node = any_node(data, chance)
    graph["graphs"].append(copy.deepcopy({**graph, "graphs": []}))
    node["args"] = [{"graph": chance.choice([0, len(graph["graphs"]), *PATHS])}]
    return f"branch {node['args'][0]}"


def append_call(graph: Json, call: str, *args: Json) -> None:
    """Let a graph end with a call of its last value."""
    last = len(graph["inputs"]) + len(graph["nodes"]) - 1
    graph["nodes"].append({"call": call, "args": [{"node": last}, *args]})


def put_group(data: Json, chance: random.Random) -> str:
    graph, _ = any_node(data, chance)
    name = chance.choice(["tp", "pp", "dp", "0", "group0", *PATHS])
    target = chance.choice(
        ("all_reduce", "isend", "all_gather_into_tensor", "broadcast", "wait_tensor")
    )
    args = {"all_reduce": ["sum", name], "wait_tensor": []}.get(target, [1, name])
    append_call(graph, f"_c10d_functional.{target}.default", *args)
    return f"{target} of group {name!r}"


def put_payload(data: Json, chance: random.Random) -> str:
    """Operations that reach `exec`, in all the ways that were ever open."""
    graph, _ = any_node(data, chance)
    packet, first = chance.choice(PACKETS), len(graph["inputs"]) + len(graph["nodes"])
    ways = ("__getattribute__", "__getattr__"), ("__init__", "__call__", "__class__")
    calls: list[tuple[str, list[Json]]] = [
        (f"{packet}.{chance.choice(ways[0])}", [chance.choice(("__init__", "_op", "__class__"))]),
        (f"{packet}.__init__", [packet.replace(".", "::"), "x", {"node": first}, []]),
        (f"{packet}.{chance.choice(ways[0])}", ["__globals__"]),
        ("getitem", [{"node": first + 2}, "__builtins__"]),
        ("getitem", [{"node": first + 3}, "exec"]),
        (
            f"{packet}.{chance.choice(ways[1])}",
            [packet.replace(".", "::"), "x", {"node": first + 4}, []],
        ),
        (f"{packet}.__call__", [f"open({MARK!r}, 'w')"]),
    ]
    skipped = chance.randrange(8)
    graph["nodes"] += [
        {"call": call, "args": args} for i, (call, args) in enumerate(calls) if i != skipped
    ]
    return f"payload through {packet} without step {skipped}"


TEXTS_OF_CODE = (  # they end a string or a comment of a source that a compiler generates
    f'"), 0)); fclose(fopen("{MARK}", "w")); (1 ? 0 : (throw std::runtime_error("',
    f"\nopen({MARK!r}, 'w')\n",
    f"''')\nopen({MARK!r}, 'w')\n",
    f'*/ fclose(fopen("{MARK}", "w")); /*',
)


def put_text(data: Json, chance: random.Random) -> str:
    """A text that is code."""
    graph, _ = any_node(data, chance)
    target = f"aten.{chance.choice(('_assert_async.msg', '_functional_assert_async.msg', 'gelu.default'))}"
    text = chance.choice(TEXTS_OF_CODE)
    append_call(graph, target, *([text] if "assert" in target else []))
    if "gelu" in target:
        graph["nodes"][-1]["kwargs"] = {"approximate": text}
    return f"{target} with {text!r}"


GRAPH_EDITS = (
    put_operator,
    put_another,
    put_slot,
    put_keyword,
    put_argument,
    put_number,
    put_input,
    put_storage,
)
GRAPH_EDITS += (put_branch, put_group, put_payload, put_text)
Edit = Callable[[Json, random.Random], str]


def rehash(directory: Path) -> None:
    """Let the hashes in the manifest be those of the files."""
    manifest = json.loads((directory / "manifest.json").read_text())
    if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict):
        for name in manifest["files"]:
            if (path := directory / name).is_file():
                content = path.read_bytes()
                manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    write_manifest(directory, manifest)


def write_manifest(directory: Path, manifest: Json) -> None:
    manifest.pop("digest", None)
    (directory / "manifest.json").write_text(
        json.dumps({**manifest, "digest": digest_of(manifest)})
    )


def compile_when_loaded(directory: Path) -> None:
    """Let the program's graphs be compiled by inductor, which makes source of them."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["step"]["backend"] = "inductor"
    write_manifest(directory, manifest)


def edit(directory: Path, chance: random.Random) -> str:
    """Edit one file of a program, once or several times; says how."""
    files = sorted(directory.rglob("*.json"))
    for _ in range(100):
        path = chance.choices(files, [path.stat().st_size ** 0.5 for path in files])[0]
        data = json.loads(path.read_text())
        edits: tuple[Edit, ...] = (put_anything,)
        if any(graph["nodes"] for graph in graphs_in(data)):
            edits = (*GRAPH_EDITS, put_anything, put_anything)
        change = chance.choice(edits)
        try:
            says = change(data, chance)
        except IndexError:  # this file has nothing of the kind
            continue
        path.write_text(json.dumps(data))
        if change is put_text:
            compile_when_loaded(directory)
        rehash(directory)
        return f"{path.relative_to(directory)}: {says}"
    raise AssertionError("no file was edited")


def attack(saved: Path, work: Path, expected: list[str], seed: int) -> list[tuple[str, str]]:
    """Edit a copy of a program and use it; gives the outcomes, each with its words."""
    directory = work / f"program {seed}"
    shutil.copytree(saved, directory)
    says = edit(directory, random.Random(seed))
    given = directory, saved.name, expected
    found = (
        _of_both(on_two_ranks(used_in, *given)) if saved.name == MESH else apart(used_in, *given, 0)
    )
    found = found or {"both": ("hang or end of the process", "")}
    shutil.rmtree(directory)
    return [
        (f"{outcome} ({kind})", f"seed {seed}, {saved.name}, {says}: {text}")
        for kind, (outcome, text) in found.items()
    ]


def _of_both(found: list[Outcomes | None]) -> Outcomes | None:
    """The outcomes of a program that two ranks have run, which must agree on whether it can run."""
    first, second = found
    if first is None or second is None:
        return None
    if "both" in first or "both" in second:
        return first if "both" in first else second
    if is_bad(f"{second['run'][0]} (run)"):
        return first | {"run": second["run"]}
    refusals = sum(each["run"][0] == "refused" for each in (first, second))
    return (
        first | {"run": ("refused on one rank", first["run"][1] + second["run"][1])}
        if refusals == 1
        else first
    )


def used_in(directory: Path, name: str, expected: list[str], rank: int) -> Outcomes:
    """The outcomes for a program, in its directory, where payloads leave their mark."""
    with contextlib.chdir(directory):
        found = outcomes(directory, name, expected, rank)
        return {"both": ("executed", "")} if Path(MARK).exists() else found


def is_bad(outcome: str) -> bool:
    return not outcome.startswith(("refused (", "same numbers", "another program"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--show", action="store_true", help="print what was said of every program")
    options = parser.parse_args()
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        programs = save_programs(Path(folder, "programs"), *STEPS, FORWARD, MESH)
        expected = {name: expected_of(path, name) for name, path in programs.items()}
        for number in range(options.programs):
            name = sorted(programs)[number % len(programs)]
            if options.only not in name:
                continue
            for outcome, text in attack(
                programs[name], Path(folder), expected[name], options.seed + number
            ):
                counts[outcome] += 1
                if is_bad(outcome) or options.show:
                    print(f"{outcome}: {text}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
