"""Entry point of the command `elastrain`. A signal ends the command with a sentence.

Few imports: those of the commands take a second or more on a busy machine, and the user may press Ctrl-C meanwhile.
"""

from __future__ import annotations

import signal
import sys

from elastrain.base.processes import open_missing
from elastrain.launcher.shared.console import Output
from elastrain.launcher.shared.process_environment import leave_outer_job, stop


def main() -> None:
    """Run the command line. Entry point of the console script."""
    open_missing()
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):  # a signal that is ignored, as under `nohup` or a shell's `&`, stays ignored
            signal.signal(number, stop)
    leave_outer_job()
    from elastrain.launcher.cli.command_line import app

    Output.install()
    app(prog_name="elastrain")
