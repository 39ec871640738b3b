"""Machines that are network namespaces of this one, each with one link to the other; Linux, as
root."""

import ctypes
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

CLONE_NEWNET = 0x40000000


@dataclass
class Machines:
    """Two machines, 10.77.0.1 and 10.77.0.2, connected by a cable that can be pulled out. `reason`
    says why there are none."""

    holders: list[subprocess.Popen[bytes]] = field(default_factory=list)
    reason: str = ""

    def __post_init__(self) -> None:
        try:
            self.holders = [
                subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for _ in range(2)
            ]
            while any(
                os.readlink(self._space(n)) == os.readlink("/proc/self/ns/net") for n in range(2)
            ):
                pass
            self.lay_cable()
            for number in range(2):
                ip(number, self, "link set lo up")
                ip(number, self, f"addr add {self.address(number)}/24 dev zb{number}")
            self.plug(True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.reason = f"no network namespaces can be made here: {error}"
            self.close()

    def lay_cable(self) -> None:
        """Make an interface on each machine, zb0 and zb1, that lead to each other."""
        ip(0, self, f"link add zb0 type veth peer name zb1 netns {self.holders[1].pid}")

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def plug(self, connected: bool) -> None:
        """Connect the machines, or cut them off from each other: packets are lost without a
        word."""
        for number in range(2):
            ip(number, self, f"link set zb{number} {'up' if connected else 'down'}")

    def enter(self, number: int) -> None:
        """Move this thread onto a machine."""
        handle = os.open(self._space(number), os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)

    def close(self) -> None:
        for each in self.holders:
            each.kill()
            each.wait()

    def _space(self, number: int) -> Path:
        return Path(f"/proc/{self.holders[number].pid}/ns/net")


def ip(number: int, machines: Machines, what: str) -> None:
    """Run the command `ip` on a machine."""
    inside = ["nsenter", "-t", str(machines.holders[number].pid), "-n", "ip", *what.split()]
    subprocess.run(inside, check=True, capture_output=True)
