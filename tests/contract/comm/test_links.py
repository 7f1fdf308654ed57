"""Links on first use: what stands at the start, who dials whom when, and calls that come late, twice, or too early."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import pytest

from elastrain.comm.errors import MemberLost
from elastrain.comm.wire import handshake
from elastrain.comm.wire.addresses import LossCause, PeerLost
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.ports import choose_address
from tests.support.comm_tools import SECRET, Cast, Transport, cast

pytestmark = pytest.mark.parametrize("transport", get_args(Transport))
EIGHT = "abcdefgh"


@contextmanager
def ring(transport: Transport, names: str = EIGHT) -> Iterator[Cast]:
    """Meshes in one view, nothing of which was used so far; the ring stands."""
    with cast(transport) as made:
        for name in names:
            made.add(name)
        made.edit(1, names)
        made.until(lambda: all(_standing(mesh) == _next_to(names, name) for name, mesh in made.meshes.items()))
        yield made


def _next_to(names: str, name: str) -> str:
    at = names.index(name)
    return "".join(sorted({names[at - 1], names[(at + 1) % len(names)]} - {name}))


def _standing(mesh: Mesh) -> str:
    return "".join(sorted(member for member, link in mesh.links.by_member.items() if link.stream is not None))


def _sockets() -> int:
    found = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(path).startswith("socket:") for path in found if os.path.islink(path))


def _settle(made: Cast) -> None:
    """Serve all until nobody has anything to do for a while."""
    quiet = 0
    while quiet < 20:
        events = [made.meshes[name].poll(0.001) for name in list(made.meshes)]
        busy = any(mesh._connections.opener._connector.under_way for mesh in made.meshes.values())
        for name, came in zip(made.meshes, events, strict=True):
            made.events[name] += came
        quiet = 0 if busy or any(events) else quiet + 1


def test_only_the_ring_stands_until_more_is_used(transport: Transport) -> None:
    with ring(transport) as made:
        _settle(made)
        assert all(_standing(mesh) == _next_to(EIGHT, name) for name, mesh in made.meshes.items())
        made.meshes["a"].send("e", 1, b"far")
        made.until(lambda: made.count("e", body=b"far", generation=1) == 1)
        assert _standing(made.meshes["a"]) == "beh" and _standing(made.meshes["e"]) == "adf"
        made.meshes["e"].send("a", 1, b"back")  # the same link
        made.until(lambda: made.count("a", body=b"back", generation=1) == 1)
        assert _standing(made.meshes["a"]) == "beh"


@pytest.mark.parametrize("lost", ["", "d", "de"])
def test_a_view_without_some_has_a_ring_without_them(transport: Transport, lost: str) -> None:
    with ring(transport) as made:
        for name in lost:
            made.leave(name)
        rest = "abcfgh"
        made.until(lambda: all(set(lost) <= made.lost(name).keys() for name in rest))
        made.edit(2, rest)
        made.until(lambda: all(set(_next_to(rest, name)) <= set(_standing(made.meshes[name])) for name in rest))
        made.leave("f")  # and so does one that is lost after that
        made.until(lambda: all("f" in made.lost(name) for name in "abcgh"))
        made.until(lambda: "g" in _standing(made.meshes["c"]))


@pytest.mark.parametrize("knocker", ["a", "e"])
def test_whoever_uses_a_link_first_the_later_member_dials(transport: Transport, knocker: str) -> None:
    with ring(transport) as made:
        other = "e" if knocker == "a" else "a"
        made.meshes[knocker].connect([other, knocker, "nobody"])
        made.until(lambda: other in _standing(made.meshes[knocker]))
        _settle(made)
        assert all(
            mesh.links.by_member[m].opening.request is None
            for mesh in made.meshes.values()
            for m in mesh.links.by_member
        )
        assert [made.lost(name) for name in EIGHT] == [{}] * 8


def test_both_use_it_first_at_the_same_moment_and_have_one_link(transport: Transport) -> None:
    for _ in range(10):
        with ring(transport, "abcd") as made:
            before = _sockets()
            for one, other in ("ac", "ca", "bd", "db"):
                made.meshes[one].send(other, 1, b"at once")
            made.until(lambda: all(made.count(name, body=b"at once", generation=1) == 1 for name in "abcd"))
            _settle(made)
            assert _sockets() == before + 4  # two ends of two links
            assert all(len(_standing(mesh)) == 3 for mesh in made.meshes.values())


def test_links_to_all_open_at_once_where_that_is_asked_for(transport: Transport) -> None:
    with cast(transport) as made:
        for name in EIGHT:
            made.add(name)
        for name in EIGHT:
            made.meshes[name].edit(1, made.peers(EIGHT), links="all")
        made.until(lambda: all(len(_standing(mesh)) == 7 for mesh in made.meshes.values()))


def _call(mesh: Mesh) -> socket.socket:
    scheme, _, where = choose_address(mesh.address, same_node=mesh.address.startswith("unix")).partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{where}")
    else:
        sock = socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])))
    sock.setblocking(False)
    return sock


def _greet(made: Cast, host: str, guest: str, generation: int) -> socket.socket:
    """A call of `guest` at `host` that is proven to come from it."""
    sock = _call(made.meshes[host])
    shaking = handshake.Handshake(handshake.Role.DIAL, secret=SECRET, job="job", me=guest, generation=generation)

    def done() -> bool:
        try:
            while not shaking.done:
                out = shaking.bytes_to_send()
                if out:
                    sock.sendall(out)
                shaking.receive(sock.recv(shaking.wants()))
        except BlockingIOError:
            return False
        return True

    made.until(done)
    return sock


def _ends(made: Cast, sock: socket.socket) -> None:
    def ended() -> bool:
        try:
            return sock.recv(1000) == b""
        except BlockingIOError:
            return False

    made.until(ended)
    sock.close()


def test_a_knock_that_comes_again_when_the_link_stands_changes_nothing(transport: Transport) -> None:
    with ring(transport) as made:
        made.meshes["a"].send("e", 1, b"one")
        made.until(lambda: made.count("e", body=b"one", generation=1) == 1)
        link = made.meshes["e"].links.by_member["a"].stream
        for _ in range(3):
            _ends(made, _greet(made, "e", "a", 1))
        made.meshes["a"].send("e", 1, b"two")
        made.until(lambda: made.count("e", body=b"two", generation=1) == 1)
        assert made.meshes["e"].links.by_member["a"].stream is link
        assert [made.lost(name) for name in EIGHT] == [{}] * 8


def test_two_knocks_bring_about_one_link(transport: Transport) -> None:
    with ring(transport) as made:
        knocks = [_greet(made, "e", "a", 1) for _ in range(2)]
        made.until(lambda: "a" in _standing(made.meshes["e"]) and "e" in _standing(made.meshes["a"]))
        for sock in knocks:
            _ends(made, sock)
        _settle(made)
        assert [made.lost(name) for name in EIGHT] == [{}] * 8


@pytest.mark.parametrize(("host", "guest"), ["ea", "ae"])
def test_a_call_from_a_former_generation_is_turned_away(transport: Transport, host: str, guest: str) -> None:
    with ring(transport) as made:
        others = EIGHT.replace(guest, "")
        made.edit(2, others)
        _ends(made, _greet(made, host, guest, 1))
        _settle(made)
        assert not made.meshes[host]._connections.opener._early and guest not in made.meshes[host].members
        assert made.lost(host) == {}


@pytest.mark.parametrize(("early", "late"), ["ae", "ea"])
def test_who_is_called_before_it_knows_the_caller_answers_when_it_does(
    transport: Transport, early: str, late: str
) -> None:
    with cast(transport) as made:
        for name in EIGHT:
            made.add(name)
        rest = EIGHT.replace(early, "")
        made.edit(1, rest)
        for name in EIGHT.replace(late, ""):
            made.meshes[name].edit(2, made.peers(EIGHT))
        made.meshes[early].send(late, 1, b"soon")
        _settle(made)
        assert made.frames(late) == [] and made.lost(early) == {}
        made.meshes[late].edit(2, made.peers(EIGHT))
        made.until(lambda: made.count(late, body=b"soon", generation=2) == 1)


def test_a_member_that_takes_over_a_view_last_loses_nobody_however_many_have_called_before(
    transport: Transport,
) -> None:
    """Of 80 callers, those from the 65th on were hung up on, and lost for good in the view that named them."""
    guests = [f"m{number}" for number in range(1, 81)]
    with cast(transport, connect_timeout_s=60.0, handshake_timeout_s=60.0) as made:  # one thread shakes all hands
        for name in ("m0", *guests):
            made.add(name)
        for name in guests:
            made.meshes[name].edit(1, made.peers(("m0", name)), links="all")
        made.until(
            lambda: (
                set(made.meshes["m0"]._connections.opener._early) == set(guests)
                or any(made.lost(name) for name in guests)
            )
        )
        made.meshes["m0"].edit(1, made.peers(("m0", *guests)), links="all")
        for name in guests:
            made.meshes["m0"].send(name, 1, b"welcome")
        made.until(lambda: all(made.count(name, body=b"welcome", generation=1) for name in guests))
        assert {name: made.lost(name) for name in made.meshes if made.lost(name)} == {}


def test_members_that_call_while_the_door_is_crowded_wait_for_their_turn(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is hung up on in the middle of a rush is lost: the door lets in a few at a time, and closes on none."""
    monkeypatch.setattr("elastrain.comm.wire.connector._INTRODUCTIONS_MAX", 2)
    with cast(transport, "ab") as made:
        strangers = [_call(made.meshes["a"]) for _ in range(2)]
        made.until(lambda: made.meshes["a"]._connections.opener._connector.under_way == 2)
        made.add("c")
        made.edit(2, "abc")
        _settle_for(made, 0.3)
        for stranger in strangers:
            stranger.close()
        made.meshes["c"].send("a", 1, b"late")
        made.until(lambda: made.count("a", body=b"late", generation=2) == 1)
        assert made.lost("a") == made.lost("c") == {}


