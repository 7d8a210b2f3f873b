"""Nursery: clean process that forks the workers of worlds.

It imports MindSpore and runs no operator, so it has no device, no threads and can be forked at any time; a fork costs
milliseconds where a fresh start costs seconds per rank. `Nursery` is the asking side, `main` the process itself.
Requests and answers are datagrams on one Unix socket; the sockets of the workers travel with the request.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from mindspeed_ms.core.comm.forking import die_with_parent, preload
from mindspeed_ms.testing.worker import serve

START_TIMEOUT_SECONDS = 120
_MESSAGE_BYTES = 1 << 16


class NurseryError(RuntimeError):
    """Error: the process that forks workers could not be started, or has ended."""


class Nursery:
    """Handle of the clean process: starts it and requests workers.

    Raises:
        NurseryError: the process cannot import MindSpore or does not answer.
    """

    def __init__(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package_root = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.insert(0, {package_root!r}); "
            f"from mindspeed_ms.testing.nursery import main; main({theirs.fileno()})"
        )
        # a session of its own: Ctrl-C reaches the asking process only, which then ends its worlds
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._socket = ours
        self._exit_statuses = {}
        self._receive("ready", START_TIMEOUT_SECONDS)

    @property
    def alive(self):
        """Whether the process still runs."""
        return self._process.poll() is None

    def fork(self, size):
        """Fork `size` workers; returns their pids and the sockets to them."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(size)]
        request = json.dumps({"fork": size}).encode()
        try:
            socket.send_fds(self._socket, [request], [theirs.fileno() for _, theirs in pairs])
        except OSError as error:
            raise NurseryError(f"the process that forks workers has ended: {error}") from error
        for _, theirs in pairs:
            theirs.close()
        pids = self._receive("pids", START_TIMEOUT_SECONDS)
        return pids, [ours for ours, _ in pairs]

    def exit_status(self, pid, timeout=5.0):
        """Wait status of an ended worker (negative signal or exit code); None if unknown after `timeout`."""
        while pid not in self._exit_statuses:
            try:
                self._receive(None, timeout)
            except NurseryError:
                return None
        return self._exit_statuses[pid]

    def close(self):
        """End the process and every worker that it still has."""
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, key, timeout):
        """Read messages until one has `key` (any message if None), keeping exit statuses on the way."""
        self._socket.settimeout(timeout)
        while True:
            try:
                data = self._socket.recv(_MESSAGE_BYTES)
            except TimeoutError as error:
                raise NurseryError(f"the process that forks workers did not answer within {timeout} s.") from error
            except OSError as error:
                raise NurseryError(f"the process that forks workers has ended: {error}") from error
            if not data:
                raise NurseryError("the process that forks workers ended; its message is above on the error output.")
            message = json.loads(data)
            if "exited" in message:
                self._exit_statuses[message["exited"]] = message["status"]
            if key is None or key in message:
                return message.get(key)


def main(control_fd):
    """Serve fork requests until the asking process closes its socket."""
    control = socket.socket(fileno=control_fd)
    die_with_parent()
    preload()
    wake_reader, wake_writer = socket.socketpair()
    wake_writer.setblocking(False)
    wake_reader.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
    children = set()
    control.send(json.dumps({"ready": True}).encode())
    while True:
        readable, _, _ = select.select([control, wake_reader], [], [])
        if wake_reader in readable:
            wake_reader.recv(4096)
            _report_ended_children(control, children)
        if control in readable and not _serve_request(control, children, (wake_reader, wake_writer)):
            break
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _report_ended_children(control, children):
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        children.discard(pid)
        message = {"exited": pid, "status": os.waitstatus_to_exitcode(status)}
        try:
            control.send(json.dumps(message).encode())
        except OSError:
            return


def _serve_request(control, children, own_sockets):
    data, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 250)
    if not data:
        return False
    request = json.loads(data)
    pids = []
    for index, descriptor in enumerate(descriptors):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_worker(control, own_sockets, descriptors, descriptor, index, request["fork"])
        pids.append(pid)
    children.update(pids)
    for descriptor in descriptors:
        os.close(descriptor)
    control.send(json.dumps({"pids": pids}).encode())
    return True


def _become_worker(control, own_sockets, descriptors, descriptor, rank, size):
    """Run a worker in a forked child, without the nursery's resources; never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        control.close()
        for own in own_sockets:
            own.close()
        for other in descriptors:
            if other != descriptor:
                os.close(other)
        status = serve(descriptor, rank, size)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
