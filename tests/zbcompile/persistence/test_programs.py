"""Programs as directories: saved, checked, and run again with the same bits and without the model's
source."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
import zbcompile.inspect
from benchmarks.damage_sweep import killed
from tests.support import training, vocabulary_training
from tests.support.pool import Pool
from tests.support.training import Case, assert_bitwise, assert_same_tensors, gradients_of
from tests.support.vocabulary_training import Learned, VocabularyCase
from zbcompile.program.directory import digest_of
from zbcompile.schedules.generators.interlaced import interlaced

Error = zbcompile.PipelineError
SMALL = Case("short-mlp", "1f1b", 2, 2)
CASES = (Case("skips", "zb-h1", 2, 2, steps=2), Case("mlp", "dualpipe-v", 2, 4, steps=1))
Saved = Callable[[Case], Path]


def compiled(case: Case) -> zbcompile.Pipeline:
    batch = training.problem_of(case.problem).batches(1, case.microbatches * 2)[0]
    target = {} if batch.target is None else {"target": batch.target}
    return training.pipeline_of(case).compile(*batch.args, **batch.kwargs, **target)


def state_for(case: Case) -> Any:
    return training.problem_of(case.problem).model().state_dict()


def bytes_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The directory of a case, saved once."""
    root = tmp_path_factory.mktemp("programs")

    def make(case: Case) -> Path:
        directory = root / f"{case.problem} {case.schedule}"
        if not directory.exists():
            compiled(case).program.save(directory)
        return directory

    return make


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved(SMALL), tmp_path / "program"))


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loaded_program_trains_with_the_same_bits(case: Case, saved: Saved) -> None:
    ours = training.train(zbcompile.load(saved(case), state_dict=state_for(case)), case)
    theirs = training.reference(case)
    assert list(ours.state) == list(theirs.state)
    assert_bitwise(ours, theirs)


TIED = Case("small-tied", "zb-h1", 2, 4)


def save_and_step(directory: Path, folder: Path) -> None:
    """Of two replicas of a pipeline of two ranks the first saves, each rank its part; both load, from
    a directory that holds no other's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank, problem = mesh["pp"].get_local_rank(), training.problem_of(TIED.problem)
    local = list(problem.batches(1, 16)[0].parts(2))[mesh["dp"].get_local_rank()]
    options = {"schedule": TIED.schedule, "microbatches": 4, "loss": problem.loss, "exact": True}
    pipe = zbcompile.pipeline(problem.model(), mesh=mesh, **options)
    with training.compiled_once(TIED.problem, exact=True):
        loss = pipe.step(*local.args, target=local.target)
    pipe.program.save(directory)
    dist.barrier()
    own = Path(shutil.copytree(directory, folder / f"of {dist.get_rank()}"))
    for part in own.glob(f"rank-{1 - rank:04d}.*"):
        part.unlink()
    second = zbcompile.load(own, state_for(TIED), mesh=mesh)
    assert torch.equal(second.step(*local.args, target=local.target), loss)
    assert_same_tensors(gradients_of(second), gradients_of(pipe), "gradient of")


@pytest.mark.slow
def test_ranks_and_replicas_write_and_read_their_parts(
    saved: Saved, pool: Pool, tmp_path: Path
) -> None:
    """The processes write the bytes that one process writes for all ranks."""
    training.compile_for_forks(TIED)
    pool.run(save_and_step, tmp_path / "program", tmp_path, ranks=4)
    assert bytes_of(tmp_path / "program") == bytes_of(saved(TIED))


Json = dict[str, Any]
STAGE, MANIFEST = "rank-0001.json", "manifest.json"


def rewrite(
    name: str, change: Callable[[Json], object], digest: bool = True
) -> Callable[..., None]:
    """Changes a JSON file; with `digest` also every hash that would betray it."""

    def edit(directory: Path) -> None:
        data = json.loads((directory / name).read_text())
        change(data)
        if name == MANIFEST and digest:
            data["digest"] = digest_of(data)
        (directory / name).write_text(json.dumps(data))
        if name != MANIFEST and digest:
            new = hashlib.sha256((directory / name).read_bytes()).hexdigest()
            rewrite(MANIFEST, lambda manifest: manifest["files"].update({name: new}))(directory)

    return edit


def graph_of(data: Json) -> Json:
    """The graph of the last stage's forward."""
    return data["stages"]["1"]["F"]  # type: ignore[no-any-return]


