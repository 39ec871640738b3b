"""From a captured graph to the canonical one, by all canonicalisations in order."""

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.pass_list.passes_in_order import CANONICALISE
from zbcompile.passes.pass_list.run_passes import SILENT, PassManager


def canonicalise(captured: Captured, manager: PassManager = SILENT) -> Canonical:
    """The canonical form of `captured`, which is not changed. Raises CaptureError if no stage can compute it."""
    canonical: Canonical = manager.run_all(CANONICALISE, captured)[-1]
    return canonical
