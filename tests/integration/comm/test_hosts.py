"""A torch job on two hosts (network namespaces), two processes each: the same bits on all, and a cable that is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import Switch, lacking
from experiments.hosts import cut
from tests.support import warm
from tests.support.sources import ROOT

SILENCE_S = 2.0  # as in comm_host_member


class _Member:
    def __init__(self, stack: ExitStack, switch: Switch, host: str, rank: int, store: Path) -> None:
        command = [sys.executable, "-m", "tests.support.comm_host_member", str(rank), "4", str(store)]
        environment = os.environ | {"MASTER_ADDR": switch.address("one"), "PYTHONPATH": str(ROOT)}
        self.process = warm.Popen(
            [*switch.inside(host), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a member has ended: see its standard error"
        return line.strip()


def _ask(members: list[_Member], word: str) -> list[str]:
    for member in members:
        member.tell(word)
    return [member.hear() for member in members]


@pytest.mark.timeout(900)
def test_two_hosts_reduce_to_the_same_bits_and_one_goes_on_when_the_cable_is_cut(tmp_path: Path) -> None:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        switch = stack.enter_context(Switch(f"{os.getpid()}", ["one", "two"]))
        places = ["one", "one", "two", "two"]
        members = [_Member(stack, switch, host, rank, tmp_path / "store") for rank, host in enumerate(places)]
        assert [member.hear() for member in members] == ["ready on 2"] * 4
        first = _ask(members, "reduce")
        assert len(set(first)) == 1
        assert _ask(members, "reduce") == first
        cut(switch, "two")
        # Connections between the hosts are half open now: both ends think that they stand.
        ends = [member.split() for member in _ask(members, "fail")]
        assert {name for name, _ in ends} <= {"MemberLost", "Aborted"}
        assert all(float(seconds) < 10 * SILENCE_S for _, seconds in ends), ends
        here = _ask(members[:2], "edit")
        assert here[0] == here[1] != first[0]
