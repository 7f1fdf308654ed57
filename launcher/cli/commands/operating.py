"""Commands for operators: `ls` and `logs` look at runs, `stop` and `drain` end a job or a node's part in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.console import RunArgument, RunOption, one_of, print_table, say
from elastrain.launcher.shared.operator_messages import AskStop
from elastrain.launcher.shared.rundir import RunDir

_LOOK_AGAIN_S = 0.2
_COLUMNS = ("job", "started", "state", "step", "run folder")


def stop(run: RunArgument = None, named: RunOption = None) -> int:
    """Write one last checkpoint, if the job writes any, and end all nodes of the job."""
    return _ask(rundir.find(one_of(run, named)), AskStop())


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE|MEMBER", help="A node, or a member that is alone on its node.")],
    named: RunOption = None,
) -> int:
    """Let a node hand its state over to the others, and leave the job."""
    if not node:
        raise ConfigError("the name of the node is empty: `elastrain status` lists the nodes")
    return _ask(rundir.find(named), AskStop(drain=node))


def _ask(run: RunDir, request: AskStop) -> int:
    answer = operator_messages.ask(run, request)
    say(answer.sentence)
    return 0 if answer.ok else 1


def list_runs(as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False) -> int:
    """List the runs in `$ELASTRAIN_HOME`, the newest first."""
    runs = [_row(RunDir(path=folder)) for folder in rundir.newest_first()]
    if as_json:
        for row in runs:
            print(json.dumps(row))
    elif runs:
        print_table(_COLUMNS, [[str(row[name]) for name in _COLUMNS] for row in runs])
    else:
        say(f"there is no run in {rundir.runs_folder()}")
    return 0


def _row(run: RunDir) -> dict[str, str | int]:
    started = datetime.fromtimestamp(rundir.started_at(run.path)).isoformat(" ", "seconds")
    row: dict[str, str | int] = {"job": run.path.name, "started": started, "run folder": str(run.path)}
    try:
        state = operator_messages.state(run)
    except ElastrainError:
        return row | {"state": "unreadable", "step": "-"}
    return row | {"job": state["job"], "state": state["state"], "step": "-" if state["step"] is None else state["step"]}


def logs(
    member: Annotated[str | None, typer.Argument(help="A member, such as m1; default: all.")] = None,
    named: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> int:
    """Print what members have written into files: see `--redirects` and `--tee` of `run`."""
    run = rundir.find(named)
    read: dict[Path, int] = {}
    while True:
        is_last = not follow or _has_ended(run)
        for path, text in _unread(run, member, read):
            sys.stdout.write(text if member is not None else _marked(path.parent.name, text))
        if is_last:
            break
        time.sleep(_LOOK_AGAIN_S)
    if not read:
        which = f"member {member}" if member is not None else "member"
        raise ConfigError(
            f"no {which} of {run.path} has written into a file: start the job with --tee 3, or with --redirects 3, and "
            "look for the members' names in `elastrain status`"
        )
    return 0


def _unread(run: RunDir, member: str | None, read: dict[Path, int]) -> Iterator[tuple[Path, str]]:
    """Yield what was written since the last look, file by file, in whole lines. `read`: bytes that were yielded."""
    for path in sorted(path for folder in _folders(run) for path in folder.glob(f"{member or '*'}/std*.log")):
        done = read.setdefault(path, 0)
        with path.open("rb") as file:
            file.seek(done)
            whole = file.read().rpartition(b"\n")
        text = whole[0] + whole[1]
        read[path] = done + len(text)
        if text:
            yield path, text.decode(errors="replace")


def _folders(run: RunDir) -> set[Path]:
    """Return the folders of logs that the agents of the run have named, and the default one."""
    found = {run.logs}
    with run.events.open() as lines:
        for line in lines:
            if '"event": "start"' in line or '"event":"start"' in line:
                found.update(_named_in(line))
    return found


def _named_in(line: str) -> list[Path]:
    try:
        event: Mapping[str, object] = json.loads(line)
    except ValueError:  # half a line
        return []
    return [Path(str(event["logs"]))] if event.get("event") == "start" and "logs" in event else []


def _marked(member: str, text: str) -> str:
    return "".join(f"[{member}] {line}" for line in text.splitlines(keepends=True))


def _has_ended(run: RunDir) -> bool:
    try:
        state = operator_messages.state(run)
    except operator_messages.NoAnswerError:
        return False
    return state["exit_code"] is not None or state["state"] == "vanished"
