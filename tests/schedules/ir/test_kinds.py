"""The table of actions."""

from zbcompile.schedules.ir.kinds import KINDS


def test_every_kind_is_reached_by_its_letters_in_one_way() -> None:
    """Nothing is written twice: torch's letters are distinct, and what a kind refers to is in the table."""
    torch = [kind.torch for kind in KINDS.values() if kind.torch]
    assert len(torch) == len(set(torch))
    for kind in KINDS.values():
        assert {*kind.does, *kind.after, *kind.before, *([kind.takes] if kind.takes else [])} <= KINDS.keys()
