"""What ranks exchange is proven right from their graphs, or refused with parameter, dimension and line."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import dtensor_models
from tests.support.faulty_models import FAULTS, case_of
from tests.support.mutated_exchanges import Tally, all_cases, examine
from tests.support.parallel_models import LENGTH, WIDTH, ContextParallel, TensorParallel
from tests.support.proofs import Case, proof_of
from zbcompile.passes.graph.source_location import source_line

BY_HAND = ("tp plain", "tp functions", "tp sequence", "cp gather", "cp ulysses", "cp ring")
DISTRIBUTED = ("plain", "sequence", "loss", "odd")


def by_hand(kind: str) -> Case:
    dimension, _, form = kind.partition(" ")
    norms = {"*norm*": {"tp": "partial"}} if form == "sequence" else {}

    def make(mesh: Any) -> tuple[nn.Module, Any, Tensor, Tensor]:
        model = ContextParallel(mesh, form) if dimension == "cp" else TensorParallel(mesh, form)
        x, y = torch.randn(2, 2, LENGTH, WIDTH).unbind()
        return model, getattr(model, "loss", F.mse_loss), x, y

    return Case(make, dimension, TensorParallel.PLACEMENTS | norms if dimension == "tp" else {})


def distributed(form: str, layers: int = 1) -> Case:
    def make(mesh: Any) -> tuple[nn.Module, Any, Tensor, Tensor]:
        x, y = torch.randint(dtensor_models.VOCABULARY, (2, 2, dtensor_models.LENGTH)).unbind()
        return dtensor_models.parallelised(mesh["tp"], form, layers), dtensor_models.loss_of, x, y

    return Case(make, "tp", {})


def require_proven(case: Case) -> None:
    proof = proof_of(case)
    assert proof.wrong == []
    assert proof.unknown == set()
    counts = proof.counts
    assert counts["unknown"] < 0.02 * sum(counts.values())


@pytest.mark.slow
@pytest.mark.mostly_slow(every=6, suite=1)
@pytest.mark.parametrize("kind", BY_HAND)
def test_models_parallelised_by_hand_are_proven(kind: str) -> None:
    require_proven(by_hand(kind))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("form", DISTRIBUTED)
def test_models_of_dtensors_are_proven(form: str) -> None:
    require_proven(distributed(form))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name_and_line(fault: str) -> None:
    *_, name, line = FAULTS[fault]
    wrong = proof_of(case_of(fault)).wrong
    assert wrong, fault
    assert name in wrong[0].name
    assert wrong[0].node is not None
    assert line in source_line(wrong[0].node)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("fault", {kind: fault for fault, (kind, *_) in FAULTS.items()}.values())
def test_the_same_models_without_their_faults_are_proven(fault: str) -> None:
    require_proven(case_of(fault, right=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp-functions", "cp-ulysses"])
def test_a_changed_exchange_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective of a model, forward and back, dropped, doubled and moved."""
    monkeypatch.setattr(dtensor_models, "VOCABULARY", dtensor_models.VOCABULARY)  # which `all_cases` changes
    tally = Tally()
    examine(kind, all_cases()[kind], limit=100, tally=tally)
    assert tally.changed
    assert tally.missed == []
