"""Two nodes: two torchrun agents on this machine, which find each other by torchrun's
rendezvous."""

from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.warm_torchrun import warm_agents

pytestmark = pytest.mark.beyond_sample

SCRIPT = """
import torch
import zbcompile
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss, timeout=120)
x = torch.linspace(-1, 1, 32).view(4, 8)
losses = [float(pipe.step(x, target=x)) for _ in range(2)]
assert losses[0] == losses[1]
print("loss", losses[0])
rank = torch.distributed.get_rank()
pipe.step(x, target=x[: 4 - rank])  # rank 1 passes a target of 3 rows
"""


@pytest.mark.slow
def test_two_agents_train_and_fail_together(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=two")
    arguments = ("--nnodes", "2", "--nproc-per-node", "1", *place, str(script))
    codes, texts = zip(*warm_agents(2, tmp_path, "import zbcompile.run", *arguments), strict=True)
    said = sorted(texts, key=lambda text: "FaultError" in text)
    assert all(codes)
    losses = {line for text in said for line in text.splitlines() if line.startswith("loss")}
    assert len(losses) == 1, "\n".join(said)
    message = "target has 3 rows, the batch 4 (args[0])"
    assert f"PipelineError: {message}" in said[0]
    assert f"FaultError: rank 1 failed at step 2: PipelineError: {message}" in said[1]
