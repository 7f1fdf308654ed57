"""What every mesh does, whatever its transport."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
import time
import zlib
from typing import get_args

import pytest
import torch

from elastrain.comm.errors import CommError, MemberLost
from elastrain.comm.wire.addresses import Frame, LossCause, MeshConfig, Newer, Peer, PeerLost, dials
from elastrain.comm.wire.frames import DTYPES, HEADER_BYTES, Caps, encode
from elastrain.comm.wire.mesh import Mesh
from elastrain.runtime.faults.flips import FrameFlip
from tests.support.comm_tools import DEADLINE_S, Cast, Transport, cast

pytestmark = pytest.mark.parametrize("transport", get_args(Transport))


def _sockets(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Identity of each link's socket: the object's and the descriptor's."""
    return {
        member: (id(link.stream.sock), link.stream.sock.fileno())
        for member, link in mesh.links.by_member.items()
        if link.stream
    }


def test_frames_arrive_whole_and_in_order(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        a, b = made.meshes["a"], made.meshes["b"]
        for number in range(500):
            a.send("b", number, bytes([number % 251]) * (number * 7), [torch.full((number,), float(number))])
            b.send("a", number)
        made.until(lambda: len(made.frames("b")) == 500 and len(made.frames("a")) == 500)
        assert [frame.kind for frame in made.frames("a")] == list(range(500))
        for number, frame in enumerate(made.frames("b")):
            assert (frame.source, frame.generation, frame.kind) == ("a", 1, number)
            assert frame.body == bytes([number % 251]) * (number * 7)
            assert torch.equal(frame.tensors[0], torch.full((number,), float(number)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["ordinary", "shared"])
def test_tensors_keep_dtype_shape_and_bits(transport: Transport, dtype: torch.dtype, shared: bool) -> None:
    with cast(transport, "ab") as made:
        a = made.meshes["a"]
        flat = a.memory.empty(24, dtype) if shared else torch.empty(24, dtype=dtype)
        flat.copy_(torch.arange(24).to(dtype))
        a.send("b", 7, tensors=[flat, flat.view(2, 3, 4), flat[5:6].reshape(()), flat[1:1], flat.view(4, 6).t()])
        made.until(lambda: len(made.frames("b")) == 1)
        for got, sent in zip(made.frames("b")[0].tensors, [flat, flat.view(2, 3, 4), flat[5], flat[1:1]], strict=False):
            assert got.dtype == dtype and got.shape == sent.shape
            assert torch.equal(bits(got), bits(sent))
        assert torch.equal(bits(made.frames("b")[0].tensors[4]), bits(flat.view(4, 6).t()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: some dtypes have no `equal`."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_large_tensor_arrives(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        sent = torch.arange(9_000_000, dtype=torch.int32)
        made.meshes["a"].send("b", 1, b"body", [sent, sent[:3]])
        made.meshes["a"].send("b", 2)
        made.until(lambda: len(made.frames("b")) == 2)
        assert torch.equal(made.frames("b")[0].tensors[0], sent)
        assert torch.equal(made.frames("b")[0].tensors[1], sent[:3])


def test_copied_sends_are_not_disturbed_by_later_changes(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        sent = torch.ones(5_000_000)
        made.meshes["a"].send("b", 1, b"x" * 1000, [sent])
        made.meshes["a"].links.copy_unsent()
        sent.fill_(9)
        made.until(lambda: len(made.frames("b")) == 1)
        assert bool((made.frames("b")[0].tensors[0] == 1).all())


def test_a_member_sends_to_itself(transport: Transport) -> None:
    with cast(transport, "a") as made:
        made.meshes["a"].send("a", 3, b"me", [torch.ones(2)])
        (frame,) = made.meshes["a"].poll(0)
        assert isinstance(frame, Frame) and (frame.source, frame.body) == ("a", b"me")


def test_frames_of_older_generations_are_discarded(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        a, b = made.meshes["a"], made.meshes["b"]
        b.edit(2, made.peers("ab"))
        a.send("b", 1, b"old")
        a.send("b", 1, b"old", [a.memory.empty(4, torch.float32)])
        a.edit(2, made.peers("ab"))
        a.send("b", 1, b"new")
        made.until(lambda: len(made.frames("b")) > 0)
        assert [frame.body for frame in made.frames("b")] == [b"new"]


def test_frames_of_newer_generations_are_held_and_announced_once(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        a, b = made.meshes["a"], made.meshes["b"]
        a.edit(2, made.peers("ab"))
        a.send("b", 1, b"two")
        a.send("b", 1, b"two again", [torch.ones(3)])
        a.edit(5, made.peers("ab"))
        a.send("b", 1, b"five")
        made.until(lambda: made.newer("b") == [2, 5])
        assert made.frames("b") == []
        b.edit(2, made.peers("ab"))
        assert [event.body for event in b.poll(0) if isinstance(event, Frame)] == [b"two", b"two again"]
        b.edit(4, made.peers("ab"))
        assert b.poll(0) == []
        b.edit(5, made.peers("ab"))
        assert [event.body for event in b.poll(0) if isinstance(event, Frame)] == [b"five"]


def test_frames_of_newer_generations_come_at_once_to_a_reader_that_keeps_them_itself(transport: Transport) -> None:
    with cast(transport, "ab", holds_newer=False) as made:
        a, b = made.meshes["a"], made.meshes["b"]
        a.edit(2, made.peers("ab"))
        a.send("b", 1, b"two")
        a.edit(5, made.peers("ab"))
        a.send("b", 1, b"five", [torch.ones(3)])
        made.until(lambda: len(made.frames("b")) == 2)
        assert [(frame.generation, frame.body) for frame in made.frames("b")] == [(2, b"two"), (5, b"five")]
        b.edit(5, made.peers("ab"))
        assert b.poll(0) == [], "nothing comes twice"
        a.send("b", 1, b"five again")
        made.until(lambda: made.count("b", body=b"five again", generation=5) == 1)


def test_held_frames_that_an_edit_skips_are_dropped(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        made.meshes["a"].edit(2, made.peers("ab"))
        made.meshes["a"].send("b", 1, b"two")
        made.until(lambda: made.newer("b") == [2])
        made.meshes["b"].edit(3, made.peers("ab"))
        assert made.meshes["b"].poll(0.01) == []


def test_a_link_with_too_many_held_frames_waits_for_the_edit(transport: Transport) -> None:
    with cast(transport, "ab", max_held_frames=10) as made:
        made.meshes["a"].edit(2, made.peers("ab"))
        for number in range(3000):
            made.meshes["a"].send("b", number, b"x" * 1000)
        made.until(lambda: made.newer("b") == [2])
        for _ in range(20):
            made.meshes["b"].poll(0)
        held = len(made.meshes["b"].links.by_member["a"].held)
        assert 10 <= held < 3000
        made.meshes["b"].edit(2, made.peers("ab"))
        made.until(lambda: len(made.frames("b")) == 3000)
        assert [frame.kind for frame in made.frames("b")] == list(range(3000))


def test_undelivered_frames_of_the_old_generation_do_not_survive_an_edit(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        b = made.meshes["b"]
        b.send("b", 1, b"old")
        b.edit(2, made.peers("ab"))
        assert b.poll(0) == []


def test_an_edit_leaves_survivors_links_and_segments_as_they_are(transport: Transport) -> None:
    with cast(transport, "abc") as made:
        a, b = made.meshes["a"], made.meshes["b"]
        tensor = a.memory.empty(8, torch.float32)
        a.send("b", 1, b"by reference", [tensor])
        made.until(lambda: len(made.frames("b")) == 1)
        before = (
            _sockets(a)["b"],
            _sockets(b)["a"],
            a.links.by_member["b"],
            a.memory.segments(),
            b.links.by_member["a"].imports,
        )
        made.add("d")
        made.leave("c")
        made.together(2, "abd")
        after = (
            _sockets(a)["b"],
            _sockets(b)["a"],
            a.links.by_member["b"],
            a.memory.segments(),
            b.links.by_member["a"].imports,
        )
        assert before == after
        assert set(_sockets(a)) == {"b", "d"}
        a.send("b", 1, b"again", [tensor])
        made.until(lambda: made.count("b", body=b"again", generation=2) == 1)


def test_frames_in_flight_survive_an_edit_to_the_same_members(transport: Transport) -> None:
    """Frames of the new generation that follow old ones on the same link come through."""
    with cast(transport, "ab") as made:
        a = made.meshes["a"]
        for generation in range(2, 30):
            a.send("b", 1, b"old" * 100)
            a.edit(generation, made.peers("ab"))
        a.send("b", 1, b"last")
        made.meshes["b"].edit(29, made.peers("ab"))
        made.until(lambda: len(made.frames("b")) > 0)
        assert [frame.body for frame in made.frames("b")] == [b"last"]


@pytest.mark.parametrize("first", ["a", "b"])
def test_the_two_ends_may_edit_at_different_times(transport: Transport, first: str) -> None:
    """The earlier one's link and frames wait for the later one, whichever dials."""
    with cast(transport) as made:
        second = "b" if first == "a" else "a"
        for name in "ab":
            made.add(name)
        made.meshes[first].edit(3, made.peers("ab"))
        made.meshes[first].send(second, 9, b"early", [torch.arange(5)])
        for _ in range(20):
            for name in "ab":
                made.events[name] += made.meshes[name].poll(0.002)
        assert made.frames(second) == [] and made.lost(first) == {}
        made.meshes[second].edit(3, made.peers("ab"))
        made.until(lambda: made.count(second, body=b"early", generation=3) == 1)


def test_exactly_one_link_joins_two_members(transport: Transport) -> None:
    with cast(transport, "abcd") as made:
        ends: list[str] = []
        for mesh in made.meshes.values():
            for link in mesh.links.by_member.values():
                assert link.stream is not None
                ends.append(str(link.stream.sock.fileno()))
        assert len(ends) == len(set(ends)) == 12


def test_a_removed_member_hears_that_it_was_left_out(transport: Transport) -> None:
    with cast(transport, "abc") as made:
        for name in "ab":
            made.meshes[name].edit(2, made.peers("ab"))
        made.until(lambda: set(made.lost("c")) == {"a", "b"})
        assert "went on without us in generation 2" in made.lost("c")["a"]
        assert made.newer("c") == [2]
        with pytest.raises(MemberLost, match="not in the view of generation 2"):
            made.meshes["a"].send("c", 1)
        with pytest.raises(MemberLost, match="went on without us"):
            made.meshes["c"].send("a", 1)


def test_frames_sent_before_the_end_arrive_before_lost(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        for number in range(20):
            made.meshes["a"].send("b", number, b"x" * 3000, [torch.ones(10)])
        made.leave("a")
        made.until(lambda: bool(made.lost("b")))
        kinds = [event.kind if isinstance(event, Frame) else event for event in made.events["b"]]
        assert kinds[:-1] == list(range(20))
        assert isinstance(kinds[-1], PeerLost) and (kinds[-1].reason, kinds[-1].cause) == ("it left", LossCause.LEFT)


def test_lost_is_told_once_and_sending_raises(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        before_s = time.monotonic()
        made.leave("a")
        made.until(lambda: bool(made.lost("b")))
        for _ in range(5):
            made.events["b"] += made.meshes["b"].poll(0.001)
        (lost,) = made.events["b"]
        assert isinstance(lost, PeerLost) and before_s <= lost.at_s <= time.monotonic()
        with pytest.raises(MemberLost, match="'a' is lost: it left"):
            made.meshes["b"].send("a", 1)
        made.meshes["b"].edit(2, made.peers("b"))
        assert made.meshes["b"].poll(0) == []


def test_a_new_view_that_still_names_a_lost_member_tells_of_it_again(transport: Transport) -> None:
    with cast(transport, "abc") as made:
        everybody = made.peers("abc")
        made.leave("c")
        made.until(lambda: "c" in made.lost("a"))
        for generation in (2, 3):
            made.meshes["a"].edit(generation, everybody)
            assert [type(event) for event in made.meshes["a"].poll(0)] == [PeerLost]
        made.meshes["b"].edit(3, everybody)  # lost, but not told yet
        made.events["b"].clear()
        made.until(lambda: "c" in made.lost("b"))
        made.meshes["b"].poll(0.01)
        assert sum(isinstance(event, PeerLost) for event in made.events["b"]) == 1


@pytest.mark.parametrize("first", ["a", "c"])
def test_broken_links_to_members_that_stay_are_made_anew_where_a_view_asks_for_it(
    transport: Transport, first: str
) -> None:
    """The two ends take the view over at different times, and one of them may not know yet that the link is broken."""
    with cast(transport, "abc") as made:
        between = {("a", "c"), ("c", "a")} if transport == "unix" else {("a", "c")}
        for here, there in between:
            made.meshes[here]._connections.lose(made.meshes[here].links.by_member[there], "it broke on request")
        for name in sorted("abc", key=lambda name: name != first):
            made.meshes[name].edit(2, made.peers("abc"), links="all", renew=True)
            for _ in range(20):
                for other in "abc":
                    made.events[other] += made.meshes[other].poll(0.001)
        for name in "abc":
            for other in "abc":
                made.meshes[name].send(other, 1, b"again")
        made.until(lambda: all(made.count(name, body=b"again", generation=2) == 3 for name in "abc"))


def test_a_frame_in_which_a_bit_flips_on_its_way_is_not_delivered_and_its_link_is_made_anew(
    transport: Transport,
) -> None:
    flipped = FrameFlip()
    with cast(transport) as made:
        for name in "ab":
            made.add(name).tamper(flipped.tamper)
        made.together(1, "ab")
        flipped.ask(3)
        made.meshes["a"].send("b", 1, b"payload")
        made.until(lambda: "a" in made.lost("b") and "b" in made.lost("a"))
        assert made.count("b", body=b"payload", generation=1) == 0
        assert made.lost("b")["a"] in (
            "its connection broke (bytes were altered on the way)",
            "it broke the protocol: what arrived is not a frame",
            "it broke the protocol: a frame's payload does not match its checksum",
        )
        for name in "ab":
            made.meshes[name].edit(2, made.peers("ab"), links="all", renew=True)
        made.meshes["a"].send("b", 1, b"payload")
        made.until(lambda: made.count("b", body=b"payload", generation=2) == 1)


def test_a_loss_that_an_edit_has_dealt_with_is_not_told(transport: Transport) -> None:
    with cast(transport, "abc") as made:
        made.leave("c")
        made.until(lambda: made.meshes["a"].links.by_member["c"].lost is not None)
        made.events["a"].clear()
        made.meshes["a"]._events.put(PeerLost(member="c", reason="just heard", at_s=0.0))
        made.meshes["a"].edit(2, made.peers("ab"))
        assert [event for event in made.meshes["a"].poll(0) if not isinstance(event, Newer)] == []


def test_a_member_that_nobody_listens_for_is_lost(transport: Transport) -> None:
    with cast(transport) as made:
        gone, later = made.add("a"), made.add("b")
        peers = made.peers("ab")
        gone.close()
        del made.meshes["a"]
        later.edit(1, peers)
        made.until(lambda: "a" in made.lost("b"))
        assert "no connection" in made.lost("b")["a"]


def test_a_member_that_never_dials_is_lost_after_the_deadline(transport: Transport) -> None:
    with cast(transport, connect_timeout_s=0.05, handshake_timeout_s=0.05) as made:
        made.add("b")
        made.add("a").edit(1, made.peers("ab"))
        made.until(lambda: made.lost("a") == {"b": "it did not connect in time"})


def test_a_silent_listener_is_lost_after_the_deadline(transport: Transport) -> None:
    with cast(transport, connect_timeout_s=0.05, handshake_timeout_s=0.05) as made:
        made.add("a")
        made.add("b").edit(1, made.peers("ab"))
        silent = made.meshes.pop("a")  # accepts, as the kernel does for it, but never answers
        made.until(lambda: "a" in made.lost("b"))
        assert "in time" in made.lost("b")["a"]
        silent.close()


def test_a_wrong_secret_is_refused_with_the_reason_on_both_sides(transport: Transport) -> None:
    with cast(transport, connect_timeout_s=1.0, handshake_timeout_s=1.0) as made:
        made.add("a", secret=b"other")
        made.add("b")
        made.edit(1, "ab")
        made.until(lambda: bool(made.lost("a")) and bool(made.lost("b")))
        assert "different secrets for job 'job'" in made.lost("a")["b"]
        assert "different secrets for job 'job'" in made.lost("b")["a"]


def test_a_secret_is_not_needed_on_loopback_but_is_elsewhere(transport: Transport) -> None:
    with cast(transport) as made:
        for name in "ab":
            made.add(name, secret=None)
        made.together(1, "ab")
    if transport == "tcp":
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ValueError, match="need a secret"):
            Mesh(me="a", node="n", job="j", secret=None, config=MeshConfig(transport="tcp", bind_host="0.0.0.0"))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before


def _connect_raw(mesh: Mesh) -> socket.socket:
    """A plain socket to the listener that peers of this transport use."""
    scheme, _, where = mesh.address.split(",")[-1].partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{where}")
    else:
        sock = socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])))
    return sock


def test_strangers_disturb_nobody(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        strangers = [_connect_raw(made.meshes["b"]) for _ in range(30)]
        for number, sock in enumerate(strangers):
            sock.sendall([b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 700, b"\x01", b""][number % 4])
        made.together(2, "ab")
        for sock in strangers:
            sock.close()
        made.together(3, "ab")
        assert len(made.meshes["b"].poll(0.01)) == 0
        made.until(lambda: not made.meshes["b"]._connections.opener._connector.under_way)


def _garbage(made: Cast, junk: bytes) -> str:
    """a's end of an authenticated link sends junk; returns what b makes of it."""
    link = made.meshes["a"].links.by_member["b"]
    assert link.stream is not None
    assert link.stream.sock.send(junk) == len(junk)
    made.until(lambda: "a" in made.lost("b"))
    return made.lost("b")["a"]


def _with_crc(head: bytes) -> bytes:
    return head + struct.pack("<I", zlib.crc32(head))


def _header(*, version: int = 1, described: int = 0, body: int = 0, count: int = 0, crc: int = 0) -> bytes:
    return _with_crc(struct.pack("<4sBxHQIIHxxI", b"ELFR", version, 1, 1, described, body, count, crc))


@pytest.mark.parametrize(
    ("junk", "words"),
    [
        (b"\x00" * HEADER_BYTES, "not a frame"),
        (encode(kind=1, generation=1, body=b"abc", tensors=())[:-1] + b"X", "does not match its checksum"),
        (_header(version=9), "version 9"),
        (_header(body=200_000), "a body of 200000 bytes, at most 100000"),
        (_header(count=60_000), "60000 tensors"),
        (_header(count=1, described=10_000), "1 tensors with 10000 bytes of descriptors"),
        (encode(kind=0xFFF0, generation=1, body=b"", tensors=()), "unknown kind 0xfff0"),
        (encode(kind=0xFF02, generation=1, body=b"", tensors=()), "with 0 bytes"),
        (encode(kind=0xFF03, generation=1, body=b"\x09" + bytes(7), tensors=()), "reference 9 was given back"),
    ],
)
def test_garbage_closes_the_link_and_says_what_came(transport: Transport, junk: bytes, words: str) -> None:
    with cast(transport, "ab", caps=Caps(max_body_bytes=100_000)) as made:
        assert words in _garbage(made, junk)


def test_an_oversized_tensor_is_refused_before_memory_is_taken(transport: Transport) -> None:
    with cast(transport, "ab", caps=Caps(max_tensor_bytes=1 << 20)) as made:
        made.meshes["a"].send("b", 1, tensors=[torch.zeros(1 << 20)])
        made.until(lambda: "a" in made.lost("b"))
        assert f"a frame with {4 << 20} bytes of tensors, at most {1 << 20}" in made.lost("b")["a"]


def test_a_reader_that_is_stuck_is_lost_before_memory_runs_out(transport: Transport) -> None:
    with cast(transport, "ab", max_send_queue_bytes=1 << 20) as made:

        def flood() -> None:
            for _ in range(1000):
                made.meshes["a"].send("b", 1, b"x" * 100_000)

        with pytest.raises(MemberLost, match="it does not read"):
            flood()


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, dtype=torch.float4_e2m1fn_x2), torch.eye(2).to_sparse(), torch.empty(2, device="meta")],
    ids=["dtype", "sparse", "device"],
)
def test_what_can_not_travel_is_refused_at_the_sender(transport: Transport, tensor: torch.Tensor) -> None:
    with cast(transport, "ab") as made, pytest.raises(ValueError, match="only dense CPU tensors"):
        made.meshes["a"].send("b", 1, tensors=[tensor])


def test_views_that_make_no_sense_are_refused(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        a = made.meshes["a"]
        for generation, names in [(1, "ab"), (0, "ab"), (2, "b"), (2, "aab")]:
            with pytest.raises(ValueError, match="a view is newer than the last one and names every member once"):
                a.edit(generation, made.peers(names))
        assert a.generation == 1 and a.members == ("a", "b")


def test_wake_ends_a_waiting_poll(transport: Transport) -> None:
    with cast(transport, "a") as made:
        timer = threading.Timer(0.05, made.meshes["a"].wake)
        timer.start()
        before_s = time.monotonic()
        assert made.meshes["a"].poll(DEADLINE_S) == []
        assert time.monotonic() - before_s < DEADLINE_S / 2
        timer.join()


def test_watched_descriptors_are_served_inside_poll(transport: Transport) -> None:
    with cast(transport, "a") as made:
        reader, writer = os.pipe()
        seen: list[bytes] = []
        made.meshes["a"].watch(reader, lambda: seen.append(os.read(reader, 10)))
        os.write(writer, b"x")
        made.until(lambda: seen == [b"x"])
        os.close(reader)
        os.close(writer)


def test_a_closed_mesh_says_so(transport: Transport) -> None:
    with cast(transport, "a") as made:
        mesh = made.meshes["a"]
        mesh.close()
        mesh.close()
        mesh.wake()
        with pytest.raises(CommError, match="this mesh is closed"):
            mesh.poll(0)


def _resources() -> tuple[int, int, int]:
    gc.collect()
    maps = [line for line in open("/proc/self/maps") if "elastrain" in line]  # noqa: SIM115
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(maps)


def test_two_hundred_edits_leak_nothing(transport: Transport) -> None:
    with cast(transport, "ab") as made:
        a = made.meshes["a"]

        def churn(generation: int) -> None:
            made.add("c")
            made.together(generation, "abc")
            a.send("c", 1, tensors=[a.memory.empty(100, torch.float32)])
            made.meshes["c"].send("a", 1, tensors=[made.meshes["c"].memory.empty(100, torch.float32)])
            made.until(lambda: len(made.frames("a")) == 1 and len(made.frames("c")) == 1)
            made.leave("c")
            made.together(generation + 1, "ab")
            made.events = {"a": [], "b": []}

        churn(2)
        before = _resources()
        for generation in range(4, 200, 2):
            churn(generation)
        # Fewer is possible: what earlier tests left to the collector goes meanwhile.
        assert all(now <= then for now, then in zip(_resources(), before, strict=True))
        assert [len(segment.regions) for segment in a.memory.segments()] <= [1]


def test_an_address_that_makes_no_sense_is_refused_by_who_dials_it(transport: Transport) -> None:
    with cast(transport) as made:
        mesh = made.add("b")
        mesh.edit(1, [Peer(id="b", node=mesh.node, address="")])
        with pytest.raises(ValueError, match="is no mesh address"):
            mesh.edit(2, [*made.peers("b"), Peer(id="a", node="n", address="carrier pigeon")])


def test_the_later_member_dials_also_when_numbers_grow_longer(transport: Transport) -> None:
    assert dials("b", "a") and not dials("a", "b")
    assert dials("m10", "m9") and not dials("m9", "m10")
