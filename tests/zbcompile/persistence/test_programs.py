"""Programs as directories: saved, checked, and run again with the same bits and without the model's
source."""

import hashlib
import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
import zbcompile.inspect
from tests.support import vocabulary_training
from tests.support.hostile_programs import edited_programs
from tests.support.pool import Pool
from tests.support.training import (
    Case,
    assert_bitwise,
    assert_same_tensors,
    gradients_of,
    join,
    pipeline_of,
    problem_of,
    reference,
    train,
)
from tests.support.vocabulary_training import VocabularyCase
from zbcompile.passes.graph.fx import graph_text
from zbcompile.program.directory import digest_of
from zbcompile.program.program import Program
from zbcompile.schedules.generators.interlaced import interlaced

SMALL = Case("mlp", "1f1b", 2, 2)
CASES = (
    Case("skips", "zb-h1", 2, 2, steps=2),
    Case("mlp", "dualpipe-v", 2, 4, steps=1),
    Case("small-tied", "dualpipe", 2, 4, steps=1),
)


def compiled(case: Case) -> zbcompile.Pipeline:
    batch = problem_of(case.problem).batches(1, case.microbatches * 2)[0]
    target = {} if batch.target is None else {"target": batch.target}
    return pipeline_of(case).compile(*batch.args, **batch.kwargs, **target)


def save(case: Case, directory: str) -> None:
    compiled(case).program.save(directory)


def bytes_of(directory: Path) -> dict[str, str]:
    """The hash of every file."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The directory of a case, saved once."""
    root = tmp_path_factory.mktemp("programs")

    def make(case: Case) -> Path:
        directory = root / f"{case.problem} {case.schedule}"
        if not directory.exists():
            save(case, str(directory))
        return directory

    return make


def train_loaded(directory: str, case: Case) -> Any:
    return train(
        zbcompile.load(directory, state_dict=problem_of(case.problem).model().state_dict()), case
    )


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loaded_program_trains_with_the_same_bits(
    case: Case, saved: Callable[[Case], Path]
) -> None:
    ours, theirs = train_loaded(str(saved(case)), case), reference(case)
    assert list(ours.state) == list(theirs.state)
    assert_bitwise(ours, theirs)


def own_part(directory: str, rank: int) -> str:
    """A copy without the parts of other ranks."""
    copy = f"{directory} of {rank}"
    shutil.copytree(directory, copy)
    for second in Path(copy).glob("rank-*"):
        if second.stem != f"rank-{rank:04d}":
            second.unlink()
    return copy


def save_and_train(directory: str, case: Case) -> Any:
    """Each rank saves its part; each loads from a directory that holds no other's."""
    save(case, directory)
    torch.distributed.barrier()
    return train_loaded(own_part(directory, torch.distributed.get_rank()), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[2], marks=pytest.mark.beyond_sample)], ids=str
)
def test_each_rank_writes_and_reads_its_own_part(
    case: Case, saved: Callable[[Case], Path], pool: Pool, tmp_path: Path
) -> None:
    """Two processes write the bytes that one process writes for both ranks, and train with eager's
    bits."""
    directory = tmp_path / "program"
    assert_bitwise(join(pool.run(save_and_train, str(directory), case)), reference(case))
    assert bytes_of(directory) == bytes_of(saved(case))


