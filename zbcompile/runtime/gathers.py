"""Parameters that live divided among replicas (`zero=3`): each replica has its slices, and memory for a whole parameter
only while something reads it.

A step gathers the parameters of a stage around each use: FETCH gives them memory and begins to send every slice from
its owner, GATHER waits for them, FREE takes the memory back. Meanwhile a slice has no memory of its own, unless it is a
master. Views of a parameter that a pass keeps for a later one stay right meanwhile: they share its storage, which is
resized. Between steps `hold` gathers everything, so that parameters can be read and written, until the next step or
update takes the slices out again; `lend` does so with one parameter at a time.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.parcels import Parcel
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.held_elsewhere import is_in_parts, release, withhold
from zbcompile.runtime.slice import LATE, Slice, await_parcels, spread


@dataclass
class Gathers:
    """`slices` are those of parameters that live divided, of all owners; `reshard` says whether a stage lets its
    parameters go between two uses in a step. `whole` are the parameters that are held between steps: until the first
    step begins, all that have memory. The replicas make all calls in the same order."""

    slices: Sequence[Slice]
    ranks: Ranks
    reshard: bool = False
    whole: set[str] = field(default_factory=set)
    under_way: dict[int, list[Parcel[Slice]]] = field(default_factory=dict)
    lent: set[Slice] = field(default_factory=set)  # those whose values are in the gathered parameters alone
    users: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # stages, of what is gathered

    def __post_init__(self) -> None:
        self.tensors = {each.name: (each.parameter, each.shown) for each in self.slices}
        self.whole |= {name for name, (own, _) in self.tensors.items() if not is_in_parts(own)}
        for name in self.whole:
            _require_own_memory(name, self.tensors[name][0])

    def fetch(self, stage: int, names: Collection[str]) -> None:
        """Begin to gather these parameters for a stage, unless they are held, or gathered for another one; returns at
        once."""
        self._gather(stage, {name for name in names if not self.users[name]}, lends=True)
        for name in names:
            self.users[name].add(stage)

    def _gather(self, stage: int, names: Collection[str], lends: bool) -> None:
        wanted = [each for each in self.slices if each.name in names and each.name not in self.whole]
        for each in wanted:
            self._allocate(each.name)
            storage = each.tensor.untyped_storage()
            if each.mine:
                each.values.copy_(each.tensor.detach())
            if each.mine and lends and not each.is_master and storage.resizable():
                self.lent.add(each)
                storage.resize_(0)
        self.under_way[stage] = spread(wanted)

    def arrive(self, stage: int) -> None:
        """Wait for what is gathered for a stage, and for those that read some of it as well."""
        stages = {stage}.union(*(users for users in self.users.values() if stage in users))
        for each in sorted(stages & self.under_way.keys()):
            with self.ranks.watch.apart(what := "the gathered parameters"), self.ranks.watch.position.waiting(what):
                await_parcels(self.under_way.pop(each))

    def end_use(self, stage: int, names: Collection[str]) -> None:
        """Free these parameters, which a stage has read, but not what is gathered for others."""
        for name in names:
            self.users[name].discard(stage)
        self.free([name for name in names if not self.users[name]])

    def free(self, names: Collection[str]) -> None:
        """Take the memory of these parameters back, unless they are held."""
        lent = {each.name for each in self.lent}  # these come last: a slice needs memory before its parameter has none
        for name in sorted(self.tensors.keys() & set(names) - self.whole, key=lambda each: (each in lent, each)):
            self._return([each for each in self.lent if each.name == name])
            own, shown = self.tensors[name]
            if not own.untyped_storage().resizable():
                _renew(own, shown)
            own.untyped_storage().resize_(0)
            for tensor in {id(own): own, id(shown): shown}.values():
                withhold(tensor, name)

    def hold(self) -> None:
        """Gather all parameters, so that they can be read and written between steps."""
        missing = self.tensors.keys() - self.whole
        if missing:
            with torch.no_grad():
                self._gather(LATE, missing, lends=False)
                self.arrive(LATE)
            self.whole |= missing

    @contextmanager
    def lend(self, name: str, values: bool) -> Iterator[None]:
        """Inside, one parameter has memory, with its `values` if that is said; what is written there goes into the
        slices."""
        if name in self.whole or name not in self.tensors:
            yield
            return
        with torch.no_grad():
            self._allocate(name)
            if values:
                self._gather(LATE, {name}, lends=False)
                self.arrive(LATE)
            yield
            for each in self.slices:
                if each.mine and each.name == name:
                    each.refresh(each.values)
            self.free({name})

    def let_go(self) -> None:
        """End that: the slices take what was written meanwhile."""
        if self.whole:
            for each in self.slices:
                if each.mine and each.name in self.whole:
                    each.refresh(each.values)
            held, self.whole = self.whole, set()
            self.free(held)

    def forget(self) -> None:
        """A step has failed: slices have their own memory again."""
        self.under_way.clear()
        self.users.clear()
        self._return(list(self.lent))

    def _return(self, slices: Sequence[Slice]) -> None:
        for each in slices:
            own = each.tensor.detach()
            own.untyped_storage().resize_(own.numel() * own.element_size())
            own.copy_(each.values)
            self.lent.remove(each)

    def _allocate(self, name: str) -> None:
        own, shown = self.tensors[name]
        for tensor in (own, shown):  # of several slices the first one finds it so
            if is_in_parts(tensor):
                release(tensor)
        own.untyped_storage().resize_(own.numel() * own.element_size())


def _require_own_memory(name: str, own: nn.Parameter) -> None:
    """Raise PipelineError for a parameter that shares its memory with others."""
    found, size = own.untyped_storage().nbytes(), own.numel() * own.element_size()
    if found != size:
        raise PipelineError(
            f"{name} is a view of memory that holds more ({found} bytes, of which it has {size}), so that it cannot "
            "live divided among replicas. Give it memory of its own (tensor.clone()), or pass zero=2."
        )


def _renew(own: nn.Parameter, shown: Any) -> None:
    """Give a parameter memory that can be taken back, which that of a NumPy array, or of a file, cannot."""
    own.data = torch.empty_like(own.data)
    if shown is not own:
        with torch.no_grad():
            shown.to_local().data = own.data
