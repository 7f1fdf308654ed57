"""The launcher's side of the metrics: it takes the port before the job starts, and runs the server beside the job."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from elastrain.base.processes import tied
from elastrain.errors import ConfigError

_SERVER = "elastrain.launcher.watch.metrics.metrics_server"


@contextmanager
def metrics(address: tuple[str, int] | None, folder: Path) -> Iterator[None]:
    """Serve the metrics of the run in this folder while the body runs; None serves nothing.

    Raises ConfigError if the port is taken, the address is not one of this host, or the library is missing.
    """
    if address is None:
        yield
        return
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            "--metrics-port needs prometheus_client, which is not installed: pip install 'elastrain[watch]'"
        )
    with _listener(*address) as listener:
        command = [sys.executable, "-m", _SERVER, str(listener.fileno()), str(folder)]
        # A session of its own, so that Ctrl-C reaches the job alone; `tied` ends it with this process.
        server = subprocess.Popen(
            tied(command), pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield
        finally:
            server.kill()
            server.wait()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--metrics-port {port} is taken on {host}: choose another one") from None
        raise ConfigError(f"--metrics-port {port} on {host} cannot be opened: {error.strerror or error}") from None
    return listener
