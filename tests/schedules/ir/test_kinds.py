"""The tables of operations."""

from zbcompile.schedules.ir.kinds import COMPUTE_OPS, OPS, OPTIMIZER_OPS, TORCH_LETTERS, work_of


def test_what_the_tables_refer_to_is_in_them() -> None:
    """Nothing is written twice: torch's letters are distinct, and what an operation refers to is in
    a table."""
    assert len(TORCH_LETTERS) == len(set(TORCH_LETTERS.values()))
    for op, each in {**COMPUTE_OPS, **OPTIMIZER_OPS}.items():
        assert {*work_of(op), *each.after} <= OPS
