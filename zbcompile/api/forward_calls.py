"""The calls of a pipeline that compute nothing but forwards: outputs and log-probabilities."""

from collections.abc import Sequence
from typing import Any

import torch

from zbcompile.api.held_model import HeldModel
from zbcompile.compiler.inference import Computation
from zbcompile.errors import PipelineError
from zbcompile.model.batch import flatten_batch, split_batches
from zbcompile.options import checked
from zbcompile.program_cache.forward_programs import MODES, OUTPUTS, Asked, require_same_calls


class ForwardCalls(HeldModel):
    """`eval` and `log_probs`."""

    def eval(
        self,
        *args: Any,
        microbatches: int | Sequence[tuple[Any, ...]] | None = None,
        mode: str = "eval",
        outputs: str = "all",
        **kwargs: Any,
    ) -> Any:
        """The model's output without gradients, on every rank. Nothing of the pipeline or the model changes.

        Args:
            microbatches: how many microbatches at most (default: those of a step); the last one may be smaller. Or
                microbatches that are already split, `[(args, kwargs), ...]`, of any shapes; gives a list of outputs.
            mode: "eval", or "train": each microbatch as the next step's forward computes it, with the modules in the
                modes that they are in and the same random numbers.
            outputs: "all", or "last": only the rank of the last stage gets them, others None.

        An output without a row per sample (a loss) is computed on the whole batch. Raises PipelineError and
        CompileError.
        """
        if not args and not kwargs and not isinstance(microbatches, Sequence):
            raise PipelineError("eval runs a batch, and got none; for the modes of the modules use model.eval().")
        with self._watch.region("eval"), torch.inference_mode(False):
            asked = self._asked("eval", mode, outputs, microbatches)
            return self._forward(args, kwargs, None, microbatches, asked)

    def log_probs(
        self,
        *args: Any,
        labels: torch.Tensor | None = None,
        entropies: bool = False,
        microbatches: int | Sequence[tuple[Any, ...]] | None = None,
        mode: str = "eval",
        outputs: str = "all",
        **kwargs: Any,
    ) -> Any:
        """The log-probability of every label, `log p(labels[b, t] | logits[b, t])`, without gradients; with `entropies`
        also the entropy (in nats) of every token's distribution.

        The model's output for `args` and `kwargs` are the logits [..., words], or has them under `logits`; `labels` has
        their shape without the words, and nothing is shifted: for the next token pass labels that begin one token
        later. Label -100 gives 0. Results have the labels' shape and, like the normalisation, at least fp32. They are
        computed where the logits are, which no other rank sees: that rank holds one microbatch's logits and, beside
        them, its log-probabilities.

        `microbatches`, `mode` and `outputs` as for `eval`; microbatches that are already split are
        `[(args, kwargs, labels), ...]`. Raises PipelineError and CompileError: for an output without logits, for labels
        of another shape or beyond the words.

        >>> logp = pipe.log_probs(tokens[:, :-1], labels=tokens[:, 1:])                  # doctest: +SKIP
        """
        if not args and not kwargs and not isinstance(microbatches, Sequence):
            raise PipelineError("log_probs runs a batch, and got no inputs beside labels=. Pass those of eval.")
        with self._watch.region("log_probs"), torch.inference_mode(False):
            asked = self._asked("entropies" if entropies else "log_probs", mode, outputs, microbatches)
            found = self._forward(args, kwargs, labels, microbatches, asked)
        return [_without_words(each) for each in found] if isinstance(found, list) else _without_words(found)

    def _asked(self, computes: str, mode: str, outputs: str, microbatches: Any) -> Asked:
        if mode not in MODES or outputs not in OUTPUTS:
            raise PipelineError(f"mode={mode!r}, outputs={outputs!r}; expected one of {MODES}, and of {OUTPUTS}.")
        count = None if isinstance(microbatches, Sequence) else checked("microbatches", microbatches)
        return Asked(
            Computation(computes, mode == "train"), outputs, count, self.step_index, self.observation.of_forward()
        )

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Any, given: Any, asked: Asked) -> Any:
        split = isinstance(given, Sequence)
        if split:
            batches = split_batches(given, asked.wanted.computes, beside=bool(args or kwargs or labels is not None))
        else:
            batches = [flatten_batch(args, kwargs, labels, self.options.split, True)]
        require_same_calls(self._ranks, asked, batches)
        self._optimizers.arrive()
        run = self._forwards
        found = run.of_microbatches(batches, asked) if split else run.of_batch(batches[0], asked)
        self._parts.renew()
        self.observation.forward_done()
        return found


def _without_words(found: Any) -> Any:
    """Results without the number of words behind them: one tensor, or log-probabilities and entropies."""
    return found if found is None else found[0] if len(found) == 2 else found[:-1]
