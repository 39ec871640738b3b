"""Ports of this machine that nobody uses."""

import random
import socket

_GIVEN: set[int] = set()


def free_port() -> int:
    """One that the system gives to nobody who asks for any port, as it would one that was free a moment ago: what
    starts to listen later still finds it free."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port
    raise RuntimeError("none of a hundred ports is free")