def call(operator: str, **fields: Any) -> Callable[..., None]:
    """The first operation of the last stage is another one."""
    change = {"call": operator, **fields}
    return rewrite(STAGE, lambda data: graph_of(data)["nodes"][0].update(change))


def append_code(data: Json) -> None:
    """A text that inductor writes into its source."""
    nodes = graph_of(data)["nodes"]
    last = {"node": len(graph_of(data)["inputs"]) + len(nodes) - 1}
    code = {"approximate": '"), 0)); exit(1); ('}
    nodes.append({"call": "aten.gelu.default", "args": [last], "kwargs": code})


def swap_receives(data: Json) -> None:
    """The last rank receives its first two messages in the opposite order."""
    order = data["orders"][-1]
    first, second, *_ = [i for i, action in enumerate(order) if action.startswith("RECV_F")]
    order[first], order[second] = order[second], order[first]


def cut(name: str) -> Callable[..., object]:
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:-40])


def blank(name: str) -> Callable[..., object]:
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:-2] + b" }")


def program(change: Callable[[Json], object], digest: bool = True) -> Callable[..., None]:
    return rewrite(MANIFEST, lambda data: change(data["program"]), digest)


NO_OPERATOR, DAMAGED = "is not an operator that a graph may call", "is damaged or incomplete"
UNSAVED = "is not what was saved"
DAMAGES: list[tuple[Callable[..., object], str]] = [
    (lambda d: (d / MANIFEST).unlink(), "is not a program, or saving it was interrupted"),
    (lambda d: (d / STAGE).unlink(), "cannot be read .* Copy all of the directory"),
    (cut(MANIFEST), DAMAGED),
    (cut(STAGE), UNSAVED),
    (cut("rank-0000.safetensors"), UNSAVED),
    (blank("schedule.json"), UNSAVED),
    (program(lambda data: data["step"].update(seed=1), False), "was changed after it was written"),
    (rewrite(MANIFEST, lambda data: data.update(version=99)), "of version 99; this release reads"),
    (rewrite(MANIFEST, lambda data: data.update(torch="1.0.0")), "compiled with torch 1.0.0 and"),
    (rewrite("schedule.json", swap_receives), rf"schedule\.json {DAMAGED} \(ScheduleError"),
    (program(lambda data: data.update(loss_dtype=7)), "received 7; expected str"),
    (program(lambda data: data["homes"].clear()), "no stage is the home of the trained parameter"),
    (rewrite(STAGE, lambda data: data["stages"]["1"].update(F=7)), DAMAGED),
    (rewrite(STAGE, lambda data: graph_of(data).pop("nodes")), f"{DAMAGED} .KeyError: 'nodes'"),
    (call("aten.manual_seed.default", args=[], kwargs={}), NO_OPERATOR),
    (call("aten.set_grad_enabled.default", args=[], kwargs={}), NO_OPERATOR),
    (call("aten.resize_.default", args=[], kwargs={}), NO_OPERATOR),
    (call("aten.from_file.default"), NO_OPERATOR),
    (call("other.evil.default"), r'pass operators=\["other::evil"\]'),
    (call("os.system"), "'os.system' is not the name of an operator"),
    (call("aten.tanh.default", kwargs={"a=exit(),b": 1}), "damaged .*RuntimeError: aten::tanh"),
    (
        rewrite(STAGE, lambda data: graph_of(data).update(kind="x=exit()")),
        "'x=exit\\(\\)' is not the name of a pass",
    ),
    (rewrite(STAGE, append_code), "expected only letters, digits, spaces and"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_was_not_saved_like_this_is_refused(
    damage: Callable[[Path], object], message: str, copy: Path
) -> None:
    damage(copy)
    with pytest.raises((Error, zbcompile.CompileError), match=message):
        zbcompile.load(copy)


@pytest.fixture
def library() -> Iterator[None]:
    """An operator of another library, `zbtests::doubled`."""
    with torch.library._scoped_library("zbtests", "DEF") as created:
        created.define("doubled(Tensor x) -> Tensor")
        created.impl("doubled", lambda x: 2 * x, "CompositeExplicitAutograd")
        yield


@pytest.mark.parametrize("packet", ["aten._assert_async", "zbtests.doubled"])
def test_the_methods_of_an_operator_reach_no_code(
    packet: str, copy: Path, tmp_path: Path, library: None
) -> None:
    """Seven operations that call `exec` through the methods of an operator's packet: its constructor
    makes a packet of anything, and what it does not have it asks of that. Neither while a program is
    loaded, although its operators are trusted, nor while it is inspected."""
    mark, complete = tmp_path / "mark", packet.replace(".", "::", 1)

    def insert(data: Json) -> None:
        first = len(graph_of(data)["inputs"])
        calls: list[tuple[str, list[Any]]] = [
            (f"{packet}.__getattribute__", ["__init__"]),
            (f"{packet}.__init__", [complete, "x", {"node": first}, []]),
            (f"{packet}.__getattr__", ["__globals__"]),
            ("getitem", [{"node": first + 2}, "__builtins__"]),
            ("getitem", [{"node": first + 3}, "exec"]),
            (f"{packet}.__init__", [complete, "x", {"node": first + 4}, []]),
            (f"{packet}.__call__", [f"open({str(mark)!r}, 'w')"]),
        ]
        graph_of(data)["nodes"][:0] = [{"call": target, "args": args} for target, args in calls]

    rewrite(STAGE, insert)(copy)
    with pytest.raises(zbcompile.CompileError, match="operator that a graph may call"):
        zbcompile.load(copy, operators=["zbtests::doubled"])
    assert zbcompile.inspect.main([str(copy)]) == 2
    assert not mark.exists()


@pytest.mark.slow
def test_operators_of_other_libraries_must_be_named(saved: Saved) -> None:
    case = Case("custom-op", "1f1b", 2, 2, steps=1)
    named = [f"zbcompile_tests::{name}" for name in ("bend", "bend_backward")]
    with pytest.raises(zbcompile.CompileError, match=r'pass operators=\["zbcompile_tests::bend'):
        zbcompile.load(saved(case), state_for(case))
    assert zbcompile.inspect.main([str(saved(case))]) == 0
    pipe = zbcompile.load(saved(case), state_for(case), operators=named)
    assert_bitwise(training.train(pipe, case), training.reference(case))


def test_what_a_loaded_program_cannot_do_is_said(saved: Saved) -> None:
    with pytest.raises(Error, match="compiled for 2 ranks, but there are 4"):
        zbcompile.load(saved(SMALL), ranks=4)
    pipe = zbcompile.load(saved(SMALL))
    (x,) = training.problem_of(SMALL.problem).batches(1, 4)[0].args
    with pytest.raises(Error, match=r"not filled\. Call pipe\.load_state_dict"):
        pipe.step(x, target=x)
    pipe.load_state_dict(state_for(SMALL))
    wider = torch.cat([x, x])
    with pytest.raises(Error, match=r"compiled for microbatches of args\[0\]: float32\[2, "):
        pipe.step(wider, target=wider)
    with pytest.raises(Error, match="holds the training step alone, and cannot compute eval"):
        pipe.eval(x)
    with pytest.raises(Error, match="was loaded from a directory"):
        pipe.program.save("elsewhere")


def test_a_directory_with_other_files_is_left_alone(copy: Path) -> None:
    pipe = compiled(SMALL)
    pipe.program.save(copy)  # a program is replaced
    for name in ("notes.txt", "rank-notes", "manifest.json.mine"):
        (copy / name).write_text("mine")
        with pytest.raises(Error, match=rf"holds other files \({name}\)"):
            pipe.program.save(copy)
        assert (copy / name).read_text() == "mine"
        (copy / name).unlink()


class Tables(nn.Module):
    """Values that no state dict holds: a buffer, a constant with a stride of 0, one that is
    transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.register_buffer("table", torch.randn(8), persistent=False)
        self.register_buffer("steps", torch.zeros(()))
        self.wide = torch.randn(8, 1).expand(8, 8)
        self.turned = torch.randn(8, 4).t()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.layers(x * self.table) @ self.wide @ self.turned.repeat(2, 1)


def test_values_that_no_state_dict_holds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Tables(), torch.randn(4, 8)
    options = {"schedule": "1f1b", "microbatches": 2, "ranks": 2, "exact": True}
    pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, **options)
    pipe.compile(x, target=x).program.save(tmp_path)
    second = zbcompile.load(tmp_path, state_dict=model.state_dict())
    assert torch.equal(pipe.step(x, target=x), second.step(x, target=x))
    assert_same_tensors(gradients_of(second), gradients_of(pipe), "gradient of")
    assert_same_tensors(second.state_dict(), pipe.state_dict(), "state dict:")
    assert "table" not in second.state_dict()


@pytest.mark.slow
def test_a_sharded_output_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program with vocabulary passes has the gradients of the unsplit model, and trains with the
    same bits once it was saved and loaded."""
    case = VocabularyCase("gpt-options", interlaced(2, 4), 2, 2)
    pipe = vocabulary_training.pipeline_of(case)
    losses, gradients = vocabulary_training.learn(pipe, case)
    state = dict(pipe.state_dict(full=True))
    ours, theirs = Learned(losses, gradients, state, None), vocabulary_training.eager(case)
    vocabulary_training.assert_equal_within(ours, theirs, 1e-12)
    pipe.program.save(tmp_path)
    second = zbcompile.load(tmp_path, vocabulary_training.model_of(case).state_dict())
    again, differently = vocabulary_training.learn(second, case)
    assert_same_tensors(again, losses, "loss of step")
    for our, their in zip(differently, gradients, strict=True):
        assert_same_tensors(our, their, "gradient of")
    assert_same_tensors(second.state_dict(full=True), state, "state dict:")
    assert zbcompile.inspect.main([str(tmp_path)]) == 0
    assert "words" in capsys.readouterr().out


def load_unlike_the_other(good: Path, other: Path, damaged: Path, nowhere: Path) -> list[str]:
    """Returns what each rank is told where the ranks, or what they load, differ."""
    rank, before = dist.get_rank(), torch.get_num_threads()
    told = []
    for place in (damaged, (good, other)[rank], (good, nowhere)[rank], good):
        torch.set_num_threads(1 + rank if len(told) == 3 else 1)
        with pytest.raises(Error) as caught:
            zbcompile.load(place)
        told.append(str(caught.value))
        dist.barrier()
    torch.set_num_threads(before)
    return told


@pytest.mark.slow
def test_ranks_that_differ_are_refused_on_every_rank(
    saved: Saved, copy: Path, pool: Pool, tmp_path: Path
) -> None:
    blank(STAGE)(copy)
    places = (saved(SMALL), saved(replace(SMALL, schedule="gpipe")), copy, tmp_path / "nowhere")
    remedy = "Every rank must load the same directory, with the same torch and number of threads"
    for damaged, other, nowhere, threads in pool.run(load_unlike_the_other, *places):
        assert "rank-0001.json is not what was saved" in damaged
        assert "loaded different programs: digest is" in other
        assert "nowhere has no manifest.json" in nowhere
        assert "threads is 1 on rank 0 and 2 on rank 1" in threads
        assert remedy in other
        assert remedy in threads


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_a_whole_program_or_none(tmp_path: Path) -> None:
    """At every call that writes."""
    program = compiled(SMALL).program
    program.save(tmp_path)
    complete, told = bytes_of(tmp_path), list[str]()
    while killed(len(told), tmp_path, lambda: program.save(tmp_path)):
        told.append("whole")
        try:
            zbcompile.load(tmp_path)
        except Error as error:
            told[-1] = str(error)
    refused = [text for text in told if text != "whole"]
    assert all("is not a program, or saving it was interrupted" in text for text in refused)
    assert refused
    assert bytes_of(tmp_path) == complete
