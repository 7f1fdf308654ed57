"""The training loop's position, published for the agent that watches it.

Declared stretches have time bounds of their own.

`job.phase`, the loader's wait and torch's compiler declare stretches. For the main thread; nothing is judged here.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import TextIO

from elastrain.base.thread_status import Station
from elastrain.comm.shm.heartbeat_page import STACKS_SIGNAL, Trail
from elastrain.errors import ConfigError
from elastrain.runtime.io.device_heartbeat import DeviceHeartbeat, DeviceWork

PHASE_TIMEOUT_S = 600.0
"""Timeout of a phase that names none."""
LOADING_TIMEOUT_S = 300.0
"""Timeout of the wait for one micro-batch."""
COMPILE_TIMEOUT_S = 1800.0
"""Timeout of torch.compile, whenever it compiles."""
EVALUATION_TIMEOUT_S = 1800.0
"""Timeout of one batch of `job.evaluate`. The whole evaluation has none."""
_MEASURED = 64
"""Maximum number of micro-batches of a step whose times are kept."""
_OF_OTHERS = (Station.WAITING, Station.OUTSIDE)
"""Places where the loop owes nothing; a declared stretch does not change that."""


class LoopHeartbeat:
    """The heartbeat of the training loop. `trail` is None if no agent watches."""

    def __init__(self, trail: Trail | None = None) -> None:
        self.device = DeviceHeartbeat(self._work)
        self._trail = trail
        self._owner = threading.get_ident()
        self._place, self._step = Station.OUTSIDE, -1
        self._micro_batch: int | None = None
        self._declared: list[tuple[str, float]] = []
        self._phase_s = 0.0
        """Longest timeout of the script's phases since the loop last submitted work to its device."""
        self._hears_compiler = False
        self._computed_s: deque[float] = deque(maxlen=_MEASURED)
        self.micro_batches = 0
        """Number of micro-batches that this process has computed."""
        self._compiling = ExitStack()

    def enter(self, place: Station, step: int | None = None, micro_batch: int | None = None) -> None:
        """Publish that the loop is at this place. `step` None means the same step and micro-batch as before."""
        self._place = place
        if step is not None:
            self._step, self._micro_batch = step, micro_batch
        self._show()

    def go_on(self) -> None:
        """Publish progress at the same place. For any thread that works while the main thread waits for it."""
        if self._trail is not None:
            self._trail.beat()

    @contextmanager
    def stretch(self, name: str, timeout_s: float) -> Iterator[None]:
        """Allow the body `timeout_s` seconds without a heartbeat. Has no effect in other threads than the main one.

        The device may take as long for the work that the loop submits in the body.
        """
        if threading.get_ident() != self._owner:
            yield
            return
        if not timeout_s > 0:
            raise ConfigError(f"the timeout of phase {name!r} is a number of seconds above 0; got {timeout_s!r}")
        self._phase_s = max(self._phase_s, timeout_s)
        with self._stretch(name, timeout_s):
            yield

    @contextmanager
    def _stretch(self, name: str, timeout_s: float) -> Iterator[None]:
        self._declared.append((name, timeout_s))
        self._show()
        try:
            yield
        finally:
            self._declared.pop()
            self._show()

    @property
    def is_computing(self) -> bool:
        """True while the loop is inside a micro-batch, or its device has work to finish. For any thread."""
        return self._place is Station.COMPUTING or self.device.is_computing

    def computed(self, took_s: float) -> None:
        """Note how long a micro-batch took. For any thread."""
        self._computed_s.append(took_s)
        self.micro_batches += 1

    def take_computed_s(self) -> float | None:
        """Return the median time of the micro-batches since the last call, or None. For the engine's thread."""
        took_s = [self._computed_s.popleft() for _ in range(len(self._computed_s))]
        return median(took_s) if took_s else None

    def known_stretch(self, name: str, timeout_s: float) -> AbstractContextManager[None]:
        """Return a stretch that scripts need not declare. A stretch declared by the script takes precedence."""
        is_main = threading.get_ident() == self._owner
        return self._stretch(name, timeout_s) if is_main and not self._declared else nullcontext()

    def hear_compiler(self) -> None:
        """Declare a stretch whenever torch's compiler works. Costs nothing in a script that does not compile."""
        callback = sys.modules.get("torch._dynamo.callback")
        if callback is None or self._hears_compiler:
            return
        self._hears_compiler = True
        callback.on_compile_start(lambda _: self._on_compile_start())
        callback.on_compile_end(lambda _: self._compiling.close())

    def _on_compile_start(self) -> None:
        self._compiling.enter_context(self.known_stretch("torch.compile", COMPILE_TIMEOUT_S))

    def _work(self) -> DeviceWork:
        """Return the place of work that is submitted to the device now. It takes the time of the phases before it."""
        phase_s = self._phase_s
        if threading.get_ident() == self._owner:  # work of other threads does not end the loop's phases
            self._phase_s = max((timeout_s for _, timeout_s in self._declared), default=0.0)
        if self._place is Station.OUTSIDE:
            return DeviceWork(Station.OUTSIDE, self._step, 0.0)
        place = Station.BETWEEN if self._place is Station.BETWEEN else Station.COMPUTING
        return DeviceWork(Station.DECLARED if phase_s else place, self._step, phase_s, self._micro_batch)

    def _show(self) -> None:
        if self._trail is None:
            return
        if self._declared and self._place not in _OF_OTHERS:
            name, allowed_s = self._declared[-1]
            self._trail.move(Station.DECLARED, step=self._step, allowed_s=allowed_s, name=name)
        else:
            self._trail.move(self._place, step=self._step)


def show_stacks_on_request(run_dir: Path | None, member: str) -> TextIO | None:
    """Append the stacks of all threads to `stacks/<member>.txt` at a signal, even while a thread holds the interpreter.

    Returns the file, which has to stay open, or None without a run folder.
    """
    if run_dir is None:
        return None
    folder = run_dir / "stacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(folder / f"{member}.txt", flags, 0o600), "a")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    return file
