"""The figures of the papers, recomputed from the profiles that the papers print."""

import pytest

from zbcompile.schedules import Costs, build, peak_memory, simulate

# tables 9 (times in ms) and 5 (bubble rates) of the zero bubble paper, arXiv 2401.10241v1: heads,
# hidden size, p, m; T_F, T_B, T_W, a hop; the rates of 1F1B, ZB-H1, ZB-H2, ZB-1p and ZB-2p
TABLE = """
1.5B  m24  24 2304  8  24 18.522 18.086  9.337 0.601 0.2431 0.1585 0.1083 0.1585 0.0433
1.5B  m32  24 2304  8  32 18.513 18.086  9.331 0.626 0.1985 0.1242 0.0837 0.1242 0.0039
1.5B  m64  24 2304  8  64 18.546 18.097  9.321 0.762 0.1240 0.0674 0.0444 0.0674 0.0026
6.2B  m24  32 4096  8  24 29.718 29.444 19.927 0.527 0.2347 0.1323 0.0698 0.1323 0.0029
6.2B  m32  32 4096  8  32 29.802 29.428 19.530 0.577 0.1898 0.1045 0.0559 0.1045 0.0022
6.2B  m64  32 4096  8  64 29.935 29.621 19.388 0.535 0.1091 0.0554 0.0294 0.0554 0.0010
14.6B m48  40 5120 16  48 11.347 11.248  8.132 0.377 0.2552 0.1397 0.0672 0.1397 0.0066
14.6B m64  40 5120 16  64 11.307 11.254  8.101 0.379 0.2082 0.1088 0.0516 0.1088 0.0054
14.6B m128 40 5120 16 128 11.325 11.308  8.109 0.378 0.1251 0.0576 0.0266 0.0576 0.0028
28.3B m96  48 6144 32  96 10.419 10.207  7.715 0.408 0.2646 0.1421 0.0641 0.1421 0.0038
28.3B m128 48 6144 32 128 10.408 10.204  7.703 0.408 0.2168 0.1106 0.0490 0.1106 0.0029
28.3B m256 48 6144 32 256 10.402 10.248  7.698 0.460 0.1352 0.0594 0.0257 0.0594 0.0018
"""


AUTOMATIC = ("zb-1p", "zb-2p")


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("row", TABLE.strip().splitlines(), ids=lambda row: row[:10])
def test_table_5(row: str) -> None:
    """36 figures of handcrafted schedules are equal to 4 decimals, 24 of automatic ones or better.
    M_W / M_B = 32h / (34h + 5as): what B leaves for W of the activation, table 1."""
    heads, hidden, p, m = map(int, row.split()[2:6])
    *times, hop = map(float, row.split()[6:10])
    residue = 32 * hidden / (34 * hidden + 5 * heads * 1024)
    costs = Costs.uniform(p, *times, comm=hop, residue=residue)
    names = ("1f1b", "zb-h1", "zb-h2", *AUTOMATIC)
    for name, published in zip(names, map(float, row.split()[10:]), strict=True):
        schedule = build(name, p, m, costs=costs)
        assert max(peak_memory(schedule, costs)) <= (1 + (name in ("zb-h2", "zb-2p"))) * p
        rate = round(simulate(schedule, costs).cost_bubble, 4)
        assert rate <= published if name in AUTOMATIC else rate == published


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 2), (4, 4), (8, 6), (8, 8)])
def test_iteration_time_of_few_microbatches(p: int, m: int) -> None:
    """Appendix H of the zero bubble paper, for m <= p: (m+p-1)(T_F+T_B+T_W) and
    (m+p-1)(T_F+T_B)+T_W."""
    costs = Costs.uniform(p, forward=4, backward=5, weight=3)
    assert simulate(build("1f1b", p, m), costs).makespan == (m + p - 1) * 12
    for name in ("zb-h1", "zb-1p", "zb-2p"):
        assert simulate(build(name, p, m, costs=costs), costs).makespan == (m + p - 1) * 9 + 3


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 20), (6, 18), (8, 32)])
def test_dualpipe_readme_table(p: int, m: int) -> None:
    """DeepSeek's table, per chunk with F = T_B and full backward B = 2: bubbles of DualPipe and
    DualPipeV, F&B = F + B. PP counts stages: p for DualPipe, 2p for DualPipeV on p ranks."""
    for name, stages in (("dualpipe", p), ("dualpipe-v", 2 * p)):
        timeline = simulate(build(name, p, m), Costs.uniform(stages))
        assert timeline.makespan - timeline.work == (stages // 2 - 1) * (3 + 2 - 3 * 1)
        assert max(timeline.peak_memory) == stages + 1


def test_dualpipe_bubble_counts_the_overlapped_pair() -> None:
    """(PP/2-1)(F&B + B - 3W) with F&B = 3 - hidden: the ranks with the most pairs, at the turn."""
    costs = Costs((1,) * 4, (1,) * 4, (1,) * 4, forward_exchange=(0.5,) * 4)
    timeline = simulate(build("dualpipe", 4, 16), costs)
    idle = [timeline.makespan - busy for busy in timeline.busy]
    assert idle[1] == idle[2] == (4 / 2 - 1) * ((3 - 0.5) + 2 - 3)


@pytest.mark.parametrize(
    ("name", "published"), [("1f1b", 0.099), ("v-half", 0.042), ("v-min", 0.066)]
)
def test_controllable_memory_bubble_rates(name: str, published: float) -> None:
    """The authors' scheduler at equal times, p=8, m=64. Ours is equal or better, and the bubble
    does not depend on the number of microbatches."""
    schedules = [build(name, 8, m) for m in (64, 32)]
    long, short = (simulate(each, Costs.uniform(each.stages)) for each in schedules)
    assert round(long.cost_bubble, 3) <= published
    assert long.cost - long.work == short.cost - short.work
