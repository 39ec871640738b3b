"""A table of what was used last."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `limit` entries. Adding one more evicts the least recently used entry, but never the first if that is
    `kept`."""

    def __init__(self, limit: int, kept: bool = True) -> None:
        self.limit = limit
        self.kept = kept
        self._entries: dict[Key, Value] = {}
        self._first: Key | None = None

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._entries.values())

    def __getitem__(self, key: Key) -> Value:
        self._entries[key] = value = self._entries.pop(key)
        return value

    @property
    def keys(self) -> list[Key]:
        """The least recently used one first."""
        return list(self._entries)

    def peek(self, key: Key) -> Value:
        """The entry, without a use of it."""
        return self._entries[key]

    def first(self) -> Value:
        """The entry that was added first; if it is not kept, the least recently used one."""
        return self._entries[self._first] if self._first is not None else next(iter(self))

    def add(self, key: Key, value: Value) -> bool:
        """Add an entry; return whether another one was evicted for it."""
        if self.kept and not self._entries:
            self._first = key
        self._entries[key] = value
        return len(self._entries) > self.limit and self.evict(value)

    def evict(self, kept: Value | None = None) -> bool:
        """Evict the least recently used entry, but not the first or the value `kept`; whether there was one."""
        old = [key for key, value in self._entries.items() if key != self._first and value is not kept]
        if old:
            del self._entries[old[0]]
        return bool(old)
