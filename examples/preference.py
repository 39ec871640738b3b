"""Direct preference optimisation (arXiv 2305.18290) of the byte-level GPT against a frozen
reference.

    python examples/preference.py                                               both pipelines, all ranks in one process
    torchrun --standalone --nproc-per-node 2 examples/preference.py             one process per rank

It makes its data: after the same prompt of random letters, the preferred answer repeats them and
the other one does not. The reference is a second pipeline in the same processes that only
evaluates: it has no backward graphs. The margin is how much likelier than the reference the policy
finds the preferred answer, compared with the other.
"""

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT

PROMPT, ANSWER = 8, 8
IGNORED = -100
Pairs = tuple[
    Tensor, Tensor
]  # tokens [pairs, 2, length], their labels: the preferred answer comes first


class Preference(nn.Module):
    """The policy with its loss: a batch is pairs of sequences, whose reference log-probabilities
    are given."""

    def __init__(self, policy: nn.Module, beta: float) -> None:
        super().__init__()
        self.policy, self.beta = policy, beta

    def forward(self, tokens: Tensor, labels: Tensor, reference: Tensor) -> dict[str, Tensor]:
        """`tokens` and `labels` [pairs, 2, length], `reference` [pairs, 2]."""
        logits = self.policy(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
        inside = labels != IGNORED
        labels_inside = torch.where(inside, labels, 0)
        chosen = torch.log_softmax(logits, -1).gather(-1, labels_inside[..., None])[..., 0]
        gain = torch.where(inside, chosen, 0.0).sum(-1) - reference
        margin = gain[:, 0] - gain[:, 1]
        return {"loss": -F.logsigmoid(self.beta * margin).mean(), "margin": margin}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--schedule",
        default="zb-h1",
        help="a name from zbcompile.schedules.names() (default: %(default)s)",
    )
    add("--steps", type=int, default=30, help="optimizer steps (default: %(default)s)")
    add("--pairs", type=int, default=16, help="pairs in a batch (default: %(default)s)")
    add("--layers", type=int, default=2, help="transformer layers (default: %(default)s)")
    add("--width", type=int, default=32, help="width of the residual stream (default: %(default)s)")
    add("--beta", type=float, default=0.2, help="how far the policy may go (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the model and the data (default: %(default)s)")
    return parser.parse_args(arguments)


def make_pairs(count: int, generator: torch.Generator) -> Pairs:
    """Prompts of random letters, each with an answer that repeats it and one of other letters."""
    letters = torch.randint(ord("a"), ord("z") + 1, (count, 2, PROMPT), generator=generator)
    prompts = letters[:, :1].expand(count, 2, PROMPT)
    sequence = torch.cat([prompts, letters[..., :ANSWER]], -1)
    labels = sequence[..., 1:].clone()
    labels[..., : PROMPT - 1] = IGNORED  # the prompt is given, not learned
    return sequence[..., :-1].contiguous(), labels


def by_answer(pipe: zbcompile.Pipeline, tokens: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each answer [pairs, 2], from wherever the pipeline has its logits."""
    log_probs = pipe.log_probs(tokens.flatten(0, 1), labels=labels.flatten(0, 1))
    return log_probs.sum(-1).view(labels.shape[:2])  # type: ignore[no-any-return]


def build(options: argparse.Namespace) -> tuple[zbcompile.Pipeline, zbcompile.Pipeline]:
    """The policy to train, and the frozen reference that it starts as."""
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, length=PROMPT + ANSWER)
    reference = GPT(options.layers, options.width, length=PROMPT + ANSWER).requires_grad_(False)
    reference.load_state_dict(model.state_dict())
    ranks = None if "RANK" in os.environ else 2
    policy = Preference(model, options.beta)
    return tuple(  # type: ignore[return-value]
        zbcompile.pipeline(pipeline_, schedule=options.schedule, microbatches=4, ranks=ranks)
        for pipeline_ in (policy, reference)
    )


def run(options: argparse.Namespace) -> list[float]:
    """Train; the mean margin before the first step, and after every one of a batch that is not
    trained on."""
    torch.set_num_threads(1)
    policy, reference = build(options)
    generator = torch.Generator().manual_seed(options.seed)
    validation = make_pairs(options.pairs, generator)
    labels_inside = by_answer(reference, *validation)
    optimizer, margins = None, []
    for step in range(options.steps + 1):
        tokens, labels = make_pairs(options.pairs, generator)
        loss = policy.step(tokens, labels, by_answer(reference, tokens, labels))
        margins.append(policy.eval(*validation, labels_inside)["margin"].mean().item())
        if policy.is_first and step % 5 == 0:
            print(
                f"step {step:3}  loss {loss.item():.4f}  margin of held-out pairs"
                f" {margins[-1]:+.3f}"
            )
        optimizer = optimizer or torch.optim.AdamW(policy.parameters(), lr=options.lr)
        optimizer.step()
        optimizer.zero_grad()
    reference.close()
    policy.close()
    return margins


def main() -> None:
    try:
        margins = run(parse())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if margins[-1] <= margins[0]:
        raise SystemExit(f"the margin did not rise: {margins[0]:+.3f} to {margins[-1]:+.3f}")


if __name__ == "__main__":
    main()
