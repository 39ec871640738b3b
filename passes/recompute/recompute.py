"""Recompute (activation checkpointing): the backward computes some values of the forward again instead of keeping them.

The pass rewrites the joint graph before it is split. Chosen forward operations appear a second time, right before the
first backward operation that reads them, marked `meta["recomputed"]`; the split puts them into B, even if only W
reads them, so that the bytes between B and W do not change and W runs no forward operation.

Random numbers are never drawn again: what draws them is kept, a dropout as its mask of one byte per element. Operations
of other libraries and those that may not repeat their bits run once.
"""

from dataclasses import replace

from torch.fx import Graph, Node

from zbcompile.passes.compile_options import POLICIES, Policy
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import with_graph
from zbcompile.passes.graph.rematerialize import remake
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.machine.hardware import Hardware
from zbcompile.passes.recompute.budget import Saving, Values, fit, smallest
from zbcompile.passes.recompute.candidates import Forward, has_hints, list_values
from zbcompile.passes.split.joint_graph import Joint, Recomputation
from zbcompile.passes.torch_private import FakeTensorMode


def recompute(joint: Joint, policy: Policy = "hints", hardware: Hardware | None = None) -> Joint:
    """Rewrite `joint` so that its backward recomputes what `policy` says.

    "off": nothing. "hints": the operations of `torch.utils.checkpoint` regions, if that keeps fewer bytes.
    "selective": also everything but products with parameters (Korthikanti et al. 2022, section 5: attention and what is
    elementwise is much memory for little time). "full": whatever can be, which leaves the stage's inputs. An int: the
    least time that keeps at most that many bytes per microbatch on this stage between F and B. A float: the same with
    that share of the bytes that are kept without recomputation or, if that cannot be met, with the fewest possible.
    Times are those on `hardware`, by default at the nominal speeds of the device.

    Raises CompileError for bytes that cannot be met, naming the smallest number that can.
    """
    forward = Forward.of(joint)
    if policy == "off" or (policy == "hints" and not has_hints(forward)):
        return joint
    flops = count_flops(joint.module, FakeTensorMode(allow_non_fake_inputs=True))
    values = list_values(forward, flops, policy if policy in POLICIES else "full", hardware)  # type: ignore[arg-type]
    saving = _share(values, int(policy * forward.kept_bytes)) if isinstance(policy, float) else None
    rewritten, again = _Rewriter(forward, saving or _choose(values, policy, joint.stage.index)).run()
    report = Recomputation(
        operations=sum(not is_view(node) for node in again),
        flops=sum(flops[node] for node in again),
        kept_before=forward.kept_bytes,
        kept_after=Forward.of(rewritten).kept_bytes,
    )
    return replace(rewritten, recomputed=report)


def _share(values: Values, budget: int) -> Saving:
    found = fit(values, budget)
    return smallest(values) if found is None else found.saving


def _choose(values: Values, policy: Policy, stage: int) -> Saving:
    if not isinstance(policy, int):
        return smallest(values)
    found = fit(values, policy)
    if found is None:
        raise CompileError(
            f"recompute={policy:,} bytes: stage {stage} has to keep at least {smallest(values).bytes:,} bytes per "
            'microbatch between F and B: its inputs and what cannot be recomputed (recompute="full" keeps just these). '
            "Allow more, use more stages, or make the microbatches smaller."
        )
    return found.saving


def _moving(forward: Forward, saving: Saving) -> set[Node]:
    """The nodes computed in the backward. A view of a kept value is kept as well, which takes no bytes."""
    moving = set(forward.ahead)
    for node in forward.joint.module.graph.nodes:
        if node in saving.remade and (not is_view(node) or not moving.isdisjoint(forward.reads(node))):
            moving.add(node)
    return moving


class _Rewriter:
    """Copies a joint graph. Operations that no incoming gradient reaches move to just before their first use in the
    backward; those of the forward that are recomputed are copied there a second time."""

    def __init__(self, forward: Forward, saving: Saving) -> None:
        self.forward = forward
        self.moving = _moving(forward, saving)
        self.graph = Graph()
        self.first: dict[Node, Node] = {}
        self.late: dict[Node, Node] = {}
        self.position = {node: i for i, node in enumerate(forward.joint.module.graph.nodes)}

    def run(self) -> tuple[Joint, list[Node]]:
        """The rewritten joint graph, and the forward operations that appear in it twice."""
        joint = self.forward.joint
        stays = self.forward.made | self.forward.backward
        for node in joint.module.graph.nodes:
            if node in stays or node.op in ("placeholder", "get_attr"):
                read = self._in_backward if node in self.forward.backward else self.first.__getitem__
                if node in self.forward.backward:
                    self._make_late(node.all_input_nodes)
                self.first[node] = self.graph.node_copy(node, read)
        outputs = tuple((slot, self._output(node, slot in joint.stage.outputs)) for slot, node in joint.outputs)
        self.graph.output([node for _, node in outputs])
        inputs = tuple((slot, self.first[node]) for slot, node in joint.inputs)
        again = [node for node in self.late if node in self.forward.made]
        return replace(joint, module=with_graph(joint.module, self.graph), inputs=inputs, outputs=outputs), again

    def _output(self, node: Node, of_forward: bool) -> Node:
        if of_forward:
            return self.first[node]
        self._make_late([node])
        return self._in_backward(node)

    def _in_backward(self, node: Node) -> Node:
        return self.late[node] if node in self.moving else self.first[node]

    def _make_late(self, nodes: list[Node]) -> None:
        """Compute what the backward reads next and has not computed yet, in the order of the forward."""
        missing: set[Node] = set()
        queue = list(nodes)
        while queue:
            node = queue.pop()
            if node in self.moving and node not in self.late and node not in missing:
                missing.add(node)
                queue.extend(self.forward.reads(node))
        for node in sorted(missing, key=self.position.__getitem__):
            self.late[node] = remake(self.graph, node, self._in_backward)
            if node in self.forward.made:
                self.late[node].meta |= {"recomputed": True, "pass": "recompute"}
