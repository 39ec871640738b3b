"""Free ports of this machine."""

import random
import socket

_GIVEN: set[int] = set()


def free_port() -> int:
    """One below those that the system hands out to whoever asks for any port: until the caller
    listens, nobody takes it. No process gets the same one twice."""
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
