"""A TCP relay that can be cut: one node's way to a server, while others keep theirs."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Relay:
    """Carries bytes between those who dial `endpoint` and `target` (HOST:PORT) until `cut`, and again after `mend`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._is_cut = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut.clear()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                caller, _ = self._listener.accept()
                with suppress(OSError):
                    self._carry(caller)

    def _carry(self, caller: socket.socket) -> None:
        if self._is_cut.is_set():
            caller.close()
            return
        server = socket.create_connection(self._target)
        self._open |= {caller, server}
        for source, sink in ((caller, server), (server, caller)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
