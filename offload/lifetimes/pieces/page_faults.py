"""Page faults on protected memory of pieces: the piece is loaded, or the process ends with one sentence. Linux.

SIGSEGV is caught. The kernel stops the thread at its instruction and calls `_stopped` there, which asks the server
thread for the piece and waits; then the instruction runs again. The server thread has none of the stopped thread's
modes (autocast, no_grad, transforms), and may wait for drives.

To ask, a thread needs Python's global lock (GIL). Operators of torch release it, except for copies of whole storages.
There an OpenMP thread would wait for the GIL, which the master thread holds while it waits for that thread. So one
thread touches a piece's storage before it is copied (`pages.py`). And a served thread lets all others ask before it
goes on.

A system call is not stopped: protected memory gives EFAULT if a program passes it to a file or a socket. Programs pass
numpy arrays, so a piece is loaded for reading and writing when an array over it is made.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from elastrain.offload.lifetimes.pieces.pages import is_piece

EXIT_CODE = 1
LOOK_AGAIN_S = 1.0
LET_OTHERS_ASK_S = 0.002
OF_A_CHILD = "it is in the memory of the process that this one was forked from, and not here: hand over a copy"
OF_NOBODY = "it was not brought back when its training ended, and is lost: close() brings everything back"
_ADDRESS_AT = 16
"""Offset of the touched address in `siginfo_t`, on 64 bits."""
_SIGINFO = 4
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)
_libc = ctypes.CDLL(None, use_errno=True)


class _Action(ctypes.Structure):
    """The C library's `struct sigaction`."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_void_p),
    )


class _Touch:
    """One stopped thread. `sentence` is the reason why it cannot go on, or empty."""

    def __init__(self, address: int) -> None:
        self.address, self.known, self.sentence = address, False, ""
        self.served = threading.Event()


class TouchServer:
    """The server of page faults, one per process. It asks each of `owners` to serve an address.

    An owner returns False if the address is not its own, and True once it may be touched.
    """

    def __init__(self) -> None:
        self._owners: list[weakref.WeakMethod[Callable[[int], bool]]] = []
        self._asked: queue.SimpleQueue[_Touch] = queue.SimpleQueue()
        self._pid = self._waiting = 0
        self._thread: threading.Thread | None = None
        self._handler = _Handler(self._stopped)
        self._before = _Action()

    def watch(self, serve: Callable[[int], bool]) -> None:
        """Register a page-fault handler. It is removed when its object is garbage-collected.

        The handler is called in the server thread, and may raise.
        """
        self._owners = [each for each in self._owners if each() is not None]
        self._owners.append(weakref.WeakMethod(serve))
        if self._thread is None or not self._thread.is_alive():
            torch.Tensor.numpy = _handed_out  # type: ignore[method-assign,assignment]
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._serve, name="touches", daemon=True)
            self._thread.start()
            own = _Action(handler=self._handler, flags=_SIGINFO)
            _libc.sigaction(signal.SIGSEGV, ctypes.byref(own), ctypes.byref(self._before))

    def hand_out(self, address: int) -> None:
        """Load the piece at this address for reading and writing. Raises the errors of the owners."""
        if os.getpid() == self._pid and self._is_served(address):
            self._is_served(address)  # a touch of a readable piece counts as a write

    # Run in the stopped thread.

    def _stopped(self, _number: int, info: int, _context: int) -> None:
        touch = _Touch(ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0)
        if os.getpid() != self._pid:
            self._give_up(touch.address, OF_A_CHILD)
            return
        self._asked.put(touch)
        self._waiting += 1
        while not touch.served.is_set():
            touch.served.wait(LOOK_AGAIN_S)
            if sys.is_finalizing() or self._thread is None or not self._thread.is_alive():
                break
        self._waiting -= 1
        if not touch.known:
            self._give_up(touch.address, touch.sentence or OF_NOBODY)
        time.sleep(LET_OTHERS_ASK_S)
        while self._waiting:
            time.sleep(LET_OTHERS_ASK_S)

    def _give_up(self, address: int, sentence: str) -> None:
        """End the process if a piece was touched; else restore the former SIGSEGV handler, so that it takes over."""
        if is_piece(address):
            _end(sentence)
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(self._before), None)

    def _serve(self) -> None:
        while True:
            touch = self._asked.get()
            try:
                touch.known = self._is_served(touch.address)
            except Exception as fault:  # noqa: BLE001 - edge of a thread: any error ends the process
                touch.sentence = str(fault) or repr(fault)
            touch.served.set()

    def _is_served(self, address: int) -> bool:
        return any(serve is not None and serve(address) for serve in [each() for each in self._owners])


def _end(sentence: str) -> NoReturn:
    """Print the sentence with the program's line, and end the process. The instruction can neither go on nor raise."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), __file__)
    own = [each for each in traceback.extract_stack() if not each.filename.startswith(libraries)]
    where = f"{own[-1].filename}, line {own[-1].lineno}, touched what is out of memory: " if own else ""
    sys.stdout.flush()
    os.write(2, f"elastrain: {where}{sentence}\n".encode())
    os._exit(EXIT_CODE)


SERVER = TouchServer()
_numpy = torch.Tensor.numpy


@functools.wraps(_numpy)
def _handed_out(self: torch.Tensor, *given: Any, **named: Any) -> Any:
    array = _numpy(self, *given, **named)
    SERVER.hand_out(array.__array_interface__["data"][0])
    return array
