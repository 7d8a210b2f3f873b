"""HttpServer: uvicorn in a thread of its own; the thread that made it keeps the model and the signals."""

import threading
import time

import uvicorn


class HttpServer:
    """Server of an ASGI application on a bound socket, as a context manager.

    Args:
        app (Callable): the application.
        bound (socket.socket): see `bound_socket`.
        grace_seconds (float): for open connections, at the end.
    """

    def __init__(self, app, bound, grace_seconds=5.0):
        timeouts = {"timeout_keep_alive": 30, "timeout_graceful_shutdown": max(1, int(grace_seconds))}
        config = uvicorn.Config(app, log_level="warning", access_log=False, **timeouts)
        self._server, self._socket = uvicorn.Server(config), bound
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [bound]}, name="http", daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the HTTP server did not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *error):
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
