"""The guard of the device, and the way of an error out of a hook that runs on a thread of autograd.

When a hook raises there, torch's C++ asks the guard for its type while the error is still pending. A guard in Python
must not return then: it takes the error, and whoever called `backward` raises it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tests.support.late import private_names as private
from tests.support.late.order import this_thread

_raise_pending = ctypes.pythonapi.PyErr_Occurred
"""Raises the pending error, since ctypes looks for one behind each call of Python's own functions."""


class Guard(private.GuardBase):  # type: ignore[misc]
    """The guard of a device that is the only one of its kind."""

    def type_(self) -> object:
        try:
            _raise_pending()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that called `backward`
            this_thread().error = error
        return private.PRIVATE_USE


def register() -> None:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        host = this_thread()
        try:
            return private.run_backward(*args, **kwargs)
        except SystemError:
            if (error := host.error) is None:
                raise
        host.error = None
        raise error

    for module in (torch.autograd, torch.autograd.graph):
        vars(module)["_engine_run_backward"] = run_backward
