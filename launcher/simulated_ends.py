"""How the nodes simulated on one machine have ended: what the screen they share says, and the command's exit code."""

from __future__ import annotations

import signal

from elastrain.errors import ConfigError
from elastrain.launcher import rundir
from elastrain.launcher.rundir import RunDir
from elastrain.launcher.starting import say_last

ALL_LOST = "every node was lost, and with them the state"
_TOLD_TO_GO = 128 + signal.SIGTERM
"""The exit code of a node that was asked to leave."""


class EndsOfNodes:
    """What ends the job is said once, what ends only a node with its name."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.job_is_over = False
        self._refused: list[int] = []
        self._told_to_go = 0
        self._told: set[tuple[str, str]] = set()

    def add(self, code: int, name: str, run: RunDir) -> None:
        try:
            end = rundir.of_node(run, name).read_state()["end"]
        except ConfigError:  # it has said itself why it could not begin; others may bring the job to a good end
            self._refused.append(code)
            return
        self.codes.append(code)
        if end is None:
            return
        self.job_is_over = self.job_is_over or end["job_is_over"]
        self._told_to_go += code == _TOLD_TO_GO and not end["job_is_over"]
        self.say_once(end["sentence"] if end["job_is_over"] else f"{name}: {end['sentence']}", end["detail"])

    def lose_all(self) -> None:
        """No node is left that knows how the job has ended."""
        self.codes.append(1)
        self.job_is_over = True
        self.say_once(ALL_LOST)

    def say_once(self, sentence: str, detail: str = "") -> None:
        if (sentence, detail) not in self._told:
            self._told.add((sentence, detail))
            say_last(sentence, detail)

    def say_if_nothing_was(self, sentence: str) -> None:
        """The nodes may have been told to go before they could say so."""
        if not self._told:
            self.say_once(sentence)

    def code(self) -> int:
        """The highest; who was told to go, or could not begin, says nothing about a job that others have ended."""
        codes = sorted(self.codes or self._refused)
        if self.job_is_over and self._told_to_go < len(codes):
            for _ in range(self._told_to_go):
                codes.remove(_TOLD_TO_GO)
        return codes[-1] if codes else 1
