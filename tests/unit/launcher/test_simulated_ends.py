"""What the ends of simulated nodes come to."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from elastrain.errors import ElastrainError
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.simulated.node_starts import EndsOfNodes, begin, signal_all


def _ends(run: RunDir, *nodes: tuple[int, bool]) -> EndsOfNodes:
    ends = EndsOfNodes()
    for number, (code, job_is_over) in enumerate(nodes):
        folder = rundir.of_node(run, f"node{number}").path
        folder.mkdir(parents=True, exist_ok=True)
        end = {"sentence": "it ended", "detail": "", "job_is_over": job_is_over}
        (folder / "run.json").write_text(json.dumps({"end": end}))
        ends.add(code, f"node{number}", run)
    return ends


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ([(0, True), (0, True)], 0),
        ([(143, False), (0, True), (0, True)], 0),
        ([(143, False), (1, False), (0, True)], 1),
        ([(143, False), (1, True)], 1),
        ([(143, False), (143, False)], 143),
    ],
)
def test_a_node_that_was_told_to_go_does_not_count_where_others_have_ended_the_job(
    tmp_path: Path, nodes: list[tuple[int, bool]], code: int
) -> None:
    assert _ends(RunDir(path=tmp_path), *nodes).code() == code


@pytest.mark.parametrize(("others", "code"), [([(0, True)], 0), ([(1, False)], 1), ([], 2)])
def test_a_node_that_could_not_begin_counts_where_no_other_has_ended(
    tmp_path: Path, others: list[tuple[int, bool]], code: int
) -> None:
    run = RunDir(path=tmp_path)
    ends = _ends(run, *others)
    ends.add(2, "refused", run)
    assert ends.code() == code


class _StartsFromNobody(BaseProcess):
    """A node's process whose fork server is killed while it is asked for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(name="node1")
        self._error = error

    def start(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), ConnectionRefusedError(), BrokenPipeError()])
def test_a_fork_server_that_is_killed_as_it_starts_a_node_is_said_in_a_sentence(error: Exception) -> None:
    """The screen showed "Aborted!", as for an input that has ended, and nothing else."""
    with pytest.raises(ElastrainError, match="was killed as it was to start node1: all nodes end"):
        begin(_StartsFromNobody(error))


def test_a_node_that_has_just_ended_is_passed_over_where_all_are_told_to_go() -> None:
    """Its process id is free before the command has heard of its end: a traceback took the place of the sentence."""
    forks = multiprocessing.get_context("fork")
    ended, living = forks.Process(target=int), forks.Process(target=time.sleep, args=(60,))
    for each in (ended, living):
        each.start()
    ended.join(20)
    signal_all([ended, living], signal.SIGKILL)
    living.join(20)
    assert (ended.exitcode, living.exitcode) == (0, -signal.SIGKILL)


def test_a_stop_is_said_where_no_node_has_said_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = EndsOfNodes()
    ends.say_if_nothing_was("stopped by SIGTERM")
    told = _ends(RunDir(path=tmp_path), (143, False))
    told.say_if_nothing_was("stopped by SIGTERM")
    assert capsys.readouterr().err == "elastrain: stopped by SIGTERM\nelastrain: node0: it ended\n"
