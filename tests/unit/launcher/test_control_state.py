"""The state of a run while one of its nodes starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.rundir import RunDir


@pytest.mark.parametrize("comes", [True, False])
def test_a_state_that_comes_while_it_is_looked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Its file was not there, then it was: a status of three nodes ended with "holds no readable run"."""
    run = RunDir(path=tmp_path)
    tries = list[int]()

    def read(self: RunDir) -> dict[str, Any]:
        tries.append(1)
        if len(tries) == 1:
            if comes:
                self.state.write_text("{}")
            raise ConfigError("holds no readable run")
        return {"exit_code": None}

    monkeypatch.setattr(RunDir, "read_state", read)
    monkeypatch.setattr(operator_messages, "problem_of", lambda left: "")
    monkeypatch.setattr(operator_messages, "_ask", lambda *_: None)
    assert (operator_messages._state(run) is not None) == comes
