"""ZeRO-1: the parameters and gradients of a stage as flat buffers, divided among replicas.

Parameters are views of one buffer per stage and dtype, and their gradients accumulate in a second
one. After the last W of the stage it is reduced: each replica keeps the sum of its segment, and the
buffer is freed. After the update of its segment each replica sends it to the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.distributed.in_flight import complete, keep_in_flight
from zbcompile.engine.gradients import Gradients
from zbcompile.errors import PipelineError
from zbcompile.passes.torch_private import gradient_dtype, version_of

Range = tuple[int, int]
# The names that torch 2.13 has deprecated are the only ones of torch 2.11.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class ShardedBuffer:
    """The trained parameters of one stage and dtype, whose optimizer state is divided among the
    replicas of `group`.

    Replica i updates the elements from `bounds[i]` to `bounds[i + 1]`. If the optimizer updates
    element by element, all segments are equally long; the end is padded. With `owners`, the replica
    of each parameter, segments consist of whole parameters. `user_parameters` are those of
    `parameters` as users see them, which may be DTensors over the same memory.
    """

    stage: int
    parameters: Mapping[str, nn.Parameter]
    user_parameters: Mapping[str, Any]
    group: dist.ProcessGroup | None
    owners: Mapping[str, int] | None = None
    reduce_dtype: torch.dtype | None = None
    gradients: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.replicas = 1 if self.group is None else dist.get_world_size(self.group)
        self.replica = 0 if self.group is None else dist.get_rank(self.group)
        owners, names = self.owners, list(self.parameters)
        if owners is not None:
            names.sort(key=owners.__getitem__)
        lengths = [self.parameters[name].numel() for name in names]
        *starts, total = accumulate(lengths, initial=0)
        self._offsets = dict(zip(names, starts, strict=True))
        if owners is None:
            share = -(-total // self.replicas)
            self.bounds = [share * replica for replica in range(self.replicas + 1)]
        else:
            loads = [0] * self.replicas
            for name, length in zip(names, lengths, strict=True):
                loads[owners[name]] += length
            self.bounds = list(accumulate(loads, initial=0))
        like = next(iter(self.parameters.values()))
        # gloo's reduce-scatter and all-gather copy the whole buffer
        on_gloo = self.group is not None and "gloo" in dist.get_backend_config(self.group)
        self._is_even = owners is None and not on_gloo
        self.values = torch.zeros(self.bounds[-1], dtype=like.dtype, device=like.device)
        self._gradient_dtype = gradient_dtype(like)
        self._reductions: list[tuple[Tensor, list[dist.Work]]] = []
        self._gathers: list[dist.Work] = []
        self._writes: dict[str, int] = {}
        self.attach_parameters()

    def _view(self, flat: Tensor, name: str) -> Tensor:
        parameter = self.parameters[name]
        start = flat.storage_offset() + self._offsets[name]
        return flat.as_strided(parameter.shape, parameter.stride(), start)

    @property
    def segment(self) -> Range:
        """The elements that this replica updates."""
        return self.bounds[self.replica], self.bounds[self.replica + 1]

    def parts(self, name: str) -> list[tuple[int, int, int]]:
        """Returns the replica, the begin and the end of each part of a parameter, in elements."""
        offset, length = self._offsets[name], self.parameters[name].numel()
        if self.owners is not None:
            return [(self.owners[name], 0, length)]
        ranges = (
            (replica, max(begin - offset, 0), min(end - offset, length))
            for replica, (begin, end) in enumerate(pairwise(self.bounds))
        )
        return [(replica, begin, end) for replica, begin, end in ranges if begin < end]

    def local_part(self, flat: Tensor, name: str) -> Tensor | None:
        """Returns this replica's part of a parameter in its segment `flat`; None if it has none.
        Whole parameters have their own shape, others one dimension."""
        for replica, begin, end in self.parts(name):
            if replica == self.replica:
                start = self._offsets[name] + begin - self.segment[0] + flat.storage_offset()
                if self.owners is None:
                    return flat.as_strided((end - begin,), (1,), start)
                parameter = self.parameters[name]
                return flat.as_strided(parameter.shape, parameter.stride(), start)
        return None

    def attach_parameters(self) -> None:
        """Makes the parameters views of the buffer, with their present values."""
        for name, parameter in self.parameters.items():
            view = self._view(self.values, name)
            if parameter.data_ptr() != view.data_ptr() and parameter.numel():
                view.copy_(parameter.detach())
                parameter.data = view
                if self.user_parameters[name] is not parameter:
                    with torch.no_grad():
                        self.user_parameters[name].to_local().data = view

    def attach_gradients(self) -> None:
        """Makes the gradients views of a buffer: with their values, or zeros where they are
        None."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.values, dtype=self._gradient_dtype)
        for name, parameter in self.parameters.items():
            view = self._view(self.gradients, name)
            if parameter.grad is None:
                parameter.grad = view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view.copy_(parameter.grad)

    def reduce(self, gradients: Gradients) -> None:
        """Starts to sum the gradients over replicas; `.grad` becomes None, and the buffer is freed
        once the sum is there."""
        assert self.gradients is not None, "a step attaches gradients first"
        for name in self.parameters:
            total, view = gradients[name].total(), self._view(self.gradients, name)
            if total is None:
                view.zero_()
            elif total.data_ptr() != view.data_ptr():
                view.copy_(total)
            if total is not None and gradients.observe is not None:
                gradients.observe(name, view)
            gradients[name].release()
        flat, self.gradients = self.gradients, None
        if self.reduce_dtype is not None and not flat.is_complex():
            flat = flat.to(self.reduce_dtype)
        begin, end = self.segment
        if self.group is None:
            self._reductions.append((flat, []))
        elif self._is_even:
            part = torch.empty_like(flat[begin:end])
            work = _reduce_scatter(part, flat, group=self.group, async_op=True)
            self._reductions.append((part, [work]))
        else:
            works = [
                dist.reduce(flat[begin:end], group=self.group, group_dst=replica, async_op=True)
                for replica, (begin, end) in enumerate(pairwise(self.bounds))
                if begin < end
            ]
            self._reductions.append((flat[begin:end], works))

    @property
    def reduction_is_complete(self) -> bool:
        """True if a sum has been started and is complete."""
        return bool(self._reductions) and all(
            work.is_completed() for _, works in self._reductions for work in works
        )

    def finish_reduction(self) -> Tensor | None:
        """Completes and returns the sum of this replica's segment, or None if none was started."""
        total = None
        while self._reductions:
            part, works = self._reductions.pop(0)
            for work in works:
                work.wait()
            part = part.to(self._gradient_dtype)
            if part.numel() < part.untyped_storage().nbytes() // part.element_size():
                part = part.clone()  # the buffer can be freed
            total = part if total is None else total.add_(part)
        return total

    def drop_gradients(self) -> None:
        """Forgets gradients and sums that have been started."""
        self._reductions.clear()
        self.gradients = None

    def gather(self) -> None:
        """Starts to send each replica's segment of the parameters to the others."""
        if self.group is None:
            return
        begin, end = self.segment
        if self._is_even:
            values = self.values, self.values[begin:end]
            works = [_all_gather(*values, group=self.group, async_op=True)]
        else:
            works = [
                dist.broadcast(self.values[b:e], group=self.group, group_src=i, async_op=True)
                for i, (b, e) in enumerate(pairwise(self.bounds))
                if b < e
            ]
        self._gathers += map(keep_in_flight, works)
        self._writes = {name: version_of(parameter) for name, parameter in self.parameters.items()}

    def wait(self) -> None:
        """Blocks until the other replicas' segments of the parameters have arrived. Raises
        PipelineError if the user has written into a parameter since `gather`."""
        for name, writes in self._writes.items() if self._gathers else ():
            if version_of(self.parameters[name]) != writes:
                raise PipelineError(
                    f"{name} was written between the update of the optimizer and the arrival of its"
                    " updated values, which would replace what was written. Call"
                    " pipe.parameters() or pipe.state_dict() first, which waits for them."
                )

        while self._gathers:
            complete(self._gathers.pop(0))
