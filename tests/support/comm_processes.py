"""Forked children with a message socket to the test; each ends with the test at the latest."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

_MESSAGE_BYTES_MAX = 1 << 16


class Wire:
    """JSON values over a socket, one per packet. `hear` raises EOFError when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def say(self, value: Any) -> None:
        self.sock.send(json.dumps(value).encode())

    def hear(self) -> Any:
        data = self.sock.recv(_MESSAGE_BYTES_MAX)
        if not data:
            raise EOFError
        return json.loads(data)


class Child:
    """Runs `body(wire)` in a forked process. Make it before the test has threads."""

    def __init__(self, body: Callable[[Wire], None]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            self._run(body, Wire(theirs))
        theirs.close()
        mine.settimeout(30)
        self.wire = Wire(mine)
        self._alive = True

    @staticmethod
    def _run(body: Callable[[Wire], None], wire: Wire) -> None:
        code = 1
        try:
            body(wire)
            code = 0
        except BaseException:  # noqa: BLE001 - the edge of a process: whatever it was, the test shall read it
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        if self._alive:
            os.kill(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Wait for the end; the exit status as os.waitstatus_to_exitcode gives it."""
        self._alive = False
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._alive:
            self.kill()
            self.join()
        self.wire.sock.close()
