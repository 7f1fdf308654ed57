"""Command `elastrain report`: the history of a run as one HTML page, or a dashboard for its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.console import RunArgument, RunOption, one_of, say


def report(
    run: RunArgument = None,
    named: RunOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write.", metavar="<file>")] = None,
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Write a dashboard for the metrics of --metrics-port.")
    ] = False,
) -> int:
    """Write the history of a run as one HTML page, which needs no network and no script.

    It shows members, step time, loss, memory, audits, checkpoints, injected faults, and each incident with its phases.
    With --grafana, write a dashboard for Grafana instead.

    The run may be under way, and may have been killed: what is not known is left out.
    """
    if out is None:
        raise ConfigError(f"say where to write: --out {'dashboard.json' if grafana else 'page.html'}")
    if grafana:
        from elastrain.launcher.watch.metrics.grafana import dashboard

        if one_of(run, named) is not None:
            raise ConfigError("--grafana writes one dashboard for all runs: name none")
        _write(out, json.dumps(dashboard(), indent=2) + "\n")
        return 0
    folder = rundir.find(one_of(run, named))
    from elastrain.launcher.watch.report.history import history_of
    from elastrain.launcher.watch.report.page import page
    from elastrain.launcher.watch.report.run_logs import read_logs

    _write(out, page(history_of(read_logs(folder), _over(folder))))
    return 0


def _over(folder: rundir.RunDir) -> str:
    """Return the sentence for a run whose log has no end."""
    try:
        state = operator_messages.state(folder)
    except ElastrainError as error:
        return f"unknown: {error}"
    if state["exit_code"] is None and state["state"] != "vanished":
        return "none yet: the run is under way"
    return "none was written: the launcher was killed" if state["exit_code"] is None else f"code {state['exit_code']}"


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; name another file with --out") from None
    say(f"{out}: {len(text.encode()):,} bytes")
