"""The operator's side of a run: one request to its agent, or the state that an ended run left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher import rundir
from elastrain.launcher.messages import LINE_BYTES_MAX, encode
from elastrain.launcher.rundir import RunDir

_TIMEOUT_S = 10.0


class NoAnswerError(ElastrainError):
    """The run's agent is there but does not answer."""


def ask(run: RunDir, request: Mapping[str, Any]) -> dict[str, Any]:
    """The agent's answer. Raises ConfigError if the run has ended, NoAnswerError if the agent is stuck."""
    answer = _ask(run, request)
    if answer is None:
        raise ConfigError(f"the run in {run.path} has ended: there is nothing to ask")
    return answer


def state(run: RunDir) -> dict[str, Any]:
    """The state of a run: the agent's if it lives, else what is left in the folder. Raises ConfigError."""
    answer = _ask(run, {"type": "status"})
    if answer is not None:
        living: dict[str, Any] = answer["state"]
        return living
    left = run.read_state()
    if left["exit_code"] is None:  # the agent could not write its last words
        left["state"] = "vanished"
    return left


def _ask(run: RunDir, request: Mapping[str, Any]) -> dict[str, Any] | None:
    sock = rundir.connect(run, _TIMEOUT_S)
    if sock is None:
        return None
    try:
        with sock, sock.makefile("rb") as lines:
            sock.sendall(encode(request))
            line = lines.readline(LINE_BYTES_MAX)
    except TimeoutError:
        raise NoAnswerError(f"the agent of {run.path} does not answer within {_TIMEOUT_S:g} s") from None
    except OSError:
        return None
    if not line:
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer
