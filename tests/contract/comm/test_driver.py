"""Who carries out what its caller waits for: the caller while the communicator's thread sleeps, else that thread."""

from __future__ import annotations

import threading

import pytest
import torch

from elastrain.comm.errors import CommError
from elastrain.comm.wire.addresses import Peer
from tests.support.party import party
from tests.support.waiting import until

_FAR_S = 60.0


def test_an_edit_is_made_by_its_caller_and_a_call_by_the_thread_where_that_is_at_work() -> None:
    with party("unix", 2) as made:
        a = made.comms["a"]
        carried_out: list[threading.Thread] = []

        def note() -> None:
            carried_out.append(threading.current_thread())

        def mine() -> bool:
            a._driver.call(note)
            return carried_out.pop() is threading.current_thread()

        until(mine)
        came, go = threading.Event(), threading.Event()

        def work() -> None:
            came.set()
            assert go.wait(_FAR_S)

        a._driver.post(work)
        assert came.wait(_FAR_S)
        later = a._driver.call_later(note)
        assert not later.done
        go.set()
        later.wait()
        assert carried_out == [a._driver._thread]


def test_what_becomes_due_earlier_than_the_thread_sleeps_wakes_it() -> None:
    with party("unix", 2, connect_timeout_s=0.2, handshake_timeout_s=0.2) as made:
        a = made.comms["a"]
        nobody = Peer(id="z", node="elsewhere", address="elastrain-nobody")
        peers = [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in "ab"]
        a.edit(2, [*peers, nobody])  # who never comes: the thread has to notice, though nothing else happens
        until(lambda: "z" in a.lost)


def test_a_call_that_is_interrupted_ends_the_communicator() -> None:
    with party("unix", 2) as made:
        a = made.comms["a"]
        caller = threading.current_thread()

        def interrupted() -> None:
            if threading.current_thread() is caller:
                raise KeyboardInterrupt

        def called() -> bool:
            a._driver.call(interrupted)
            return False

        with pytest.raises(KeyboardInterrupt):
            until(called)
        a._driver._thread.join(_FAR_S)
        with pytest.raises(CommError, match="closed"):
            a.world.all_reduce(torch.ones(1)).wait()
