"""Who carries out what its caller waits for: the caller while the communicator's thread sleeps, else that thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from elastrain.comm.communicator import Communicator
from elastrain.comm.errors import CommError
from elastrain.comm.mesh import Peer
from tests.contract.test_comm_collectives import party

_FAR_S = 20.0


def _asleep(comm: Communicator) -> None:
    """Returns when its thread has nothing more to do."""
    comm._driver.post(lambda: None)
    deadline_s = time.monotonic() + _FAR_S
    while comm._driver._calls or comm._driver._turn_lock.locked():
        assert time.monotonic() < deadline_s


def test_an_edit_is_made_by_its_caller_and_a_call_by_the_thread_where_that_is_at_work() -> None:
    with party("unix", 2) as made:
        a = made.comms["a"]
        carried_out: list[threading.Thread] = []

        def note() -> None:
            carried_out.append(threading.current_thread())

        _asleep(a)
        a._driver.call(note)
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
        assert carried_out == [threading.current_thread(), a._driver._thread]


def test_what_becomes_due_earlier_than_the_thread_sleeps_wakes_it() -> None:
    with party("unix", 2) as made:
        a = made.comms["a"]
        _asleep(a)
        nobody = Peer(id="z", node="elsewhere", address="elastrain-nobody")
        peers = [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in "ab"]
        a.edit(2, [*peers, nobody])  # who never comes: the thread has to notice, though nothing else happens
        deadline_s = time.monotonic() + _FAR_S
        while "z" not in a.lost:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def test_a_call_that_is_interrupted_ends_the_communicator() -> None:
    with party("unix", 2) as made:
        a = made.comms["a"]
        _asleep(a)

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            a._driver.call(interrupted)
        a._driver._thread.join(_FAR_S)
        with pytest.raises(CommError, match="closed"):
            a.world.all_reduce(torch.ones(1)).wait()
