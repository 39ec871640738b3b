"""Lowers schedules, with pairs of passes that hide collectives.

A pass with collectives (tensor parallelism) is idle until they end. A W needs no other rank: run as
one graph with the pass, it fills the gaps between issue and wait. `with_pairs` moves Ws next to
such passes: forward in the order to the pass that precedes them, or backward to a later one; a B
next to its own W becomes BW. A move is made only if neither the simulated step nor any rank's
memory suffers; the weight gradients of a stage keep their order, and so their bits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zbcompile.compiler.stage_costs import costs_of
from zbcompile.compiler.vocabulary_sharding import insert
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import default_hardware
from zbcompile.passes.cost.stage_cost import stage_cost
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, Schedule, lower, peak_memory, simulate
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, Step, W, flatten
from zbcompile.schedules.ir.kinds import result_of, work_of

WORK = 100_000  # the most actions to simulate while looking for pairs
EQUAL = 1 + 1e-9  # sums of floats differ in their last bits with the order of the additions

Order = Sequence[Step]
Partners = Mapping[Action, Action]  # the W paired with each pass that has one


def in_order(program: Program, schedule: Schedule) -> Program:
    """The program with its passes in another order, with S and T where the output layer is
    sharded."""
    if program.vocabulary is not None and not schedule.shards:
        schedule = insert(schedule, program.vocabulary, program.stages)
    return replace(
        program, lowered=lower_for(program.stages, schedule, program.choices, program.device_type)
    )


def lower_for(
    stages: Sequence[StageProgram], schedule: Schedule, choices: CompileOptions, device: str
) -> Schedule:
    """The schedule with its messages and, unless `pairs` says otherwise, with pairs that hide the
    collectives."""
    pairs = any(collective.hides for stage in stages for collective in collectives_of(stage))
    if choices.pairs == "given" or not pairs or any("W" not in stage.pieces for stage in stages):
        return lower(with_pairs(schedule, Costs.uniform(schedule.stages)))
    hardware = choices.hardware or default_hardware(device)
    return lower(with_pairs(schedule, costs_of(stages, [stage_cost(s, hardware) for s in stages])))


def with_pairs(schedule: Schedule, costs: Costs) -> Schedule:
    """Returns `schedule` with Ws moved next to passes whose exchanges (`costs.forward_exchange`,
    `costs.backward_exchange`) they hide.

    It is unchanged if no pass exchanges. Its own pairs stay, but for those that are a BW.

    >>> from zbcompile.schedules import Costs, build
    >>> costs = Costs((2,) * 2, (2,) * 2, (2,) * 2, backward_exchange=(1,) * 2)
    >>> print(with_pairs(build("zb-h1", ranks=2, microbatches=3), costs))
    zb-h1: 2 ranks, 3 microbatches, linear placement, 1 chunk
    rank 0  F0.0  F0.1  BW0.0  F0.2         BW0.1  BW0.2
    rank 1  F1.0  B1.0  F1.1   (B1.1|W1.0)  F1.2   (B1.2|W1.1)  W1.2
    """
    schedule = paired = replace(
        schedule, orders=tuple(tuple(map(_fuse, order)) for order in schedule.orders)
    )
    before = best = simulate(schedule, costs)
    trials = max(8, WORK // sum(map(len, schedule.orders)))
    partners: list[dict[Action, Action]] = [{} for _ in schedule.orders]
    for op, direction in ((B, 1), (B, -1), (F, 1), (F, -1)):
        if not any(costs.exchange(op, stage) for stage in range(schedule.stages)):
            continue
        ranks = enumerate(zip(schedule.orders, partners, strict=True))
        groups = [
            [
                (rank, *move)
                for rank, (order, of_rank) in ranks
                for move in _nearest(order[::direction], of_rank, op)
            ]
        ]
        for group in groups:  # all moves that do no harm together, or else those of each half
            candidates = [dict(of_rank) for of_rank in partners]
            for rank, action, weight in group:
                candidates[rank][action] = weight
            orders = tuple(map(_arranged, schedule.orders, candidates))
            candidate = replace(schedule, orders=orders)
            peaks = zip(peak_memory(candidate, costs), before.peak_memory, strict=True)
            if (
                trials
                and all(map(_is_in_order, schedule.orders, orders))
                and all(p <= most * EQUAL for p, most in peaks)
            ):
                trials -= 1
                step = simulate(candidate, costs)
                if step.makespan <= best.makespan * EQUAL and step.cost <= before.cost * EQUAL:
                    paired, best, partners = candidate, step, candidates
                    continue
            middle = len(group) // 2 if trials else 0
            groups += [group[:middle], group[middle:]] if middle else []
    return paired


def _fuse(step: Step) -> Step:
    """Returns BW for a B paired with its W."""
    is_same = isinstance(step, Pair) and step == Pair(
        step.first._replace(op=B), step.first._replace(op=W)
    )
    return Action(BW, *step.first[1:]) if isinstance(step, Pair) and is_same else step


def _nearest(order: Order, partners: Partners, op: str) -> Iterator[tuple[Action, Action]]:
    """Yields each W with the last `op` pass in front of it that has no W yet; in a reversed order,
    the first behind."""
    paired_weights, free = set(partners.values()), list[Action]()
    for step in order:
        if isinstance(step, Action) and step.op == op and step not in partners:
            free.append(step)
        elif isinstance(step, Action) and step.op == W and step not in paired_weights and free:
            yield free.pop(), step


def _arranged(order: Order, partners: Partners) -> tuple[Step, ...]:
    """Returns the order with each W that is a partner next to its pass."""
    weights = set(partners.values())
    return tuple(
        _fuse(Pair(step, partners[step])) if isinstance(step, Action) and step in partners else step
        for step in order
        if step not in weights
    )


def _is_in_order(before: Order, after: Order) -> bool:
    """Returns whether every W follows its B, and the Ws of each stage each other as before."""
    done: set[tuple[int, int]] = set()
    for action in flatten(after):
        if action.op == W and action[1:] not in done:
            return False
        done |= {action[1:]} if result_of(action.op) == B else set()
    return _weights(before) == _weights(after)


def _weights(order: Order) -> dict[int, list[int]]:
    weights: dict[int, list[int]] = {}
    for action in flatten(order):
        if W in work_of(action.op):
            weights.setdefault(action.stage, []).append(action.microbatch)
    return weights
