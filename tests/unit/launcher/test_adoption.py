"""The meeting of ranks that another launcher has started: all of them come, or each is told why there is no job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.base.foreign_world import RanksHere, hear, tell
from elastrain.errors import ConfigError
from elastrain.launcher.agent.adopted import AdoptedProcess, AdoptedRanks, Rank
from elastrain.launcher.core.failures import UNKNOWN_EXIT, describe_exit
from elastrain.launcher.nodes.door import listen_abstract
from elastrain.launcher.shared.job_values import Start
from elastrain.launcher.start import adoption
from elastrain.launcher.start.adoption import Meeting


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(adoption, "_LATE_S", 0.2)
    return f"elastrain/ranks/test-{os.getpid()}"


@pytest.fixture
def meeting(address: str) -> Iterator[Meeting]:
    with listen_abstract(address) as listener:
        yield Meeting(listener, RanksHere(address=address, first=0, count=2, size=2))


def _come(address: str, rank: object, size: object = 2) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect("\0" + address)
    tell(sock, {"rank": rank, "size": size})
    return sock


def test_a_meeting_ends_with_the_last_rank(address: str, meeting: Meeting) -> None:
    with _come(address, 1), _come(address, 0):
        meeting.wait(10)
        assert {number: rank.pid for number, rank in meeting.ranks.items()} == {0: os.getpid(), 1: os.getpid()}


def test_who_does_not_come_is_named(address: str, meeting: Meeting) -> None:
    with _come(address, 1), pytest.raises(ConfigError, match=r"of 2 ranks, 0 did not call .* on this host within 0 s"):
        meeting.wait(0.3)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3), (2, 2)], ids=["twice", "another world", "beyond"])
def test_ranks_that_do_not_fit_end_the_meeting_for_all(address: str, meeting: Meeting, rank: int, size: int) -> None:
    with _come(address, 0) as first, _come(address, rank, size) as other:
        with pytest.raises(
            ConfigError, match=f"rank {rank} of a world of {size} has come to a job of 2 ranks"
        ) as caught:
            meeting.wait(10)
        meeting.refuse(str(caught.value))
        assert hear(first) == hear(other) == {"refused": str(caught.value)}


def test_a_rank_that_leaves_ends_the_meeting(address: str, meeting: Meeting) -> None:
    _come(address, 1).close()
    with pytest.raises(ConfigError, match="rank 1 has ended before all 2 ranks"):
        meeting.wait(10)


def test_a_rank_that_comes_after_the_refusal_is_told_too(address: str, meeting: Meeting) -> None:
    refusing = threading.Thread(target=meeting.refuse, args=("there is no job",))
    refusing.start()
    with _come(address, 0) as late:
        assert hear(late) == {"refused": "there is no job"}
    refusing.join()


@pytest.mark.parametrize("said", [b"", b"nonsense\n", b"[]\n", b'{"rank": 0}\n', b'{"rank": [], "size": 2}\n'])
def test_who_sends_something_else_is_not_heard(address: str, meeting: Meeting, said: bytes) -> None:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect("\0" + address)
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    with stranger, _come(address, 1), _come(address, 0):
        meeting.wait(10)
        assert sorted(meeting.ranks) == [0, 1]


def test_another_users_process_is_not_heard(address: str, meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "peer", lambda sock: (os.getpid(), os.geteuid() + 1))
    with _come(address, 0), _come(address, 1), pytest.raises(ConfigError, match="0, 1 did not call"):
        meeting.wait(0.5)


def test_no_rank_is_replaced() -> None:
    start = Start(member="m1", slot=0, rank=0, restarts=0, warm_up=False, world_size=1)
    with pytest.raises(ProcessLookupError, match="in slot 0 was started by another launcher"):
        AdoptedRanks([]).start(start, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_exit_code_is_read_before_the_launcher_takes_it(code: str, expected: int) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    pidfd = os.pidfd_open(process.pid)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    with socket.socket() as sock:
        adopted = AdoptedProcess(Rank(number=0, sock=sock, pid=process.pid, pidfd=os.dup(pidfd)))
        again = AdoptedProcess(Rank(number=0, sock=sock, pid=process.pid, pidfd=pidfd))
    assert adopted.reap() == expected
    process.wait()
    assert not Path(f"/proc/{process.pid}").exists() and again.reap() == UNKNOWN_EXIT
    assert "only its launcher knows" in describe_exit(UNKNOWN_EXIT)
