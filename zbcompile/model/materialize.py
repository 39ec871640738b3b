"""This process's share of a model that was built on the meta device: materialised after the cut,
then filled."""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import PART
from zbcompile.model.module_tensors import local_state_allowed
from zbcompile.passes import gpu
from zbcompile.passes.meta_device import is_on_meta, on_device
from zbcompile.passes.torch_private import tensor_tables

Init = Callable[[str, Tensor], None]


class Share:
    """The model's tensors that have memory here, and those of them that still wait for their
    values.

    `init(name, tensor)` fills a parameter or buffer in place. It draws from a seed made of `seed`
    and the name, so that the values depend neither on the ranks nor on the cut, and copies of a
    tensor on several ranks are equal.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, init: Init | None, seed: int
    ) -> None:
        self.model, self.device, self.init, self.seed = model, device, init, seed
        self.unfilled: set[str] = set()
        if is_on_meta(model):
            self._require_known_values()

    def make_real(self, is_local: Callable[[str], bool]) -> None:
        """Gives local tensors memory on the device, and values if there is an `init`."""
        real: dict[int, Tensor] = {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if tensor.is_meta and is_local(name):
                real[id(tensor)] = on_device(tensor, self.device)
                self._fill(name, real[id(tensor)])
        for table, name, tensor in list(tensor_tables(self.model)):
            if id(tensor) in real:
                table[name] = real[id(tensor)]

    def fill_rows(self, name: str, full: Tensor, rows: Tensor, low: int) -> None:
        """Give `rows`, which are those of a parameter from number `low` on, the values that the
        `whole` would have."""
        values = torch.empty_like(full, device="meta" if self.init is None else self.device)
        self._fill(name, values)
        if self.init is not None:
            rows.copy_(values[low : low + len(rows)])

    def filled(self, names: Iterable[str]) -> None:
        """Record that these tensors have their values now."""
        self.unfilled -= set(names)

    def require_filled(self) -> None:
        """Raise PipelineError while a parameter or buffer of this process has no values."""
        if self.unfilled:
            raise PipelineError(
                f"{shortened(sorted(self.unfilled))}: on the meta device when the model was"
                " compiled (built there, or on another rank of an earlier pipeline), and not"
                " filled. Call pipe.load_state_dict(state) after compiling, or pass init=fn(name,"
                " tensor) to pipeline."
            )

    def _fill(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor, or a part of a DTensor with what `init` gives for the whole, which is the
        same on any mesh."""
        part = getattr(tensor, PART, None)
        if self.init is None:
            self.unfilled.add(name)
        elif part is None:
            fill(self.init, self.seed, name, tensor)
        else:
            full_tensor = torch.empty(part.whole.shape, dtype=tensor.dtype, device=tensor.device)
            fill(self.init, self.seed, name, full_tensor)
            tensor.detach().copy_(part.cut(name, full_tensor))

    def _require_known_values(self) -> None:
        """Raise PipelineError for tensors that no state dict holds if there is no `init` to fill
        them."""
        plain = [
            f"{path}.{name}".lstrip(".")
            for path, module in self.model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_meta
        ]
        if plain:
            raise PipelineError(
                f"{shortened(plain)}: a tensor in a plain attribute, on the meta device, where it"
                " has no values. Make it a buffer (register_buffer), or build it on a real device."
            )
        with local_state_allowed():
            saved = set(self.model.state_dict(keep_vars=True))
        lost = [
            name
            for name, buffer in self.model.named_buffers()
            if buffer.is_meta and name not in saved
        ]
        if lost and self.init is None:
            raise PipelineError(
                f"{shortened(lost)}: buffers on the meta device that no state dict holds, so"
                " nothing can fill them. Pass init=fn(name, tensor), which fills a parameter or"
                " buffer in place."
            )


def fill(init: Init, seed: int, name: str, tensor: Tensor) -> None:
    """Let `init` fill a tensor, with random numbers that depend on `seed` and its name alone."""
    with gpu.forked_generators(tensor.device), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]))
        init(name, tensor)


def shortened(names: list[str]) -> str:
    """The first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
