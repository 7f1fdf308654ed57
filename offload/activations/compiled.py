"""Detection of programs that other backends than ours compiled inside `save_on_disk`. They are refused.

A foreign program asks for everything that it saved when its backward begins, so that spilling would gain nothing.
Programs of `backend="elastrain"` spill their saved values themselves. The compiler is not imported here, because the
import is slow.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from elastrain.offload import compiled_runs
from elastrain.offload.errors import OffloadConfigError

COMPILER = "torch._dynamo"
# The code that saves tensors of a compiled region is in this folder of torch, a few stack frames above the hook.
_RUNTIME = "_functorch/_aot_autograd"
_CALLS_ABOVE = 8


class CompileWatch:
    """A watch on what other backends compile between `begin` and `end`, in the thread that called `begin`."""

    def __init__(self) -> None:
        self._thread = -1
        self._listens = self._has_compiled = False
        self._before = (0, 0)

    def begin(self) -> None:
        """Start to watch. Until `end`, only our backend may compile, and only its programs may save tensors."""
        self._thread, self._has_compiled = threading.get_ident(), False
        self._listen()

    def check(self, module: str) -> None:
        """Check a tensor that is being saved in `module`.

        Raises `OffloadConfigError` if another backend's program saves it, or was compiled since `begin`.
        """
        if COMPILER not in sys.modules or compiled_runs.is_program_running():
            return
        self._listen()
        if self._has_compiled or _is_compiled_code_saving():
            raise _refusal(module)

    def notice(self) -> None:
        """Note that another backend has compiled in the watched thread. It is refused at the next `check` or `end`."""
        if threading.get_ident() == self._thread:
            self._has_compiled = True

    def end(self, error: BaseException | None) -> None:
        """Stop to watch.

        Raises `OffloadConfigError` if another backend compiled and the block itself ended without an error.
        """
        if self._listens:
            self._listens = False
            _callbacks().remove_start_callback(self._compiles)
            _callbacks().remove_end_callback(self._compiled)
        if isinstance(error, OffloadConfigError):
            return
        self._thread = -1
        if error is None and self._has_compiled:
            raise _refusal("the model")

    def _listen(self) -> None:
        if not self._listens and COMPILER in sys.modules:
            self._listens = True
            _callbacks().register_start_callback(self._compiles)
            _callbacks().register_end_callback(self._compiled)

    def _compiles(self, args: Any) -> None:
        if args.callback_trigger.name == "DYNAMO":
            self._before = _graphs(), compiled_runs.programs_made()

    def _compiled(self, args: Any) -> None:
        if args.callback_trigger.name != "DYNAMO":
            return
        graphs, ours = self._before
        if _graphs() - graphs > compiled_runs.programs_made() - ours:
            self.notice()  # an exception here would become an internal error of the compiler


def _callbacks() -> Any:
    return sys.modules[COMPILER].callback.callback_handler


def _graphs() -> int:
    """Return how many graphs the compiler has handed to backends so far."""
    return int(sys.modules[COMPILER].utils.counters["stats"]["unique_graphs"])


def _is_compiled_code_saving() -> bool:
    frame = sys._getframe(1)
    for _ in range(_CALLS_ABOVE):
        if _RUNTIME in frame.f_code.co_filename:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _refusal(module: str) -> OffloadConfigError:
    return OffloadConfigError(
        f"torch.compile was used inside save_on_disk (in {module}), and not with our backend: compiled code asks "
        f'for all that it saved at once; use torch.compile(..., backend="elastrain"), or leave it out'
    )