def step_replicas(directory: str) -> None:
    """Two replicas of a pipeline of two ranks: the first one saves, both load."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    problem = problem_of("small-tied")
    local = list(problem.batches(1, 16)[0].parts(2))[mesh["dp"].get_local_rank()]
    options = {"schedule": "zb-h1", "microbatches": 4, "loss": problem.loss, "exact": True}
    pipe = zbcompile.pipeline(problem.model(), mesh=mesh, **options)
    loss = pipe.step(*local.args, target=local.target)
    pipe.program.save(directory)
    second = zbcompile.load(directory, problem.model().state_dict(), mesh=mesh)
    assert torch.equal(second.step(*local.args, target=local.target), loss)
    assert_same_tensors(gradients_of(second), gradients_of(pipe), "gradient of")


@pytest.mark.slow
def test_replicas_of_a_program(pool: Pool, tmp_path: Path) -> None:
    pool.run(step_replicas, str(tmp_path), ranks=4)


def rewrite(
    directory: Path, name: str, change: Callable[[dict[str, Any]], None], digest: bool = True
) -> None:
    """Change a JSON file; with `digest` also every hash that would betray it."""
    data = json.loads((directory / name).read_text())
    change(data)
    if name == "manifest.json" and digest:
        data["digest"] = digest_of(data)
    (directory / name).write_text(json.dumps(data))
    if name != "manifest.json" and digest:
        new = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        rewrite(directory, "manifest.json", lambda manifest: manifest["files"].update({name: new}))


def swap_receives(data: dict[str, Any]) -> None:
    """The last rank receives its first two messages in the opposite order."""
    order = data["orders"][-1]
    first, second, *_ = [i for i, action in enumerate(order) if action.startswith("RECV_F")]
    order[first], order[second] = order[second], order[first]


def truncate(directory: Path, name: str) -> None:
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[: len(content) // 2])


def forward_of(data: dict[str, Any]) -> dict[str, Any]:
    """The graph of the last stage's forward."""
    return data["stages"]["1"]["F"]  # type: ignore[no-any-return]


def first_call(data: dict[str, Any]) -> dict[str, Any]:
    return forward_of(data)["nodes"][0]  # type: ignore[no-any-return]


def edit_byte(directory: Path, name: str) -> None:
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[:-3] + b" " + content[-2:])


def call(directory: Path, operator: str, *args: Any) -> None:
    """Let the first operation of the last stage be another one."""
    rewrite(
        directory,
        STAGE,
        lambda data: first_call(data).update(call=operator, args=[*args], kwargs={}),
    )


def call_with_result(data: dict[str, Any], operator: str, *args: Any, **more: Any) -> None:
    """Let a graph call an operator with its last result and these arguments."""
    graph = forward_of(data)
    last = len(graph["inputs"]) + len(graph["nodes"]) - 1
    graph["nodes"].append({"call": operator, "args": [{"node": last}, *args], **more})


