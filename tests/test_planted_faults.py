"""The list of planted faults is in step with the code."""

import pytest

from tests.support.planted_faults import FAULTS, ROOT, PlantedFault, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_place_of_a_fault_exists_once(fault: PlantedFault) -> None:
    assert planted(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
    assert all((ROOT / test).exists() for test in fault.tests)
