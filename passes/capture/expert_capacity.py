"""The check that tokens fit into the room that an exchange between experts has for them.

How many tokens choose an expert is known only while a step runs. A trace goes on as if they fitted;
whether they did is a result of the step, at which the engine looks together with the losses.
"""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def require_fit(fits: Tensor) -> None:
    """Raises RuntimeError if `fits` is False; in a trace the value becomes a result of the step."""
    if has_torch_function((fits,)):
        handle_torch_function(require_fit, (fits,), fits)
    elif not fits:
        raise RuntimeError(
            "more tokens chose the experts of one rank than its capacity. Pass a larger factor= to "
            "ExpertExchange: its number of ranks is enough for any routing."
        )
