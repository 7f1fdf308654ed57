"""Forwards of evaluations in scripts of tests: they are counted, and one kills a member."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
from typing import Any

from torch import nn


def watch_evaluations(model: nn.Module, job: Any, victim: str, after: int = 3) -> None:
    """Count the model's forwards in eval mode, and print them at exit. The victim is killed in one behind `after`."""
    counted, forward = [0], model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not model.training:
            counted[0] += 1
            if job.member == victim and counted[0] > after:
                os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **kwargs)

    model.forward = watched
    atexit.register(lambda: sys.stderr.write(f"{job.member} evaluated {counted[0]}\n"))
