"""For the kernels that tests start: a Python with this folder on its path reaches no other machine.

Whoever tries is refused, and written down in the file named by MINIGRPO_TEST_CONNECTIONS, because
libraries try and go on in silence.
"""

import os
import socket

_connect, _connect_ex = socket.socket.connect, socket.socket.connect_ex


def _refuse(sock: socket.socket, address: object) -> None:
    elsewhere = sock.family in (socket.AF_INET, socket.AF_INET6)
    if elsewhere and not str(address[0]).startswith(("127.", "::1", "localhost")):
        with open(os.environ["MINIGRPO_TEST_CONNECTIONS"], "a", encoding="utf-8") as log:
            log.write(f"{address[0]}\n")
        raise OSError(f"a test forbids the network, but a connection to {address[0]} was tried")


def connect(self: socket.socket, address: object) -> None:
    """socket.connect, to this machine alone."""
    _refuse(self, address)
    return _connect(self, address)


def connect_ex(self: socket.socket, address: object) -> int:
    """socket.connect_ex, to this machine alone."""
    _refuse(self, address)
    return _connect_ex(self, address)


socket.socket.connect, socket.socket.connect_ex = connect, connect_ex
