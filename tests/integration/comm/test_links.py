"""Links on first use between real processes: who has no link to the dead learns of it, and no first use hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from elastrain.comm.errors import CommError
from elastrain.comm.groups.works import Work
from elastrain.comm.wire.addresses import LossCause
from elastrain.comm.wire.link import Link
from tests.support import comm_member
from tests.support.comm_processes import Child, Wire
from tests.support.comm_tools import Transport

both = pytest.mark.parametrize("transport", get_args(Transport))
EIGHT = "abcdefgh"
PROMPT_S = 5.0  # on a busy machine; far below the deadline of what waits
PATIENT_S = 60.0


class _Member:
    """Does what it is told over its wire, one order at a time."""

    def __init__(self, wire: Wire, name: str, transport: Transport) -> None:
        self.wire = wire
        self.waiting: list[tuple[Work, torch.Tensor]] = []
        self.mesh, self.comm = comm_member.enter(wire, name, transport, timeout_s=PATIENT_S, segment_bytes=1 << 20)

    def serve(self) -> None:
        while True:
            order, *given = self.wire.hear()
            self.wire.say(getattr(self, order)(*given))

    def edit(self, generation: int, peers: list[dict[str, str]]) -> str:
        comm_member.edit(self.comm, generation, peers)
        return "edited"

    def hide_beacon(self) -> str:
        """As if it died before the others had its beacon."""
        Link.push_beacon = lambda link, fd, generation: None  # type: ignore[method-assign]  # in this process alone
        return "hidden"

    def send(self, members: str) -> str:
        for member in members:
            try:
                self.comm.world.send(torch.tensor([ord(self.mesh.me)]), self._rank(member)).wait()
            except CommError as error:
                return str(error)
        return "sent"

    def _rank(self, member: str) -> int:
        return self.comm.world.members.index(member)

    def begin_recv(self, members: str, timeout_s: float = PATIENT_S) -> str:
        for member in members:
            tensor = torch.zeros(1, dtype=torch.int64)
            self.waiting.append((self.comm.world.recv(tensor, self._rank(member), timeout_s=timeout_s), tensor))
        return "waits"

    def begin_broadcast(self, root: str) -> str:
        tensor = torch.zeros(1, dtype=torch.int64)
        group = self.comm.group("pair", [root, self.mesh.me])
        self.waiting.append((group.broadcast(tensor, root=0), tensor))
        return "waits"

    def end_recv(self) -> tuple[str, float]:
        """Who has sent what came, or why nothing did; and how long that took."""
        began_s, said = time.monotonic(), ""
        for work, tensor in self.waiting:
            try:
                work.wait()
                said += chr(int(tensor))
            except CommError as error:
                said = f"{type(error).__name__}: {error}"
        self.waiting.clear()
        return said, time.monotonic() - began_s

    def close(self) -> str:
        self.comm.close()
        return "closed"

    def await_lost(self, members: str) -> dict[str, str]:
        deadline_s = time.monotonic() + PROMPT_S
        while not (set(self.comm.lost) >= set(members) and self.comm.error) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return {member: how.value for member, how in self.comm.lost.items()} if self.comm.error else {}

    def await_proof(self, members: str) -> dict[str, str]:
        """Who saw a link break hears of the proof from whoever has it."""
        deadline_s = time.monotonic() + PROMPT_S
        while (
            not {self.comm.lost.get(each) for each in members} <= {LossCause.DEAD, LossCause.LEFT}
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.001)
        return {member: how.value for member, how in self.comm.lost.items()}

    def await_links(self, count: int) -> None:
        deadline_s = time.monotonic() + PROMPT_S
        while sum(link.stream is not None for link in self.mesh.links.by_member.values()) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def abort(self) -> None:
        self.comm.abort("enough")

    def sockets(self) -> int:
        return sum(os.readlink(path).startswith("socket:") for path in Path("/proc/self/fd").iterdir() if path.exists())


class _Troupe:
    """Members by name, in view 1."""

    def __init__(self, stack: ExitStack, transport: Transport, names: str) -> None:
        self.names = names
        self.generation = 0
        self.children = {
            name: stack.enter_context(Child(lambda wire, n=name: _Member(wire, n, transport).serve())) for name in names
        }
        self.peers = {name: child.wire.hear() for name, child in self.children.items()}

    def edit(self, names: str, hearers: str | None = None) -> None:
        self.generation += 1
        peers = [self.peers[name] for name in names]
        assert self.each(hearers or names, "edit", self.generation, peers) == ["edited"] * len(hearers or names)

    def each(self, names: str, *order: Any) -> list[Any]:
        for name in names:
            self.children[name].wire.say(order)
        return [self.children[name].wire.hear() for name in names]

    def signal(self, names: str, number: signal.Signals) -> None:
        for name in names:
            os.kill(self.children[name].pid, number)

    def kill(self, names: str) -> None:
        self.signal(names, signal.SIGKILL)
        for name in names:
            self.children[name].join()

    def without(self, names: str) -> str:
        return "".join(name for name in self.names if name not in names)

    def pass_on(self, names: str) -> None:
        """A message from each to the next."""
        for at, name in enumerate(names):
            assert self.each(name, "send", names[(at + 1) % len(names)]) == ["sent"]
        for at, name in enumerate(names):
            self.each(name, "begin_recv", names[at - 1], PATIENT_S)
        assert [said for said, _ in self.each(names, "end_recv")] == [names[at - 1] for at in range(len(names))]


@contextmanager
def troupe(transport: Transport, names: str = EIGHT, *, hidden: str = "") -> Iterator[_Troupe]:
    with ExitStack() as stack:
        made = _Troupe(stack, transport, names)
        made.each(hidden, "hide_beacon")
        made.edit(names)
        yield made


@both
def test_the_descriptors_of_a_member_do_not_grow_with_the_job_where_only_the_ring_is_used(transport: Transport) -> None:
    sixteen = "abcdefghijklmnop"
    with ExitStack() as stack:
        made = _Troupe(stack, transport, sixteen)
        before = made.each(sixteen, "sockets")
        made.edit(sixteen)
        made.pass_on(sixteen)
        after = made.each(sixteen, "sockets")
        assert [now - then for now, then in zip(after, before, strict=True)] == [2] * 16


@both
def test_all_use_all_links_first_at_the_same_moment(transport: Transport) -> None:
    with troupe(transport) as made:
        before = made.each(EIGHT, "sockets")
        for name in EIGHT:
            made.each(name, "begin_recv", made.without(name), PATIENT_S)
        for name in EIGHT:
            made.children[name].wire.say(("send", made.without(name)))
        assert [made.children[name].wire.hear() for name in EIGHT] == ["sent"] * 8
        assert [said for said, _ in made.each(EIGHT, "end_recv")] == [made.without(name) for name in EIGHT]
        after = made.each(EIGHT, "sockets")
        # One link to each; the ring may not have stood yet when it was counted before.
        assert all(5 <= now - then <= 7 for now, then in zip(after, before, strict=True)), (before, after)


@both
@pytest.mark.parametrize("victims", ["d", "de", "be", "cde", "bcdfgh"])
def test_all_learn_of_every_loss_whether_they_have_a_link_to_the_dead_or_not(
    transport: Transport, victims: str
) -> None:
    with troupe(transport) as made:
        made.pass_on(EIGHT)
        rest = made.without(victims)
        made.kill(victims)
        found = made.each(rest, "await_lost", victims)
        assert [set(lost) for lost in found] == [set(victims)] * len(rest), found
        if transport == "unix":  # every one is proven, so that any number of survivors may go on
            proven = made.each(rest, "await_proof", victims)
            assert {how for lost in proven for how in lost.values()} <= {"dead", "left"}, proven
        made.edit(rest)
        made.pass_on(rest)


@pytest.mark.parametrize("victims", ["d", "cde"])
def test_the_end_of_a_member_that_showed_no_beacon_is_proven(victims: str) -> None:
    with troupe("unix", hidden=victims) as made:
        made.pass_on(EIGHT)
        made.kill(victims)
        proven = made.each(made.without(victims), "await_proof", victims)
        assert proven == [dict.fromkeys(victims, "left")] * len(proven)


@both
def test_a_loss_is_known_though_one_neighbour_is_stopped(transport: Transport) -> None:
    with troupe(transport) as made:
        made.pass_on(EIGHT)
        made.signal("f", signal.SIGSTOP)
        made.kill("d")
        rest = made.without("df")
        assert [set(lost) for lost in made.each(rest, "await_lost", "d")] == [{"d"}] * 6
        made.signal("f", signal.SIGCONT)
        assert set(made.each("f", "await_lost", "d")[0]) == {"d"}
        made.edit(made.without("d"))
        made.pass_on(made.without("d"))


@both
@pytest.mark.parametrize(
    ("wait", "end", "words"),
    [
        ("begin_broadcast", "killed", "MemberLost: member 'g' is lost: "),
        ("begin_broadcast", "closed", "MemberLost: member 'g' is lost: it left"),
        ("begin_broadcast", "edited", "Aborted: aborted: 'g' went on to a newer view"),
        ("begin_recv", "killed", "MemberLost: member 'g' is lost: "),
        ("begin_recv", "closed", "MemberLost: member 'g' is lost: it left"),
    ],
)
def test_who_waits_for_somebody_learns_of_its_end_though_the_whole_ring_is_stopped(
    transport: Transport, wait: str, end: str, words: str
) -> None:
    """a waits for c, c for e, e for g: each has a link to its own one, for the first time."""
    with troupe(transport) as made:
        made.pass_on(EIGHT)
        made.signal("bdfh", signal.SIGSTOP)
        for one, other in ("ac", "ce", "eg"):
            made.each(one, wait, other)
        made.each("ce", "await_links", 3)
        made.each("ag", "await_links", 3)
        if end == "killed":
            made.kill("g")
        elif end == "closed":
            made.each("g", "close")
        else:
            made.edit(EIGHT, "g")
        ends = made.each("ace", "end_recv")
        assert all(said.startswith(words) and s < PROMPT_S for said, s in ends), ends


@both
@pytest.mark.parametrize(("user", "other"), ["ae", "ea"])
def test_who_waits_first_for_somebody_that_has_failed_learns_of_it(transport: Transport, user: str, other: str) -> None:
    with troupe(transport) as made:
        made.pass_on(EIGHT)
        made.signal("bdfh", signal.SIGSTOP)  # so that nobody else tells it
        made.each(other, "abort")
        made.each(user, "begin_recv", other)
        ((said, s),) = made.each(user, "end_recv")
        assert said.startswith("Aborted: aborted: enough") and s < PROMPT_S, (said, s)


@both
@pytest.mark.parametrize("stopped", ["", "stopped"])
@pytest.mark.parametrize("user", ["a", "e"])
def test_a_first_use_that_meets_a_dead_member_ends_with_its_loss(transport: Transport, user: str, stopped: str) -> None:
    other = "e" if user == "a" else "a"
    with troupe(transport) as made:
        if stopped:
            made.pass_on(EIGHT)
            made.signal("bdfh", signal.SIGSTOP)  # so that it has to find out itself
        made.signal(other, signal.SIGKILL)  # nobody has noticed yet, or just now
        made.each(user, "begin_recv", other, PATIENT_S)
        ((said, s),) = made.each(user, "end_recv")
        assert said.startswith(f"MemberLost: member '{other}' is lost") and s < PROMPT_S, (said, s)
        made.signal("bdfh", signal.SIGCONT)
        rest = made.without(other)
        made.edit(rest)
        made.pass_on(rest)


@both
@pytest.mark.parametrize(("user", "other"), ["ae", "ea"])
def test_a_first_use_of_a_stopped_member_takes_as_long_as_it_may_and_loses_nobody(
    transport: Transport, user: str, other: str
) -> None:
    with troupe(transport) as made:
        made.pass_on(EIGHT)
        made.signal(other, signal.SIGSTOP)
        made.each(user, "begin_recv", other, 0.3)
        ((said, s),) = made.each(user, "end_recv")
        assert said.startswith("Timeout: ") and s < PROMPT_S, (said, s)
        made.signal(other, signal.SIGCONT)
        made.edit(EIGHT)
        made.each(user, "begin_recv", other, PATIENT_S)
        made.each(other, "send", user)
        assert made.each(user, "end_recv")[0][0] == other
        made.pass_on(EIGHT)


@both
@pytest.mark.parametrize(("user", "other"), ["ae", "ea"])
def test_a_first_use_ends_with_the_view_or_the_communicator(transport: Transport, user: str, other: str) -> None:
    with troupe(transport) as made:
        made.pass_on(EIGHT)
        made.signal(other, signal.SIGSTOP)
        made.each(user, "begin_recv", other, PATIENT_S)
        made.edit(made.without(other), user)
        assert made.each(user, "end_recv")[0][0].startswith("Aborted: aborted: the view changed to generation 2")
        made.signal(other, signal.SIGCONT)
        made.edit(made.without(user + "c"))  # nor who stays in generation 2: it would be lost to them, soon or late
        made.signal("d", signal.SIGSTOP)
        made.each("h", "begin_recv", "d", PATIENT_S)
        made.each("h", "close")
        assert made.each("h", "end_recv")[0][0].startswith("Aborted: ")
