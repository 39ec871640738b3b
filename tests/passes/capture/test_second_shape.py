"""A further program for another batch shape, after parameters of other ranks moved to meta.

Every rank compiles the same graphs, parameters keep their stages, and the bits are eager's.
"""

import copy
import warnings
from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.passes.test_bits import MICROBATCHES
from tests.support.pass_graph_runner import Batch, Runner, differences, eager_step
from tests.support.zoo import ZOO, Problem
from zbcompile import schedules
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.partition.assign_stages import cuts_of_owners

NAMES = ("gpt2", "resnet")


def batches_with(problem: Problem, rows: int) -> list[Batch]:
    parts = problem.batches(1, rows * MICROBATCHES)[0].parts(MICROBATCHES)
    return [(part.args, dict(part.kwargs), part.target) for part in parts]


def without(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Returns a copy of a model with these parameters and buffers on the meta device."""
    model = copy.deepcopy(model)
    names_of = dict(model.named_parameters(remove_duplicate=False))
    names_of |= model.named_buffers(remove_duplicate=False)  # type: ignore[arg-type]
    gone = {id(names_of[name]) for name in names}
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in gone:
                    if id(tensor) not in empty:
                        value = torch.empty_like(tensor, device="meta")
                        is_parameter = isinstance(tensor, nn.Parameter)
                        empty[id(tensor)] = (
                            nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                        )
                    table[key] = empty[id(tensor)]  # type: ignore[assignment]
    return model


def compile_for(
    model: nn.Module, batch: Batch, problem: Problem, owners: Mapping[str, list[int]] | None
) -> CompiledStep:
    options = ExportOptions(device=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = export_training_step(model, *batch, problem.loss, options)
    choose = owners and (lambda step, line: cuts_of_owners(step, line, owners, 2))
    return compile_graph(step, ranks_of=[0, 1], exact=True, choose_cuts=choose)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_second_shape_after_placing(name: str) -> None:
    problem = ZOO[name]
    model = problem.model().train()
    placed = compile_for(model, batches_with(problem, 2)[0], problem, None)
    batches = batches_with(problem, 3)
    programs = []
    for rank in range(2):
        elsewhere = [parameter for parameter, stages in placed.owners.items() if rank not in stages]
        assert elsewhere
        part = without(model, elsewhere)
        assert any(parameter.is_meta for parameter in part.parameters())
        programs.append(compile_for(part, batches[0], problem, placed.owners))
    one, other = programs
    for label, graph in one.passes.items():
        assert graph.fingerprint == other.passes[label].fingerprint
        assert graph.inputs == other.passes[label].inputs
    assert one.owners == placed.owners
    orders = schedules.build("zb-h1", ranks=2, microbatches=MICROBATCHES).orders
    result = Runner(one, model, batches, seed=5).run(orders)
    assert not differences(result, eager_step(model, batches, problem.loss, seed=5))