def _settle_for(made: Cast, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for name, mesh in made.meshes.items():
            made.events[name] += mesh.poll(0.001)


@pytest.mark.parametrize(("one", "other"), ["ae", "ea"])
def test_who_uses_a_link_to_members_that_went_on_without_it_hears_of_it(
    transport: Transport, one: str, other: str
) -> None:
    """Its neighbours are stopped and say nothing."""
    with ring(transport) as made:
        for name in EIGHT.replace(one, "").replace(_next_to(EIGHT, one)[0], "").replace(_next_to(EIGHT, one)[1], ""):
            made.meshes[name].edit(2, made.peers(EIGHT.replace(one, "")))
        made.meshes[one].send(other, 1, b"still here")
        made.until(lambda: other in made.lost(one) and made.newer(one) == [2])
        assert made.frames(other) == []


def test_who_closed_its_mesh_is_known_as_left_to_all(transport: Transport) -> None:
    with ring(transport) as made:
        made.leave("d")
        made.until(lambda: all("d" in made.lost(name) for name in "abcefgh"))
        losses = [event for name in "abcefgh" for event in made.events[name] if isinstance(event, PeerLost)]
        assert {event.cause for event in losses} == {LossCause.LEFT} and len(losses) == 7
        with pytest.raises(MemberLost, match="it left"):
            made.meshes["h"].send("d", 1)
        made.until(lambda: _standing(made.meshes["c"]) == "be" and _standing(made.meshes["e"]) == "cf")


@pytest.mark.parametrize("gone", ["cd", "cg", "bdf", "cdef"])
def test_several_that_leave_at_once_are_known_to_all_and_the_ring_closes(transport: Transport, gone: str) -> None:
    with ring(transport) as made:
        for name in gone:
            made.leave(name)
        rest = "".join(name for name in EIGHT if name not in gone)
        made.until(lambda: all(set(made.lost(name)) == set(gone) for name in rest))
        made.until(lambda: all(set(_next_to(rest, name)) <= set(_standing(made.meshes[name])) for name in rest))


def test_losses_are_known_to_who_takes_over_the_view_later_and_to_whom_it_parts(transport: Transport) -> None:
    """The ring is torn in two places by b and e, who are still in the view before."""
    with ring(transport) as made:
        made.add("i")
        names, everybody = EIGHT + "i", made.peers(EIGHT + "i")
        for name in names.replace("b", "").replace("e", ""):
            made.meshes[name].edit(2, everybody)
        made.until(lambda: _standing(made.meshes["i"]) == "ah")
        made.leave("i")
        made.until(lambda: all("i" in made.lost(name) for name in "afgh"))
        _settle(made)
        assert [made.lost(name) for name in "bcde"] == [{}] * 4
        for name in "be":
            made.meshes[name].edit(2, everybody)
        made.until(lambda: all("i" in made.lost(name) for name in "bcde"))


def test_a_newer_view_is_heard_of_by_all_of_the_former_one(transport: Transport) -> None:
    with ring(transport) as made:
        made.meshes["c"].edit(5, made.peers(EIGHT))
        made.meshes["c"].tell_generation()
        made.until(lambda: all(made.newer(name) == [5] for name in "abdefgh"))
        assert [made.meshes[name].links.is_ahead("c") for name in "bdh"] == [True, True, False]
        made.meshes["h"].connect(["c"])  # who waits for it asks for a link, and hears it there
        made.until(lambda: made.meshes["h"].links.is_ahead("c"))
        assert all(set(_standing(made.meshes[name])) == set(_next_to(EIGHT, name)) for name in "abdefg")
