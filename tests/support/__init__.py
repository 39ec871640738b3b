"""What tests and sweeps share. Its modules use the models of examples/, also when they are run
outside of pytest."""

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
