"""What ranks exchange is proven right from their graphs, or refused with parameter, dimension and line."""

import pytest

from tests.support import dtensor_models
from tests.support.faulty_models import FAULTS, case_of
from tests.support.mutated_exchanges import Mutation, Tally, changed, drop, examine, mutated_cases
from tests.support.proofs import Case, alone, captured, kinds_counted, proof_of, prove
from tests.support.proven_models import BY_HAND, DISTRIBUTED, OTHERS, all_cases, by_hand, distributed
from zbcompile.passes.graph.source_location import source_line

MUTATED = (
    *("tp-plain", "tp-functions", "tp-words", "cp-ulysses", "ep-dispatched", "ep-looked-up", "dp-norm"),
    *("sharded-output",),
)


def require_proven(case: Case) -> None:
    proof = proof_of(case)
    assert proof.wrong == []
    assert proof.unknown == set()
    counts = kinds_counted(proof)
    assert counts["unknown"] < 0.02 * sum(counts.values())


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("kind", BY_HAND)
def test_models_parallelised_by_hand_are_proven(kind: str) -> None:
    require_proven(by_hand(kind))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
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


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("fault", {kind: fault for fault, (kind, *_) in FAULTS.items()}.values())
def test_the_same_models_without_their_faults_are_proven(fault: str) -> None:
    require_proven(case_of(fault, right=True))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_replicas_experts_and_shards_are_proven(kind: str) -> None:
    require_proven(all_cases()[kind])


@pytest.mark.slow
@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("kind", MUTATED)
def test_a_changed_exchange_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective of a model, forward and back, dropped, doubled and moved."""
    monkeypatch.setattr(dtensor_models, "VOCABULARY", dtensor_models.VOCABULARY)  # which `mutated_cases` changes
    tally = Tally()
    examine(kind, mutated_cases()[kind], limit=100, tally=tally)
    assert tally.changed
    assert tally.missed == []


HIDDEN = {  # exchanges that no gradient passes: the number of one in a model's graph, and what is said without it
    "ep-padded": (1, "picks rows by the places of others"),
    "ep-looked-up": (0, "picks rows by the places of others"),
    "dtensor-loss": (6, "adds up exponentials from which each rank has subtracted its own largest value"),
    "tp-words": (2, "uses a rank's sum of exponentials, less the largest value of all ranks, as the whole"),
}


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("kind", HIDDEN)
def test_an_exchange_that_no_gradient_passes_is_missed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor_models, "VOCABULARY", dtensor_models.VOCABULARY)
    case, (place, what) = mutated_cases()[kind], HIDDEN[kind]
    with alone(0):
        broken = changed(captured(case), Mutation("drop", 0, place, drop), case.dimension)
        assert broken is not None
        wrong = prove(case, broken, broken).wrong
    assert what in wrong[0].what
    assert wrong[0].node is not None
    assert source_line(wrong[0].node)
