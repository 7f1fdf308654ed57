"""In `main_first` the first member of a node goes first, its successor if it is lost, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from elastrain.base.environment import Environment
from elastrain.errors import ConfigError
from elastrain.job.world import Member, View
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.turns import Turns


class Party:
    """Members m0, m1, … on one node, or on two from `apart` on, each in a thread of its own."""

    def __init__(self, folder: Path, count: int, apart: int = 99) -> None:
        self.went: list[str] = []
        self.view: View | None = None
        self.nodes = [f"node{int(index >= apart)}" for index in range(count)]
        self.turns = [self._turns(index, index - apart * (index >= apart), folder) for index in range(count)]

    def _turns(self, index: int, slot: int, folder: Path) -> Turns:
        environment = Environment(
            job="job",
            member=f"m{index}",
            node=self.nodes[index],
            agent=None,
            secret=None,
            run_dir=folder,
            host=None,
            memory_limit_bytes=None,
            offload_dirs=(),
        )
        return Turns(environment, slot, LoopHeartbeat())

    def see(self, *members: int) -> None:
        """Let all members see this view."""
        found = tuple(Member(id=f"m{index}", node=self.nodes[index]) for index in members)
        self.view = View(generation=1, members=found)

    def go(self, index: int, timeout_s: float = 10.0) -> None:
        """Take one turn as a member."""
        with self.turns[index].take(lambda: self.view, timeout_s):
            self.went.append(f"m{index}")

    def start(self, *members: int) -> list[threading.Thread]:
        """Let members take a turn in threads."""
        threads = [threading.Thread(target=self.go, args=(index,)) for index in members]
        for each in threads:
            each.start()
        time.sleep(0.15)
        return threads


@pytest.mark.parametrize("has_view", [False, True], ids=["before the first view", "in a view"])
def test_the_others_follow_the_first_however_late_it_comes(tmp_path: Path, has_view: bool) -> None:
    party = Party(tmp_path, 3)
    if has_view:
        party.see(0, 1, 2)
    for turn in (1, 2):
        late = party.start(2, 1)
        assert len(party.went) == 3 * (turn - 1)
        party.go(0)
        for each in late:
            each.join()
        assert party.went[3 * (turn - 1)] == "m0" and len(party.went) == 3 * turn


def test_once_the_first_is_lost_its_successor_goes_first(tmp_path: Path) -> None:
    party = Party(tmp_path, 3)
    party.see(0, 1, 2)
    waiting = party.start(2, 1)
    party.see(1, 2)
    for each in waiting:
        each.join()
    assert party.went == ["m1", "m2"]


def test_a_newcomer_counts_from_the_step_that_it_joins_in(tmp_path: Path) -> None:
    party = Party(tmp_path, 2)
    party.see(0)
    party.go(0)
    for step in (4, 5):
        party.turns[0].begin(step)
        party.go(0)
    party.go(1)  # before its loop: the others have long been through
    party.see(0, 1)
    party.turns[1].begin(5)
    party.go(1)
    with pytest.raises(TimeoutError):
        party.go(1, 0.1)


def test_each_node_has_a_first_one(tmp_path: Path) -> None:
    party = Party(tmp_path, 4, apart=2)
    party.go(2)
    party.go(3)
    party.see(0, 1, 2, 3)
    party.go(2)
    assert party.went == ["m2", "m3", "m2"]


def test_an_exception_inside_lets_the_others_go_on(tmp_path: Path) -> None:
    party = Party(tmp_path, 2)
    with pytest.raises(OSError), party.turns[0].take(lambda: None, 1.0):
        raise OSError("no such host")
    party.go(1)


def test_who_waits_in_vain_says_for_whom(tmp_path: Path) -> None:
    party = Party(tmp_path, 2)
    with pytest.raises(
        TimeoutError, match=r"m1 has waited 0\.1 s in job\.main_first\(\) for the first member of node0"
    ):
        party.go(1, 0.1)
    with pytest.raises(ConfigError, match="above 0"):
        party.go(0, 0.0)


def test_the_file_of_turns_is_its_users_alone(tmp_path: Path) -> None:
    Party(tmp_path, 1).go(0)
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
