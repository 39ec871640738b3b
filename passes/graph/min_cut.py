"""Minimum cuts of directed networks with integer capacities, exactly (Dinic 1970: blocking flows on
level graphs)."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

SOURCE, SINK = "source", "sink"


@dataclass
class Network:
    """A network between `SOURCE` and `SINK`; any other hashable value is an inner vertex.

    Capacities are integers of any size; None is an edge that no cut may take.

    >>> network = Network()
    >>> network.connect(SOURCE, "a", 3); network.connect("a", SINK, 2)
    >>> sorted(map(str, network.source_side()))
    ['a', 'source']
    """

    edges: dict[tuple[Hashable, Hashable], int | None] = field(default_factory=dict)

    def connect(self, tail: Hashable, head: Hashable, capacity: int | None = None) -> None:
        """Add capacity to the edge from `tail` to `head`."""
        before = self.edges.get((tail, head), 0)
        self.edges[tail, head] = None if capacity is None or before is None else before + capacity

    def source_side(self) -> frozenset[Hashable]:
        """The vertices on the source's side of a minimum cut, the smallest such set.

        Raises ValueError if every cut contains an edge without capacity.
        """
        infinite = 1 + sum(capacity for capacity in self.edges.values() if capacity is not None)
        flow = _Flow([(t, h, infinite if c is None else c) for (t, h), c in self.edges.items()])
        if flow.saturate() >= infinite:
            raise ValueError("source and sink are connected by edges that cannot be cut")
        return frozenset(flow.reached())


class _Flow:
    """Residual capacities; the reverse of edge i is edge i ^ 1."""

    def __init__(self, edges: list[tuple[Hashable, Hashable, int]]) -> None:
        self.number: dict[Hashable, int] = {SOURCE: 0, SINK: 1}
        self.head: list[int] = []
        self.rest: list[int] = []
        self.out: list[list[int]] = [[], []]
        for tail, head, capacity in edges:
            self._add(self._vertex(tail), self._vertex(head), capacity)
        self.level: list[int] = []

    def _vertex(self, name: Hashable) -> int:
        if name not in self.number:
            self.number[name] = len(self.out)
            self.out.append([])
        return self.number[name]

    def _add(self, tail: int, head: int, capacity: int) -> None:
        for start, end, rest in ((tail, head, capacity), (head, tail, 0)):
            self.out[start].append(len(self.head))
            self.head.append(end)
            self.rest.append(rest)

    def saturate(self) -> int:
        total = 0
        while self._find_levels():
            self.next = [0] * len(self.out)
            while pushed := self._push_along_a_path():
                total += pushed
        return total

    def _find_levels(self) -> bool:
        """Compute breadth-first distances from the source over residual edges; return whether the
        sink is reached."""
        self.level = [-1] * len(self.out)
        self.level[0] = 0
        queue = deque([0])
        while queue:
            vertex = queue.popleft()
            for edge in self.out[vertex]:
                if self.rest[edge] and self.level[self.head[edge]] < 0:
                    self.level[self.head[edge]] = self.level[vertex] + 1
                    queue.append(self.head[edge])
        return self.level[1] >= 0

    def _push_along_a_path(self) -> int:
        """Walk to the sink level by level, backing out of dead ends, and fill the path that was
        found; 0 if none."""
        path: list[int] = []
        vertex = 0
        while vertex != 1:
            edge = self._usable(vertex)
            if edge is not None:
                path.append(edge)
                vertex = self.head[edge]
            elif path:
                vertex = self.head[path.pop() ^ 1]
                self.next[vertex] += 1
            else:
                return 0
        pushed = min(self.rest[edge] for edge in path)
        for edge in path:
            self.rest[edge] -= pushed
            self.rest[edge ^ 1] += pushed
        return pushed

    def _usable(self, vertex: int) -> int | None:
        edges = self.out[vertex]
        while self.next[vertex] < len(edges):
            edge = edges[self.next[vertex]]
            if self.rest[edge] and self.level[self.head[edge]] == self.level[vertex] + 1:
                return edge
            self.next[vertex] += 1
        return None

    def reached(self) -> list[Hashable]:
        """The vertices that the source still reaches (after `saturate`)."""
        return [name for name, vertex in self.number.items() if self.level[vertex] >= 0]
