"""The command `elastrain`: from here on a signal ends it with a sentence.

Few imports: those of the commands take a second and more on a busy machine, in which somebody may press Ctrl-C.
"""

from __future__ import annotations

import signal
from types import FrameType

from elastrain.launcher.say import Output, say


def main() -> None:
    """Entry point of the console script."""
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == usual:  # what is ignored, as by `nohup` or a shell's `&`, stays so
            signal.signal(number, _stop)
    from elastrain.launcher.command_line import app

    Output.install()
    app(prog_name="elastrain")


def _stop(number: int, _frame: FrameType | None) -> None:
    """Until a job takes the signals for itself, and again when it has ended."""
    say(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)