STAGE = "rank-0001.json"
Damage = tuple[Callable[[Path], object], str]
DAMAGES: dict[str, Damage] = {
    "no manifest": (
        lambda d: (d / "manifest.json").unlink(),
        "is not a program, or saving it was interrupted",
    ),
    "a truncated manifest": (lambda d: truncate(d, "manifest.json"), "is damaged or incomplete"),
    "an edited manifest": (
        lambda d: rewrite(
            d, "manifest.json", lambda data: data["program"]["step"].update(seed=1), digest=False
        ),
        "was changed after it was written",
    ),
    "another format": (
        lambda d: rewrite(d, "manifest.json", lambda data: data.update(version=99)),
        "of version 99; this release reads",
    ),
    "another torch": (
        lambda d: rewrite(d, "manifest.json", lambda data: data.update(torch="1.0.0")),
        "compiled with torch 1.0.0 and this is torch",
    ),
    "a missing file": (
        lambda d: (d / STAGE).unlink(),
        "cannot be read .* Copy all of the directory",
    ),
    "a truncated graph": (lambda d: truncate(d, STAGE), "is not what was saved"),
    "truncated constants": (
        lambda d: truncate(d, "rank-0000.safetensors"),
        "is not what was saved",
    ),
    "an edited graph": (lambda d: edit_byte(d, STAGE), "is not what was saved"),
    "an edited schedule": (lambda d: edit_byte(d, "schedule.json"), "is not what was saved"),
    "two receives in the order of no sender": (
        lambda d: rewrite(d, "schedule.json", swap_receives),
        r"schedule\.json is damaged or incomplete \(ScheduleError",
    ),
    "a seed": (
        lambda d: call(d, "aten.manual_seed.default"),
        "is not an operator that a graph may call",
    ),
    "a mode": (
        lambda d: call(d, "aten.set_grad_enabled.default"),
        "is not an operator that a graph may call",
    ),
    "metadata": (
        lambda d: call(d, "aten.resize_.default"),
        "is not an operator that a graph may call",
    ),
    "a number where there is a name": (
        lambda d: rewrite(d, STAGE, lambda data: data["stages"]["1"].update(F=7)),
        "is damaged or incomplete",
    ),
    "a foreign operator": (
        lambda d: rewrite(
            d, STAGE, lambda data: first_call(data).update(call="other.evil.default")
        ),
        r'pass operators=\["other::evil"\]',
    ),
    "an operator that writes files": (
        lambda d: rewrite(
            d, STAGE, lambda data: first_call(data).update(call="aten.from_file.default")
        ),
        "is not an operator that a graph may call",
    ),
    "a function": (
        lambda d: rewrite(d, STAGE, lambda data: first_call(data).update(call="os.system")),
        "'os.system' is not the name of an operator",
    ),
    "code as a name": (
        lambda d: rewrite(d, STAGE, lambda data: forward_of(data).update(kind="x=exit()")),
        "'x=exit\\(\\)' is not the name of a pass",
    ),
    "code as a keyword": (
        lambda d: rewrite(d, STAGE, lambda data: first_call(data).update(kwargs={"a=exit(),b": 1})),
        r"rank-0001.json is damaged .*RuntimeError: aten::tanh",
    ),
    "code in a text that inductor writes into its source": (
        lambda d: rewrite(
            d,
            STAGE,
            lambda data: call_with_result(
                data, "aten.gelu.default", kwargs={"approximate": '"), 0)); exit(1); ('}
            ),
        ),
        "expected only letters, digits, spaces and",
    ),
    "a field of another type": (
        lambda d: rewrite(d, "manifest.json", lambda data: data["program"].update(loss_dtype=7)),
        "received 7; expected str",
    ),
    "a trained parameter without a home": (
        lambda d: rewrite(d, "manifest.json", lambda data: data["program"]["homes"].clear()),
        "no stage is the home of the trained parameter",
    ),
    "a graph without nodes": (
        lambda d: rewrite(d, STAGE, lambda data: forward_of(data).pop("nodes")),
        "is damaged or incomplete .KeyError: 'nodes'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_not_saved_like_this_is_refused(
    damage: str, saved: Callable[[Case], Path], tmp_path: Path
) -> None:
    break_, message = DAMAGES[damage]
    shutil.copytree(saved(SMALL), tmp_path / "program")
    break_(tmp_path / "program")
    with pytest.raises((zbcompile.PipelineError, zbcompile.CompileError), match=message):
        zbcompile.load(tmp_path / "program")


@pytest.mark.slow
def test_random_edits_are_refused_or_have_no_effect(tmp_path: Path) -> None:
    """A sample of `python -m tests.support.hostile_programs --edits 300`. An edit may also make
    another valid program, such as one with another constant."""
    counts, _ = edited_programs(tmp_path, 30)
    assert counts["refused"] >= 20
    assert counts.keys() <= {"refused", "same numbers", "another program"}


@pytest.fixture
def library() -> Iterator[None]:
    """An operator of another library, `zbtests::doubled`."""
    with torch.library._scoped_library("zbtests", "DEF") as created:
        created.define("doubled(Tensor x) -> Tensor")
        created.impl("doubled", lambda x: 2 * x, "CompositeExplicitAutograd")
        yield


def reach_exec(directory: Path, packet: str, code: str) -> None:
    """Let the first graph of the last stage begin with seven operations that call `exec` through
    the methods of an operator's packet: its constructor makes a packet of anything, and what it
    does not have it asks of that.
    """
    complete = packet.replace(".", "::", 1)

    def insert(data: dict[str, Any]) -> None:
        first = len(forward_of(data)["inputs"])
        calls: list[tuple[str, list[Any]]] = [
            (f"{packet}.__getattribute__", ["__init__"]),
            (f"{packet}.__init__", [complete, "x", {"node": first}, []]),
            (f"{packet}.__getattr__", ["__globals__"]),
            ("getitem", [{"node": first + 2}, "__builtins__"]),
            ("getitem", [{"node": first + 3}, "exec"]),
            (f"{packet}.__init__", [complete, "x", {"node": first + 4}, []]),
            (f"{packet}.__call__", [code]),
        ]
        forward_of(data)["nodes"][:0] = [{"call": target, "args": args} for target, args in calls]

    rewrite(directory, STAGE, insert)


@pytest.mark.parametrize("packet", ["aten._assert_async", "zbtests.doubled"])
def test_the_methods_of_an_operator_reach_no_code(
    packet: str, saved: Callable[[Case], Path], tmp_path: Path, library: None
) -> None:
    """Neither while a program is loaded, although its operators are trusted, nor while it is
    inspected."""
    directory, mark = tmp_path / "program", tmp_path / "mark"
    shutil.copytree(saved(SMALL), directory)
    reach_exec(directory, packet, f"open({str(mark)!r}, 'w')")
    trusted = "zbtests::doubled"
    with pytest.raises(zbcompile.CompileError, match="operator that a graph may call"):
        zbcompile.load(directory, operators=[trusted])
    assert zbcompile.inspect.main([str(directory)]) == 2
    assert not mark.exists()


def load_parts(directory: str) -> None:
    zbcompile.load(directory, state_dict=problem_of(SMALL.problem).model().state_dict())


def test_a_damaged_part_is_refused_on_every_rank(
    saved: Callable[[Case], Path], pool: Pool, tmp_path: Path
) -> None:
    shutil.copytree(saved(SMALL), tmp_path / "program")
    edit_byte(tmp_path / "program", STAGE)
    outcomes = pool.outcomes(load_parts, str(tmp_path / "program"))
    assert [outcome.error for outcome in outcomes] == ["PipelineError"] * 2
    assert all("rank-0001.json is not what was saved" in outcome.text for outcome in outcomes)


def test_a_program_is_read_as_it_was_saved(saved: Callable[[Case], Path]) -> None:
    case = CASES[0]
    ours, theirs = zbcompile.load(saved(case)).program, compiled(case).program
    for name in (
        "inputs",
        "call",
        "cuts",
        "homes",
        "choices",
        "lowered",
        "step",
        "loss_dtype",
        "manifest",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    for our, their in zip(ours.stages, theirs.stages, strict=True):
        assert replace(our, pieces={}) == replace(their, pieces={})
        for name, piece in our.pieces.items():
            assert piece.inputs == their.pieces[name].inputs
            assert piece.outputs == their.pieces[name].outputs
            assert graph_text(piece.module) == graph_text(their.pieces[name].module)


@pytest.mark.slow
def test_operators_of_other_libraries_must_be_named(saved: Callable[[Case], Path]) -> None:
    case = Case("custom-op", "1f1b", 2, 2, steps=1)
    directory, state = saved(case), problem_of(case.problem).model().state_dict()
    named = [f"zbcompile_tests::{name}" for name in ("bend", "bend_backward")]
    with pytest.raises(zbcompile.CompileError, match=r'pass operators=\["zbcompile_tests::bend'):
        zbcompile.load(directory, state)
    assert zbcompile.inspect.main([str(directory)]) == 0
    assert_bitwise(train(zbcompile.load(directory, state, operators=named), case), reference(case))


def test_another_number_of_ranks_is_refused(saved: Callable[[Case], Path]) -> None:
    with pytest.raises(zbcompile.PipelineError, match="compiled for 2 ranks, but there are 4"):
        zbcompile.load(saved(SMALL), ranks=4)


def test_what_a_loaded_program_cannot_do_is_said(saved: Callable[[Case], Path]) -> None:
    pipe = zbcompile.load(saved(SMALL))
    batch = problem_of(SMALL.problem).batches(1, 4)[0]
    with pytest.raises(zbcompile.PipelineError, match=r"not filled\. Call pipe\.load_state_dict"):
        pipe.step(*batch.args, target=batch.target)
    pipe.load_state_dict(problem_of(SMALL.problem).model().state_dict())
    wider = torch.cat([*batch.args, *batch.args])
    with pytest.raises(
        zbcompile.PipelineError, match=r"compiled for microbatches of args\[0\]: float32\[2, "
    ):
        pipe.step(wider, target=wider)
    with pytest.raises(
        zbcompile.PipelineError, match="holds the training step alone, and cannot compute eval"
    ):
        pipe.eval(*batch.args)
    with pytest.raises(zbcompile.PipelineError, match="was loaded from a directory"):
        pipe.program.save("elsewhere")


def test_a_directory_with_other_files_is_left_alone(
    saved: Callable[[Case], Path], tmp_path: Path
) -> None:
    shutil.copytree(saved(SMALL), tmp_path / "program")
    pipe = compiled(SMALL)
    pipe.program.save(tmp_path / "program")  # a program is replaced
    for name in ("notes.txt", "evaluation", "rank-notes", "manifest.json.mine"):
        mine = tmp_path / "program" / name
        mine.write_text("mine")
        with pytest.raises(zbcompile.PipelineError, match=rf"holds other files \({mine.name}\)"):
            pipe.program.save(tmp_path / "program")
        assert mine.read_text() == "mine"
        mine.unlink()


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
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=2, ranks=2, loss=_mean, exact=True
    )
    pipe.compile(x, target=x)
    pipe.program.save(tmp_path)
    second = zbcompile.load(tmp_path, state_dict=model.state_dict())
    assert torch.equal(pipe.step(x, target=x), second.step(x, target=x))
    theirs = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert_same_tensors(
        {name: p.grad for name, p in second.named_parameters()}, theirs, "gradient of"
    )
    assert_same_tensors(second.state_dict(), pipe.state_dict(), "state dict:")
    assert "table" not in second.state_dict()


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def learn_both(directory: str, case: VocabularyCase) -> None:
    """A program with vocabulary passes trains with the same bits once it was saved and loaded."""
    pipe = vocabulary_training.pipeline_of(case)
    losses, gradients = vocabulary_training.learn(pipe, case)
    pipe.program.save(directory)
    second = zbcompile.load(directory, state_dict=vocabulary_training.model_of(case).state_dict())
    again, differently = vocabulary_training.learn(second, case)
    assert_same_tensors(again, losses, "loss of step")
    for our, their in zip(differently, gradients, strict=True):
        assert_same_tensors(our, their, "gradient of")
    assert_same_tensors(second.state_dict(full=True), pipe.state_dict(full=True), "state dict:")


@pytest.mark.slow
def test_a_sharded_output_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn_both(str(tmp_path), VocabularyCase("gpt-options", interlaced(2, 4), 2, 2))
    assert zbcompile.inspect.main([str(tmp_path)]) == 0
    assert "words" in capsys.readouterr().out


def load_with_threads(directory: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + torch.distributed.get_rank())
    try:
        zbcompile.load(directory)
    finally:
        torch.set_num_threads(before)


def load_for_others(directory: str, local: str) -> None:
    zbcompile.load(directory if torch.distributed.get_rank() == 0 else local)


def test_ranks_that_differ_are_refused_on_every_rank(
    saved: Callable[[Case], Path], pool: Pool, tmp_path: Path
) -> None:
    directory, second = str(saved(SMALL)), str(saved(CASES[0]))
    complete = "Every rank must load the same directory, with the same torch and number of threads"
    for outcomes, reason in (
        (pool.outcomes(load_with_threads, directory), "threads is 1 on rank 0 and 2 on rank 1"),
        (pool.outcomes(load_for_others, directory, second), "loaded different programs: digest is"),
        (
            pool.outcomes(load_for_others, directory, str(tmp_path / "nowhere")),
            "nowhere has no manifest.json",
        ),
    ):
        assert [outcome.error for outcome in outcomes] == ["PipelineError"] * 2
        assert all(reason in outcome.text for outcome in outcomes), outcomes
        assert (
            complete in outcomes[0].text or "Compile and save the program again" in outcomes[0].text
        )
    outcomes = pool.outcomes(load_parts, directory, ranks=4)
    assert ["compiled for 2 ranks, but there are 4" in outcome.text for outcome in outcomes] == [
        True
    ] * 4


def save_for_ever(program: Program, directory: Path, begun: Event) -> None:
    begun.set()
    while True:
        program.save(directory)


def refusal(directory: Path) -> str:
    """Why a program cannot be loaded; "" if it can."""
    try:
        zbcompile.load(directory)
    except zbcompile.PipelineError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_a_whole_program_or_none(tmp_path: Path) -> None:
    program, moments = compiled(SMALL).program, random.Random(0)
    began = time.monotonic()
    program.save(tmp_path)
    duration, complete = time.monotonic() - began, bytes_of(tmp_path)
    context, refusals = multiprocessing.get_context("fork"), []
    for _ in range(6):
        begun = context.Event()
        process = context.Process(target=save_for_ever, args=(program, tmp_path, begun))
        process.start()
        assert begun.wait(60)
        time.sleep(moments.uniform(0, 3 * duration))
        process.kill()
        process.join()
        refusals.append(refusal(tmp_path))
    assert any(refusals)
    assert all(
        not item or "is not a program, or saving it was interrupted" in item for item in refusals
    ), refusals
    program.save(tmp_path)
    assert bytes_of(tmp_path) == complete
