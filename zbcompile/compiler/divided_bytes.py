"""What a rank holds during a step of parameters that live divided among replicas, and of their gradients."""

from collections.abc import Hashable, Iterable, Iterator, Mapping

from zbcompile.distributed.parcels import ALONE_BYTES
from zbcompile.passes.partition.memory_estimate import DividedParameter
from zbcompile.schedules.ir.actions import FETCH, FREE, GATHER, REDUCE, Action
from zbcompile.schedules.ir.kinds import KINDS


class DividedBytes:
    """Parameters that are gathered, less the slices that are in them, and gradients. From a stage's first W until the
    sum of the next stage begins a replica has whole gradients, then its part of their sums. `parameters` are those that
    live divided, of each stage of the rank by name; of what several stages read the gradient is none of these."""

    def __init__(self, parameters: Mapping[int, Mapping[Hashable, DividedParameter]], replicas: int) -> None:
        self.parameters, self.replicas = parameters, replicas
        self.whole = {stage: [each.gradient for each in own.values()] for stage, own in parameters.items()}
        self.gathered: dict[int, Mapping[Hashable, DividedParameter]] = {}
        self.beside: dict[int, float] = {}
        self.gradients: dict[int, float] = {}
        self.reducing: list[int] = []

    def after(self, action: Action) -> Iterator[tuple[float, float]]:
        """Bytes of gathered parameters and of gradients, while and after an action is carried out."""
        stage = action.stage
        if action.op == FETCH:
            self.beside[stage] = small_bytes(each.size for each in self._alone(stage))
            self.gathered[stage] = self.parameters[stage]
        elif action.op == GATHER:
            self.beside.pop(stage)
        elif action.op == FREE:
            plain = [each.size for each in self._alone(stage) if not each.master]
            largest, part = max(plain, default=0), sum(plain) / self.replicas
            self.beside[stage] = max(0, min(largest, part) - max(0, sum(plain) - part - largest))
            yield self.now  # a slice gets its memory before the parameter loses its own
            self.beside.pop(stage)
            self.gathered.pop(stage)
        elif action.op == REDUCE:
            yield from self.finish()
            self.gradients[stage] = sum(self.whole[stage]) + small_bytes(self.whole[stage])
            self.reducing.append(stage)
        elif "W" in KINDS[action.op].does:
            self.gradients.setdefault(stage, sum(self.whole[stage]))
        yield self.now

    def _added(self, parameter: DividedParameter) -> float:
        """What a gathered parameter takes in addition to its slice, or its master."""
        return parameter.size - parameter.stays(self.replicas)

    def _alone(self, stage: int) -> list[DividedParameter]:
        """The parameters of a stage that are not gathered for others."""
        others = {name for other, own in self.gathered.items() if other != stage for name in own}
        return [each for name, each in self.parameters[stage].items() if name not in others]

    def finish(self) -> Iterator[tuple[float, float]]:
        """The sums under way have arrived: of each a part is copied before the whole is freed."""
        for stage in self.reducing:
            part = sum(self.whole[stage]) / self.replicas
            self.gradients[stage] += part
            yield self.now
            self.gradients[stage] = part
        self.reducing.clear()

    @property
    def now(self) -> tuple[float, float]:
        gathered = {name: self._added(each) for own in self.gathered.values() for name, each in own.items()}
        return sum(gathered.values()) + sum(self.beside.values()), sum(self.gradients.values())

    @property
    def least(self) -> float:
        """What any order holds while a pass of the largest stage runs."""
        own = self.parameters.items()
        return max((sum(map(self._added, each.values())) + sum(self.whole[stage]) for stage, each in own), default=0.0)


def small_bytes(sizes: Iterable[float]) -> float:
    """Bytes of what travels to other replicas in copies."""
    return sum(size for size in sizes if size < ALONE_BYTES)
