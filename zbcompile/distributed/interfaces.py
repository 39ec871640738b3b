"""The network interface that leads to the other machines: gloo resolves the host's name, which often fails."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one, by its name; empty on systems other than Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(host: str) -> str | None:
    """The interface through which `host` is reached; None on a loopback, where gloo needs to be told nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 9))  # sends nothing
        address = asked.getsockname()[0]
        if not ipaddress.ip_address(address).is_loopback:
            return next((name for name, own in interfaces().items() if own == address), None)
    return None


def let_gloo_find(host: str) -> None:
    """Let gloo connect through the interface that leads to `host`, unless the environment names one, now and later."""
    name = None if VARIABLE in os.environ else interface_towards(host)
    if name is not None:
        os.environ[VARIABLE] = name
