"""Lines of JSON over sockets, and what a process can say of its machine; for the meeting of ranks."""

import ipaddress
import json
import os
import socket

from mindspeed_ms.core.comm import processes, shm_files

_MOST_BYTES = 1 << 16


class Line:
    """Messages (JSON, one a line) of a socket."""

    def __init__(self, connection):
        self.connection = connection
        self._received = b""

    def send(self, **message):
        """Send a message; a peer that is gone shows when reading."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self):
        """The next message (dict); None if nothing but its end can come.

        Raises:
            TimeoutError: nothing came within the socket's timeout.
        """
        while b"\n" not in self._received:
            try:
                data = self.connection.recv(4096)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data or len(self._received) > _MOST_BYTES:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    @property
    def has_more(self):
        """Whether a whole message was received already."""
        return b"\n" in self._received


def shared_memory():
    """Identifies what ranks must share to use shared memory: kernel, pid namespace, folder, user."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        folder = os.stat(shm_files.directory())
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{boot} {processes.namespace()} {folder.st_dev} {folder.st_ino} {os.getuid()}"


def is_loopback(address):
    """Whether an address (str) is this machine's own loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def free_port(address):
    """A port of this machine's `address` that nobody uses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        return server.getsockname()[1]
