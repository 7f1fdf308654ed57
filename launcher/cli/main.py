"""The command `elastrain`: from here on a signal ends it with a sentence.

Few imports: those of the commands take a second and more on a busy machine, in which somebody may press Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from elastrain.base.processes import open_missing
from elastrain.launcher.shared.console import Output, say
from elastrain.launcher.shared.process_environment import leave_outer_job


def main() -> None:
    """Entry point of the console script."""
    open_missing()
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):  # what is ignored, as by `nohup` or a shell's `&`, stays so
            signal.signal(number, _stop)
    leave_outer_job()
    from elastrain.launcher.cli.command_line import app

    Output.install()
    app(prog_name="elastrain")


def _stop(number: int, _frame: FrameType | None) -> None:
    """Until a job takes the signals for itself, and again when it has ended."""
    say(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)
