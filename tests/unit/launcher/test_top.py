"""`elastrain top` shows what `status` shows, again and again, and ends with the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from typer.testing import CliRunner

from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.cli import command_line
from elastrain.launcher.core import Core
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.job_values import JobConfig
from elastrain.launcher.shared.notices import MemberWork
from elastrain.launcher.shared.rundir import RunDir

STATE = describe(Core(JobConfig(workers=1), (), choose=lambda members: members[0]), "job", 0.0)
WINDOW = {"shards": {"3": 1}, "since_step": 7, "since_s": 2.0}


@pytest.mark.parametrize("end", [{"exit_code": 0}, {"state": "vanished"}], ids=["ended", "vanished"])
def test_it_is_shown_until_the_run_is_over(end: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    work = asdict(MemberWork()) | {"replaces": ""}
    member = work | {"rank": 0, "id": "m0", "node": "a", "pid": 7, "state": "member", "step": 6}
    waiting = [member | {"waits_for": "no vote of m1 yet"}]
    told = iter(
        [
            STATE | {"step": 7, "window": WINDOW, "members": waiting},
            STATE | {"step": 8, "window": None},
            STATE | {"step": 9} | end,
        ]
    )
    monkeypatch.setattr(rundir, "find", lambda named: RunDir(path=Path("/runs/job")))
    monkeypatch.setattr(operator_messages, "state", lambda run: next(told))
    monkeypatch.setattr(time, "sleep", slept.append)
    result = CliRunner().invoke(command_line.app, ["top", "--every", "0.5"], catch_exceptions=False)
    assert result.exit_code == 0
    shown = result.stdout.split("job         job")[1:]
    assert [f"step        {step}," in each for each, step in zip(shown, (7, 8, 9), strict=True)] == [True] * 3
    assert "window      shard 3 held by 1 member only; since step 7, 2.0 s ago" in shown[0]
    assert "m0 waits: no vote of m1 yet" in shown[0] and "waits" not in shown[1]
    assert "window" not in shown[1] and slept == [0.5, 0.5]
