"""Notices `torch.compile` inside `save_on_disk`, which is refused until it works.

Hooks on modules break a compiled model's graph, so that it computes other bits; a model that was compiled before asks
for all that it saved at once, so that nothing is gained. The compiler is not imported here: it is slow to import.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from elastrain.offload.errors import OffloadConfigError

COMPILER = "torch._dynamo"
# What saves on behalf of a compiled region lies in this folder of torch, a few calls above the hook.
_RUNTIME = "_functorch/_aot_autograd"
_CALLS_ABOVE = 8
_COMPILING = "_dynamo/convert_frame.py"


class CompileWatch:
    """Watches between `begin` and `end` what the thread of `begin` compiles."""

    def __init__(self) -> None:
        self._thread = -1
        self._listens = self._has_compiled = False

    def begin(self) -> None:
        """Start to watch: until `end` nothing may be compiled, and no compiled code may save tensors."""
        self._thread, self._has_compiled = threading.get_ident(), False
        self._listen()

    def check(self, module: str) -> None:
        """Look who saves a tensor in `module`. Raises `OffloadConfigError` if compiled code does, or ran before."""
        if COMPILER not in sys.modules:
            return
        self._listen()
        if self._has_compiled or _is_compiled_code_saving():
            raise _refusal(module)

    def notice(self) -> None:
        """Note that something is being compiled, or was: it is refused at the next chance."""
        if threading.get_ident() == self._thread:
            self._has_compiled = True

    def end(self, error: BaseException | None) -> None:
        """Stop to watch. Raises `OffloadConfigError` if something was compiled, also where that ended in `error`."""
        if self._listens:
            self._listens = False
            _callbacks().remove_start_callback(self._compiles)
        if isinstance(error, OffloadConfigError):
            return
        if error is not None and _comes_from_compiling(error):
            raise _refusal("the model") from error
        self._thread = -1
        if error is None and self._has_compiled:
            raise _refusal("the model")

    def _listen(self) -> None:
        if not self._listens and COMPILER in sys.modules:
            self._listens = True
            _callbacks().register_start_callback(self._compiles)

    def _compiles(self, args: Any) -> None:
        if args.callback_trigger.name == "DYNAMO":
            self.notice()  # to raise here would make it an error inside the compiler


def _callbacks() -> Any:
    return sys.modules[COMPILER].callback.callback_handler


def _is_compiled_code_saving() -> bool:
    frame = sys._getframe(1)
    for _ in range(_CALLS_ABOVE):
        if _RUNTIME in frame.f_code.co_filename:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _comes_from_compiling(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(_COMPILING):
            return True
        trace = trace.tb_next
    return type(error).__module__.startswith(COMPILER)


def _refusal(module: str) -> OffloadConfigError:
    return OffloadConfigError(
        f"torch.compile was used inside save_on_disk (in {module}): expected a model that is not compiled, since "
        f"compiled code would compute other bits or save no memory; leave torch.compile out, or offload nothing"
    )
