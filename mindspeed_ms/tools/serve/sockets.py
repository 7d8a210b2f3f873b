"""Sockets that a server listens on."""

import socket


def bound_socket(host, port):
    """Socket that listens on host and port (0: a free one).

    Raises:
        OSError: the address is in use or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    result = socket.socket(family, socket.SOCK_STREAM)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind((host, port))
    except OSError:
        result.close()
        raise
    return result
